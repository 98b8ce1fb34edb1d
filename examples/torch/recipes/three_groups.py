"""(c) FSDP2, tensor parallelism and statistics over all ranks: three groups that overlap.

What hangs today. Each rank is in three groups, and their kernels meet on the same GPU in an order
that hooks, threads and streams decide, not the same on all ranks. Then they can hold each other's
SMs. The cures in use are orders: CUDA_DEVICE_MAX_CONNECTIONS=1, NCCL_LAUNCH_ORDER_IMPLICIT=1, one
stream for all, or statistics only at the end of a step.

What changes. Nothing in the program, and no setting. Here every rank calls the statistics of
block i when its own turn comes: rank r lets r blocks pass first, so that the all-reduce over all
ranks comes before some all-gathers and reductions on one rank and after them on another.

Why it works. Each group's own order agrees on its members, and nobody waits for the statistics
before the step's last call. What is pending holds no GPU. (With two ranks, one of the three groups
has one member each, and two are left to meet.)

    python examples/torch/recipes/three_groups.py --backend unjam
    torchrun --nproc-per-node 4 examples/torch/recipes/three_groups.py --backend nccl --device cuda
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from fsdp_tp_gpt import GPT, loss_of, parallelize, text  # noqa: E402
from harness import compare, main, mean_over_ranks  # noqa: E402


class Statistics:
    """Sums of each block's squared outputs over all ranks, called late on ranks that are late."""

    def __init__(self, blocks: nn.Sequential, group: dist.ProcessGroup, late: int) -> None:
        self.group, self.late, self.waiting, self.pending = group, late, [], []
        self.here: list[float] = []
        for block in blocks:
            block.register_forward_hook(self.collect)
            block.register_full_backward_hook(self.pass_by)

    def collect(self, module: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        x = output.to_local() if hasattr(output, "to_local") else output
        self.waiting.append(x.detach().float().square().sum().reshape(1))
        self.call(keep=self.late)

    def pass_by(self, *_: object) -> None:
        self.call(keep=max(0, self.late - 2))

    def call(self, keep: int) -> None:
        while len(self.waiting) > keep:
            x = self.waiting.pop(0)
            self.here.append(x.item())
            self.pending.append((x, dist.all_reduce(x, group=self.group, async_op=True)))

    def finish(self) -> list[float]:
        self.call(keep=0)
        for _, work in self.pending:
            work.wait()
        sums = [x.item() for x, _ in self.pending]
        everybody: list[list[float]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everybody, self.here)
        expected = [sum(column) for column in zip(*everybody, strict=True)]
        compare(sums, expected)
        self.pending, self.here = [], []
        return sums


def train(args: argparse.Namespace) -> list[float]:
    shape = (dist.get_world_size() // 2, 2)
    mesh = init_device_mesh(args.device, shape, mesh_dim_names=("dp", "tp"))
    dp = mesh["dp"]
    torch.manual_seed(args.seed)
    alone = GPT().to(args.device)
    torch.manual_seed(args.seed)
    model = parallelize(GPT().to(args.device), mesh)
    # Not the default group: of two ranks, a mesh takes that for its "tp".
    everybody = dist.new_group()
    statistics = Statistics(model.blocks, everybody, late=dist.get_rank())
    both = [(m, torch.optim.SGD(m.parameters(), lr=0.1)) for m in (model, alone)]
    curves: tuple[list[float], list[float]] = ([], [])
    for step in range(args.steps):
        shares = [text(step * dp.size() + i).to(args.device) for i in range(dp.size())]
        data = shares[dp.get_local_rank()], torch.cat(shares)
        for (m, optimizer), tokens, losses in zip(both, data, curves, strict=True):
            loss = loss_of(m, tokens)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(mean_over_ranks(loss, dp.get_group()) if m is model else loss.item())
        statistics.finish()
    compare(*curves)
    return curves[0]


if __name__ == "__main__":
    main(train, ranks=4, steps=6)
