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
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .. import __version__, _lib
from .._errors import LibraryError
from ..bench import (
    COLLECTIVES,
    DTYPES,
    MODES,
    PEERS,
    BenchError,
    GemmSweep,
    Sweep,
    parse_sizes,
    run_gemm,
    run_sweep,
)
from ..bench.cases import size_text
from ..bench.libraries import missing
from ..cuda.gpus import describe, lacking
from ._console import make_console, make_table, positive, progress_bar, rank_count

_DEVICES = ("host", "cuda")
_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
_GEMM_LANES = (1, 2, 4, 8, 16)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument(
        "--device", choices=_DEVICES, default="host", help="where the data is (default: host)"
    )
    parser.add_argument(
        "--peer",
        choices=PEERS,
        default="none",
        help="library to compare with: PyTorch's gloo on the host, nccl on GPUs (default: none)",
    )
    parser.add_argument(
        "--ranks",
        type=rank_count,
        default=2,
        help="ranks, a process each, on GPUs the GPU of its number (default: 2)",
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
        "--kinds",
        action="extend",
        type=_several(*COLLECTIVES, "all"),
        metavar="KIND,…",
        help=f"of {', '.join(COLLECTIVES)}, or all; may be repeated (default: all_reduce, "
        "all_gather and broadcast)",
    )
    parser.add_argument(
        "--dtype", type=_dtype, default="float32", help=f"one of {', '.join(DTYPES)}; bf16 is short"
    )
    parser.add_argument(
        "--mode",
        "--modes",
        action="extend",
        type=_several(*MODES),
        metavar="MODE,…",
        help="host: one call at a time, and its wait; on GPUs also device: queued in a stream, "
        "between events, and async: many outstanding (default: host)",
    )
    parser.add_argument(
        "--seconds",
        type=_seconds,
        default=1.0,
        help="repetitions of one collective, size and mode (default: 1; at least 7 repetitions)",
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
    parser.add_argument(
        "--heap",
        action="store_true",
        help="all buffers, the other library's too, are in unjam's heap, into which ranks may "
        "store directly",
    )
    parser.add_argument(
        "--registered",
        action="store_true",
        help="all buffers, the other library's too, are in memory that is registered with unjam, "
        "into which ranks may store directly",
    )
    parser.add_argument(
        "--gemm",
        action="store_true",
        help="on GPUs: an 8192³ bf16 matrix product beside 1 GiB all-reduces instead",
    )
    parser.add_argument(
        "--lanes",
        type=_numbers,
        default=list(_GEMM_LANES),
        metavar="N,…",
        help="settings of UNJAM_LANES, and of NCCL's channels, for --gemm (default: 1,2,4,8,16)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")


def run(options: argparse.Namespace) -> int:
    """Measures, prints the table, writes the file; status 1 if a rank failed or a result was "
    "wrong."""
    sweep = _sweep(options)
    console = make_console()
    try:
        if options.gemm:
            gemm = _gemm_sweep(options)
            with _progress(gemm.ways * len(gemm.lanes)) as advance:
                rows = run_gemm(gemm, lambda _: advance(1))
            table = _gemm_table(rows, gemm)
        else:
            with _progress(len(list(sweep.cases())) * len(sweep.modes)) as advance:
                rows = run_sweep(sweep, lambda _: advance(1))
            table = _table(rows, sweep)
    except BenchError as error:
        print(f"unjam: {error}", file=sys.stderr)
        return 1
    console.print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(_report(rows, options.device), indent=1) + "\n")
    return 0


def _sweep(options: argparse.Namespace) -> Sweep:
    """The arguments' meaning; ends with a usage error that names the option."""
    if options.step < 2:
        options.parser.error(f"argument --step: {options.step} is not at least 2")
    try:
        sizes = parse_sizes(options.sizes, options.step)
    except ValueError as error:
        options.parser.error(f"argument --sizes: {error}")
    if lack := missing(options.peer, options.device):
        options.parser.error(f"argument --peer: {lack}")
    if options.gemm and options.heap:
        options.parser.error("argument --heap: --gemm has buffers of its own")
    if options.registered and options.heap:
        options.parser.error("argument --registered: not with --heap")
    if options.registered and options.device == "host" and not options.threads:
        options.parser.error(
            "argument --registered: processes of the host device cannot map each other's memory: "
            "add --threads, or measure GPUs (--device cuda)"
        )
    modes = [name for name in MODES if name in (options.mode or ["host"])]
    if options.device == "host":
        if modes != ["host"]:
            options.parser.error(f"argument --mode: {modes[-1]} is for --device cuda")
        if options.gemm:
            options.parser.error("argument --gemm: needs --device cuda")
    elif options.threads:
        options.parser.error("argument --threads: on GPUs every rank is a process")
    elif lack := lacking(options.ranks):
        options.parser.error(f"argument --device: {lack}")
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
        modes=tuple(modes),
        seconds=options.seconds,
        limit_s=options.timeout,
        threads=options.threads,
        device=options.device,
        buffers="heap" if options.heap else "registered" if options.registered else "own",
    )


