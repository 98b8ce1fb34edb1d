"""unjam's all-reduces in a stream beside PyTorch's symmetric memory's and NCCL's, in one run.

    python3 bench/symmetric_memory.py --ranks 4 --seconds 0.1 --repetitions 7 --json FILE

One host, a process and a GPU a rank. All ways are called from Python, in the same stream, and take
turns: a repetition of each, in an order that changes from one to the next (the same on all ranks).
Each has buffers of its own. What a rank moves, of S bytes with n ranks:

* ``unjam``: in place, in torch's memory. Algorithm and protocol are the library's choice, and in
  the rows; what peers send goes through memory of the library's, and is copied or added from there.
* ``unjam, registered``: in place, in torch's memory that is registered, so that peers may store
  results there themselves.
* ``one-shot``: ``symm_mem::one_shot_all_reduce_out``. It reads all of the others' inputs, (n - 1) S
  over the links, and writes the sums into an output of its own, in torch's memory.
* ``two-shot``: ``symm_mem::two_shot_all_reduce_``, in place. It reads an nth of each of the others'
  buffers, (n - 1) S / n, and stores the sums into all of them, as much again.
* ``nccl``: ``torch.distributed.all_reduce``, in place, in torch's memory, which the host does not
  wait for. NCCL's choice of algorithm; a ring's is to send 2 (n - 1) S / n.

So one-shot and two-shot have their inputs in symmetric memory to begin with: no copy into it or out
of it is timed, nor is any allocation. Nothing uses multicast: it is off for PyTorch's symmetric
memory and for NCCL, and a symmetric memory that says it has it is not used.

A repetition is as ``unjam bench``'s in device mode: after a barrier of all ranks a kernel that only
waits stands in the stream for longer than the calls take to issue, behind it a call that is not
counted, where the ranks' streams meet, and then, between events, the calls. They are as many as
take --seconds / --repetitions, of 20 to 1,000, and no more than were queued in time when that was
tried: repetitions that began before all calls were queued are counted in ``issued_late``, and tell
of the issuing thread. A repetition takes what its slowest rank takes. All data is zero then, so
that it is the same for all ways; before and after, results are checked against small integers whose
sums are exact. A way that cannot run, or is wrong, has a row that says so.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import repeat
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from textwrap import shorten
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing
from rich.table import Table

import unjam
from unjam.bench import Case, cuda_data, parse_sizes
from unjam.bench.cases import size_text
from unjam.bench.cuda_data import Buffers
from unjam.bench.cuda_libraries import plan_of
from unjam.bench.cuda_worker import clock, no_collector
from unjam.bench.figures import bandwidth, quantile, slowest
from unjam.bench.libraries import register_for_all
from unjam.bench.report import make_report, write_report
from unjam.bench.rows import Row
from unjam.cli._console import (
    add_json_file,
    duration,
    make_console,
    make_table,
    measuring,
    microseconds,
    positive,
    rank_count,
)
from unjam.cuda import nccl
from unjam.cuda.gpus import lacking

ENVIRONMENT = {
    **nccl.ENVIRONMENT,
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMMMEM": "CUDA",
    # An allocation for each buffer: torch 2.11's kernels take no notice of a place in a pool.
    "TORCH_SYMMMEM_IMPLICIT_POOL": "0",
    "GLOO_SOCKET_IFNAME": "lo",
}
"""What every rank has in its environment."""

WAYS = ("unjam", "unjam, registered", "one-shot", "two-shot", "nccl")
DTYPES = {"float32": "float32", "bf16": "bfloat16", "bfloat16": "bfloat16"}

_FEWEST_CALLS = 20  # in a repetition
_MOST_CALLS = 1000
_ISSUED = 100  # calls whose issue is timed beforehand: few enough that no queue is full
_MARGIN = 1.5  # by which the delay before the calls is longer than their issue
_SLACK_S = 1e-3  # of the delay: ranks leave the barrier at different times
_SETTLES_S = 1e-2  # until an engine of unjam's that nobody waits for has left, which may stay 5 ms
_CLOSES_S = 30.0
_LOOK_S = 0.2  # between two looks at the ranks
_DEATH_S = 10.0  # for one that was killed to end
_WORDS = 300  # characters of why a way does not run
_SHORT = 80  # of those in a table
_TRACE = 2000  # characters of a traceback: what ranks send is never in pieces
_WRONG = "wrong result: "

Call = Callable[[], object]


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes:
        ranks: how many, a GPU each.
        dtypes: of the elements.
        sizes: bytes, see Case.of_size.
        seconds: for the repetitions of one way at one size.
        repetitions: of each way at each size.
        limit_s: the longest that all may take.
        unique_id: of the unjam job.
    """

    ranks: int
    dtypes: tuple[str, ...]
    sizes: tuple[int, ...]
    seconds: float
    repetitions: int
    limit_s: float
    unique_id: bytes = b""

    def cases(self) -> list[Case]:
        """Every size of every data type, without repetition."""
        every = (
            Case.of_size("all_reduce", dtype, self.ranks, size)
            for dtype in self.dtypes
            for size in self.sizes
        )
        return list(dict.fromkeys(every))


