"""Many runs for one picture: the deadlock ratio, or the cost of a round, against something."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .engine import Simulator, wilson
from .errors import InputError
from .job import Group, Job, Parallel
from .words import short

Begin = Callable[[str], Callable[[int], None] | None]

_FACTORS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
# Up to 100,032 GPUs: more and more stages of 48, or one stage with larger and larger DP groups.
_COUNTS: dict[str, Any] = {"tp_collectives": 400, "dp_collectives": 1200}
_NOTES = {
    "disorder": "this probability changes, the other stays",
    "synchronisation": "this probability changes, the other stays",
    "copies": "the job several times, side by side, with nothing in common",
    "copies, joined": "the same, and one more group, of the first GPU of each copy",
    "interleaved": "a GPU's groups take turns",
    "concatenated": "a GPU's groups come one after another",
}
_COST_SECONDS = 0.5  # measured for each point


@dataclass(frozen=True)
class Point:
    """A measured value and its 95 % interval (for costs: the value)."""

    x: float
    y: float
    low: float
    high: float


@dataclass
class Line:
    """Points that belong together; the note says what the name means."""

    name: str
    points: list[Point] = field(default_factory=list)
    note: str = ""


@dataclass
class Sweep:
    """What a picture shows.

    Attributes:
        title: one line.
        x_name: what the points differ in.
        y_name: what was measured.
        lines: of points.
        y_short: for the head of a column.
        counts: x are whole numbers, to be shown as they are.
        percent: y are probabilities.
        interrupted: by Ctrl-C, so that points are missing.
    """

    title: str
    x_name: str
    y_name: str
    lines: list[Line]
    y_short: str = "chance"
    counts: bool = True
    percent: bool = True
    interrupted: bool = False


def sweep(
    kind: str,
    job: Job,
    rounds: int,
    semantics: str = "exact",
    threads: int | None = None,
    begin: Begin | None = None,
    unit: str = "iteration",
) -> Sweep:
    """Runs what a picture needs.

    Args:
        kind: probabilities (the job with other disorder and synchronisation probabilities), gpus
            (copies of the job side by side), overlap (the same number of GPUs and invocations in
            more groups a GPU), cost (microseconds a round, for larger and larger 3D jobs).
        job: where to start from.
        rounds: of each point.
        semantics: exact or released.
        threads: as for :meth:`Simulator.run`.
        begin: called with each point's name.
        unit: what a round is.
    """
    if kind == "cost":
        return _cost(job, threads, begin)
    makers = {"probabilities": _probabilities, "gpus": _gpus, "overlap": _overlap}
    if kind not in makers:
        raise InputError("plot", f"{kind!r} is none of {', '.join(makers)}, cost")
    if not job.disorder:
        raise InputError(
            "disorder", "must be over 0: without disorder nothing deadlocks by the exact rule"
        )
    x_names = {
        "probabilities": "probability of a disorder or synchronisation",
        "gpus": "GPUs",
        "overlap": "groups a GPU is in",
    }
    result = Sweep(
        f"{job.name or job.model}: how often it hangs ({semantics})",
        x_names[kind],
        f"chance of a hang per {unit}",
        [],
        counts=kind != "probabilities",
    )
    for name, x, variant in makers[kind](job):
        if not result.lines or result.lines[-1].name != name:
            result.lines.append(Line(name, note=_NOTES.get(name, "")))
        with Simulator(variant) as simulator:
            progress = begin(f"{name} {x:g}") if begin else None
            found = simulator.run(rounds, semantics, threads, progress=progress)
        hits = found.hits(semantics)
        if found.rounds:
            low, high = wilson(hits, found.rounds)
            result.lines[-1].points.append(Point(x, hits / found.rounds, low, high))
        if found.stopped:
            result.interrupted = True
            break
    return result


def _probabilities(job: Job) -> Iterator[tuple[str, float, Job]]:
    for factor in _FACTORS:
        disorder = min(job.disorder * factor, 1.0)
        yield "disorder", disorder, job.replace(disorder=disorder)
    if job.model == "synchronization" and job.sync:
        for factor in _FACTORS:
            sync = min(job.sync * factor, 0.999)
            yield "synchronisation", sync, job.replace(sync=sync)


def _gpus(job: Job) -> Iterator[tuple[str, float, Job]]:
    """Copies side by side, alone, and held together by one more group of their first GPUs."""
    count = max(group.collectives for group in job.groups)
    for joined in (False, True):
        for copies in (1, 2, 4, 8, 16):
            groups = [
                Group([gpu + copy * job.gpus for gpu in group.gpus], group.collectives, group.name)
                for copy in range(copies)
                for group in job.groups
            ]
            if joined and copies > 1:
                firsts = [copy * job.gpus for copy in range(copies)]
                groups.append(Group(firsts, count, "joining"))
            variant = job.replace(
                gpus=job.gpus * copies, groups=groups, order=_plain_order(job), sequence=()
            )
            yield ("copies, joined" if joined else "copies"), variant.gpus, variant


def _overlap(job: Job) -> Iterator[tuple[str, float, Job]]:
    """Each GPU in more and more groups of 4; as many invocations as the job has.

    Layer l groups GPUs whose numbers agree in all but one digit, base 4: no two GPUs share more
    than one group.
    """
    gpus, digits = 64, 3
    per_gpu = max(job.invocations // job.gpus, 12)
    orders = ("interleaved", "concatenated") if job.model == "single-queue" else ("interleaved",)
    for order in orders:
        for overlap in (1, 2, 3):
            groups = []
            for digit in range(min(overlap, digits)):
                step = 4**digit
                for first in range(gpus):
                    if first // step % 4 == 0:
                        members = [first + i * step for i in range(4)]
                        groups.append(Group(members, per_gpu // overlap, f"layer {digit}"))
            yield order, overlap, job.replace(gpus=gpus, groups=groups, order=order, sequence=())


def _plain_order(job: Job) -> str:
    return "interleaved" if job.order == "explicit" else job.order


def _cost(job: Job, threads: int | None, begin: Begin | None) -> Sweep:
    """Microseconds of CPU a round, at the job's probabilities and at a tenth of them."""
    result = Sweep(
        "What simulating a round costs", "GPUs", "µs of CPU a round", [], "µs", percent=False
    )
    disorder, sync = job.disorder or 1e-6, job.sync or 1e-6
    stages = [Parallel(tp=8, dp=6, pp=n, **_COUNTS) for n in (1, 8, 64, 512, 2084)]
    one_stage = [Parallel(tp=8, dp=n, **_COUNTS) for n in (6, 48, 384, 3072, 12504)]
    for model, order in (("single-queue", "concatenated"), ("synchronization", "interleaved")):
        for factor, shapes, note in (
            (1.0, stages, ""),
            (0.1, stages, ""),
            (0.1, one_stage, ", 1 stage"),
        ):
            p, q = disorder * factor, sync * factor if model == "synchronization" else 0.0
            line = Line(f"{model}, disorder {short(p)}" + f", sync {short(q)}" * bool(q) + note)
            result.lines.append(line)
            for shape in shapes:
                variant = shape.job(model=model, order=order, disorder=p, sync=q, seed=job.seed)
                with Simulator(variant) as simulator:
                    if begin:
                        begin(f"{line.name}, {variant.gpus:,} GPUs")
                    simulator.run(1, "both", threads)
                    rounds, start = 1, time.perf_counter()
                    while True:
                        found = simulator.run(rounds, "both", threads)
                        if found.stopped:
                            result.interrupted = True
                            return result
                        if time.perf_counter() - start > _COST_SECONDS or rounds > 1 << 22:
                            break
                        rounds *= 4
                cost = 1e6 * found.cpu_seconds / found.rounds
                line.points.append(Point(variant.gpus, cost, cost, cost))
    return result
