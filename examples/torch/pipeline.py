"""Pipeline parallelism: one stage per rank, micro-batches in the order 1F1B.

    python examples/torch/pipeline.py --backend unjam --ranks 4
    torchrun --nproc-per-node 2 examples/torch/pipeline.py --backend unjam --device cuda

The stages send activations forward and gradients backward, point to point.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import mse_loss

from harness import main

WIDTH, LAYERS, BATCH, MICRO_BATCHES = 32, 8, 16, 4


def layers(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS))
    )


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What to learn: each number's neighbour."""
    x = torch.rand(BATCH, WIDTH, generator=torch.Generator().manual_seed(step)) - 0.5
    return x, x.roll(1, dims=1)


def train(args: argparse.Namespace) -> list[float]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    share = LAYERS // ranks
    mine = layers(args.seed)[rank * share : (rank + 1) * share].to(args.device)
    stage = PipelineStage(mine, rank, ranks, torch.device(args.device))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=mse_loss)
    optimizer = torch.optim.Adam(mine.parameters(), lr=3e-3)
    losses = torch.zeros(args.steps, device=args.device)
    for step in range(args.steps):
        x, target = (t.to(args.device) for t in batch(step))
        optimizer.zero_grad()
        if rank == ranks - 1:
            parts: list[torch.Tensor] = []
            schedule.step(*([x] if ranks == 1 else []), target=target, losses=parts)
            losses[step] = torch.stack(parts).mean()
        elif rank == 0:
            schedule.step(x)
        else:
            schedule.step()
        optimizer.step()
    dist.broadcast(losses, src=ranks - 1)  # only the last stage knows them
    return losses.tolist()


if __name__ == "__main__":
    main(train, ranks=2, steps=20)
