"""fig11: one late rank, fixed against adaptive thresholds (the paper's Fig. 11)."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

from ..late_rank import ENOUGH, LateRank, Outcome, Spread, compare, ratios, verdict
from ._console import (
    make_console,
    make_table,
    measuring,
    positive,
    rank_count,
    whole,
)

_FIXED, _ADAPTIVE = "fixed", "adaptive"
_FIGURES: dict[str, Callable[[Outcome], float]] = {
    "switches": lambda outcome: outcome.switches,
    "ms in queue": lambda outcome: outcome.queued_ms,
    "ms a burst": lambda outcome: outcome.ms_per_iteration,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument(
        "--ranks", type=rank_count, default=4, help="ranks, as threads (default: 4)"
    )
    parser.add_argument("--collectives", type=positive, default=40, help="in a burst (default: 40)")
    parser.add_argument(
        "--size", type=whole(4, 1 << 40), default=64 << 10, help="bytes (default: 65536)"
    )
    parser.add_argument(
        "--iterations", type=positive, default=3, help="bursts of a run (default: 3)"
    )
    parser.add_argument(
        "--runs",
        type=whole(2, 1000, "number of runs"),
        default=ENOUGH,
        help=f"of each kind, in turn with the other's (default: {ENOUGH}, the fewest that tell)",
    )
    parser.add_argument(
        "--delay-us",
        type=whole(0, 1_000_000),
        default=200,
        help="of the late rank's calls (default: 200)",
    )
    parser.add_argument(
        "--spin-base",
        type=whole(1, 1 << 30),
        default=None,
        help="polls: the fixed policy's threshold",
    )


def run(options: argparse.Namespace) -> int:
    """Runs both kinds in turn; prints medians, spreads, and what they tell."""
    if options.ranks < 2:
        options.parser.error("argument --ranks: takes at least 2")
    late = min(2, options.ranks - 1)

    def setup(policy: str, iterations: int) -> LateRank:
        spin_base = options.spin_base if policy == _FIXED else None
        return LateRank(
            ranks=options.ranks,
            collectives=options.collectives,
            size=options.size,
            iterations=iterations,
            late=late,
            delay_us=options.delay_us,
            config={"policy": policy, "spin_base": spin_base},
        )

    console = make_console()
    console.print(
        f"\n{options.ranks} ranks call {options.collectives} all-reduces of {options.size:,} bytes "
        f"in one order; rank {late} is {options.delay_us} µs late to each. A run is "
        f"{options.iterations} such bursts."
    )
    # Once to warm up, which also tells how long it will take.
    started = time.perf_counter()
    compare(setup(_FIXED, 1), setup(_ADAPTIVE, 1), 1)
    seconds = (time.perf_counter() - started) * options.iterations * options.runs
    console.print(
        f"{options.runs} runs of each kind, in turn: about {max(1, round(seconds))} s or less.\n"
    )
    with measuring(2 * options.runs) as advance:
        pairs = compare(
            setup(_FIXED, options.iterations),
            setup(_ADAPTIVE, options.iterations),
            options.runs,
            advance,
        )
    table = make_table("", ["policy", *_FIGURES], list(_FIGURES), box=None)
    for place, policy in enumerate((_FIXED, _ADAPTIVE)):
        spreads = [Spread.of([of(pair[place]) for pair in pairs]) for of in _FIGURES.values()]
        table.add_row(policy, *map(_text, spreads))
    found = {
        name: ratios([(of(fixed), of(adaptive)) for fixed, adaptive in pairs])
        for name, of in _FIGURES.items()
    }
    table.add_section()
    table.add_row("adaptive / fixed", *map(_text, found.values()))
    console.print(table)
    console.print(
        "\nMedians of the runs (ratios: of the pairs of runs), and in brackets the smallest and "
        "the largest. Of the ranks that are in time, for one collective: switches, times that it "
        "was set aside before it was complete; ms in queue, from its call to its end, when it was "
        "not running.\n"
    )
    for name, ratio in found.items():
        console.print(verdict(name, ratio, _FIXED, _ADAPTIVE) + ".")
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if max(load, options.ranks) > cores:
        console.print(
            f"({options.ranks} ranks on {cores} cores, load average {load:.1f}: what shares the "
            "cores is in these figures, too.)"
        )
    return 0


def _text(spread: Spread) -> str:
    def number(value: float) -> str:
        return f"{value:.0f}" if value >= 100 else f"{value:.2f}"

    return f"{number(spread.median)} ({number(spread.least)}–{number(spread.most)})"
