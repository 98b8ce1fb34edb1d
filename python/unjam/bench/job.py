"""The parent's side: starts the ranks, asks all of them at once, and watches that they answer."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import unjam

from .._closing import ClosesAtEnd
from ..cuda import nccl
from . import messages, worker
from .barrier import SharedBarrier

_LOG_TAIL = 2000  # characters of a worker's output in an error
_START_S = 120.0  # for workers to import what they need, and to meet
_END_S = 60.0  # for workers to leave by themselves
_DEATH_S = 10.0  # for one whose connection has ended to end


class BenchError(Exception):
    """A rank died, hung, failed, or gave a wrong result; the message names it."""


class Job(ClosesAtEnd):
    """The ranks of a benchmark, as processes or as threads. A context manager.

    :meth:`ask` sends one request to all ranks and gives their answers, by rank. It never waits
    longer than the limit; when it raises, the job is of no more use.
    """

    def __init__(
        self,
        ranks: int,
        peer: str,
        limit_s: float,
        threads: bool = False,
        device: str = "host",
        block_bytes: int | None = None,
        registered: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Starts the ranks; returns when they have joined their jobs.

        Args:
            ranks: how many.
            peer: the other library, or "none".
            limit_s: the longest that one request may take.
            threads: ranks are threads of this process.
            device: "host", or "cuda": a GPU for each rank, by its number.
            block_bytes: of the one block that all buffers are to be cut from; None: there is none.
            registered: it is memory that is registered, and not of unjam's heap.
            environment: what ranks that are processes have in theirs beside this one's.

        Raises:
            BenchError: a rank could not start.
        """
        self._limit_s = limit_s
        self._folder = tempfile.TemporaryDirectory(prefix="unjam-bench-")
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._threads: list[threading.Thread] = []
        self._barrier: threading.Barrier | None = None
        try:
            if threads:
                self._start_threads(ranks)
            else:
                self._start_processes(ranks, environment or {})
            unique_id = unjam.unique_id()
            store = str(Path(self._folder.name) / "store")
            for rank, connection in enumerate(self._connections):
                start = messages.Start(
                    rank,
                    ranks,
                    unique_id,
                    peer,
                    store,
                    limit_s,
                    device,
                    block_bytes,
                    registered,
                )
                self._send(rank, connection, start)
            self._answers(max(_START_S, 2 * limit_s))
        except BaseException:
            self._end(kill=True)
            raise

    def close(self) -> None:
        """Ends the ranks, which have nothing to do any more."""
        self._end(kill=False)

    def _end_block(self, failed: bool) -> None:
        self._end(kill=failed)

    def ask(self, request: object) -> list[Any]:
        """Sends `request` to every rank.

        Raises:
            BenchError: a rank died, hung or failed.
        """
        for rank, connection in enumerate(self._connections):
            self._send(rank, connection, request)
        return self._answers(2 * self._limit_s)  # ranks notice first, and say more

    # ---- inside ----

    def _start_processes(self, ranks: int, more: Mapping[str, str]) -> None:
        barrier = SharedBarrier.make(ranks)
        environment = {**os.environ, **more}
        package = str(Path(unjam.__file__).resolve().parents[1])
        paths = [package, environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        environment.setdefault("OMP_NUM_THREADS", "1")
        environment.update(nccl.ENVIRONMENT)
        try:
            for rank in range(ranks):
                ours, theirs = socket.socketpair()
                command = [sys.executable, "-m", "unjam.bench.worker"]
                command += ["--connection", str(theirs.fileno()), "--barrier", str(barrier)]
                command += ["--rank", str(rank), "--ranks", str(ranks)]
                command += ["--limit", str(self._limit_s)]
                self._connections.append(Connection(ours.detach()))
                with theirs, self._log(rank).open("wb") as log:
                    self._processes.append(
                        subprocess.Popen(
                            command,
                            env=environment,
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=log,
                            pass_fds=(theirs.fileno(), barrier),
                        )
                    )
        finally:
            os.close(barrier)

    def _start_threads(self, ranks: int) -> None:
        self._barrier = barrier = threading.Barrier(ranks, timeout=self._limit_s)
        for rank in range(ranks):
            ours, theirs = multiprocessing.Pipe()
            self._connections.append(ours)
            thread = threading.Thread(
                target=_serve_and_close,
                args=(theirs, barrier),
                name=f"unjam-bench-{rank}",
                daemon=True,  # one that hangs must not keep the program
            )
            thread.start()
            self._threads.append(thread)

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name) / f"rank{rank}.log"

    def _send(self, rank: int, connection: Connection, request: object) -> None:
        try:
            connection.send(request)
        except OSError:
            raise self._death(rank) from None

    def _answers(self, limit_s: float) -> list[Any]:
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + limit_s
        while len(answers) < len(self._connections):
            left = deadline - time.monotonic()
            missing = {
                connection: rank
                for rank, connection in enumerate(self._connections)
                if rank not in answers
            }
            ready = wait(list(missing), timeout=max(0.0, left))
            if not ready:
                names = ", ".join(str(rank) for rank in missing.values())
                raise BenchError(f"no answer of rank {names} for {limit_s:g} s")
            for connection in ready:
                rank = missing[connection]  # type: ignore[index]
                try:
                    answers[rank] = connection.recv()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    raise self._death(rank) from None
                if isinstance(answers[rank], messages.Failure):
                    raise self._failure(rank, answers[rank])
        return [answers[rank] for rank in range(len(self._connections))]

    def _death(self, rank: int) -> BenchError:
        how = "ended"
        if self._processes:
            with suppress(subprocess.TimeoutExpired):
                status = self._processes[rank].wait(_DEATH_S)
                how = f"was killed by signal {-status}" if status < 0 else f"exited with {status}"
        return BenchError(f"rank {rank} {how} in the middle of the benchmark{self._tail(rank)}")

    def _failure(self, rank: int, failure: messages.Failure) -> BenchError:
        if failure.wrong:
            return BenchError(f"rank {rank} has a wrong result: {failure.text}")
        return BenchError(f"rank {rank} failed: {failure.text}\n{failure.details}".rstrip())

    def _tail(self, rank: int) -> str:
        with suppress(OSError):
            text = self._log(rank).read_text(errors="replace").strip()
            if text:
                return f"; its last words:\n{text[-_LOG_TAIL:]}"
        return ""

    def _end(self, kill: bool) -> None:
        for connection in self._connections:
            connection.close()
        if kill and self._barrier is not None:
            self._barrier.abort()  # who waits for a rank that has failed
        deadline = time.monotonic() + (0.0 if kill else _END_S)
        for process in self._processes:
            if not kill:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
            if process.poll() is None:
                process.kill()
                process.wait()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._folder.cleanup()


def _serve_and_close(connection: Connection, barrier: threading.Barrier) -> None:
    with connection, suppress(threading.BrokenBarrierError):
        worker.serve(connection, barrier)
