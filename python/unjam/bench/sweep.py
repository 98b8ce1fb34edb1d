"""All cases of a run: how often each is repeated, and the rows that come out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .._lib import library, read_json
from .._types import Op, kind_of
from . import cuda_sweep, messages
from .cases import Case
from .estimate import estimate
from .job import Job
from .rows import WARM_UP, PlanUsed, Row, host_times, make_row, repetitions_in


@dataclass(frozen=True)
class Sweep:
    """What to measure.

    Attributes:
        collectives: which.
        sizes: bytes, see Case.of_size.
        ranks: how many.
        dtype: of the elements.
        peer: the other library, or "none".
        modes: "host": one call at a time, and its wait; on GPUs also "device" and "async", see
            ``cuda_sweep``.
        seconds: time for the repetitions of one case and mode, both libraries together.
        limit_s: the longest that a case may take.
        threads: ranks are threads of one process.
        device: "host" or "cuda".
        buffers: of both libraries: "own", "heap" (unjam's), or "registered" (with unjam).
        dma: settings of UNJAM_DMA, a job and all rows for each; (): as the environment has it.
        in_place: all-gathers' inputs lie in their outputs, on GPUs. (All-reduces, broadcasts and
            reductions always run in place, reduce-scatters never.)
    """

    collectives: tuple[str, ...]
    sizes: tuple[int, ...]
    ranks: int
    dtype: str = "float32"
    peer: str = "none"
    modes: tuple[str, ...] = ("host",)
    seconds: float = 1.0
    limit_s: float = 120.0
    threads: bool = False
    device: str = "host"
    buffers: str = "own"
    dma: tuple[str, ...] = ()
    in_place: bool = False

    def cases(self) -> Iterator[Case]:
        """Every collective at every size, without repetition."""
        every = (
            Case.of_size(collective, self.dtype, self.ranks, size, self.in_place)
            for collective in self.collectives
            for size in self.sizes
        )
        return iter(dict.fromkeys(every))

    @property
    def block_bytes(self) -> int | None:
        """What the largest case needs of a block for all buffers; None if there is none."""
        if self.buffers == "own":
            return None
        several = "async" in self.modes
        return max(
            case.heap_bytes * (cuda_sweep.outstanding_of(case.nbytes) if several else 1)
            for case in self.cases()
        )


def run_sweep(
    sweep: Sweep,
    on_row: Callable[[Row], object],
    on_estimate: Callable[[float], object] | None = None,
) -> list[Row]:
    """Runs all cases; gives their rows, and each to `on_row` as soon as it is there.

    `on_estimate` is told beforehand, where there are some cases, about how many seconds they take.

    Raises:
        BenchError: a rank died, hung or failed, or a result was wrong.
    """
    rows: list[Row] = []
    measure = _measure if sweep.device == "host" else cuda_sweep.measure
    for number, dma in enumerate(sweep.dma or (None,)):
        with _job(sweep, dma) as job:
            if number == 0 and on_estimate is not None:
                seconds = estimate(sweep, job)
                if seconds is not None:
                    on_estimate(seconds * max(1, len(sweep.dma)))
            for case in sweep.cases():
                for row in measure(sweep, job, case):
                    row |= {"buffers": sweep.buffers, "dma": dma}
                    rows.append(row)
                    on_row(row)
    return rows


def _job(sweep: Sweep, dma: str | None) -> Job:
    """The ranks; `dma`: their UNJAM_DMA, None: this process's."""
    return Job(
        sweep.ranks,
        sweep.peer,
        sweep.limit_s,
        sweep.threads,
        sweep.device,
        sweep.block_bytes,
        sweep.buffers == "registered",
        None if dma is None else {"UNJAM_DMA": dma},
    )


def _measure(sweep: Sweep, job: Job, case: Case) -> Iterator[Row]:
    names: list[str] = job.ask(messages.Prepare(case))[0]
    warm = host_times(job, names, WARM_UP)
    repetitions = repetitions_in(sweep.seconds, warm)
    times = host_times(job, names, repetitions)
    job.ask(messages.Check())
    plan = plan_of(case)
    used = PlanUsed(plan["algorithm"], plan["protocol"])
    yield make_row(sweep.peer, case, "host", used, times)


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
