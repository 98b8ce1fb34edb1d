"""All cases of a run: how often each is repeated, and the rows that come out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .._lib import library, read_json
from .._types import Op, kind_of
from . import messages
from .cases import Case
from .figures import bandwidth, figure, slowest
from .job import Job

FEWEST = 7  # repetitions of each library
_MOST = 2000
_WARM_UP = 3

Row = dict[str, Any]


@dataclass(frozen=True)
class Sweep:
    """What to measure.

    Attributes:
        collectives: which.
        sizes: bytes, see Case.of_size.
        ranks: how many.
        dtype: of the elements.
        peer: the other library, or "none".
        mode: "host": one call at a time, and its wait. (Others, for devices, are to come.)
        seconds: time for the repetitions of one case, both libraries together.
        limit_s: the longest that a case may take.
        threads: ranks are threads of one process.
    """

    collectives: tuple[str, ...]
    sizes: tuple[int, ...]
    ranks: int
    dtype: str = "float32"
    peer: str = "none"
    mode: str = "host"
    seconds: float = 1.0
    limit_s: float = 120.0
    threads: bool = False

    def cases(self) -> Iterator[Case]:
        """Every collective at every size, without repetition."""
        every = (
            Case.of_size(collective, self.dtype, self.ranks, size)
            for collective in self.collectives
            for size in self.sizes
        )
        return iter(dict.fromkeys(every))


def run_sweep(sweep: Sweep, on_row: Callable[[Row], object]) -> list[Row]:
    """Runs all cases; gives their rows, and each to `on_row` as soon as it is there.

    Raises:
        BenchError: a rank died, hung or failed, or a result was wrong.
    """
    rows = []
    with Job(sweep.ranks, sweep.peer, sweep.limit_s, sweep.threads) as job:
        for case in sweep.cases():
            row = _measure(sweep, job, case)
            rows.append(row)
            on_row(row)
    return rows


def _measure(sweep: Sweep, job: Job, case: Case) -> Row:
    names: list[str] = job.ask(messages.Prepare(case))[0]
    warm = _times(job, names, _WARM_UP)
    once_ns = sum(min(times) for times in warm.values())
    repetitions = min(_MOST, max(FEWEST, int(sweep.seconds * 1e9 / max(1, once_ns))))
    times = _times(job, names, repetitions)
    job.ask(messages.Check())
    ours = figure(times["unjam"])
    plan = plan_of(case)
    row: Row = {
        "collective": case.collective,
        "dtype": case.dtype,
        "bytes": case.nbytes,
        "ranks": case.ranks,
        "mode": sweep.mode,
        "algorithm": plan["algorithm"],
        "protocol": plan["protocol"],
        "unjam_us": round(ours.us, 2),
        "unjam_busbw": round(bandwidth(case.nbytes, case.bus_factor, ours.us), 4),
        "peer": None,
        "peer_us": None,
        "peer_busbw": None,
        "ratio": None,
        "spread": round(ours.spread, 3),
        "peer_spread": None,
        "repetitions": repetitions,
    }
    if sweep.peer in times:
        theirs = figure(times[sweep.peer])
        row |= {
            "peer": sweep.peer,
            "peer_us": round(theirs.us, 2),
            "peer_busbw": round(bandwidth(case.nbytes, case.bus_factor, theirs.us), 4),
            "ratio": round(theirs.us / ours.us, 3),
            "peer_spread": round(theirs.spread, 3),
        }
    return row


def _times(job: Job, names: list[str], repetitions: int) -> dict[str, list[int]]:
    """Nanoseconds of each repetition, by library: the slowest rank's."""
    answers: list[dict[str, list[int]]] = job.ask(messages.Repeat(repetitions))
    return {name: slowest([answer[name] for answer in answers]) for name in names}


def plan_of(case: Case) -> dict[str, Any]:
    """The plan that the selector takes: at least "algorithm" and "protocol"."""
    lib = library()
    report: dict[str, Any] = read_json(
        lambda buffer, size, needed: lib.unjamPlanCheck(
            kind_of(case.collective),
            case.element_type,
            Op.SUM,
            case.count,
            case.ranks,
            0,
            -1,
            1,
            5,
            0,
            buffer,
            size,
            needed,
        )
    )
    return report
