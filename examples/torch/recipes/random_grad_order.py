"""(a) Data and tensor parallelism; gradients are reduced in an order that each rank draws by lot.

What hangs today. Collectives of one group are matched by their order. Whatever makes the order of
gradients differ (a hook that fires earlier on one rank, an unused branch, a scheduler that
prefers what is ready) pairs one parameter's gradient with another's: sizes that differ hang the
kernels or end the job, sizes that agree give wrong numbers without a word. With a group per
parameter the calls are paired well, but their kernels hold SMs in different orders, between those
of the tensor parallelism.

What changes. ``with unjam.key(name)`` around the call. The n-th use of a key is matched with its
n-th use on the other ranks, whatever else was called before.

Why it works. Each gradient's all-reduce is called without a wait, and waited for after the last
one: no rank owes a call while it waits. The tensor-parallel all-reduces in between are waited for
at once, in the order that the model gives to all.

    python examples/torch/recipes/random_grad_order.py --backend unjam
    python examples/torch/recipes/random_grad_order.py --backend gloo    # wrong, hung, or killed
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import unjam

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from harness import compare, main, mean_over_ranks  # noqa: E402

WIDTH, HIDDEN, BLOCKS, BATCH = 16, 32, 4, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class RandomOrder:
    """Collects gradients during the backward pass, and launches some of them, in any order."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, seed: int) -> None:
        self.group, self.dice, self.ready, self.works = group, random.Random(seed), [], []
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(self.hook(name))

    def hook(self, name: str) -> Callable[[torch.Tensor], None]:
        def is_ready(p: torch.Tensor) -> None:
            self.ready.append((name, p.grad.to_local()))  # this rank's part of it
            self.launch(self.dice.randrange(len(self.ready) + 1))

        return is_ready

    def launch(self, count: int) -> None:
        for _ in range(count):
            name, grad = self.ready.pop(self.dice.randrange(len(self.ready)))
            grad /= self.group.size()
            with unjam.key(name):
                self.works.append(dist.all_reduce(grad, group=self.group, async_op=True))

    def finish(self) -> None:
        self.launch(len(self.ready))
        for work in self.works:
            work.wait()
        self.works.clear()


def train(args: argparse.Namespace) -> list[float]:
    ranks = dist.get_world_size()
    tp = 2 if ranks > 2 else 1  # two ranks: data parallelism alone, for it is what is disordered
    mesh = init_device_mesh(args.device, (ranks // tp, tp), mesh_dim_names=("dp", "tp"))
    dp = mesh.get_group("dp")
    torch.manual_seed(args.seed)
    model, alone = (nn.Sequential(*(Block() for _ in range(BLOCKS))) for _ in range(2))
    alone.load_state_dict(model.state_dict())  # what one process computes from the whole batch
    model, alone = model.to(args.device), alone.to(args.device)
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    gradients = RandomOrder(model, dp, seed=args.seed * 1000 + dist.get_rank())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.2) for m in (model, alone)]
    curve, expected = [], []
    for step in range(args.steps):
        x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step)).to(args.device)
        mine = x.chunk(dp.size())[dp.rank()]
        losses = [(m(t) - t.flip(1)).square().mean() for m, t in ((model, mine), (alone, x))]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
        gradients.finish()
        for optimizer in optimizers:
            optimizer.step()
        curve.append(mean_over_ranks(losses[0], dp))
        expected.append(losses[1].item())
    compare(curve, expected)
    return curve


if __name__ == "__main__":
    main(train, ranks=4, steps=8)
