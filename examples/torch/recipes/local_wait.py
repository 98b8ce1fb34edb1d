"""(d) A rank that blocks on something local, behind an all-reduce that a peer will only call later.

What hangs today. Rank 0 calls an all-reduce of metrics without waiting, then does something
innocent that waits for its whole GPU: ``torch.cuda.synchronize()``, ``empty_cache()`` (cudaFree),
an allocation that must free first. The others call the metrics only after a collective of the
model, in which rank 0 takes part only after its synchronisation: everybody waits for everybody.
torchrec's issue 4149 is such a case: 62 ranks in ``cuda.synchronize()`` behind an all-to-all, two
in ``.tolist()``. On a CPU nothing waits for "everything", but calls of one group are matched by
order: metrics meet the model's sum.

What changes. Nothing with two groups; with one (``--groups 1``) a key tells the metrics from the
rest.

Why it works. An all-reduce that nobody waits for holds no GPU: the engine leaves when nothing
moves, the synchronisation returns, and the sum is made when the last rank has called.

    python examples/torch/recipes/local_wait.py --backend unjam
    python examples/torch/recipes/local_wait.py --backend gloo --groups 1
    torchrun --nproc-per-node 4 examples/torch/recipes/local_wait.py --backend nccl --device cuda
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import unjam

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from harness import main  # noqa: E402

COUNT = 50_000


def block_here(device: str, step: int) -> None:
    """What programs do without a thought of collectives."""
    x = torch.ones(1000, device=device)
    if device == "cuda" and step % 3 == 0:
        torch.cuda.synchronize()
    elif device == "cuda" and step % 3 == 1:
        torch.empty(1 << 25, dtype=torch.uint8, device=device)  # so that there is what to free
        torch.cuda.empty_cache()
    x.sum().item()


def train(args: argparse.Namespace) -> list[float]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    group = dist.new_group() if args.groups == 2 else dist.group.WORLD
    losses = []
    for step in range(args.steps):
        metrics = torch.full((COUNT,), float(rank), device=args.device)
        model = torch.full((COUNT,), float(step), device=args.device)

        def call_metrics(x: torch.Tensor = metrics) -> dist.Work:
            with unjam.key("metrics"):
                return dist.all_reduce(x, group=group, async_op=True)

        first = rank == step % ranks  # today's early bird
        work = call_metrics() if first else None
        if first:
            block_here(args.device, step)
        dist.all_reduce(model)
        block_here(args.device, step)
        work = work or call_metrics()
        work.wait()
        found = model.mean().item(), metrics.mean().item()
        expected = float(step * ranks), ranks * (ranks - 1) / 2
        if found != expected:
            raise ArithmeticError(f"wrong: {found} in step {step}, expected {expected}")
        losses.append(found[0])
    return losses


if __name__ == "__main__":
    groups = {
        "type": int,
        "choices": [1, 2],
        "default": 2,
        "help": "metrics in a group of their own",
    }
    main(train, ranks=2, steps=12, more=[("--groups", groups)])
