"""The programs with NCCL: one stream a GPU, a communicator for each all-reduce. They hang.

Run in child processes with a time limit, because a hung NCCL kernel cannot be ended from within:
``python -m unjam.cuda.nccl_program RANKS SEED DEVICE_SYNC ITERATIONS [RANK IDS]``, without a rank
for all ranks as threads of one process, with one for a process of many. It prints "consistent" when
the iterations in one order on all ranks are complete and right, which shows that the harness is
sound, then "random" and the number of each iteration in random order that is complete.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from ctypes import c_void_p
from dataclasses import dataclass
from pathlib import Path

import torch

from ..programs import SIZES, consistent_orders, random_orders
from .nccl import Nccl, hand_over
from .program import Data, start

START_S = 120.0
"""The longest to wait for children to import torch, to make eight communicators and to show that
the harness is sound."""

_SOUND = 3  # iterations in one order


@dataclass(frozen=True)
class NcclTry:
    """What NCCL did.

    Attributes:
        hung: an iteration in random order was not complete after the time limit.
        iterations: those that were complete, on all ranks.
        seconds: of the wait, from when all ranks had come to the random order.
    """

    hung: bool
    iterations: int
    seconds: float


def try_nccl(
    ranks: int,
    seed: int,
    device_sync: bool,
    iterations: int = 20,
    limit_s: float = 10.0,
    processes: bool = False,
) -> NcclTry:
    """Runs a program with NCCL in a child process or several, killed after the time limit.

    Args:
        ranks: GPUs.
        seed: of the call orders.
        device_sync: program 2.
        iterations: in random order.
        limit_s: for them, after as many as show that the harness is sound.
        processes: a child for each rank instead of one whose threads they are. The threads meet
            after each iteration; the processes do not, so that one may be in the next iteration
            while others wait for the end of the last.

    Raises:
        OSError: a child could not be started.
        RuntimeError: a child failed, or they could not even run in one order.
    """
    with tempfile.TemporaryDirectory(prefix="unjam-nccl-") as folder:
        words = [str(ranks), str(seed), str(int(device_sync)), str(iterations)]
        ids = str(Path(folder) / "ids")
        places = [[str(rank), ids] for rank in range(ranks)] if processes else [[]]
        children: list[_Child] = []
        try:
            for number, place in enumerate(places):
                log = Path(folder) / f"log{number}"
                children.append(_Child(start("nccl_program", [*words, *place], {}, log), log))
            return _watch(children, iterations, limit_s)
        finally:
            # All, before the first is waited for: its end may take as long as the others wait.
            for child in children:
                child.process.kill()
            for child in children:
                child.process.wait()


@dataclass(frozen=True)
class _Child:
    process: subprocess.Popen[bytes]
    log: Path


def _watch(children: Sequence[_Child], iterations: int, limit_s: float) -> NcclTry:
    """Until all children have done all iterations, or one has failed, or the time is over."""
    begin = time.monotonic()
    began_random = 0.0
    while True:
        # Before reading, so that nothing is missed.
        ended = [child.process.poll() is not None for child in children]
        told = [child.log.read_text(errors="replace").splitlines() for child in children]
        now = time.monotonic()
        done = [sum(line.isdecimal() for line in lines) for lines in told]
        begun = ["random" in lines for lines in told]
        if all(begun) and not began_random:
            began_random = now
        if min(done) == iterations:
            return NcclTry(False, iterations, now - began_random)
        for number, lines in enumerate(told):
            late = not begun[number] and now - begin > START_S
            if late or (ended[number] and done[number] < iterations):
                which = f", rank {number}" if len(children) > 1 else ""
                how = f"came to no random order within {START_S:g} s" if late else "failed"
                raise RuntimeError(f"NCCL's program {how}{which}: " + "\n".join(lines[-20:]))
        if began_random and now - began_random > limit_s:
            return NcclTry(True, min(done), now - began_random)
        time.sleep(0.02)


class _Rank:
    """One rank of a child: its GPU, which is that of its number, with buffers and a stream."""

    def __init__(self, ranks: int, rank: int) -> None:
        self.comms: list[c_void_p] = []  # by all-reduce
        self._rank = rank
        self._stream = torch.cuda.Stream(rank)
        self._data = Data(SIZES, ranks, rank, torch.device("cuda", rank))
        torch.cuda.synchronize(rank)

    def run(self, nccl: Nccl, turn: int, order: Sequence[int], device_sync: bool) -> None:
        """One iteration; its results are checked."""
        torch.cuda.set_device(self._rank)
        with torch.cuda.stream(self._stream):
            self._data.fill(turn)
            for place, key in enumerate(order):
                if device_sync and place:
                    torch.cuda.synchronize(self._rank)
                buffer = self._data.buffers[key]
                address = buffer.data_ptr()
                function, arguments = nccl.call(
                    "all_reduce", self.comms[key], self._stream.cuda_stream, "float32",
                    buffer.numel(), address, address,
                )  # fmt: skip
                nccl.check(function(*arguments))
            self._stream.synchronize()
            self._data.check(turn)


def main() -> None:
    """A child."""
    ranks, seed, device_sync, iterations = map(int, sys.argv[1:5])
    nccl = Nccl()
    if len(sys.argv) > 5:
        here = [int(sys.argv[5])]
        members = [_join(nccl, ranks, here[0], Path(sys.argv[6]))]
    else:
        here = list(range(ranks))
        members = _join_all(nccl, ranks)
    shape = (ranks, len(SIZES))
    made = [
        *consistent_orders(seed, _SOUND, *shape).tolist(),
        *random_orders(seed, iterations, *shape).tolist(),
    ]
    errors: list[BaseException] = []

    def rank_turn(place: int, turn: int) -> None:
        try:
            members[place].run(nccl, turn, made[turn][here[place]], bool(device_sync))
        except BaseException as error:
            errors.append(error)

    for turn in range(len(made)):
        if turn == _SOUND:
            print("consistent\nrandom", flush=True)
        threads = [threading.Thread(target=rank_turn, args=(p, turn)) for p in range(len(here))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        if turn >= _SOUND:
            print(turn - _SOUND, flush=True)
    if len(here) < ranks:
        time.sleep(START_S)  # till it is killed: others may still need what ends with this process


def _join_all(nccl: Nccl, ranks: int) -> list[_Rank]:
    """All ranks, in this process."""
    comms = [nccl.join_all(ranks) for _ in SIZES]
    members = [_Rank(ranks, rank) for rank in range(ranks)]
    for rank, member in enumerate(members):
        member.comms = [of_ranks[rank] for of_ranks in comms]
    return members


def _join(nccl: Nccl, ranks: int, rank: int, ids: Path) -> _Rank:
    """One of several processes: rank 0 makes the communicators' ids, and all read them."""
    torch.cuda.set_device(rank)
    member = _Rank(ranks, rank)
    make = b"".join(nccl.unique_id() for _ in SIZES) if rank == 0 else None
    told = hand_over(ids, rank, make, START_S)
    each = len(told) // len(SIZES)
    member.comms = [
        nccl.join(ranks, rank, told[first : first + each]) for first in range(0, len(told), each)
    ]
    return member


if __name__ == "__main__":
    main()
