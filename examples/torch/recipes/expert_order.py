"""(e) A mixture of experts: each rank visits the experts in the order that its own tokens ask for.

What hangs today. The experts' weights are sharded, so a visit needs an all-gather, and the way
back a reduce-scatter. Collectives of a group are matched by order: a rank that visits expert 3
first receives expert 0's shards from a rank that begins there. Equal sizes compute wrong numbers
without a word, others hang. So programs visit experts in a fixed order, however their tokens are
spread.

What changes. ``with unjam.key(f"{layer}.expert{i}")`` around the calls, and the order is free:
here the expert with most tokens comes first, for which the rank has the longest computation to
hide the others behind.

Why it works. A rank calls *all* of the layer's all-gathers before it waits for the first one, and
all reduce-scatters before it waits at the step's end. Gathering one expert, waiting for it, and
then the next, in a different order on each rank, is a true cycle (rank 0 waits for a shard of
expert 3 that rank 1 would send after it has expert 0): no library can help there, and
``unjam.explain()`` shows it. FSDP2 does just that, and waits for each reduce-scatter before the
next: with ``fully_shard``, also with keys, the order of modules must agree.

    python examples/torch/recipes/expert_order.py --backend unjam
    python examples/torch/recipes/expert_order.py --backend gloo    # wrong
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import unjam

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from harness import compare, main, mean_over_ranks  # noqa: E402

WIDTH, EXPERTS, LAYERS, BATCH = 16, 4, 3, 32


class Layer(nn.Module):
    """Experts' weights, whole (``group`` is None) or a slice of each one's rows."""

    def __init__(self, number: int, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.number, self.group = number, group
        g = torch.Generator().manual_seed(number)
        self.register_buffer("router", torch.randn(EXPERTS, WIDTH, generator=g))
        whole = torch.randn(EXPERTS, WIDTH, WIDTH, generator=g) / WIDTH**0.5
        if group is not None:
            whole = whole.chunk(group.size(), dim=1)[group.rank()]
        self.experts = nn.ParameterList(nn.Parameter(w.clone()) for w in whole)
        self.pending: list[tuple[dist.Work, nn.Parameter, torch.Tensor]] = []

    def gather(self, expert: int) -> tuple[torch.Tensor, dist.Work | None]:
        shard = self.experts[expert]
        if self.group is None:
            return shard, None
        weight = shard.new_empty(WIDTH, WIDTH)
        with unjam.key(f"{self.number}.expert{expert}"):
            work = dist.all_gather_into_tensor(
                weight, shard.detach(), group=self.group, async_op=True
            )
        return weight, work

    def scatter_gradient(self, expert: int, weight: torch.Tensor) -> None:
        """As soon as an expert's gradient is there: in this rank's order again."""
        grad = torch.empty_like(self.experts[expert])
        with unjam.key(f"{self.number}.expert{expert}"):
            work = dist.reduce_scatter_tensor(grad, weight.grad, group=self.group, async_op=True)
        self.pending.append((work, self.experts[expert], grad))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = (x @ self.router.T).softmax(dim=-1)
        share, choice = scores.max(dim=-1)
        tokens = torch.bincount(choice, minlength=EXPERTS)
        order = tokens.argsort(descending=True, stable=True).tolist()
        gathered = {e: self.gather(e) for e in order}  # all are called before one is waited for
        y = x
        for e in order:
            weight, work = gathered[e]
            if work is not None:
                work.wait()
                weight.requires_grad_()
                weight.register_post_accumulate_grad_hook(
                    lambda w, e=e: self.scatter_gradient(e, w)
                )
            mine = (
                (choice == e).nonzero().flatten()
            )  # may be empty: the calls are made all the same
            y = y.index_add(0, mine, share[mine, None] * torch.tanh(x[mine] @ weight.T))
        return y

    def finish(self) -> None:
        for work, shard, grad in self.pending:
            work.wait()
            shard.grad = grad / self.group.size()
        self.pending.clear()


def curve(args: argparse.Namespace, group: dist.ProcessGroup | None) -> list[float]:
    """The loss curve; without a group, what one process computes from all ranks' tokens."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = nn.Sequential(*(Layer(i, group) for i in range(LAYERS))).to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(args.steps):
        g = torch.Generator().manual_seed(args.seed * 1000 + step)
        x = torch.randn(ranks * BATCH, WIDTH, generator=g)
        if group is not None:
            x = x.chunk(ranks)[rank]
        x = x.to(args.device)
        loss = (model(x) - x.roll(1, dims=1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if group is not None:
            for layer in model:
                layer.finish()
        optimizer.step()
        losses.append(mean_over_ranks(loss) if group is not None else loss.item())
    return losses


def train(args: argparse.Namespace) -> list[float]:
    losses = curve(args, dist.group.WORLD)
    compare(losses, curve(args, None))
    return losses


if __name__ == "__main__":
    main(train, ranks=2, steps=8)
