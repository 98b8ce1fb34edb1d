"""bench: throughput of collectives beside another library's, interleaved in one run."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .. import __version__
from ..bench import COLLECTIVES, DTYPES, PEERS, BenchError, Sweep, parse_sizes, run_sweep
from ..bench.cases import size_text
from ..bench.libraries import missing
from ._console import make_console, make_table, positive, progress_bar, rank_count

_DEVICES = ("host",)
_MODES = ("host",)  # one call and its wait at a time


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument(
        "--device", choices=_DEVICES, default="host", help="where the data is (default: host)"
    )
    parser.add_argument(
        "--peer",
        choices=PEERS,
        default="none",
        help="library to compare with; gloo is PyTorch's (default: none)",
    )
    parser.add_argument(
        "--ranks", type=rank_count, default=2, help="ranks, a process each (default: 2)"
    )
    parser.add_argument(
        "--sizes",
        default="1K:64M",
        metavar="FIRST:LAST",
        help="bytes of the whole vector, as nccl-tests counts them: a range or a list with "
        "commas, such as 1K,64K (default: 1K:64M)",
    )
    parser.add_argument(
        "--step", type=positive, default=2, help="factor between sizes of a range (default: 2)"
    )
    parser.add_argument(
        "--collective",
        action="append",
        choices=[*COLLECTIVES, "all"],
        help="may be repeated (default: all_reduce, all_gather and broadcast)",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument(
        "--mode",
        choices=_MODES,
        default="host",
        help="host: one call at a time, and its wait (default: host)",
    )
    parser.add_argument(
        "--seconds",
        type=_seconds,
        default=1.0,
        help="repetitions of one collective and size (default: 1; at least 7 repetitions)",
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=120.0,
        help="seconds after which a rank that does not answer is an error (default: 120)",
    )
    parser.add_argument(
        "--threads", action="store_true", help="ranks are threads of one process instead"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")


def run(options: argparse.Namespace) -> int:
    """Measures, prints the table, writes the file; status 1 if a rank failed or a result was "
    "wrong."""
    sweep = _sweep(options)
    console = make_console()
    try:
        with _progress(len(list(sweep.cases()))) as advance:
            rows = run_sweep(sweep, lambda _: advance(1))
    except BenchError as error:
        print(f"unjam: {error}", file=sys.stderr)
        return 1
    console.print(_table(rows, sweep))
    if options.json is not None:
        options.json.write_text(json.dumps(_report(rows), indent=1) + "\n")
    return 0


def _sweep(options: argparse.Namespace) -> Sweep:
    """The arguments' meaning; ends with a usage error that names the option."""
    if options.step < 2:
        options.parser.error(f"argument --step: {options.step} is not at least 2")
    try:
        sizes = parse_sizes(options.sizes, options.step)
    except ValueError as error:
        options.parser.error(f"argument --sizes: {error}")
    if lacking := missing(options.peer):
        options.parser.error(f"argument --peer: {lacking}")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        options.parser.error(f"argument --json: {options.json.parent} is not a folder")
    chosen = options.collective or ["all_reduce", "all_gather", "broadcast"]
    collectives = [name for name in COLLECTIVES if name in chosen or "all" in chosen]
    return Sweep(
        collectives=tuple(collectives),
        sizes=tuple(sizes),
        ranks=options.ranks,
        dtype=options.dtype,
        peer=options.peer,
        mode=options.mode,
        seconds=options.seconds,
        limit_s=options.timeout,
        threads=options.threads,
    )


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr if that is a terminal, otherwise nothing."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda steps: None
        return
    with progress_bar(console, "measuring", total) as advance:
        yield advance


def _table(rows: list[dict[str, Any]], sweep: Sweep) -> Table:
    kind = "threads" if sweep.threads else "processes"
    title = f"{sweep.ranks} ranks ({kind}), {sweep.dtype}, medians of interleaved repetitions"
    columns = ["collective", "size", "plan", "unjam µs", "GB/s"]
    if sweep.peer != "none":
        columns += [f"{sweep.peer} µs", f"{sweep.peer} GB/s", "ratio"]
    columns += ["spread"]
    table = make_table(title, columns, columns[1:2] + columns[3:])
    before = None
    for row in rows:
        if before not in (None, row["collective"]):
            table.add_section()
        before = row["collective"]
        cells = [
            row["collective"],
            size_text(row["bytes"]),
            f"{row['algorithm']}, {row['protocol']}",
            _number(row["unjam_us"]),
            f"{row['unjam_busbw']:.3f}",
        ]
        if sweep.peer != "none":
            cells += ["-"] * 3
            if row["peer"] is not None:
                cells[-3:] = [
                    _number(row["peer_us"]),
                    f"{row['peer_busbw']:.3f}",
                    f"{row['ratio']:.2f}",
                ]
        table.add_row(*cells, f"{100 * row['spread']:.0f}%")
    return table


def _number(us: float) -> str:
    return f"{us:,.0f}" if us >= 100 else f"{us:.1f}"


def _report(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The JSON file: rows, and what they were measured with."""
    versions = {"unjam": __version__, "python": platform.python_version()}
    for name in ("torch", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "command": shlex.join(["unjam", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": {
            "cpu": _cpu_name(),
            "cores": len(os.sched_getaffinity(0)),
            "system": platform.platform(),
            "load": list(os.getloadavg()),
        },
        "versions": versions,
        "rows": rows,
    }


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < 86400:
        raise argparse.ArgumentTypeError(f"{text} is not a time between 0 and a day")
    return seconds


_seconds.__name__ = "number"  # for argparse's messages
