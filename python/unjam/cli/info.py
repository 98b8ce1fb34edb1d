"""info: settings in force, memory for each key and peer, and counters of a small run."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from ..context import Context
from ..threads import launch
from ._console import make_console, pairs_table, print_json, rank_count, rows_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument(
        "--ranks", type=rank_count, default=2, help="ranks of the small job (default: 2)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Makes a small job, runs one all-reduce, and prints what rank 0 knows about itself."""

    def rank(context: Context) -> dict[str, Any]:
        group = context.group(name="example")
        group.all_reduce(np.zeros(1000, dtype=np.float32), key="example").wait(30)
        return context.info()

    info = launch(options.ranks, rank)[0]
    if options.json:
        print_json(info)
        return 0
    console = make_console()
    console.print(f"Rank 0 of a job of {options.ranks}, after one all-reduce of 4,000 bytes.\n")
    plain = {name: value for name, value in info.items() if not isinstance(value, (dict, list))}
    if plain:
        console.print(pairs_table("Context", plain))
    for name, value in info.items():
        if isinstance(value, dict):
            console.print(pairs_table(name.capitalize(), value))
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            console.print(rows_table(name.capitalize(), value))
    return 0
