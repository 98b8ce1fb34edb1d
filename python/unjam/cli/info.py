"""info: settings in force, memory per key and peer, and what is held and why."""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.table import Table

from .._config import make_config
from .._devices import cuda_by_environment
from .._lib import library, read_json
from ..context import Context, init_all
from ..cuda import gpus
from ..threads import run_ranks
from ._console import (
    cell,
    make_console,
    make_table,
    pairs_table,
    print_json,
    rank_count,
    rows_table,
)

# Of the tables, those that are shown without --all.
_SHORT = ("settings", "memory", "kernel", "held")
_MOST_SHOWN = 4  # lanes, or peers: a column each


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument(
        "--device",
        choices=("host", "cuda"),
        default=None,
        help="cuda: on GPUs, with what the engine's kernels take of them; ranks may share one "
        "(default: UNJAM_DEVICE, or host)",
    )
    parser.add_argument(
        "--ranks", type=rank_count, default=2, help="ranks of the small job (default: 2)"
    )
    parser.add_argument(
        "--all", action="store_true", help="with the engine's counters, by lane, peer and key"
    )
    parser.add_argument(
        "--computed",
        action="store_true",
        help="start no job: what each rank of one of --ranks ranks would hold",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with all of it")


def computed(ranks: int, device: str | None) -> dict[str, Any]:
    """What a rank of such a job would hold, as the C API's JSON."""
    config = make_config({"device": device})
    result: dict[str, Any] = read_json(
        lambda buffer, size, needed: library().unjamJobMemory(
            ranks, ctypes.byref(config), buffer, size, needed
        )
    )
    return result


def computed_table(needs: dict[str, Any]) -> Table:
    """A row for each number of neighbours that plans may have; from computed()."""
    fixed = needs["base_bytes"] + (needs["engine_bytes"] or 0)
    table = make_table(
        f"A rank of {needs['ranks']:,} by number of neighbours",
        ["neighbours", "at first MiB", "at most MiB"],
        ["neighbours", "at first MiB", "at most MiB"],
    )
    for neighbours in sorted(
        {n for n in (0, 1, 2, 8, 16) if n < needs["ranks"]} | {needs["ranks"] - 1}
    ):
        first = fixed + neighbours * needs["neighbour_first_bytes"]
        most = fixed + neighbours * needs["neighbour_most_bytes"]
        table.add_row(cell(neighbours), f"{first / 2**20:,.1f}", f"{most / 2**20:,.1f}")
    return table


def _print_computed(options: argparse.Namespace) -> None:
    needs = computed(options.ranks, options.device)
    if options.json:
        print_json(needs)
        return
    console = make_console()
    console.print(pairs_table("Computed, for each rank", needs))
    console.print(computed_table(needs))
    if needs["engine_bytes"] is None:
        console.print("Without the engine: the CUDA library cannot be loaded here.")
    if needs["device"] == "host":
        console.print("On the host memory is taken page by page, as it is touched.")
    else:
        console.print("At most: when keys have use for all connectors of every neighbour.")


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
    if options.computed:
        _print_computed(options)
        return 0
    on_gpus = _on_gpus(options)

    def rank(context: Context) -> dict[str, Any]:
        group = context.group(name="example")
        data = buffers[context.rank]
        group.all_reduce(data, key="example").wait(30)
        # A root does not wait: what it sends lingers until it is taken. (On GPUs the device alone
        # knows of that.)
        if context.rank == 0 and not on_gpus:
            group.broadcast(data, root=0, key="early").wait(30)
        return context.info()

    with init_all(options.ranks, device=options.device) as contexts:
        buffers = [_zeros(context) for context in contexts]
        info = run_ranks(contexts, rank)[0]
        device = contexts[0].device
        sharers = sum(context.device == device for context in contexts) if on_gpus else 1
    if options.json:
        print_json(info)
        return 0
    console = make_console()
    early = "" if on_gpus else ", and a broadcast that the others have not called"
    where = f", on {device}" if on_gpus else ""
    console.print(
        f"Rank 0 of a job of {options.ranks}{where}, after one all-reduce of 4,000 bytes{early}.\n"
    )
    if sharers > 1:
        console.print(
            f"{sharers} ranks share {device}: each may have fewer lanes than a rank that has it "
            "alone, as with --ranks 1.\n"
        )
    plain = {name: value for name, value in info.items() if not isinstance(value, (dict, list))}
    if plain:
        console.print(pairs_table("Context", plain))
    for name, value in info.items():
        if not options.all and name not in _SHORT:
            continue
        if name == "settings":  # as the variables take them
            console.print(pairs_table("Settings", {k: str(v) for k, v in value.items()}))
        elif name == "held":
            console.print(held_table(info))
        elif isinstance(value, dict):
            console.print(pairs_table(name.capitalize(), _flat(value)))
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            title = name.capitalize()
            if len(value) > _MOST_SHOWN:
                title += f" (the first {_MOST_SHOWN} of {len(value)}; --json shows all)"
            console.print(rows_table(title, [_flat(row) for row in value[:_MOST_SHOWN]]))
    if not options.all:
        console.print("`unjam info --all` shows the engine's counters as well.")
    return 0


def _on_gpus(options: argparse.Namespace) -> bool:
    """Whether the job is to be on GPUs; ends with a usage error where it cannot be."""
    if options.device != "cuda" and (options.device or not cuda_by_environment()):
        return False
    if lack := gpus.lacking(options.ranks, shared=True):
        what = "argument --device" if options.device else "UNJAM_DEVICE=cuda"
        options.parser.error(f"{what}: {lack}")
    return True


def _zeros(context: Context) -> Any:
    """1,000 floats where the context's engine works."""
    if context.device == "host":
        return np.zeros(1000, dtype=np.float32)
    import torch

    return torch.zeros(1000, dtype=torch.float32, device=context.device)


def _flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Without mappings inside: their names stand in front of those of their values."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{before}{name} ")
        else:
            flat[before + name] = value
    return flat
