"""What a simulation found, in sentences."""

from __future__ import annotations

from dataclasses import dataclass

from .engine import Result, wilson

# Of Table 1's rows; test_simulate.py compares with their files.
PAPER_DISORDER = {"single-queue": (1e-9, 1e-5), "synchronization": (4e-6, 4e-3)}
_OFTEN = 0.1  # from here on hangs are counted in 100, below in "one in so many"


@dataclass(frozen=True)
class Unit:
    """What a round is to whoever asked.

    Attributes:
        one: its name.
        many: its plural.
        note: what it means, where the name does not tell.
    """

    one: str
    many: str
    note: str = ""


ITERATION = Unit("iteration", "iterations")
ROUND = Unit("round", "rounds", "A round is every collective of every group once.")
TRACED = Unit("run", "runs", "A run is all calls of the trace once.")


def verdict(result: Result, kind: str, unit: Unit = ITERATION, bound: bool = False) -> str:
    """One sentence on how often it hangs.

    Args:
        result: of the rounds.
        kind: "exact" or "released".
        unit: what a round is.
        bound: the ratio is an upper limit.
    """
    hits, rounds = result.hits(kind), result.rounds
    if rounds == 0:
        return f"Nothing is known: it was ended before the first {unit.one} was simulated."
    if hits == 0 and kind == "exact" and not result.job.disorder:
        return "No hang is possible: without disorder all GPUs call in one order."
    count = f"{rounds:,} {unit.one if rounds == 1 else unit.many}"
    low, high = wilson(hits, rounds)
    if hits == 0:
        return f"No hang in {count}: at most about {_rate(high)} (95 %)."
    if hits == rounds:
        return f"Every {unit.one} hangs: {hits:,} of {rounds:,}."
    ratio = hits / rounds
    limit = "At most about" if bound else "About"
    if ratio > 0.995:
        return f"Nearly every {unit.one} hangs: {hits:,} of {rounds:,}."
    if ratio > _OFTEN:
        interval = f"{_number(100 * low)} to {_number(100 * high)}"
        return f"{limit} {_number(100 * ratio)} hangs in 100 {unit.many} (95 %: {interval})."
    interval = f"one in {_number(1 / high)} to one in {_number(1 / low)}"
    return f"{limit} one hang in {_number(1 / ratio)} {unit.many} (95 %: {interval})."


def assumption(result: Result) -> str:
    """Where a disorder comes from that was given, not measured."""
    job = result.job
    low, high = PAPER_DISORDER[job.model]
    paper = f"The paper's Table 1 assumes {short(low)} to {short(high)} for this model"
    cure = "`--trace` measures a real run's"
    if not job.disorder:
        return f"Give one by --disorder. {paper}; {cure}."
    return (
        f"Disorder {short(job.disorder)} is an assumption: so often a GPU makes a later call "
        f"before the one that is next. {paper}; {cure}."
    )


def _rate(ratio: float) -> str:
    if ratio > _OFTEN:
        return f"{_number(100 * ratio)} in 100"
    return f"one in {_number(1 / ratio)}"


def _number(value: float) -> str:
    """Two digits, as more would say more than is known."""
    rounded = float(f"{value:.2g}")
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:g}"


def short(value: float) -> str:
    """1e-5, as people write it."""
    plain = f"{value:.3e}" if 0 < value < 0.01 else f"{value:g}"
    mantissa, e, exponent = plain.partition("e")
    return f"{float(mantissa):g}e{int(exponent)}" if e else plain
