"""One rank of a benchmark: answers the parent's requests over a connection.

As a process: ``python -m unjam.bench.worker --connection FD --barrier FD``.
"""

from __future__ import annotations

import argparse
import gc
import signal
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np

from .._errors import UnjamError
from . import data
from .barrier import SharedBarrier
from .block import Block
from .cases import HEAP_PIECE, Case
from .libraries import Call, Gloo, Library, Unjam
from .messages import Check, Failure, Prepare, Repeat, Start


class Barrier(Protocol):
    """Where the ranks meet."""

    def wait(self) -> object:
        """Returns when all ranks are here."""


class WrongData(Exception):
    """A library gave a wrong result."""


class Rank:
    """The work of one rank."""

    def __init__(self, start: Start, barrier: Barrier) -> None:
        """Joins the jobs of both libraries."""
        self._rank = start.rank
        self._barrier = barrier
        # The peer first: what it starts is there before unjam looks at the machine.
        self._libraries: dict[str, Library] = {}
        if start.peer == "gloo":
            self._libraries["gloo"] = Gloo(start.rank, start.ranks, start.store, start.limit_s)
        self.unjam = Unjam(
            start.rank, start.ranks, start.unique_id, start.limit_s, start.heap_bytes
        )
        self._libraries = {"unjam": self.unjam} | self._libraries
        self._block = (
            None
            if start.block_bytes is None
            else Block(self._make_block(start.block_bytes, start.registered))
        )
        self._case: Case | None = None
        self._buffers: tuple[data.Array, data.Array | None] | None = None
        self._calls: dict[str, Call] = {}

    def answer(self, request: object) -> object:
        """Does what the parent asks for."""
        if isinstance(request, Prepare):
            return self._prepare(request.case)
        if isinstance(request, Repeat):
            return self._repeat(request.times)
        if isinstance(request, Check):
            self._check()
            self._calls, self._buffers = {}, None
            return None
        raise TypeError(f"unknown request {request!r}")

    def close(self) -> None:
        """Leaves both jobs, together: no rank hears of a connection that another has closed."""
        self._barrier.wait()
        for library in self._libraries.values():
            library.close()

    def _make_block(self, nbytes: int, registered: bool) -> data.Array:
        if not registered:
            return np.frombuffer(self.unjam.alloc(nbytes), np.uint8)
        memory = np.zeros(nbytes + HEAP_PIECE, np.uint8)  # aligned as the heap's
        first = -memory.ctypes.data % HEAP_PIECE
        block = memory[first : first + nbytes]
        self.unjam.register(block)
        return block

    def _prepare(self, case: Case) -> list[str]:
        self._case = case
        self._calls, self._buffers = {}, None
        if self._block is not None:
            self._block.restart()
        self._buffers = data.allocate(case, self._block)
        prepared = {
            name: library.prepare(case, *self._buffers) for name, library in self._libraries.items()
        }
        self._calls = {name: call for name, call in prepared.items() if call is not None}
        self._check()
        return list(self._calls)

    def _check(self) -> None:
        case, buffers = self._case, self._buffers
        if case is None or buffers is None:
            raise RuntimeError("no case is prepared")
        for name, call in self._calls.items():
            data.fill(case, self._rank, *buffers)
            self._barrier.wait()
            call()
            problem = data.wrong(case, self._rank, *buffers)
            self._barrier.wait()
            if problem:
                raise WrongData(f"{name}: {case.collective} of {case.nbytes} bytes: {problem}")

    def _repeat(self, times: int) -> dict[str, list[int]]:
        """The timed part. Sums that run in place may reach infinity here, which costs nothing."""
        measured: dict[str, list[int]] = {name: [] for name in self._calls}
        turns = [(measured[name].append, call) for name, call in self._calls.items()]
        meet, clock = self._barrier.wait, time.perf_counter_ns
        gc.collect()
        gc.disable()
        try:
            for _ in range(times):
                for note, call in turns:
                    meet()
                    begin = clock()
                    call()
                    note(clock() - begin)
        finally:
            gc.enable()
        return measured


def _make_rank(start: Start, barrier: Barrier) -> Any:
    """A Rank, or a CudaRank, which needs torch."""
    if start.device == "host":
        return Rank(start, barrier)
    from .cuda_worker import CudaRank

    return CudaRank(start, barrier, WrongData)


def serve(connection: Connection, barrier: Barrier, own_process: bool = False) -> None:
    """Answers requests until the parent closes the connection.

    Args:
        connection: to the parent.
        barrier: of all ranks.
        own_process: this rank is a process of its own.
    """
    try:
        start = connection.recv()
        rank = _make_rank(start, barrier)
    except EOFError:
        return
    except BaseException as error:
        _tell(connection, error)
        return
    if own_process:
        gc.freeze()  # what is imported stays, and torch is a tenth of a second of each gc.collect()
    connection.send(None)
    while True:
        try:
            request = connection.recv()
        except (EOFError, OSError):  # the latter where the parent has left an answer unread
            break
        try:
            answer = rank.answer(request)
        except BaseException as error:
            # Nothing can be relied on after this: the other ranks must not wait for it.
            rank.unjam.abort()
            _tell(connection, error)
            return
        try:
            connection.send(answer)
        except OSError:
            break  # the parent has given up
    rank.close()


def main(arguments: Sequence[str] | None = None) -> None:
    """A worker process."""
    parser = argparse.ArgumentParser(prog="unjam.bench.worker")
    parser.add_argument("--connection", type=int, required=True)
    parser.add_argument("--barrier", type=int, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--limit", type=float, required=True)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    barrier = SharedBarrier(options.barrier, options.rank, options.ranks, options.limit)
    serve(Connection(options.connection), barrier, own_process=True)


def _tell(connection: Connection, error: BaseException) -> None:
    wrong = isinstance(error, WrongData)
    speaks = wrong or isinstance(error, (UnjamError, TimeoutError))  # says all by itself
    text = str(error) if speaks else f"{type(error).__name__}: {error}"
    details = "" if speaks else "".join(traceback.format_exception(error))
    with suppress(OSError):  # the parent has heard enough from another rank
        connection.send(Failure(text, details, wrong))


if __name__ == "__main__":
    main()
