"""How a case is measured on GPUs: three modes that cost different things.

* host: one outstanding call, and the stream's synchronisation; wall clock.
* device: calls queued in a stream behind a delay, so that the device and not the issuing thread is
  timed, between events, a call; and the time to issue one.
* async: calls outstanding at once, under a key each with unjam, then a wait for all; wall clock, a
  call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from . import messages
from .cases import Case
from .figures import figure, slowest
from .job import Job
from .rows import WARM_UP, PlanUsed, Row, host_times, make_row, repetitions_in

if TYPE_CHECKING:
    from .sweep import Sweep

MODES = ("host", "device", "async")

_LEAST = 5  # measurements of each library in device and async mode
_MOST = 50
_MOST_CALLS = 1000
_FEWEST_CALLS = 4
_LONGEST_S = 0.3  # a measurement
_OUTSTANDING = 64
_MEMORY = 16 << 30  # bytes for the buffers of outstanding calls


def measure(sweep: Sweep, job: Job, case: Case) -> Iterator[Row]:
    """A row for each mode."""
    names: list[str] = job.ask(messages.Prepare(case))[0]
    host_times(job, names, WARM_UP)
    warm = host_times(job, names, WARM_UP)
    plan = plan_of_all(job.ask(messages.Plan()))
    call_s = max(min(times) for times in warm.values()) * 1e-9
    if "host" in sweep.modes:
        times = host_times(job, names, repetitions_in(sweep.seconds, warm))
        yield make_row(sweep.peer, case, "host", plan, times)
    if "device" in sweep.modes:
        calls = calls_in(call_s, len(names), sweep.seconds, _MOST_CALLS)
        repetitions = _repetitions(call_s * calls * len(names), sweep.seconds)
        queued = job.ask(messages.Queue(repetitions, calls))
        yield _device_row(sweep.peer, case, plan, names, queued) | {"calls": calls}
    job.ask(messages.Check())
    if "async" in sweep.modes:
        calls = calls_in(call_s, len(names), sweep.seconds, outstanding_of(case.nbytes))
        repetitions = _repetitions(call_s * calls * len(names), sweep.seconds)
        answers = job.ask(messages.Burst(repetitions, calls))
        times = {name: slowest([answer[name] for answer in answers]) for name in names}
        yield make_row(sweep.peer, case, "async", plan, times) | {"calls": calls}
        job.ask(messages.Check())


def plan_of_all(plans: list[PlanUsed]) -> PlanUsed:
    """What all ranks have used: of a kind with a root some have nothing to send.

    The protocol says more of a rank that has sent straight, or by copy engines.
    """
    return max(plans, key=lambda plan: (len(plan.protocol), plan.dma_share or 0.0))


def _device_row(
    peer: str, case: Case, plan: PlanUsed, names: list[str], answers: list[dict[str, Any]]
) -> Row:
    times = {name: slowest([answer[name][0] for answer in answers]) for name in names}
    issue = {
        name: round(figure(slowest([answer[name][1] for answer in answers])).us, 2)
        for name in names
    }
    row = make_row(peer, case, "device", plan, times)
    return row | {"issue_us": issue["unjam"], "peer_issue_us": issue.get(peer)}


def calls_in(call_s: float, libraries: int, seconds: float, most: int) -> int:
    """Calls in one measurement, so that the fewest measurements fit into the time.

    Args:
        call_s: seconds of a call.
        libraries: how many take turns.
        seconds: for all measurements.
        most: the limit.
    """
    longest = min(_LONGEST_S, seconds / (_LEAST * libraries))
    return max(min(_FEWEST_CALLS, most), min(most, int(longest / max(call_s, 1e-9))))


def outstanding_of(nbytes: int) -> int:
    """Most calls of a size at once: all have buffers of their own."""
    return max(1, min(_OUTSTANDING, _MEMORY // nbytes))


def _repetitions(turn_s: float, seconds: float) -> int:
    """Measurements of each library, where a turn of all takes `turn_s`."""
    return max(_LEAST, min(_MOST, int(seconds / max(1e-9, turn_s))))