class Timed(NamedTuple):
    """A repetition, as one rank saw it.

    Attributes:
        ns: of a call, between events.
        issue_ns: of the issuing thread, of a call.
        in_time: all calls were queued before the first of them began.
    """

    ns: int
    issue_ns: int
    in_time: bool


@dataclass(frozen=True)
class Way:
    """A way to reduce.

    Attributes:
        buffers: bytes of the largest case: input and output; no output where it is in place.
        make: a call that reduces a case's parts of them.
    """

    buffers: Buffers
    make: Callable[[Case, Buffers], Call]


@dataclass
class Turn:
    """A way at one size, on one rank.

    Attributes:
        call: reduces.
        buffers: of the case.
        calls: in a repetition, the same on all ranks.
        issue_s: of a call, the slowest rank's.
        times: of the repetitions.
    """

    call: Call
    buffers: Buffers
    calls: int = 0
    issue_s: float = 0.0
    times: list[Timed] = field(default_factory=list)


class Rank:
    """One rank: all of its methods are called on all ranks, in the same order."""

    def __init__(self, rank: int, settings: Settings, port: int, barrier: Any) -> None:
        """Joins the job of PyTorch's; returns when all ranks have.

        Args:
            rank: this one, and its GPU.
            settings: what to measure.
            port: of the parent's store.
            barrier: where the ranks meet.
        """
        self._rank = rank
        self._settings = settings
        self._barrier = barrier
        self._device = torch.device("cuda", rank)
        torch.cuda.set_device(self._device)
        self._stream = torch.cuda.Stream(self._device)
        torch.cuda.set_stream(self._stream)  # which symmetric memory and NCCL are called in
        self._begin = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)
        limit = timedelta(seconds=settings.limit_s)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=settings.ranks, timeout=limit
        )
        self._bytes = max(case.nbytes for case in settings.cases())
        self._context: unjam.Context | None = None
        self._collectives: dict[str, unjam.Collective] = {}  # by key
        self._ways: dict[str, Way] = {}
        self._lacks: dict[str, str] = {}  # why a way is not among them
        self._cycles_a_second = 0.0

    def set_up(self) -> None:
        """Makes all ways that there are."""
        # The others first: what they start is there before unjam looks at the machine.
        self._add("nccl", self._make_nccl)
        self._add_symmetric()
        self._add_unjam()
        self._cycles_a_second = clock()

    def measure(self, case: Case) -> list[Row]:
        """A row for each way."""
        lacks = dict(self._lacks)
        turns: dict[str, Turn] = {}
        for name, way in self._ways.items():
            buffers = _parts(case, way.buffers)
            call, lack = self._together(partial(way.make, case, buffers))
            lack = lack or self._check(case, name, call, buffers)
            if lack:
                lacks[name] = lack
            else:
                turns[name] = Turn(call, buffers)
        for turn in turns.values():
            self._prepare(turn)
        with no_collector():
            for repetition in range(self._settings.repetitions):
                # (The same order on all ranks.)
                order = random.Random(f"{case.dtype} {case.nbytes} {repetition}")
                for turn in (turns[name] for name in order.sample(list(turns), len(turns))):
                    turn.times.append(self._repetition(turn, turn.calls))
        of_ranks = self._gather({name: turn.times for name, turn in turns.items()})
        for name, turn in turns.items():
            if lack := self._check(case, name, turn.call, turn.buffers):
                lacks[name] = lack
        self._look_for_errors()
        rows = []
        for name in WAYS:
            if name in lacks:
                rows.append(missing_row(case, name, lacks[name]))
            else:
                times = [of_rank[name] for of_rank in of_ranks]
                rows.append(make_row(case, name, turns[name].calls, self._plan(case, name), times))
        return rows

    def close(self) -> None:
        """Leaves the jobs, together: no rank hears of a connection that another has closed."""
        self._meet()
        if self._context is not None:
            self._context.device_synchronize(_CLOSES_S)
            self._context.close()
        self._meet()
        self._ways.clear()  # and symmetric memory with them
        dist.destroy_process_group()

    def abort(self) -> None:
        """Lets the other ranks know that this one will not come."""
        if self._context is not None:
            self._context.abort()

    # ---- the ways ----

    def _add(self, name: str, make: Callable[[], Way]) -> None:
        """A way, if all ranks can make it."""
        way, lack = self._together(make)
        if lack:
            self._lacks[name] = lack
        else:
            self._ways[name] = way

    def _memory(self) -> torch.Tensor:
        """Of torch's, for the largest case."""
        return torch.zeros(self._bytes, dtype=torch.uint8, device=self._device)

    def _make_nccl(self) -> Way:
        memory = self._memory()
        dist.all_reduce(memory[:1])
        self._stream.synchronize()

        def make(case: Case, buffers: Buffers) -> Call:
            return partial(dist.all_reduce, buffers[0])  # (not async_op: in the current stream)

        return Way((memory, None), make)

    def _add_symmetric(self) -> None:
        memory, lack = self._together(self._allocate_symmetric)
        if not lack:  # (what comes now waits for all ranks)
            _, lack = self._together(partial(_map_peers, memory))
        if lack:
            self._lacks |= {"one-shot": lack, "two-shot": lack}
            return
        assert dist.group.WORLD is not None
        group = dist.group.WORLD.group_name

        def one_shot(case: Case, buffers: Buffers) -> Call:
            run = torch.ops.symm_mem.one_shot_all_reduce_out.default
            return partial(run, buffers[0], "sum", group, buffers[1])

        def two_shot(case: Case, buffers: Buffers) -> Call:
            run = torch.ops.symm_mem.two_shot_all_reduce_.default
            return partial(run, buffers[0], "sum", group)

        self._add("one-shot", lambda: Way((memory[0], self._memory()), one_shot))
        self._add("two-shot", lambda: Way((memory[1], None), two_shot))

    def _allocate_symmetric(self) -> list[torch.Tensor]:
        """Symmetric memory of this rank's, not yet known to the others: for each kernel a buffer.

        Raises:
            RuntimeError: it would have multicast. It must not even be mapped then.
        """
        from torch._C._autograd import DeviceType
        from torch._C._distributed_c10d import _SymmetricMemory
        from torch.distributed import _symmetric_memory

        if _SymmetricMemory.has_multicast_support(DeviceType.CUDA, self._device.index):
            raise RuntimeError("symmetric memory has multicast on, whatever the environment says")
        return [
            _symmetric_memory.empty(self._bytes, dtype=torch.uint8, device=self._device)
            for _ in range(2)
        ]

    def _add_unjam(self) -> None:
        settings = self._settings

        def join() -> unjam.Context:
            return unjam.init(
                settings.ranks,
                self._rank,
                settings.unique_id,
                device="cuda",
                device_index=self._rank,
            )

        self._context, lack = self._together(join)
        if lack:
            self._lacks |= {"unjam": lack, "unjam, registered": lack}
            return
        assert self._context is not None
        context, group = self._context, self._context.group(name="bench")

        def call(name: str, case: Case, buffers: Buffers) -> Call:
            key = _key(case, name)
            if key not in self._collectives:
                self._collectives[key] = group.register_all_reduce(key, buffers[0].dtype)
            run = self._collectives[key].run
            return partial(run, buffers[0], stream=self._stream, in_stream=True)

        def registered() -> Way:
            memory = self._memory()
            register_for_all(context, memory)  # until the context is closed
            return Way((memory, None), partial(call, "unjam, registered"))

        self._add("unjam", lambda: Way((self._memory(), None), partial(call, "unjam")))
        self._add("unjam, registered", registered)

    def _plan(self, case: Case, name: str) -> tuple[str, str]:
        """Algorithm and protocol of unjam's calls; "" if not told."""
        if self._context is not None and name.startswith("unjam"):
            return plan_of(self._context.info(), _key(case, name))
        return "", ""

    def _look_for_errors(self) -> None:
        """Raises what has gone wrong in a stream."""
        error = None if self._context is None else self._context.async_error()
        if error is not None:
            raise error

    # ---- with the other ranks ----

    def _meet(self) -> None:
        """All ranks are here, and their streams are empty."""
        self._stream.synchronize()
        self._barrier.wait()

    def _gather(self, value: Any) -> list[Any]:
        """All ranks' values, the same list on all ranks."""
        answers: list[Any] = [None] * self._settings.ranks
        dist.all_gather_object(answers, value)
        return answers

    def _together(self, what: Callable[[], Any]) -> tuple[Any, str]:
        """What all ranks do: its result, and in words why one of them could not; "" if all could.

        The words are the same on all ranks.
        """
        result, failure = _attempt(what)
        return result, in_words(self._gather(failure))

    # ---- measuring ----

    def _check(self, case: Case, name: str, call: Call, buffers: Buffers) -> str:
        """The result of one call: what is wrong with it on some rank, "" if nothing.

        Raises:
            RuntimeError: only some ranks could make the call, which the others wait for now.
        """
        cuda_data.fill(case, self._rank, buffers)
        self._meet()
        _, failure = _attempt(call)
        failures = self._gather(failure)
        if any(failures) and not all(failures):
            raise RuntimeError(f"{name} on some ranks only: {in_words(failures)}")
        if any(failures):
            return in_words(failures)
        self._stream.synchronize()
        wrong = in_words(self._gather(cuda_data.wrong(case, self._rank, buffers)))
        return _WRONG + wrong if wrong else ""

    def _prepare(self, turn: Turn) -> None:
        """Warms up, and finds how many calls to queue; the same on all ranks."""
        for buffer in turn.buffers:
            if buffer is not None:
                buffer.zero_()
        for calls in (_FEWEST_CALLS, _ISSUED):
            self._meet()
            issue_s = _issue(turn.call, calls) * 1e-9 / calls
        turn.issue_s = max(self._gather(issue_s))
        call_ns = max(self._gather(self._repetition(turn, _FEWEST_CALLS).ns))
        turn.calls = calls_in(self._settings.seconds / self._settings.repetitions, call_ns * 1e-9)
        while turn.calls > _FEWEST_CALLS:
            # (A queue of a stream holds about as many launches as we may want, or fewer.)
            if all(self._gather(self._repetition(turn, turn.calls).in_time)):
                break
            turn.calls = max(_FEWEST_CALLS, turn.calls // 2)

    def _repetition(self, turn: Turn, calls: int) -> Timed:
        """Calls queued behind a delay, between events."""
        call = turn.call
        time.sleep(_SETTLES_S)
        self._meet()
        seconds = _MARGIN * turn.issue_s * (calls + 1) + _SLACK_S
        torch.cuda._sleep(int(seconds * self._cycles_a_second))
        call()
        self._begin.record(self._stream)
        issue_ns = _issue(call, calls)
        in_time = not self._begin.query()
        self._end.record(self._stream)
        self._stream.synchronize()
        ns = self._begin.elapsed_time(self._end) * 1e6 / calls
        return Timed(round(ns), round(issue_ns / calls), in_time)


def run_rank(
    rank: int, settings: Settings, port: int, barrier: Any, connection: Connection
) -> None:
    """A process; rank 0 sends the rows, one at a time, and a rank that fails its reason."""
    torch.set_num_threads(1)
    job: Rank | None = None
    try:
        job = Rank(rank, settings, port, barrier)
        job.set_up()
        for case in settings.cases():
            for row in job.measure(case):
                if rank == 0:
                    connection.send(row)
        job.close()
    except BaseException:
        with suppress(OSError):  # the parent has gone
            connection.send(f"rank {rank} failed:\n{traceback.format_exc()[-_TRACE:]}")
        if job is not None:
            job.abort()
        raise


def run_ranks(settings: Settings, on_row: Callable[[Row], object]) -> str:
    """Starts the ranks, and gives each row to `on_row`; what went wrong, "" if nothing."""
    context = multiprocessing.get_context("spawn")
    deadline = time.monotonic() + settings.limit_s
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    barrier = context.Barrier(settings.ranks, timeout=settings.limit_s)
    ours, theirs = context.Pipe(duplex=False)
    arguments = (settings, store.port, barrier, theirs)
    ranks = torch.multiprocessing.spawn(run_rank, arguments, settings.ranks, join=False)
    theirs.close()
    told = failed = ""
    try:
        while not told and not ranks.join(timeout=_LOOK_S):
            told = _pass_on(ours, on_row)
            if time.monotonic() > deadline:
                failed = f"the ranks were not done within {settings.limit_s:g} s, and were killed"
                break
    except (
        torch.multiprocessing.ProcessRaisedException,
        torch.multiprocessing.ProcessExitedException,
    ) as error:
        failed = str(error).strip()
    finally:
        for process in ranks.processes:
            process.kill()
        for process in ranks.processes:
            process.join(_DEATH_S)
    last = _pass_on(ours, on_row)
    return told or last or failed


def _pass_on(connection: Connection, on_row: Callable[[Row], object]) -> str:
    """The rows that are there; gives what the first rank that has failed says, "" if none does."""
    told = ""
    with suppress(EOFError, OSError):
        while connection.poll():
            message = connection.recv()
            if isinstance(message, str):
                told = told or message
            else:
                on_row(message)
    return told


def calls_in(seconds: float, call_s: float) -> int:
    """Calls in a repetition that is to take so long."""
    return max(_FEWEST_CALLS, min(_MOST_CALLS, int(seconds / max(call_s, 1e-9))))


def make_row(
    case: Case, way: str, calls: int, plan: tuple[str, str], times: Sequence[Sequence[Timed]]
) -> Row:
    """What was measured of one way.

    Args:
        case: which.
        way: its name.
        calls: in a repetition.
        plan: unjam's algorithm and protocol.
        times: by rank, of each repetition.
    """
    ns = slowest([[one.ns for one in of_rank] for of_rank in times])
    issue_ns = slowest([[one.issue_ns for one in of_rank] for of_rank in times])
    us = median(ns) / 1e3
    return _row(case, way) | {
        "algorithm": plan[0],
        "protocol": plan[1],
        "us": round(us, 2),
        "low_us": round(quantile(ns, 0.1) / 1e3, 2),
        "high_us": round(quantile(ns, 0.9) / 1e3, 2),
        "busbw": round(bandwidth(case.nbytes, case.bus_factor, us), 4),
        "issue_us": round(median(issue_ns) / 1e3, 2),
        "issued_late": sum(
            not all(one.in_time for one in ones) for ones in zip(*times, strict=True)
        ),
        "calls": calls,
        "repetitions": len(ns),
    }


def missing_row(case: Case, way: str, words: str) -> Row:
    """Of a way that did not run, or was wrong."""
    return _row(case, way) | {"not_run": words}


def _row(case: Case, way: str) -> Row:
    return {
        "collective": case.collective,
        "dtype": case.dtype,
        "bytes": case.nbytes,
        "ranks": case.ranks,
        "way": way,
        "algorithm": "",
        "protocol": "",
        "us": None,
        "low_us": None,
        "high_us": None,
        "busbw": None,
        "issue_us": None,
        "issued_late": None,
        "calls": 0,
        "repetitions": 0,
        "not_run": None,
    }


def table_of(rows: Sequence[Row], dtype: str, ranks: int) -> Table:
    """The rows of a data type."""
    title = f"All-reduces in a stream, {ranks} ranks, {dtype}: µs a call, slowest rank; medians"
    columns = ["size", "way", "µs", "p10", "p90", "GB/s", "issue µs", "calls"]
    table = make_table(title, columns, [name for name in columns if name != "way"])
    before = None
    for row in (one for one in rows if one["dtype"] == dtype):
        if before not in (None, row["bytes"]):
            table.add_section()
        before = row["bytes"]
        if row["not_run"] is not None:
            words = row["not_run"]
            words = words if words.startswith(_WRONG) else f"not run: {words}"
            way, figures = f"{row['way']}: {shorten(words, _SHORT)}", ["-"] * 6
        else:
            names = filter(None, (row["way"], row["algorithm"], row["protocol"]))
            late, of = row["issued_late"], row["repetitions"]
            way = ", ".join(names) + (f" ({late} of {of} issued late)" if late else "")
            figures = [
                *(microseconds(row[name]) for name in ("us", "low_us", "high_us")),
                f"{row['busbw']:.3f}",
                microseconds(row["issue_us"]),
                f"{row['calls']:,}",
            ]
        table.add_row(size_text(row["bytes"]), way, *figures)
    return table


def report_of(rows: Sequence[Row], failed: str, device: str = "cuda") -> dict[str, Any]:
    """The JSON file, as ``unjam bench --json`` writes it.

    Args:
        rows: what was measured.
        failed: why these are not all, or "".
        device: "host" leaves the GPUs out.
    """
    report = make_report(list(rows), device, ["python3", *sys.argv])
    with suppress(Exception):  # (torch without NCCL)
        report["versions"]["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
    report["environment"] = ENVIRONMENT
    report["failed"] = failed or None
    report["rows"] = report.pop("rows")  # last
    return report


def in_words(failures: Sequence[str]) -> str:
    """What ranks say, in a line: the first that says something; "" if none does."""
    for rank, text in enumerate(failures):
        if text:
            return text if all(one == text for one in failures) else f"rank {rank}: {text}"
    return ""


def _attempt(what: Callable[[], Any]) -> tuple[Any, str]:
    """The result, and what was raised instead, in a line."""
    try:
        return what(), ""
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return None, f"{type(error).__name__}: {lines[0]}"[:_WORDS]


def _map_peers(memory: Sequence[torch.Tensor]) -> None:
    """Makes symmetric memory known to all ranks; waits for them.

    Raises:
        RuntimeError: it has multicast.
    """
    from torch.distributed import _symmetric_memory

    for tensor in memory:
        assert dist.group.WORLD is not None
        handle: Any = _symmetric_memory.rendezvous(tensor, dist.group.WORLD)
        if handle.multicast_ptr:
            raise RuntimeError("symmetric memory has multicast on")


def _parts(case: Case, buffers: Buffers) -> Buffers:
    """A case's, of buffers that are large enough."""
    source, target = (
        None if whole is None else whole[: case.nbytes].view(getattr(torch, case.dtype))
        for whole in buffers
    )
    assert source is not None
    return source, target


def _key(case: Case, name: str) -> str:
    """Of unjam's calls."""
    return f"{name}, {case.dtype}"


def _issue(call: Call, calls: int) -> int:
    """Queues calls; nanoseconds that it took."""
    begin = time.perf_counter_ns()
    for _ in repeat(None, calls):
        call()
    return time.perf_counter_ns() - begin


def _dtypes(text: str) -> tuple[str, ...]:
    """argparse type: data types with commas between."""
    for name in text.split(","):
        if name not in DTYPES:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of float32, bf16")
    return tuple(dict.fromkeys(DTYPES[name] for name in text.split(",")))


def _sizes(text: str) -> tuple[int, ...]:
    """argparse type: sizes, a range or a list."""
    try:
        return tuple(parse_sizes(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def make_parser() -> argparse.ArgumentParser:
    """Of the command line."""
    parser = argparse.ArgumentParser(
        description="All-reduces in a stream: unjam, PyTorch's symmetric memory (one-shot and "
        "two-shot, without multicast), NCCL; interleaved, on the GPUs of one host."
    )
    parser.add_argument(
        "--ranks", type=rank_count, default=2, help="a process and a GPU each (default: 2)"
    )
    parser.add_argument(
        "--sizes",
        type=_sizes,
        default="1K,8K,64K,256K,1M,4M,16M",
        metavar="SIZE,…",
        help="bytes: a list, or a range FIRST:LAST of doubled sizes (default: "
        "1K,8K,64K,256K,1M,4M,16M)",
    )
    parser.add_argument(
        "--dtype",
        type=_dtypes,
        default="float32",
        metavar="DTYPE,…",
        help="float32, bf16, or both with a comma (default: float32)",
    )
    parser.add_argument(
        "--seconds",
        type=duration,
        default=0.1,
        help="for the repetitions of one way at one size (default: 0.1; a repetition has at least "
        f"{_FEWEST_CALLS} calls and at most {_MOST_CALLS})",
    )
    parser.add_argument(
        "--repetitions", type=positive, default=7, help="of each way at each size (default: 7)"
    )
    parser.add_argument(
        "--limit-s",
        type=duration,
        default=240.0,
        help="seconds after which the ranks are killed (default: 240)",
    )
    add_json_file(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints the tables, writes the file; 1 if a rank failed or a result was wrong."""
    os.environ.update(ENVIRONMENT)  # before any rank is there
    parser = make_parser()
    options = parser.parse_args(arguments)
    if lack := lacking(options.ranks):
        parser.error(f"argument --ranks: {lack}")
    settings = Settings(
        ranks=options.ranks,
        dtypes=options.dtype,
        sizes=options.sizes,
        seconds=options.seconds,
        repetitions=options.repetitions,
        limit_s=options.limit_s,
        unique_id=unjam.unique_id(),
    )
    rows: list[Row] = []
    with measuring(len(WAYS) * len(settings.cases())) as advance:

        def on_row(row: Row) -> None:
            rows.append(row)
            advance(1)

        failed = run_ranks(settings, on_row)
    return finish(settings, rows, failed, options.json)


def finish(settings: Settings, rows: Sequence[Row], failed: str, file: Path | None) -> int:
    """Prints and writes what is there; the exit status."""
    console = make_console()
    for dtype in settings.dtypes:
        if any(row["dtype"] == dtype for row in rows):
            console.print(table_of(rows, dtype, settings.ranks))
    if failed:
        print(f"symmetric_memory.py: {failed}", file=sys.stderr)
    if file is not None:
        write_report(file, report_of(rows, failed))
    wrong = any((row["not_run"] or "").startswith(_WRONG) for row in rows)
    return 1 if failed or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
