"""What all-reduces cost a matrix product that runs beside them on the same GPU."""

from __future__ import annotations

import json
import math
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

import unjam

from .cuda_libraries import CudaNccl
from .messages import Gemm

_PRODUCTS = 16  # in a measurement
_CALLS = 32  # all-reduces queued beside them: at 1 GiB they outlast the products by far
_LOOK_S = 1e-4  # between two looks at what is done
_DAEMON = "unjam_engine_kernel"  # may be there, and has blocks that leave at once
_SETTLES_S = 2e-2  # until daemons have left, which may stay 5 ms, and who waits does so as it will


@dataclass(frozen=True)
class Beside:
    """One way of communicating, as one rank saw it.

    Attributes:
        name: "alone", "unjam" (asynchronous calls beside the stream), "unjam, in stream" or "nccl";
            with ", waiting" behind it: one call that waits for the last rank, which is late.
        ms: of a product, a measurement each; of calls that wait 0 on the rank that is late.
        busbw: GB/s of the all-reduces meanwhile, as nccl-tests counts them; 0 alone, or waiting.
        covered: the all-reduces outlasted the products in all measurements.
        blocks: of a call's kernel, each of which holds an SM; 0: not looked at.
    """

    name: str
    ms: list[float]
    busbw: float
    covered: bool = True
    blocks: int = 0


Answer = list[Beside]


class _Traffic:
    """All-reduces in a stream of their own."""

    def issue(self, calls: int) -> None:
        """Queues them."""
        raise NotImplementedError

    def done(self) -> int:
        """How many are complete."""
        raise NotImplementedError

    def finish(self) -> None:
        """Waits for all."""
        raise NotImplementedError


class _BesideTraffic(_Traffic):
    """unjam's, beside the stream: asynchronous calls under one key."""

    def __init__(self, call: Callable[[], unjam.Request]) -> None:
        self._call = call
        self._requests: list[unjam.Request] = []

    def issue(self, calls: int) -> None:
        self._requests = [self._call() for _ in range(calls)]

    def done(self) -> int:
        return sum(request.test() for request in self._requests)

    def finish(self) -> None:
        unjam.wait_all(self._requests)
        self._requests = []


class _StreamTraffic(_Traffic):
    """Calls in a stream, an event after each."""

    def __init__(self, call: Callable[[], object], stream: Any) -> None:
        self._call, self._stream = call, stream
        self._events: list[Any] = []

    def issue(self, calls: int) -> None:
        self._events = []
        for _ in range(calls):
            self._call()
            event = torch.cuda.Event()
            event.record(self._stream)
            self._events.append(event)

    def done(self) -> int:
        return sum(event.query() for event in self._events)

    def finish(self) -> None:
        self._stream.synchronize()


