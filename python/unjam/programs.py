"""The two programs of the DFCCL paper, Sec. 6.1, for demo, stress runs and tests.

Program 1: every rank calls the same eight all-reduces, 256 B to 1 MiB, in its own random order, for
many iterations. Program 2: the same, with a device synchronisation between the calls. Under
``policy="hold"`` (one at a time, in call order, as NCCL in one stream) they deadlock;
:func:`try_hold` shows it.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ._errors import Aborted, Peer, UnjamError
from .context import Context, Contexts, init_all
from .group import Group
from .request import Request, wait_all
from .stats import Stats
from .threads import run_ranks
from .trace import TraceEvent

SIZES = (256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 512 << 10, 1 << 20)
"""Bytes of the eight all-reduces."""

Orders = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


class WrongResult(AssertionError):
    """A result that is not what it must be; the message names rank, iteration, key and element."""


@dataclass(frozen=True)
class Program:
    """What to run.

    Attributes:
        ranks: ranks, as threads of this process.
        iterations: how often each of the `orders` runs all collectives.
        seed: of call orders and data.
        device_sync: a device synchronisation between the calls (program 2).
        orders: "random" (each rank its own, new in every iteration) and "consistent" (the same on
            all ranks, new in every iteration). With both, they alternate in short stretches on the
            same contexts, so that their times can be compared.
        sizes: bytes of each all-reduce of float32.
        data: "integers": sums are exact and compared bit by bit; "floats": compared within
            rounding;
            "mixed": every other collective.
        digest: hash all result bits.
        batch: iterations between two checks of results. Inputs are made before, results checked
            after, and only the stretch between is timed.
        timeout: seconds that one wait may take.
        config: further settings for ``unjam.init_all``, such as policy.
    """

    ranks: int = 8
    iterations: int = 200
    seed: int = 0
    device_sync: bool = False
    orders: tuple[str, ...] = ("random",)
    sizes: tuple[int, ...] = SIZES
    data: str = "integers"
    digest: bool = True
    batch: int = 5
    timeout: float = 60.0
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Part:
    """What one order of a program gave.

    Attributes:
        order: "random" or "consistent".
        iterations: run.
        seconds: the ranks' calls and waits, without making inputs and checking results.
        results: results checked, over all ranks; all were right.
        stats: counters of this order, summed over ranks.
        digest: hash of all result bits, in order of iterations and keys; all ranks had the same
            bits. Equal in every repetition with the same settings. "" if not asked for.
    """

    order: str
    iterations: int = 0
    seconds: float = 0.0
    results: int = 0
    stats: Stats = field(default_factory=Stats)
    digest: str = ""

    @property
    def ms_per_iteration(self) -> float:
        """Milliseconds for one iteration of all ranks."""
        return 1e3 * self.seconds / max(1, self.iterations)

    def per_block(self, counter: int) -> float:
        """A counter of `stats` as average over all blocks of all ranks."""
        return counter / self.stats.lanes if self.stats.lanes else 0.0


def key_names(count: int) -> list[str]:
    """Keys of the collectives: A, B, C, …"""
    return [chr(ord("A") + i) if count <= 26 else f"K{i}" for i in range(count)]


def size_text(size: int) -> str:
    """Bytes as "256 B", "64 KiB", "1 MiB"."""
    if size >= 1 << 20 and size % (1 << 20) == 0:
        return f"{size >> 20} MiB"
    if size >= 1 << 10 and size % (1 << 10) == 0:
        return f"{size >> 10} KiB"
    return f"{size} B"


def random_orders(seed: int, iterations: int, ranks: int, keys: int) -> Orders:
    """Call orders [iteration, rank, place] → key; different on every rank where there are "
    "enough."""
    generator = np.random.default_rng([seed, 1])
    orders = generator.permuted(np.tile(np.arange(keys), (iterations, ranks, 1)), axis=2)
    if ranks > 1 and keys >= 8:  # the paper: each GPU a unique order
        for one in orders:
            while len(np.unique(one, axis=0)) < ranks:
                one[:] = generator.permuted(one, axis=1)
    return orders


