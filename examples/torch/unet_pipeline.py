"""A U-Net as a pipeline: skip connections go from a stage straight to the one that needs them.

    python examples/torch/unet_pipeline.py --ranks 4
    python examples/torch/unet_pipeline.py --ranks 2 --schedule eager_1f1b --split

Four stages: two on the way down, two on the way up. On two ranks each has one of either. The losses
are compared with those of one process.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import avg_pool2d, mse_loss, silu

from harness import compare, main
from unjam.pipeline import SCHEDULES, Order, make_order, simulate, split_backward
from unjam.torch.pipeline import Edge, Pipeline, Stage

BATCH, MICROBATCHES, SIZE = 16, 4, 16


class Down(nn.Module):
    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(into, out, 3, padding=1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        skip = silu(self.conv(x))
        return avg_pool2d(skip, 2), skip


class Up(nn.Module):
    def __init__(self, into: int, skip: int, out: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(into, out, 2, stride=2)
        self.conv = nn.Conv2d(out + skip, out, 3, padding=1)

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        return self.conv(torch.cat([silu(self.up(x)), skip], 1))


EDGES = [
    Edge(0, 1, ("x",)),
    Edge(1, 2, ("x", "inner")),
    Edge(2, 3, ("x",)),
    Edge(0, 3, ("outer",)),  # past two stages
]


def unet(seed: int) -> list[Stage]:
    torch.manual_seed(seed)
    return [
        Stage(Down(1, 8), inputs=("picture",), outputs=("x", "outer")),
        Stage(Down(8, 16), inputs=("x",), outputs=("x", "inner")),
        Stage(Up(16, 16, 8), inputs=("x", "inner"), outputs=("x",)),
        Stage(Up(8, 8, 1), inputs=("x", "outer"), outputs=("x",)),
    ]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What to learn: the picture without noise."""
    g = torch.Generator().manual_seed(step)
    clean = avg_pool2d(torch.randn(BATCH, 1, SIZE + 4, SIZE + 4, generator=g), 5, 1)
    return clean + 0.1 * torch.randn(clean.shape, generator=g), clean


def order(args: argparse.Namespace, ranks: int) -> Order:
    """Of four stages, with two on a rank where there are two ranks: in the order of their times."""
    found = make_order(args.schedule, 4, MICROBATCHES)
    found = split_backward(found) if args.split else found
    spans = [span for row in simulate(found).spans for span in row]
    spans.sort(key=lambda span: (span.start, span.action))
    rows = [[s.action for s in spans if s.action.stage % ranks == r] for r in range(ranks)]
    return Order(tuple(map(tuple, rows)))


def alone(args: argparse.Namespace) -> list[float]:
    modules = nn.ModuleList(stage.module for stage in unet(args.seed))
    optimizer = torch.optim.SGD(modules.parameters(), lr=0.1)
    losses = []
    for step in range(args.steps):
        picture, clean = batch(step)
        x, outer = modules[0](picture)
        loss = mse_loss(modules[3](modules[2](*modules[1](x)), outer), clean)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(args: argparse.Namespace) -> list[float]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = {n: stage for n, stage in enumerate(unet(args.seed)) if n % ranks == rank}
    weights = [w for stage in mine.values() for w in stage.module.to(args.device).parameters()]
    pipeline = Pipeline(mine, EDGES, order(args, ranks), loss_fn=mse_loss)
    optimizer = torch.optim.SGD(weights, lr=0.1)
    losses = torch.zeros(args.steps, device=args.device)
    for step in range(args.steps):
        picture, clean = (t.to(args.device) for t in batch(step))
        optimizer.zero_grad()
        parts = pipeline.step(
            {"picture": picture} if 0 in mine else None, clean if 3 in mine else None
        )
        losses[step] = torch.stack(parts).mean() if parts else 0
        optimizer.step()
    dist.broadcast(losses, src=3 % ranks)  # only the last stage knows them
    compare(losses.tolist(), alone(args))
    return losses.tolist()


if __name__ == "__main__":
    schedule = ("--schedule", {"choices": sorted(SCHEDULES), "default": "1f1b"})
    main(train, ranks=2, steps=20, more=[schedule, ("--split", {"action": "store_true"})])
