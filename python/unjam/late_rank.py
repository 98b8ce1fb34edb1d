"""One late rank: fixed against adaptive thresholds, after Fig. 11 of the DFCCL paper.

All ranks call a burst of all-reduces in one order, as the backward pass of data-parallel training
does; one rank comes late to each. With one fixed threshold the others give up on each collective in
turn and switch contexts without end; adaptive thresholds keep them together.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .context import Context, init_all
from .request import wait_all
from .stats import Stats
from .threads import run_ranks
from .trace import EventType, TraceEvent


@dataclass(frozen=True)
class LateRank:
    """What to run.

    Attributes:
        ranks: ranks, as threads.
        collectives: all-reduces in a burst.
        size: bytes of each.
        iterations: bursts.
        late: the rank that is late.
        delay_us: by how much, before each of its calls.
        config: settings for ``unjam.init_all``, such as policy.
    """

    ranks: int = 4
    collectives: int = 40
    size: int = 64 << 10
    iterations: int = 5
    late: int = 2
    delay_us: int = 200
    config: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Outcome:
    """What it gave; the punctual ranks' figures, as averages over a collective.

    Attributes:
        ms_per_iteration: for one burst.
        switches: times that a collective was set aside before it was complete.
        switches_max: the most for one collective.
        queued_ms: time from its call to its end when it was not running.
        queued_ms_max: the longest for one collective.
        stats: counters of all ranks.
    """

    ms_per_iteration: float
    switches: float
    switches_max: int
    queued_ms: float
    queued_ms_max: float
    stats: Stats


def run(setup: LateRank) -> Outcome:
    """Runs the bursts and reads the figures from the ranks' traces."""
    keys = [f"layer {place}" for place in range(setup.collectives)]
    called: dict[tuple[int, str, int], int] = {}

    def rank(context: Context) -> None:
        group = context.group()
        buffers = [np.ones(setup.size // 4, dtype=np.float32) for _ in keys]
        for use in range(setup.iterations):
            requests = []
            for key, buffer in zip(keys, buffers, strict=True):
                if context.rank == setup.late:
                    time.sleep(setup.delay_us * 1e-6)
                called[context.rank, key, use] = time.monotonic_ns()
                requests.append(group.all_reduce(buffer, key=key, op="max"))
            wait_all(requests, 60)

    with init_all(setup.ranks, trace_events=1 << 18, **(setup.config or {})) as contexts:
        started = time.perf_counter()
        run_ranks(contexts, rank)
        seconds = time.perf_counter() - started
        traces = {c.rank: c.trace() for c in contexts if c.rank != setup.late}
        stats = Stats()
        for context in contexts:
            stats = stats + context.stats()
    switches: list[int] = []
    queued: list[float] = []
    for number, trace in traces.items():
        for (key, use), (count, running_ns, end_ns) in _by_use(trace).items():
            switches.append(count)
            queued.append((end_ns - called[number, key, use] - running_ns) * 1e-6)
    return Outcome(
        ms_per_iteration=1e3 * seconds / setup.iterations,
        switches=_mean(switches),
        switches_max=max(switches, default=0),
        queued_ms=_mean(queued),
        queued_ms_max=max(queued, default=0.0),
        stats=stats,
    )


def compare(
    first: LateRank, second: LateRank, pairs: int, progress: Callable[[int], None] | None = None
) -> list[tuple[Outcome, Outcome]]:
    """Runs of both, one after the other, so that what else the machine does meets both.

    Args:
        first: one of them.
        second: the other one.
        pairs: runs of each. Which of the two comes first changes from pair to pair.
        progress: called with 1 after each run.
    """
    found = []
    for number in range(pairs):
        outcomes: dict[bool, Outcome] = {}
        for is_first in (True, False) if number % 2 == 0 else (False, True):
            outcomes[is_first] = run(first if is_first else second)
            if progress is not None:
                progress(1)
        found.append((outcomes[True], outcomes[False]))
    return found


ENOUGH = 6
"""Runs of each kind, for a verdict that is wrong in one case of thirty."""


@dataclass(frozen=True)
class Spread:
    """Values of several runs.

    Their median lies between the smallest and the largest of n with a probability of 1 - 2^(1-n):
    97 % of six. That holds for values of any distribution, such as those of a busy machine.
    """

    median: float
    least: float
    most: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(statistics.median(values), min(values), max(values), len(values))


def ratios(pairs: Sequence[tuple[float, float]]) -> Spread:
    """Second over first, pair by pair."""
    return Spread.of(
        [1.0 if one == other else other / one if one > 0 else float("inf") for one, other in pairs]
    )


def verdict(what: str, second_over_first: Spread, first: str, second: str) -> str:
    """Which of two has the smaller value, if the runs tell, in a sentence."""
    spread = f"{second_over_first.least:.2f} to {second_over_first.most:.2f}"
    if second_over_first.count < ENOUGH:
        return f"{what}: {second_over_first.count} runs of each are too few to tell ({spread})"
    if second_over_first.most < 1 or second_over_first.least > 1:
        has = "fewer" if what == "switches" else "less"
        if second_over_first.least > 1:
            has = "more"
        return (
            f"{what}: {second} has {has}, {second_over_first.median:.2f} times {first}'s ({spread})"
        )
    return f"{what}: no difference beyond the spread on this machine ({spread} times {first}'s)"


def _by_use(trace: Sequence[TraceEvent]) -> dict[tuple[str, int], tuple[int, int, int]]:
    """(key, use) → times set aside, nanoseconds running on the busiest lane, end."""
    switches: dict[tuple[str, int], int] = defaultdict(int)
    running: dict[tuple[str, int], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    end: dict[tuple[str, int], int] = {}
    since: dict[int, TraceEvent] = {}
    for event in trace:
        use = (event.key, event.n)
        if event.type is EventType.START:
            since[event.lane] = event
            continue
        start = since.pop(event.lane, None)
        if start is not None:
            running[start.key, start.n][event.lane] += event.time_ns - start.time_ns
        if event.type in (EventType.PREEMPT, EventType.YIELD):
            switches[use] += 1
        elif event.type is EventType.FINISH:
            end[use] = max(end.get(use, 0), event.time_ns)
    return {
        use: (switches[use], max(running[use].values(), default=0), end_ns)
        for use, end_ns in end.items()
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
