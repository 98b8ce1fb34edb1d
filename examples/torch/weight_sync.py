"""Weights go to two generators beside training, in another order on each rank.

    python examples/torch/weight_sync.py
    torchrun --nproc-per-node 6 examples/torch/weight_sync.py

The first ranks train a sharded model (FSDP2), the last two are generators, each with a whole copy.
In every step the weights begin their way, and training goes on meanwhile. Whether a rank begins the
resharding, its own side's collective or that of all ranks first depends on the rank and the step.
In the end the generators' losses are compared with the trainer's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss

import unjam.torch
from harness import compare, main

WIDTH, HIDDEN, BATCH, GENERATORS = 16, 33, 8, 2


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.rand(BATCH, WIDTH, generator=torch.Generator().manual_seed(step)) - 0.5
    return x, x.roll(1, dims=1)


def in_turn(first: int, *calls: Callable[[], Any]) -> list[Any]:
    """Makes all calls, beginning with any of them; gives what they gave, in their own order."""
    order = [(first + i) % len(calls) for i in range(len(calls))]
    found = {i: calls[i]() for i in order}
    return [found[i] for i in range(len(calls))]


def train(args: argparse.Namespace) -> list[float]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    trainers = ranks - GENERATORS
    if trainers < 1:
        raise SystemExit(f"{ranks} ranks: give {GENERATORS + 1} or more, two of them generators")
    is_trainer = rank < trainers
    sides = [
        dist.new_group(list(members), use_local_synchronization=True)
        for members in (range(trainers), range(trainers, ranks))
        if rank in members
    ]
    mine = model(args.seed if is_trainer else args.seed + 1 + rank)
    if is_trainer:
        fully_shard(mine, mesh=DeviceMesh("cpu", list(range(trainers))))
        optimizer = torch.optim.Adam(mine.parameters(), lr=1e-2)
        # What is under way must not change: a copy of the weights travels.
        weights = {name: x.detach().clone() for name, x in mine.state_dict().items()}
        sync = unjam.torch.Reshard.between(src=weights, key="weights")
    else:
        sync = unjam.torch.Reshard.between(dst=mine.state_dict(), key="weights")
    losses: list[float] = []
    work = None
    for step in range(args.steps):
        x, target = batch(step)
        if is_trainer:
            loss = mse_loss(mine(x), target)
            losses.append(loss.item())
            if work is not None:
                work.wait()  # the weights of the step before have gone
            for name, value in mine.state_dict().items():
                weights[name].copy_(value.detach())
            move = partial(sync, src=weights)
        else:
            move = partial(sync, dst=mine.state_dict())
        everybody, side = torch.ones(4), torch.ones(4)
        work, *others = in_turn(
            rank + step,
            move,
            partial(unjam.torch.all_reduce, everybody, key="metrics", async_op=True),
            partial(dist.all_reduce, side, group=sides[0], async_op=True),
        )
        if is_trainer:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        for other in reversed(others) if rank % 2 else others:
            other.wait()
        if (everybody != ranks).any() or (side != dist.get_world_size(sides[0])).any():
            raise ArithmeticError(f"wrong: a sum in step {step} on rank {rank}")
        if not is_trainer:
            work.wait()
            with torch.no_grad():
                losses.append(mse_loss(mine(x), target).item())
    work.wait()
    known: list[list[float]] = [[] for _ in range(ranks)]
    dist.all_gather_object(known, losses)
    for generator in range(trainers, ranks):
        compare(known[generator], known[0])
    return known[0]


if __name__ == "__main__":
    main(train, ranks=4, steps=10)
