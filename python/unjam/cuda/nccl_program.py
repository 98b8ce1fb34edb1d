"""The programs with NCCL: one stream a GPU, a communicator for each all-reduce. They hang.

Run in a child process with a time limit, because a hung NCCL kernel cannot be ended from within:
``python -m unjam.cuda.nccl_program RANKS SEED DEVICE_SYNC ITERATIONS``. It prints "consistent" when
the iterations in one order on all ranks are complete and right, which shows that the harness is
sound, then "random" and the number of each iteration in random order that is complete.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from ..programs import SIZES, consistent_orders, random_orders
from .nccl import Nccl
from .program import Data, start

_START_S = 120.0  # for the child to import torch, and for eight communicators to be made
_SOUND = 3  # iterations in one order


@dataclass(frozen=True)
class NcclTry:
    """What NCCL did.

    Attributes:
        hung: an iteration in random order was not complete after the time limit.
        iterations: those that were complete.
        seconds: of the wait, from the first call in random order.
    """

    hung: bool
    iterations: int
    seconds: float


def try_nccl(
    ranks: int, seed: int, device_sync: bool, iterations: int = 20, limit_s: float = 10.0
) -> NcclTry:
    """Runs a program with NCCL in a child process, which is killed after the time limit.

    Args:
        ranks: GPUs.
        seed: of the call orders.
        device_sync: program 2.
        iterations: in random order.
        limit_s: for them, after as many as show that the harness is sound.

    Raises:
        RuntimeError: the child failed, or could not even run in one order.
    """
    with tempfile.TemporaryDirectory(prefix="unjam-nccl-") as folder:
        log = Path(folder) / "log"
        words = [str(ranks), str(seed), str(int(device_sync)), str(iterations)]
        process = start("nccl_program", words, {}, log)
        try:
            begin = time.monotonic()
            began_random = 0.0
            while True:
                ended = process.poll() is not None  # before reading, so that nothing is missed
                lines = log.read_text(errors="replace").splitlines()
                now = time.monotonic()
                done = sum(line.isdecimal() for line in lines)
                if "random" in lines and not began_random:
                    began_random = now
                if done == iterations:
                    return NcclTry(False, done, now - began_random)
                if ended or (not began_random and now - begin > _START_S):
                    raise RuntimeError("NCCL's program failed: " + "\n".join(lines[-20:]))
                if began_random and now - began_random > limit_s:
                    return NcclTry(True, done, now - began_random)
                time.sleep(0.02)
        finally:
            process.kill()
            process.wait()


def main() -> None:
    """The child."""
    ranks, seed, device_sync, iterations = map(int, sys.argv[1:])
    nccl = Nccl()
    comms = [nccl.join_all(ranks) for _ in SIZES]
    streams = [torch.cuda.Stream(rank) for rank in range(ranks)]
    data = [Data(SIZES, ranks, rank, torch.device("cuda", rank)) for rank in range(ranks)]
    for rank in range(ranks):
        torch.cuda.synchronize(rank)
    shape = (ranks, len(SIZES))
    made = [
        *consistent_orders(seed, _SOUND, *shape).tolist(),
        *random_orders(seed, iterations, *shape).tolist(),
    ]
    errors: list[BaseException] = []

    def rank_turn(rank: int, turn: int) -> None:
        try:
            torch.cuda.set_device(rank)
            with torch.cuda.stream(streams[rank]):
                data[rank].fill(turn)
                for place, key in enumerate(made[turn][rank]):
                    if device_sync and place:
                        torch.cuda.synchronize(rank)
                    buffer = data[rank].buffers[key]
                    address = buffer.data_ptr()
                    function, arguments = nccl.call(
                        "all_reduce", comms[key][rank], streams[rank].cuda_stream, "float32",
                        buffer.numel(), address, address,
                    )  # fmt: skip
                    nccl.check(function(*arguments))
                streams[rank].synchronize()
                data[rank].check(turn)
        except BaseException as error:
            errors.append(error)

    for turn in range(len(made)):
        if turn == _SOUND:
            print("consistent\nrandom", flush=True)
        threads = [threading.Thread(target=rank_turn, args=(r, turn)) for r in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        if turn >= _SOUND:
            print(turn - _SOUND, flush=True)


if __name__ == "__main__":
    main()
