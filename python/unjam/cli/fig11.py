"""fig11: one late rank, fixed against adaptive thresholds (the paper's Fig. 11)."""

from __future__ import annotations

import argparse
from typing import Any

from .. import late_rank
from ..late_rank import LateRank
from ._console import make_console, make_table, natural, positive, rank_count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument(
        "--ranks", type=rank_count, default=4, help="ranks, as threads (default: 4)"
    )
    parser.add_argument("--collectives", type=positive, default=40, help="in a burst (default: 40)")
    parser.add_argument("--size", type=positive, default=64 << 10, help="bytes (default: 65536)")
    parser.add_argument("--iterations", type=positive, default=5, help="bursts (default: 5)")
    parser.add_argument(
        "--delay-us", type=natural, default=200, help="of the late rank's calls (default: 200)"
    )
    parser.add_argument(
        "--spin-base", type=positive, default=None, help="polls: the fixed policy's threshold"
    )


def run(options: argparse.Namespace) -> int:
    """Prints one row a policy."""
    if options.ranks < 2:
        options.parser.error("--ranks: takes at least 2")
    late = min(2, options.ranks - 1)
    console = make_console()
    console.print(
        f"\n{options.ranks} ranks call {options.collectives} all-reduces of {options.size:,} bytes "
        f"in one order; rank {late} is\n{options.delay_us} µs late to each. Figures of the others, "
        "for one collective:"
    )
    numbers = ["switches", "most", "ms in queue", "longest", "ms/burst", "failed polls"]
    table = make_table("", ["policy", *numbers], numbers)
    for policy in ("fixed", "adaptive"):
        config: dict[str, Any] = {"policy": policy}
        if policy == "fixed":
            config["spin_base"] = options.spin_base
        outcome = late_rank.run(
            LateRank(
                ranks=options.ranks,
                collectives=options.collectives,
                size=options.size,
                iterations=options.iterations,
                late=late,
                delay_us=options.delay_us,
                config=config,
            )
        )
        table.add_row(
            policy,
            f"{outcome.switches:.1f}",
            str(outcome.switches_max),
            f"{outcome.queued_ms:.2f}",
            f"{outcome.queued_ms_max:.2f}",
            f"{outcome.ms_per_iteration:.1f}",
            f"{outcome.stats.spins:,}",
        )
    console.print(table)
    console.print(
        "switches: times that a collective was set aside before it was complete; ms in queue: from "
        "its call to its end,\nwhen it was not running."
    )
    return 0
