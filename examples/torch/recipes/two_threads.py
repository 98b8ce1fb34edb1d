"""(b) Two groups driven by two threads, whose calls come in the opposite order on every other rank.

What hangs today. One thread exchanges activations point to point in one group, another reduces in
a second group; which of them calls first is the operating system's choice. With NCCL each group's
first call connects, and blocks its thread until the peer comes, so that two threads which hand
over to each other stand for good; later a kernel of each group can hold what the other needs (a
full GPU, or one hardware queue: CUDA_DEVICE_MAX_CONNECTIONS=1). Hence NCCL's rule: one order of
all groups' calls, the same on all ranks.

What changes. Nothing in the program: two groups, two threads, each on a stream of its own.

Why it works. A call is handed over without waiting for a peer, and one engine serves what all
groups have pending. Both threads on *one* stream, each with a wait behind its call, are a true
cycle: the second call is then ordered behind the first one's end. ``--streams 1`` (on GPUs) shows
it: no library can end that, and unjam's explanation names both operations, and who waits.

    python examples/torch/recipes/two_threads.py --backend unjam
    torchrun --nproc-per-node 4 examples/torch/recipes/two_threads.py --backend nccl --device cuda
    python examples/torch/recipes/two_threads.py --device cuda --streams 1 --limit 20    # hung
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from harness import main  # noqa: E402

COUNT = 100_000


def use(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager:
    """This thread's stream; a new thread begins on GPU 0."""
    if stream is None:
        return contextlib.nullcontext()
    torch.cuda.set_device(stream.device)
    return torch.cuda.stream(stream)


def train(args: argparse.Namespace) -> list[float]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    streams: list[torch.cuda.Stream | None] = [None, None]
    if args.device == "cuda":
        streams = [torch.cuda.Stream() for _ in range(args.streams)] * (2 // args.streams)
    elif args.streams == 1:
        raise ValueError("--streams 1 needs --device cuda: a CPU has no streams")
    pipe, data = dist.new_group(), dist.new_group()
    # In step i: the first thread calls, lets the second call, and only then waits. On one stream it
    # waits before: on a GPU that blocks no thread, only what is called in the stream after it.
    called = [threading.Event() for _ in range(2 * args.steps)]

    def turn(step: int, place: int) -> None:
        """Waits until it is this thread's turn to call."""
        before = 2 * step + place - 1
        if before >= 0 and not called[before].wait(args.limit):
            raise TimeoutError("the other thread has not called")

    def finish(works: list[dist.Work], event: threading.Event) -> None:
        if args.streams == 2:
            event.set()
        for work in works:
            work.wait()
        event.set()  # once more does no harm

    def exchange() -> list[float]:
        place, last = rank % 2, []
        peer = rank ^ 1
        with use(streams[0]):
            for step in range(args.steps):
                x = torch.full((COUNT,), float(rank + step), device=args.device)
                y = torch.empty_like(x)
                turn(step, place)
                works = dist.batch_isend_irecv(
                    [
                        dist.P2POp(dist.isend, x, peer, pipe),
                        dist.P2POp(dist.irecv, y, peer, pipe),
                    ]
                )
                finish(works, called[2 * step + place])
                last.append(y.mean().item())
        return last

    def reduce() -> list[float]:
        place, last = 1 - rank % 2, []
        with use(streams[1]):
            for step in range(args.steps):
                x = torch.full((COUNT,), float(rank + step), device=args.device)
                turn(step, place)
                work = dist.all_reduce(x, group=data, async_op=True)
                finish([work], called[2 * step + place])
                last.append(x.mean().item())
        return last

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.submit(exchange), threads.submit(reduce)
        received, sums = first.result(), second.result()
    for step in range(args.steps):
        expected = (rank ^ 1) + step, ranks * (ranks - 1) / 2 + ranks * step
        if (received[step], sums[step]) != expected:
            raise ArithmeticError(f"wrong: {received[step]}, {sums[step]}, expected {expected}")
    return sums


if __name__ == "__main__":
    streams = {"type": int, "choices": [1, 2], "default": 2, "help": "of a rank's two threads"}
    main(train, ranks=2, steps=20, more=[("--streams", streams)])