def consistent_orders(seed: int, iterations: int, ranks: int, keys: int) -> Orders:
    """Call orders [iteration, rank, place] → key; the same on every rank, new in each iteration."""
    generator = np.random.default_rng([seed, 2])
    one = generator.permuted(np.tile(np.arange(keys), (iterations, 1, 1)), axis=2)
    return np.repeat(one, ranks, axis=1)


def run(program: Program, progress: Callable[[int], None] | None = None) -> dict[str, Part]:
    """Runs a program and checks every result.

    Args:
        program: what to run.
        progress: called with the number of iterations just finished, from a rank's thread.

    Returns:
        Order → what it gave.

    Raises:
        WrongResult: a result is wrong, or ranks have different bits.
        Timeout: a wait took longer than the program allows; the message holds unjam's explanation.
    """
    with init_all(program.ranks, **program.config) as contexts:
        job = _Job(program, contexts, progress)
        run_ranks(contexts, job.rank)
        return job.results()


class _Job:
    """One run of a program: what its ranks share."""

    def __init__(
        self, program: Program, contexts: Contexts, progress: Callable[[int], None] | None
    ) -> None:
        self.program = program
        self.contexts = contexts
        self.progress = progress
        self.keys = key_names(len(program.sizes))
        generator = np.random.default_rng([program.seed, 3])
        self.exact = [
            program.data == "integers" or (program.data == "mixed" and i % 2 == 0)
            for i in range(len(program.sizes))
        ]
        self.base: list[Floats] = [
            generator.integers(0, 1024, size // 4).astype(np.float32)
            if exact
            else generator.standard_normal(size // 4, dtype=np.float32)
            for size, exact in zip(program.sizes, self.exact, strict=True)
        ]
        make = {"random": random_orders, "consistent": consistent_orders}
        shape = (program.seed, program.iterations, program.ranks, len(program.sizes))
        self.orders = {name: make[name](*shape) for name in program.orders}
        self.parts = {name: Part(name) for name in program.orders}
        self.slots = min(program.batch, max(1, program.iterations))
        self.buffers: list[list[list[Floats]]] = [[] for _ in range(program.ranks)]
        self.hashes: dict[str, list[bytes]] = {
            name: [b""] * program.iterations for name in program.orders
        }
        self.lock = threading.Lock()
        self.barrier = threading.Barrier(program.ranks, action=self._turn)
        self.current: Part | None = None
        self.started = 0.0
        self.before = Stats()

    def stretches(self) -> list[tuple[str, int, int]]:
        """(order, first iteration, iterations), in turn."""
        program = self.program
        return [
            (order, first, min(program.batch, program.iterations - first))
            for first in range(0, program.iterations, program.batch)
            for order in program.orders
        ]

    def rank(self, context: Context) -> None:
        """What one rank does, in its own thread."""
        try:
            self._rank(context)
        except threading.BrokenBarrierError:
            raise Aborted("another rank failed") from None
        except BaseException:
            self.barrier.abort()
            raise

    def _rank(self, context: Context) -> None:
        program = self.program
        group = context.group()
        buffers = [[np.empty_like(base) for base in self.base] for _ in range(self.slots)]
        scratch = [np.empty_like(base) for base in self.base]
        self.buffers[context.rank] = buffers
        for order, first, count in self.stretches():
            for slot in range(count):
                self._fill(buffers[slot], context.rank, order, first + slot)
            self.barrier.wait()
            if context.rank == 0:
                self.current = self.parts[order]
            for slot in range(count):
                calls = self.orders[order][first + slot, context.rank]
                requests = call_all(
                    group, self.keys, buffers[slot], calls, program.device_sync, program.timeout
                )
                try:
                    wait_all(requests, program.timeout)
                except TimeoutError as error:
                    raise TimeoutError(f"{error}; unjam says: {context.explain()}") from error
            self.barrier.wait()
            for slot in range(count):
                self._check(scratch, context.rank, order, first, slot)
            self.barrier.wait()  # others compare with this rank's results until here
            if context.rank == 0 and self.progress is not None:
                self.progress(count)

    def _turn(self) -> None:
        """Run by one rank while all are at the barrier: before and after every timed stretch."""
        now = Stats()
        for context in self.contexts:
            now = now + context.stats()
        part, self.current = self.current, None
        if part is not None:
            part.seconds += time.perf_counter() - self.started
            delta = now - self.before
            part.stats = part.stats + Stats(
                **{
                    name: getattr(delta, name)
                    for name in Stats.__dataclass_fields__
                    if name not in ("lanes", "pending")
                }
            )
        self.before = now
        self.started = time.perf_counter()

    def _offset(self, rank: int, order: str, iteration: int, key: int) -> int:
        turn = self.program.orders.index(order)
        return 1 + (131 * rank + 31 * iteration + 17 * key + 7 * turn) % 1021

    def _fill(self, buffers: list[Floats], rank: int, order: str, iteration: int) -> None:
        for key, base in enumerate(self.base):
            offset = self._offset(rank, order, iteration, key)
            if self.exact[key]:
                np.add(base, np.float32(offset), out=buffers[key])
            else:
                np.multiply(base, np.float32(offset / 1021), out=buffers[key])

    def _check(self, scratch: list[Floats], rank: int, order: str, first: int, slot: int) -> None:
        """One rank compares an iteration's results with what they must be, the others with its "
        "bits."""
        iteration = first + slot
        checker = iteration % self.program.ranks
        results = self.buffers[checker][slot]
        if rank != checker:
            for key, (got, theirs) in enumerate(
                zip(self.buffers[rank][slot], results, strict=True)
            ):
                if not np.array_equal(got.view(np.int32), theirs.view(np.int32)):
                    where = f" (rank {checker} has it)"
                    self._wrong(got, theirs, rank, order, iteration, key, where)
            return
        digest = hashlib.sha256()
        for key, got in enumerate(results):
            want = scratch[key]
            if not self._right(got, want, order, iteration, key):
                self._expect(want, order, iteration, key)
                self._wrong(got, want, rank, order, iteration, key, "")
            if self.program.digest:
                digest.update(got.data)
        self.hashes[order][iteration] = digest.digest()
        part = self.parts[order]
        with self.lock:
            part.iterations += 1
            part.results += self.program.ranks * len(self.base)

    def _expect(self, want: Floats, order: str, iteration: int, key: int) -> None:
        ranks = self.program.ranks
        offsets = [self._offset(r, order, iteration, key) for r in range(ranks)]
        if self.exact[key]:
            np.multiply(self.base[key], np.float32(ranks), out=want)
            np.add(want, np.float32(sum(offsets)), out=want)
        else:
            total = sum(float(np.float32(offset / 1021)) for offset in offsets)
            np.multiply(self.base[key], np.float32(total), out=want)

    def _right(self, got: Floats, want: Floats, order: str, iteration: int, key: int) -> bool:
        self._expect(want, order, iteration, key)
        if self.exact[key]:
            return bool(np.array_equal(got.view(np.int32), want.view(np.int32)))
        # All terms have the same sign, so the relative error is bounded by their number.
        bound = np.abs(want) * np.float32(self.program.ranks * 3e-7)
        np.subtract(got, want, out=want)
        np.abs(want, out=want)
        return bool((want <= bound).all())

    def _wrong(
        self,
        got: Floats,
        want: Floats,
        rank: int,
        order: str,
        iteration: int,
        key: int,
        where: str,
    ) -> None:
        wrong = got.view(np.int32) != want.view(np.int32)
        first = int(np.argmax(wrong))
        raise WrongResult(
            f"rank {rank}, {order} order, iteration {iteration}, all-reduce {self.keys[key]} "
            f"({size_text(self.program.sizes[key])}): {int(wrong.sum())} of {got.size} elements "
            f"are wrong, the first is [{first}]: {got[first]!r} instead of {want[first]!r}{where}"
        )

    def results(self) -> dict[str, Part]:
        lanes = sum(context.stats().lanes for context in self.contexts)
        for name, part in self.parts.items():
            part.stats = part.stats + Stats(lanes=lanes)
            if self.program.digest:
                part.digest = hashlib.sha256(b"".join(self.hashes[name])).hexdigest()
        return self.parts


def call_all(
    group: Group,
    keys: Sequence[str],
    buffers: Sequence[Any],
    order: Sequence[int] | Orders,
    device_sync: bool,
    timeout: float | None = None,
) -> list[Request]:
    """Calls all-reduces in place, in the given order; a device synchronisation between, if "
    "asked."""
    requests: list[Request] = []
    for key in order:
        if device_sync and requests:
            group.context.device_synchronize(timeout)
        requests.append(group.all_reduce(buffers[key], key=keys[key]))
    return requests


TRACED_USE = 3
"""The first use of the keys to show of :func:`trace_iteration`: those before set up connections."""


def trace_iteration(
    ranks: int,
    seed: int,
    trace_events: int,
    sizes: Sequence[int] = SIZES,
    iterations: int = TRACED_USE + 1,
) -> list[list[TraceEvent]]:
    """Each rank's events of some iterations of program 1; show uses from TRACED_USE on."""
    keys = key_names(len(sizes))
    orders = random_orders(seed, iterations, ranks, len(sizes))
    barrier = threading.Barrier(ranks)

    def rank(context: Context) -> None:
        group = context.group()
        buffers = [np.ones(size // 4, dtype=np.float32) for size in sizes]
        for order in orders[:, context.rank]:
            barrier.wait(30)
            wait_all(call_all(group, keys, buffers, order, False), 30)

    with init_all(ranks, trace_events=trace_events) as contexts:
        run_ranks(contexts, rank)
        return [context.trace() for context in contexts]


# ---- hold-and-wait: the deadlock ----


@dataclass(frozen=True)
class Edge:
    """One rank of a cycle: it runs `key` and waits for rank `waits_for`."""

    rank: int
    key: str
    waits_for: int


@dataclass(frozen=True)
class HoldTry:
    """One iteration under ``policy="hold"``.

    Attributes:
        deadlocked: a cycle was named (otherwise the iteration completed).
        cycle: the cycle that unjam named, from its lowest rank.
        text: the library's own words for it.
        problem: "" if the cycle is a true one, that is, follows from the call orders.
        orders: the call orders [rank, place] → index of the key.
        seconds: from the first call until the cycle was named, or until completion.
        traces: each rank's events, if asked for.
        ended_ns: when the traces were read, on their clock.
    """

    deadlocked: bool
    cycle: tuple[Edge, ...]
    text: str
    problem: str
    orders: Orders
    seconds: float
    traces: tuple[list[TraceEvent], ...] = ()
    ended_ns: int = 0


def try_hold(
    ranks: int = 8,
    seed: int = 0,
    device_sync: bool = False,
    sizes: Sequence[int] = SIZES,
    trace_events: int = 0,
    timeout: float = 30.0,
    orders: Orders | None = None,
) -> HoldTry:
    """Runs one iteration, each rank in its own random order, one collective at a time.

    A watcher asks unjam who waits for whom until it names a cycle, or the iteration completes; then
    everything is aborted.

    Args:
        ranks: ranks, as threads.
        seed: of the call orders.
        device_sync: a device synchronisation between the calls.
        sizes: bytes of each all-reduce.
        trace_events: events to keep, for a picture.
        timeout: seconds after which neither cycle nor completion is an error.
        orders: [rank, place] → index of the key, instead of random ones.

    Raises:
        TimeoutError: neither a cycle nor completion.
    """
    keys = key_names(len(sizes))
    if orders is None:
        orders = random_orders(seed, 1, ranks, len(sizes))[0]
    calls = orders
    with init_all(ranks, policy="hold", trace_events=trace_events) as contexts:

        def rank(context: Context) -> None:
            buffers = [np.ones(size // 4, dtype=np.float32) for size in sizes]
            with suppress(Aborted, Peer):  # the deadlock is ended by an abort
                wait_all(call_all(context.group(), keys, buffers, calls[context.rank], device_sync))

        started = time.perf_counter()
        ended_ns = 0
        explanation: dict[str, Any] = {}
        watched = _Background(lambda: run_ranks(contexts, rank))
        try:
            while not watched.finished(0.005):
                explanation = contexts[0].explain()
                if explanation["cycles"]:
                    break
                if time.perf_counter() - started > timeout:
                    raise TimeoutError(
                        f"neither completion nor a cycle after {timeout:g} s; unjam says: "
                        f"{explanation}"
                    )
            seconds = time.perf_counter() - started
            if trace_events:
                time.sleep(2 * seconds + 0.005)  # the picture is to show the others stuck, too
            ended_ns = time.monotonic_ns()
            traces = tuple(context.trace() for context in contexts) if trace_events else ()
        finally:
            if not watched.finished(0):
                contexts.abort()
            watched.join()
        cycles = explanation.get("cycles", ())
        deadlocked = bool(cycles)
        cycle = parse_cycle(cycles[0]) if deadlocked else ()
        return HoldTry(
            deadlocked=deadlocked,
            cycle=cycle,
            text=cycles[0]["text"] if deadlocked else "",
            problem=cycle_problem(cycle, calls, keys) if deadlocked else "",
            orders=calls,
            seconds=seconds,
            traces=traces,
            ended_ns=ended_ns,
        )


def parse_cycle(cycle: Mapping[str, Any]) -> tuple[Edge, ...]:
    """The edges of a cycle of ``Context.explain()``, turned so that the lowest rank comes first."""
    edges = [Edge(edge["rank"], edge["runs"]["key"], edge["waits_for"]) for edge in cycle["edges"]]
    if not edges:
        return ()
    first = min(range(len(edges)), key=lambda place: edges[place].rank)
    return tuple(edges[first:] + edges[:first])


def cycle_problem(cycle: Sequence[Edge], orders: Orders, keys: Sequence[str]) -> str:
    """Why a named cycle does not follow from the call orders; "" if it does.

    It does if each rank waits for the next one round, and the next one comes to the collective that
    it is waited for in only after the one that it runs itself.

    Args:
        cycle: the edges.
        orders: [rank, place] → index into `keys`, of one iteration.
        keys: names.
    """
    if not cycle:
        return "the cycle is empty"
    if len({edge.rank for edge in cycle}) != len(cycle):
        return "a rank appears twice"
    for edge, following in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
        if edge.waits_for != following.rank:
            return f"rank {edge.rank} waits for rank {edge.waits_for}, not for {following.rank}"
        theirs = [keys[index] for index in orders[following.rank]]
        if edge.key not in theirs or following.key not in theirs:
            return f"rank {following.rank} never calls {edge.key} or {following.key}"
        if theirs.index(edge.key) <= theirs.index(following.key):
            return (
                f"rank {following.rank} calls {edge.key} before {following.key}, so it does not "
                f"keep rank {edge.rank} waiting"
            )
    return ""


def cycle_text(cycle: Sequence[Edge], sizes: Sequence[int] = SIZES) -> str:
    """The cycle in words, with the sizes of its collectives."""
    names = dict(zip(key_names(len(sizes)), sizes, strict=True))

    def runs(edge: Edge) -> str:
        size = f" ({size_text(names[edge.key])})" if edge.key in names else ""
        return f"runs all-reduce {edge.key}{size}"

    first, *others = cycle
    words = [f"rank {first.rank} {runs(first)} and waits for rank {first.waits_for}"]
    words += [f"which {runs(edge)} and waits for rank {edge.waits_for}" for edge in others]
    return ", ".join(words) + "."


class _Background:
    """A function in a thread, with its exception kept."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._error: BaseException | None = None

        def body() -> None:
            try:
                function()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=body, name="unjam-watched")
        self._thread.start()

    def finished(self, timeout: float) -> bool:
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def join(self) -> None:
        """Waits for the end; raises what the function raised, unless that only tells of an "
        "abort."""
        while not self.finished(0.1):
            pass
        if isinstance(self._error, UnjamError) and isinstance(self._error, (Aborted, Peer)):
            return
        if self._error is not None:
            raise self._error