def measure(
    request: Gemm,
    rank: int,
    ranks: int,
    stream: Any,
    nccl: CudaNccl | None,
    meet: Callable[[], Any],
) -> Answer:
    """What one rank measures: the product alone, beside unjam, and beside NCCL if it is there.

    Args:
        request: what to measure.
        rank: this one, whose device is the current one.
        ranks: how many.
        stream: where the product runs.
        nccl: NCCL's communicator, or None.
        meet: returns when all ranks are here and their streams empty.
    """
    device = stream.device
    traffic_stream = torch.cuda.Stream(device)
    shape = (request.size, request.size)
    left, right, out = (torch.randn(shape, device=device).bfloat16() for _ in range(3))
    data = torch.zeros(request.nbytes // 2, dtype=torch.bfloat16, device=device)

    def products(meanwhile: Callable[[], object] = lambda: None) -> float:
        """Milliseconds of one, between events."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(stream)
        for _ in range(_PRODUCTS):
            torch.matmul(left, right, out=out)
        end.record(stream)
        while not end.query():
            meanwhile()
            time.sleep(_LOOK_S)
        return float(begin.elapsed_time(end)) / _PRODUCTS

    with unjam.init(
        ranks, rank, request.unique_id, device="cuda", device_index=device.index,
        lanes=request.lanes,
    ) as context:  # fmt: skip
        if request.registered:
            context.register_memory(data)  # until the context is closed
        run = context.group(name="gemm").register_all_reduce("traffic", data.dtype).run
        ways = _ways(partial(run, data), data, nccl, traffic_stream)
        products()  # warms up
        _warm_up(ways, meet)
        late = {f"{name}, waiting": traffic for name, traffic in ways.items()}
        found: dict[str, list[float]] = {name: [] for name in ("alone", *ways, *late)}
        rates: dict[str, list[float]] = {name: [] for name in ways}
        covered = dict.fromkeys(found, True)
        factor = 2 * (ranks - 1) / ranks * request.nbytes / 1e9
        for repetition in range(request.times):
            # What a product takes depends on what was before it: so nothing comes always after the
            # same. The order is the same on all ranks.
            for name in random.Random(repetition).sample(list(found), len(found)):
                meet()
                time.sleep(_SETTLES_S)
                if name in late:
                    found[name].append(_waiting(late[name], products, rank == ranks - 1, meet))
                elif name in ways:
                    milliseconds, rate, outlasted = _beside(ways[name], products)
                    found[name].append(milliseconds)
                    rates[name].append(factor * rate)
                    covered[name] = covered[name] and outlasted
                else:
                    found[name].append(products())
        blocks: dict[str, int] = {}
        for name, traffic in ways.items():  # last: what watches kernels may slow them down
            if isinstance(traffic, _StreamTraffic):
                meet()
                blocks[name] = _blocks(traffic)
    return [
        Beside(
            name,
            times,
            median(rates[name]) if name in rates else 0.0,
            covered[name],
            blocks.get(name, 0),
        )
        for name, times in found.items()
    ]


def _ways(
    run: Callable[..., Any], data: Any, nccl: CudaNccl | None, stream: Any
) -> dict[str, _Traffic]:
    """The traffic beside the product, by its name. `run`: unjam's all-reduce of `data`."""
    ways: dict[str, _Traffic] = {
        "unjam": _BesideTraffic(partial(run, stream=stream)),
        "unjam, in stream": _StreamTraffic(partial(run, stream=stream, in_stream=True), stream),
    }
    if nccl is not None:
        ways["nccl"] = _StreamTraffic(partial(nccl.all_reduce, data, stream), stream)
    return ways


def _warm_up(ways: dict[str, _Traffic], meet: Callable[[], Any]) -> None:
    # NCCL's first call returns when all ranks have made it: it must not be one that waits.
    for traffic in ways.values():
        meet()
        traffic.issue(1)
        traffic.finish()


def _beside(
    traffic: _Traffic, products: Callable[[Callable[[], object]], float]
) -> tuple[float, float, bool]:
    """Milliseconds of a product; calls a second meanwhile; whether there were calls to the end."""
    progress = Progress()

    def look() -> None:
        progress.note(traffic.done(), time.perf_counter())

    traffic.issue(_CALLS)
    while not traffic.done():  # the first one is under way everywhere
        time.sleep(_LOOK_S)
    look()
    begin = time.perf_counter()
    milliseconds = products(look)
    end = time.perf_counter()
    look()
    done = traffic.done()
    while done < _CALLS and traffic.done() == done:  # the one under way; the job has a limit
        time.sleep(_LOOK_S)
    look()
    traffic.finish()
    return milliseconds, (progress.at(end) - progress.at(begin)) / (end - begin), done < _CALLS


def _waiting(
    traffic: _Traffic,
    products: Callable[[], float],
    is_late: bool,
    meet: Callable[[], Any],
) -> float:
    """Milliseconds of a product beside a call that another rank has yet to make; 0 on that one."""
    milliseconds = 0.0
    meet()
    if not is_late:
        traffic.issue(1)
        time.sleep(_SETTLES_S)
        milliseconds = products()
    meet()
    if is_late:
        traffic.issue(1)
    traffic.finish()
    return milliseconds


def _blocks(traffic: _Traffic) -> int:
    """Of the largest kernel of a call."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        traffic.issue(1)
        traffic.finish()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return blocks_in(json.loads(path.read_text()))


def blocks_in(trace: dict[str, Any]) -> int:
    """Of the largest kernel, but for unjam's daemon, of a trace as PyTorch's profiler writes it."""
    grids = (
        math.prod(event["args"]["grid"])
        for event in trace["traceEvents"]
        if event.get("cat") == "kernel" and _DAEMON not in event["name"]
    )
    return max(grids, default=0)


class Progress:
    """How many of some calls were done at a time, with the part of the one under way then."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, int]] = []  # when one more was done, and how many were

    def note(self, done: int, when: float) -> None:
        """So many are done."""
        if not self._seen or done > self._seen[-1][1]:
            self._seen.append((when, done))

    def at(self, when: float) -> float:
        """How many then, in between in proportion; what was not seen counts as the nearest seen."""
        before = [x for x in self._seen if x[0] <= when] or self._seen[:1]
        after = [x for x in self._seen if x[0] > when] or before[-1:]
        (since, first), (until, second) = before[-1], after[0]
        part = (when - since) / (until - since) if until > since else 0.0
        return first + max(part, 0.0) * (second - first)
