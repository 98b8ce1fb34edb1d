"""(g) A refit with hundreds of point-to-point operations between each pair of ranks.

What hangs today. Weights change their layout by sends and receives of slices, hundreds for each
pair of ranks, in one group call. NCCL cuts a large group into several plans, each rank for itself:
a send and its receive come to lie in different plans, and ranks wait in a circle (Megatron-LM issue
7189). The cure in use are groups of a bounded size, which all ranks must cut alike.

What changes. A tag for each operation, which is a key. Here each rank submits in an order of its
own; a window bounds how many are under way. ``unjam.torch.doors.copies`` does this and more: small
slices go together, what goes to several ranks goes once, and ranks that differ are named.

Why it works. Sends and receives are matched by their tags and hold nothing while they wait. In a
window all ranks have the same operations under way, so none waits for one that is not there.

    python examples/torch/recipes/big_refit.py --backend unjam --ranks 4
    python examples/torch/recipes/big_refit.py --backend gloo
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from harness import main  # noqa: E402

ROWS, WINDOW = 4, 40


def whole(number: int, ranks: int, step: int) -> torch.Tensor:
    """A tensor of the model: rows and columns for each rank."""
    size = ROWS * ranks
    return torch.arange(size * size, dtype=torch.float32).reshape(size, size) % 1009 + number + step


def refit(args: argparse.Namespace, step: int) -> None:
    """From rows to columns: each rank sends each other one a block of each tensor."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    others = [other for other in range(ranks) if other != rank]
    pick = random.Random(1000 * args.seed + 10 * step + rank)

    def block(number: int, source: int, target: int) -> torch.Tensor:
        rows, columns = (
            slice(ROWS * source, ROWS * (source + 1)),
            slice(ROWS * target, ROWS * (target + 1)),
        )
        return whole(number, ranks, step)[rows, columns].contiguous().to(args.device)

    for first in range(0, args.tensors, WINDOW):
        calls = [
            (number, other, sends)
            for number in range(first, min(first + WINDOW, args.tensors))
            for other in others
            for sends in (True, False)
        ]
        if args.backend == "unjam":
            pick.shuffle(calls)
        ops, boxes = [], []
        for number, other, sends in calls:
            x = block(number, rank, other) if sends else torch.empty(ROWS, ROWS)
            if not sends:
                x = x.to(args.device)
                boxes.append((x, number, other))
            ops.append(dist.P2POp(dist.isend if sends else dist.irecv, x, other, tag=number))
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        for x, number, other in boxes:
            if not torch.equal(x, block(number, other, rank)):
                raise ArithmeticError(f"wrong: tensor {number} from rank {other}, step {step}")


def train(args: argparse.Namespace) -> list[float]:
    """Nothing is trained: the number of operations of each step."""
    for step in range(args.steps):
        refit(args, step)
    return [2.0 * args.tensors * (dist.get_world_size() - 1)] * args.steps


if __name__ == "__main__":
    tensors = ("--tensors", {"type": int, "default": 300, "help": "sends each pair has a way"})
    main(train, ranks=4, steps=2, more=[tensors])
