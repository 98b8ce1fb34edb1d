"""bench: throughput of collectives beside another library's, interleaved in one run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from rich.table import Table

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
from ..bench.report import make_report, write_report
from ..cuda.gpus import lacking
from ._console import (
    add_json_file,
    duration,
    lane_count,
    make_console,
    make_table,
    measuring,
    microseconds,
    rank_count,
    whole,
)
from ._outputs import write
from ._streams import complain

_DEVICES = ("host", "cuda")
_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
_LARGEST = 1 << 40  # bytes of a vector
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
        "--step",
        type=whole(2, 1 << 30),
        default=2,
        help="factor between sizes of a range (default: 2)",
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
        type=duration,
        default=1.0,
        help="repetitions of one collective, size and mode (default: 1; at least 7 repetitions)",
    )
    parser.add_argument(
        "--timeout",
        type=duration,
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
        type=_lanes,
        default=list(_GEMM_LANES),
        metavar="N,…",
        help="settings of UNJAM_LANES, and of NCCL's channels, for --gemm (default: 1,2,4,8,16)",
    )
    add_json_file(parser)


def run(options: argparse.Namespace) -> int:
    """Measures, prints the table, writes the file; status 1 if a rank failed or a result was "
    "wrong."""
    sweep = _sweep(options)
    console = make_console()
    try:
        if options.gemm:
            gemm = _gemm_sweep(options)
            with measuring(gemm.ways * len(gemm.lanes)) as advance:
                rows = run_gemm(gemm, lambda _: advance(1))
            table = _gemm_table(rows, gemm)
        else:
            with measuring(len(list(sweep.cases())) * len(sweep.modes)) as advance:
                rows = run_sweep(sweep, lambda _: advance(1))
            table = _table(rows, sweep)
    except BenchError as error:
        complain(str(error))
        return 1
    console.print(table)
    if options.json is None:
        return 0
    report = make_report(rows, options.device, ["unjam", *sys.argv[1:]])
    written = write("--json", options.json, lambda: write_report(options.json, report))
    return 0 if written else 1


def _sweep(options: argparse.Namespace) -> Sweep:
    """The arguments' meaning; ends with a usage error that names the option."""
    try:
        sizes = parse_sizes(options.sizes, options.step)
    except ValueError as error:
        options.parser.error(f"argument --sizes: {error}")
    if sizes[-1] > _LARGEST:
        options.parser.error(f"argument --sizes: {options.sizes} is more than {_LARGEST >> 40} TiB")
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
            microseconds(row["unjam_us"]),
            f"{row['unjam_busbw']:.3f}",
        ]
        if sweep.device == "cuda":
            cells[2:2] = [row["mode"]]
        if sweep.peer != "none":
            cells += ["-"] * 3
            if row["peer"] is not None:
                cells[-3:] = [
                    microseconds(row["peer_us"]),
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


def _lanes(text: str) -> list[int]:
    return [lane_count(part) for part in text.split(",")]


_lanes.__name__ = "list"  # for argparse's messages
