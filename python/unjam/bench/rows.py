"""What comes out of measuring one case: a row."""

from __future__ import annotations

from typing import Any, NamedTuple

from . import messages
from .cases import Case
from .figures import bandwidth, figure, slowest
from .job import Job

FEWEST = 7  # repetitions of each library
_MOST = 2000
WARM_UP = 3

Row = dict[str, Any]


class PlanUsed(NamedTuple):
    """By what unjam has run a case.

    Attributes:
        algorithm: of the plan.
        protocol: of the plan; with "direct" behind it if slices were stored straight into others'
            outputs, and with "dma" if copy engines have moved some.
        lanes: of the plan, on GPUs an SM each; None: not told.
        dma_share: of the bytes that were sent, what copy engines have moved; None: not told.
    """

    algorithm: str
    protocol: str
    lanes: int | None = None
    dma_share: float | None = None


def repetitions_in(seconds: float, warm: dict[str, list[int]]) -> int:
    """How often to repeat what took as long as `warm` says, by library."""
    once_ns = sum(min(times) for times in warm.values())
    return min(_MOST, max(FEWEST, int(seconds * 1e9 / max(1, once_ns))))


def make_row(peer: str, case: Case, mode: str, plan: PlanUsed, times: dict[str, list[int]]) -> Row:
    """What was measured of one case in one mode.

    Args:
        peer: the other library's name in `times`, if it is there.
        case: which.
        mode: how.
        plan: by what unjam has run it.
        times: nanoseconds of a call, a repetition each, by library.
    """
    ours = figure(times["unjam"])
    row: Row = {
        "collective": case.collective,
        "dtype": case.dtype,
        "bytes": case.nbytes,
        "ranks": case.ranks,
        "mode": mode,
        "in_place": case.in_place or not case.buffers[1],
        "algorithm": plan.algorithm,
        "protocol": plan.protocol,
        "lanes": plan.lanes,
        "dma_share": plan.dma_share,
        "unjam_us": round(ours.us, 2),
        "unjam_busbw": round(bandwidth(case.nbytes, case.bus_factor, ours.us), 4),
        "peer": None,
        "peer_us": None,
        "peer_busbw": None,
        "ratio": None,
        "spread": round(ours.spread, 3),
        "peer_spread": None,
        "repetitions": len(times["unjam"]),
    }
    if peer in times:
        theirs = figure(times[peer])
        row |= {
            "peer": peer,
            "peer_us": round(theirs.us, 2),
            "peer_busbw": round(bandwidth(case.nbytes, case.bus_factor, theirs.us), 4),
            "ratio": round(theirs.us / ours.us, 3),
            "peer_spread": round(theirs.spread, 3),
        }
    return row


UNSURE = 0.3  # a spread from which on a row tells little


def verdict(row: Row) -> str:
    """Whether unjam "wins" or "loses" beyond the spread; "" if neither, or if it ran alone.

    Beyond: the medians are further apart than half of both spreads together, which is about where
    the middle halves of both libraries' repetitions begin to overlap. A row that tells little
    (:func:`is_unsure`) has no verdict.
    """
    if row["peer"] is None or is_unsure(row):
        return ""
    ours, theirs = row["unjam_us"], row["peer_us"]
    if abs(ours - theirs) <= (row["spread"] * ours + row["peer_spread"] * theirs) / 2:
        return ""
    return "wins" if ours < theirs else "loses"


def is_unsure(row: Row) -> bool:
    """Whether either library's spread is large."""
    return max(row["spread"], row["peer_spread"] or 0.0) > UNSURE


def host_times(job: Job, names: list[str], repetitions: int) -> dict[str, list[int]]:
    """Nanoseconds of each repetition, by library: the slowest rank's."""
    answers: list[dict[str, list[int]]] = job.ask(messages.Repeat(repetitions))
    return {name: slowest([answer[name] for answer in answers]) for name in names}
