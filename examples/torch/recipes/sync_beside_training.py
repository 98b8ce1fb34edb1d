"""(f) Weights go to generators beside training, and every rank calls in an order of its own.

What hangs today. Trainers average gradients in one group, generators reduce in another one, and
weights and metrics go through a third one that has all ranks. Whoever calls the weights' broadcasts
from a thread or a coroutine beside the step has another order on each rank. In one group the calls
are mixed up then; across groups, kernels of one hold what those of the other need (trl issues 6798
and 7103, verl 7423, sglang 22620). So programs add locks, barriers, and phases without other calls.

What changes. ``with unjam.key(f"weights.{layer}")`` around the broadcasts, and a key for the
metrics. Everything else goes on meanwhile.

Why it works. A rank calls all that belongs to a round before it waits for anything, and may wait in
any order. What goes must not change meanwhile, so a copy of the weights goes. For sharded weights
and other layouts take ``unjam.torch.Reshard``, which plans once what goes where.

    python examples/torch/recipes/sync_beside_training.py --backend unjam --ranks 4
    python examples/torch/recipes/sync_beside_training.py --backend gloo
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import unjam

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from harness import compare, main  # noqa: E402

WIDTH, LAYERS, BATCH = 8, 6, 4
Weights = list[torch.Tensor]


def start(seed: int) -> Weights:
    g = torch.Generator().manual_seed(seed)
    return [
        torch.randn(WIDTH, WIDTH, generator=g, dtype=torch.float64) / WIDTH**0.5
        for _ in range(LAYERS)
    ]


def gradients(weights: Weights, seed: int, step: int, trainer: int) -> tuple[float, Weights]:
    """Of one trainer's batch: its loss, and a gradient for each layer."""
    g = torch.Generator().manual_seed(1_000_003 * seed + 101 * step + trainer)
    x = y = torch.randn(BATCH, WIDTH, generator=g, dtype=torch.float64)
    leaves = [w.detach().cpu().requires_grad_() for w in weights]
    for w in leaves:
        y = torch.tanh(y @ w)
    loss = (y - x.roll(1, 1)).square().mean()
    return loss.item(), list(torch.autograd.grad(loss, leaves))


def alone(args: argparse.Namespace, trainers: int) -> tuple[list[float], list[float]]:
    """The first trainer's losses, and the sum of all weights behind each step."""
    weights, losses, sums = start(args.seed), [], []
    for step in range(args.steps):
        found = [gradients(weights, args.seed, step, trainer) for trainer in range(trainers)]
        losses.append(found[0][0])
        for layer, w in enumerate(weights):
            w -= 0.1 * sum(grads[layer] for _, grads in found) / trainers
        sums.append(sum(w.sum().item() for w in weights))
    return losses, sums


def train(args: argparse.Namespace) -> list[float]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks < 2:
        raise SystemExit("give 2 ranks or more: trainers, and generators")
    trainers = ranks - ranks // 2
    sides = [dist.new_group(list(range(trainers))), dist.new_group(list(range(trainers, ranks)))]
    is_trainer = rank < trainers
    side = sides[0 if is_trainer else 1]
    weights = [w.to(args.device) for w in start(args.seed if is_trainer else args.seed + 1 + rank)]
    order = random.Random(1000 * args.seed + rank)
    losses: list[float] = []
    sums: list[float] = []
    for step in range(args.steps):
        if is_trainer:
            loss, grads = gradients(weights, args.seed, step, rank)
            losses.append(loss)
            own = [grad.to(args.device) for grad in grads]
        else:  # what tensor parallelism of generators reduces
            own = [
                torch.full((WIDTH,), float(layer), device=args.device) for layer in range(LAYERS)
            ]
        # Those of the step before: what training gives now goes in the next round.
        moved = [w.clone() for w in weights]
        metrics = torch.ones(2, device=args.device)

        def broadcast(layer: int, moved: Weights = moved) -> dist.Work:
            with unjam.key(f"weights.{layer}"):
                return dist.broadcast(moved[layer], src=0, async_op=True)

        def count(metrics: torch.Tensor = metrics) -> dist.Work:
            with unjam.key("metrics"):
                return dist.all_reduce(metrics, async_op=True)

        def reduce(layer: int, own: Weights = own) -> dist.Work:
            with unjam.key(f"layer.{layer}"):
                return dist.all_reduce(own[layer], group=side, async_op=True)

        calls: list[Callable[[], dist.Work]] = [count]
        for layer in range(LAYERS):
            calls += [lambda layer=layer: broadcast(layer), lambda layer=layer: reduce(layer)]
        order.shuffle(calls)
        works = [call() for call in calls]  # all are called before one is waited for
        order.shuffle(works)
        for work in works:
            work.wait()
        if (metrics != ranks).any():
            raise ArithmeticError(f"wrong: metrics {metrics.tolist()} in step {step}")
        if is_trainer:
            for w, grad in zip(weights, own, strict=True):
                w -= 0.1 * grad / trainers
        elif any((x != layer * dist.get_world_size(side)).any() for layer, x in enumerate(own)):
            raise ArithmeticError(f"wrong: a generators' sum in step {step}")
        sums.append(sum(w.sum().item() for w in (weights if is_trainer else moved)))
    found: list[tuple[list[float], list[float]]] = [([], [])] * ranks
    dist.all_gather_object(found, (losses, sums))
    losses, expected = alone(args, trainers)
    compare(found[0][0], losses, 1e-9)
    for other, (_, got) in enumerate(found):
        late = int(other >= trainers)  # generators have the weights of the step before
        compare(got[late:], expected[: len(got) - late], 1e-9)
    return losses


if __name__ == "__main__":
    main(train, ranks=4, steps=20)
