"""One rank of a benchmark on a GPU: host, device and async mode. See ``worker`` for the rest."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import repeat
from typing import Protocol

import torch

from . import cuda_data, gemm
from .block import Block
from .cases import Case
from .cuda_libraries import Calls, CudaLibrary, CudaNccl, CudaUnjam
from .messages import Burst, Check, Gemm, Plan, Prepare, Queue, Repeat, Start

_ISSUED = 100  # calls whose issue is timed: few enough that no queue is full
_SLACK_S = 5e-4  # of the delay before queued calls: ranks leave the barrier at different times
_CYCLES = 10_000_000


class Barrier(Protocol):
    """Where the ranks meet."""

    def wait(self) -> object:
        """Returns when all ranks are here."""


class CudaRank:
    """The work of one rank; it uses the GPU of its number."""

    def __init__(self, start: Start, barrier: Barrier, wrong_data: type[Exception]) -> None:
        """Joins the jobs of both libraries.

        Args:
            start: what the parent said first.
            barrier: where the ranks meet.
            wrong_data: what to raise for a wrong result.
        """
        self._start = start
        self._barrier = barrier
        self._wrong_data = wrong_data
        self._device = torch.device("cuda", start.rank)
        torch.cuda.set_device(self._device)
        self._stream = torch.cuda.Stream(self._device)
        torch.cuda.set_stream(self._stream)
        self._cycles_a_second = clock()
        # The peer first: what it starts is there before unjam looks at the machine.
        self._nccl: CudaNccl | None = None
        if start.peer == "nccl":
            self._nccl = CudaNccl(start.rank, start.ranks, start.store, self._stream, start.limit_s)
        self.unjam = CudaUnjam(
            start.rank, start.ranks, start.unique_id, self._stream, start.heap_bytes
        )
        self._libraries: dict[str, CudaLibrary] = {"unjam": self.unjam}
        if self._nccl is not None:
            self._libraries["nccl"] = self._nccl
        self._block = (
            None
            if start.block_bytes is None
            else Block(self._make_block(start.block_bytes, start.registered))
        )
        # Where the ranks' streams meet: an all-reduce of one number.
        self._number = torch.zeros(1, device=self._device)
        meeting = Case("all_reduce", "float32", start.ranks, 1)
        self._meetings = {
            name: library.prepare(meeting, [(self._number, None)], "meeting").issue
            for name, library in self._libraries.items()
        }
        self._case: Case | None = None
        self._buffers: list[cuda_data.Buffers] = []
        self._calls: dict[str, Calls] = {}

    def answer(self, request: object) -> object:
        """Does what the parent asks for."""
        if isinstance(request, Prepare):
            self._case = request.case
            return self._prepare(1)
        if isinstance(request, Repeat):
            return self._repeat(request.times)
        if isinstance(request, Queue):
            return self._queue(request.times, request.calls)
        if isinstance(request, Burst):
            return self._burst(request.times, request.outstanding)
        if isinstance(request, Plan):
            return self.unjam.plan(self._of_case())
        if isinstance(request, Gemm):
            return gemm.measure(
                request, self._start.rank, self._start.ranks, self._stream, self._nccl, self._meet
            )
        if isinstance(request, Check):
            self._check()
            self._release()
            return None
        raise TypeError(f"unknown request {request!r}")

    def close(self) -> None:
        """Leaves both jobs, together: no rank hears of a connection that another has closed."""
        self._barrier.wait()
        for library in self._libraries.values():
            library.close()

    def _make_block(self, nbytes: int, registered: bool) -> torch.Tensor:
        if not registered:
            return torch.as_tensor(self.unjam.alloc(nbytes), device=self._device)
        block = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self.unjam.register(block)
        return block

    def _of_case(self) -> Case:
        if self._case is None:
            raise RuntimeError("no case is prepared")
        return self._case

    def _prepare(self, outstanding: int) -> list[str]:
        case = self._of_case()
        self._release()
        if self._block is not None:
            self._block.restart()
        self._buffers = [
            cuda_data.allocate(case, self._device, self._block, self._start.rank)
            for _ in range(outstanding)
        ]
        self._stream.synchronize()
        self._calls = {
            name: library.prepare(case, self._buffers) for name, library in self._libraries.items()
        }
        self._check()
        return list(self._calls)

    def _release(self) -> None:
        self._stream.synchronize()
        self._calls, self._buffers = {}, []

    def _check(self) -> None:
        """The results of each library once: of a call, or of a burst's first and last."""
        case, rank = self._of_case(), self._start.rank
        several = len(self._buffers) > 1
        ends = [self._buffers[0], self._buffers[-1]] if several else self._buffers
        for name, calls in self._calls.items():
            for pair in ends:
                cuda_data.fill(case, rank, pair)
            self._meet()
            if several:
                calls.burst()
            else:
                calls.check(calls.issue())
            self._stream.synchronize()
            problems = [cuda_data.wrong(case, rank, pair) for pair in ends]
            self._barrier.wait()
            for problem in filter(None, problems):
                raise self._wrong_data(
                    f"{name}: {case.collective} of {case.nbytes} bytes: {problem}"
                )

    def _meet(self) -> None:
        """All ranks are here, and their streams are empty."""
        self._stream.synchronize()
        self._barrier.wait()

    def _repeat(self, times: int) -> dict[str, list[int]]:
        """Host mode: a call, and the stream's synchronisation."""
        measured: dict[str, list[int]] = {name: [] for name in self._calls}
        clock, synchronize, meet = (
            time.perf_counter_ns,
            self._stream.synchronize,
            self._barrier.wait,
        )
        with no_collector():
            for _ in range(times):
                for name, calls in self._calls.items():
                    issue = calls.issue
                    meet()
                    begin = clock()
                    code = issue()
                    synchronize()
                    measured[name].append(clock() - begin)
                    calls.check(code)
        return measured

    def _queue(self, times: int, calls: int) -> dict[str, tuple[list[int], list[int]]]:
        """Device mode: calls queued behind a delay, between events.

        The first calls after the delay are not counted, one of the case and the meeting: ranks
        leave the delay at different times, and of a broadcast or a reduce not all wait for others.
        """
        measured: dict[str, tuple[list[int], list[int]]] = {}
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        delays = {name: self._issue_seconds(one, calls) for name, one in self._calls.items()}
        with no_collector():
            for _ in range(times):
                for name, one in self._calls.items():
                    self._meet()
                    seconds = 1.5 * delays[name] + _SLACK_S
                    torch.cuda._sleep(int(seconds * self._cycles_a_second))
                    code = one.issue() or self._meetings[name]()
                    begin.record(self._stream)
                    issued = _issue(one, min(calls, _ISSUED))
                    if calls > _ISSUED:
                        _issue(one, calls - _ISSUED)
                    end.record(self._stream)
                    self._stream.synchronize()
                    one.check(code)
                    per_call, per_issue = measured.setdefault(name, ([], []))
                    per_call.append(round(begin.elapsed_time(end) * 1e6 / calls))
                    per_issue.append(round(issued / min(calls, _ISSUED)))
        return measured

    def _issue_seconds(self, calls: Calls, count: int) -> float:
        """Warms up, and tells how long the calls take to issue."""
        few = min(count, _ISSUED)
        self._meet()
        return _issue(calls, few) * 1e-9 * count / few

    def _burst(self, times: int, outstanding: int) -> dict[str, list[int]]:
        """Async mode: calls outstanding at once, until the last is complete."""
        self._prepare(outstanding)
        measured: dict[str, list[int]] = {name: [] for name in self._calls}
        with no_collector():
            for _ in range(times):
                for name, calls in self._calls.items():
                    self._meet()
                    begin = time.perf_counter_ns()
                    calls.burst()
                    self._stream.synchronize()
                    measured[name].append(round((time.perf_counter_ns() - begin) / outstanding))
        return measured


def _issue(calls: Calls, count: int) -> int:
    """Queues calls; nanoseconds that it took."""
    issue, code = calls.issue, 0
    begin = time.perf_counter_ns()
    for _ in repeat(None, count):
        code |= issue()
    took = time.perf_counter_ns() - begin
    calls.check(code)
    return took


def clock() -> float:
    """Cycles of the device's clock in a second, as torch's delay counts them."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(_CYCLES)
    begin.record()
    torch.cuda._sleep(_CYCLES)
    end.record()
    end.synchronize()
    return _CYCLES / (begin.elapsed_time(end) * 1e-3)


@contextmanager
def no_collector() -> Iterator[None]:
    """Without Python's collector of garbage, which comes when it likes."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
