"""How long a sweep will take, from a smallest and a largest case that are run beforehand."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from . import messages
from .cases import Case
from .job import Job
from .rows import WARM_UP, host_times, repetitions_in

if TYPE_CHECKING:
    from .sweep import Sweep

_BATCHES, _BATCH_S, _MOST_TURNS = 3, 0.1, 200  # of calls in a trial
FEWEST_CASES = 4  # of fewer the trial would take longer than what it tells


@dataclass(frozen=True)
class Trial:
    """One case, run once.

    Attributes:
        nbytes: its size.
        call_s: seconds of a call of each library, one after the other.
        turn_s: the same with what is around it: ranks meet before each call.
        around_s: seconds of making its buffers and checking its result, twice.
    """

    nbytes: int
    call_s: float
    turn_s: float
    around_s: float


def estimate(sweep: Sweep, job: Job) -> float | None:
    """Seconds that all cases will take, about; None where there are too few for a trial."""
    cases = list(sweep.cases())
    if len(cases) < FEWEST_CASES:
        return None
    by_size = sorted(cases, key=lambda case: case.nbytes)
    return seconds_of(sweep, cases, _try(job, by_size[0]), _try(job, by_size[-1]))


def seconds_of(sweep: Sweep, cases: list[Case], small: Trial, large: Trial) -> float:
    """The sum over cases, whose times lie between those of the trials by their sizes."""
    total = 0.0
    for case in cases:
        part = (case.nbytes - small.nbytes) / max(1, large.nbytes - small.nbytes)
        call_s, turn_s, around_s = (
            low + part * (high - low)
            for low, high in (
                (small.call_s, large.call_s),
                (small.turn_s, large.turn_s),
                (small.around_s, large.around_s),
            )
        )
        times = repetitions_in(sweep.seconds, {"all": [max(1, round(1e9 * call_s))]})
        for mode in sweep.modes:
            # Modes of a stream repeat until the time is over, whatever a call takes.
            total += times * turn_s if mode == "host" else max(sweep.seconds, 5 * turn_s)
        total += around_s + WARM_UP * turn_s
    return total


def _try(job: Job, case: Case) -> Trial:
    start = time.perf_counter()
    names: list[str] = job.ask(messages.Prepare(case))[0]
    prepared = time.perf_counter()
    call_s = _call_s(host_times(job, names, WARM_UP))
    turns = min(max(2, int(_BATCH_S / call_s)), _MOST_TURNS)
    asking, batches = [], []
    for _ in range(_BATCHES):  # as others may use the machine in between
        begun = time.perf_counter()
        job.ask(messages.Repeat(0))
        between = time.perf_counter()
        call_s = min(call_s, _call_s(host_times(job, names, turns)))
        asking.append(between - begun)
        batches.append(time.perf_counter() - between)
    checked = time.perf_counter()
    job.ask(messages.Check())
    around_s = prepared - start + time.perf_counter() - checked + 2 * median(asking)
    turn_s = max(call_s, (median(batches) - median(asking)) / turns)
    return Trial(case.nbytes, call_s, turn_s, around_s)


def _call_s(times: dict[str, list[int]]) -> float:
    return max(1e-9, 1e-9 * sum(min(those) for those in times.values()))