def _gemm_sweep(options: argparse.Namespace) -> GemmSweep:
    return GemmSweep(
        lanes=tuple(options.lanes),
        ranks=options.ranks,
        peer=options.peer,
        limit_s=options.timeout,
        registered=options.registered,
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
    if sweep.device == "cuda":
        columns[2:2] = ["mode"]
    if sweep.peer != "none":
        columns += [f"{sweep.peer} µs", f"{sweep.peer} GB/s", "ratio"]
    columns += ["spread"]
    numbers = [name for name in columns if name not in ("collective", "mode", "plan")]
    table = make_table(title, columns, numbers)
    before = None
    for row in rows:
        if before not in (None, row["collective"]):
            table.add_section()
        before = row["collective"]
        cells = [
            row["collective"],
            size_text(row["bytes"]),
            ", ".join(
                filter(
                    None,
                    (
                        row["algorithm"],
                        row["protocol"],
                        sweep.buffers if sweep.buffers != "own" else "",
                    ),
                )
            ),
            _number(row["unjam_us"]),
            f"{row['unjam_busbw']:.3f}",
        ]
        if sweep.device == "cuda":
            cells[2:2] = [row["mode"]]
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


def _gemm_table(rows: list[dict[str, Any]], sweep: GemmSweep) -> Table:
    title = (
        f"{sweep.size}³ bf16 matrix product beside all-reduces of {size_text(sweep.nbytes)}"
        f"{' in registered memory' if sweep.registered else ''}, "
        f"{sweep.ranks} ranks; medians, p10 to p90"
    )
    columns = ["lanes", "beside", "blocks", "ms", "p10", "p90", "slowdown", "all-reduce GB/s"]
    table = make_table(title, columns, [name for name in columns if name != "beside"])
    for row in rows:
        if row["beside"] == "alone" and row is not rows[0]:
            table.add_section()
        table.add_row(
            str(row["lanes"]),
            row["beside"] + ("" if row["covered"] else " (ended first)"),
            str(row["blocks"] or "-"),
            *(f"{row[name]:.3f}" for name in ("ms", "low_ms", "high_ms", "slowdown")),
            f"{row['busbw']:.0f}",
        )
    return table


def _number(us: float) -> str:
    return f"{us:,.0f}" if us >= 100 else f"{us:.1f}"


def _report(rows: list[dict[str, Any]], device: str) -> dict[str, Any]:
    """The JSON file: rows, and what they were measured with."""
    versions = {"unjam": __version__, "python": platform.python_version()}
    for name in ("torch", "numpy", "nvidia-nccl-cu13"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "command": shlex.join(["unjam", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "machine": {
            "cpu": _cpu_name(),
            "cores": len(os.sched_getaffinity(0)),
            "system": platform.platform(),
            "load": list(os.getloadavg()),
            **(describe() if device == "cuda" else {}),
        },
        "versions": versions,
        "rows": rows,
    }


def _commit() -> str | None:
    """What UNJAM_COMMIT says, or else of the checkout that the library lies in: "1a2b3c4", and
    "-dirty" if tracked files differ from it."""
    if said := os.environ.get("UNJAM_COMMIT"):
        return said
    with contextlib.suppress(LibraryError):
        for root in _lib.library_path().resolve().parents:
            # Not one that only has an environment with unjam in it.
            if (root / ".git").exists() and (root / "include/unjam/unjam.h").is_file():
                with contextlib.suppress(OSError, subprocess.SubprocessError):
                    return _described(root)
    return None


def _described(root: Path) -> str:
    # (Without tags, and nothing is written there.)
    words = ["describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    told = subprocess.run(
        ["git", "--no-optional-locks", "-C", str(root), *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    return told.stdout.strip()


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _several(*names: str) -> Callable[[str], list[str]]:
    """argparse type: some of the names, with commas between."""

    def parse(text: str) -> list[str]:
        given = [part.strip() for part in text.split(",")]
        for name in given:
            if name not in names:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(names)}")
        return given

    return parse


def _dtype(text: str) -> str:
    name = _SHORT_DTYPES.get(text, text)
    if name not in DTYPES:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(DTYPES)}")
    return name


def _numbers(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < 86400:
        raise argparse.ArgumentTypeError(f"{text} is not a time between 0 and a day")
    return seconds


_numbers.__name__ = "list"
_seconds.__name__ = "number"  # for argparse's messages
