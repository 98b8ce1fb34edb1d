"""info: settings in force, what is held and why, and counters of a small run."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from rich.table import Table

from ..context import Context
from ..threads import launch
from ._console import (
    cell,
    make_console,
    make_table,
    pairs_table,
    print_json,
    rank_count,
    rows_table,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument(
        "--ranks", type=rank_count, default=2, help="ranks of the small job (default: 2)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def held_table(info: dict[str, Any]) -> Table:
    """What a rank holds, how many bytes that is, and why; from Context.info()."""
    held, memory, peers = info["held"], info["memory"], info["peers"]
    limit = info["settings"].get("UNJAM_IDLE_KEYS")
    waits_for = sorted({rank for key in info["keys"] for rank in key["undelivered_to"]})
    takers = ", ".join(map(str, waits_for)) or "none"
    table = make_table("Held", ["what", "number", "bytes", "why"], ["number", "bytes"])

    def row(what: str, number: int | None, size: int | None, why: str) -> None:
        table.add_row(what, cell(number), cell(size), why)

    row("keys under way", held["keys_busy"], None, "invocations are pending")
    row("keys lingering", held["keys_lingering"], None, f"data is left for ranks: {takers}")
    row("keys idle", held["keys_idle"], None, f"kept in full up to {cell(limit)}, then shrunk")
    row("keys registered", held["keys_registered"], None, "until deregistered")
    over = held["keys_doomed"] + held["keys_leaving"]
    row("keys going", over, None, "failed, shrunk, or of a destroyed group")
    row("all those keys", None, memory["keys_bytes"], "endpoints, plans, latest signatures")
    row(
        "records of keys",
        held["key_records"],
        memory["key_records_bytes"],
        "shrunk: the number of their uses",
    )
    each = memory["connector_bytes"]
    for name, why in (
        ("busy", "of keys under way"),
        ("undelivered", "data for the peers"),
        ("idle", "of idle keys; taken over when others need them"),
        ("abandoned", "data for a rank that is gone"),
    ):
        number = sum(peer[f"connectors_{name}"] for peer in peers)
        row(f"connectors {name}", number, number * each, why)
    row("arena", None, memory["arena_bytes_committed"], "what peers have written to this rank")
    row("engine", None, memory["engine_bytes_reserved"], "queues, contexts; reserved")
    return table


def run(options: argparse.Namespace) -> int:
    """Makes a small job, runs a few collectives, and prints what rank 0 knows about itself."""

    def rank(context: Context) -> dict[str, Any]:
        group = context.group(name="example")
        group.all_reduce(np.zeros(1000, dtype=np.float32), key="example").wait(30)
        if context.rank == 0:  # a root does not wait: what it sends lingers until it is taken
            group.broadcast(np.zeros(1000, dtype=np.float32), root=0, key="early").wait(30)
        return context.info()

    info = launch(options.ranks, rank)[0]
    if options.json:
        print_json(info)
        return 0
    console = make_console()
    console.print(
        f"Rank 0 of a job of {options.ranks}, after one all-reduce of 4,000 bytes, and a broadcast "
        "that the others\nhave not called.\n"
    )
    plain = {name: value for name, value in info.items() if not isinstance(value, (dict, list))}
    if plain:
        console.print(pairs_table("Context", plain))
    for name, value in info.items():
        if name == "held":
            console.print(held_table(info))
        elif isinstance(value, dict):
            console.print(pairs_table(name.capitalize(), value))
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            console.print(rows_table(name.capitalize(), value))
    return 0
