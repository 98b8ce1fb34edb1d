"""A U-Net as a pipeline: skip connections go from a stage straight to the one that needs them.

    python examples/torch/unet_pipeline.py --ranks 4
    python examples/torch/unet_pipeline.py --ranks 2 --schedule eager_1f1b --split
    python examples/torch/unet_pipeline.py --ranks 3 --wide

Four stages: two on the way down, two on the way up. On two ranks each has one of either. With
--wide the last two ranks share their stages: each computes half of the channels, and edges reshard
what crosses. The losses are compared with those of one process.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import avg_pool2d, mse_loss, silu

from harness import compare, main
from unjam.pipeline import SCHEDULES, Order, make_order, simulate, split_backward
from unjam.torch.pipeline import Edge, Pipeline, Spec, Stage

BATCH, MICROBATCHES, SIZE = 16, 4, 16


class Copied(torch.autograd.Function):
    """What both ranks have; back, the sum of their gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return summed(grad, ctx.group), None


class Summed(torch.autograd.Function):
    """The sum over both ranks; back, what both have."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


def summed(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    total = x.detach().clone()
    dist.all_reduce(total, group=group)
    return total


class Half:
    """Which half of the channels a rank computes; without a group, both."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.all = (0, 1) if group is None else (dist.get_rank(group),)

    def copied(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.group is None else Copied.apply(x, self.group)

    def summed(self, parts: list[torch.Tensor]) -> torch.Tensor:
        return parts[0] + parts[1] if self.group is None else Summed.apply(parts[0], self.group)


class Down(nn.Module):
    """Gives this rank's channels."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(into, out // 2, 3, padding=1) for _ in range(2))
        self.half = Half()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.half.copied(x)
        skip = torch.cat([silu(self.convs[n](x)) for n in self.half.all], 1)
        return avg_pool2d(skip, 2), skip


class Up(nn.Module):
    """Takes this rank's channels of the skip connection, and gives all of its own."""

    def __init__(self, into: int, skip: int, out: int) -> None:
        super().__init__()
        wide = (out + 1) // 2
        self.ups = nn.ModuleList(nn.ConvTranspose2d(into, wide, 2, stride=2) for _ in range(2))
        self.convs = nn.ModuleList(
            nn.Conv2d(wide + skip // 2, out, 3, padding=1, bias=False) for _ in range(2)
        )
        self.half = Half()

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        x = self.half.copied(x)
        skips = skip.chunk(len(self.half.all), 1)
        parts = [
            self.convs[n](torch.cat([silu(self.ups[n](x)), own], 1))
            for n, own in zip(self.half.all, skips, strict=True)
        ]
        return self.half.summed(parts)


def edges(wide: bool) -> list[Edge]:
    """With --wide, stages 1 and 3 of three ranks, and stage 3 of five, are those of two ranks."""
    part, whole = SIZE // 2, ["R"]
    size = BATCH // MICROBATCHES
    specs = {"x": Spec((size, 16, part // 2, part // 2)), "inner": Spec((size, 16, part, part))}
    channels = ["S(1)"] if wide else whole
    return [
        Edge(0, 1, ("x",)),
        Edge(1, 2, ("x", "inner"), specs, layouts=dict.fromkeys(specs, (channels, whole))),
        Edge(2, 3, ("x",)),
        Edge(0, 3, ("outer",), layouts={"outer": (whole, ["S(1)"])}),  # past two stages
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


def order(args: argparse.Namespace, rows: int) -> Order:
    """Of four stages, with two in a row where there are two rows: in the order of their times."""
    found = make_order(args.schedule, 4, MICROBATCHES)
    found = split_backward(found) if args.split else found
    spans = [span for row in simulate(found).spans for span in row]
    spans.sort(key=lambda span: (span.start, span.action))
    lists = [[s.action for s in spans if s.action.stage % rows == r] for r in range(rows)]
    return Order(tuple(map(tuple, lists)))


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
    rows = [[rank] for rank in range(ranks - args.wide)]
    if args.wide:
        rows[-1] = [ranks - 2, ranks - 1]
    row = next(n for n, members in enumerate(rows) if rank in members)
    mine = {n: stage for n, stage in enumerate(unet(args.seed)) if n % len(rows) == row}
    if len(rows[row]) == 2:
        half = Half(dist.new_group(rows[row], use_local_synchronization=True))
        for stage in mine.values():
            stage.module.half = half
    weights = [w for stage in mine.values() for w in stage.module.to(args.device).parameters()]
    is_wide = args.wide and len(rows) == 2  # then stage 1 is on the last row, too
    pipeline = Pipeline(mine, edges(is_wide), order(args, len(rows)), loss_fn=mse_loss, meshes=rows)
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
    dist.broadcast(losses, src=rows[3 % len(rows)][0])  # only the last stage knows them
    compare(losses.tolist(), alone(args))
    return losses.tolist()


if __name__ == "__main__":
    schedule = ("--schedule", {"choices": sorted(SCHEDULES), "default": "1f1b"})
    switches = [(name, {"action": "store_true"}) for name in ("--split", "--wide")]
    main(train, ranks=2, steps=20, more=[schedule, *switches])
