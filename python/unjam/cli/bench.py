"""bench: throughput of collectives beside another library's, interleaved in one run."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console

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
from ..bench.rows import FEWEST, UNSURE, Row, is_unsure, verdict
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
_BUFFERS = {"own": "each its own", "heap": "in unjam's heap", "registered": "registered with unjam"}
_STYLES = {"wins": "green", "loses": "red", "": ""}
_WIDTHS = {
    "ratio": 5,
    "": 5,
    "mode": 6,
    "plan": 6,
    "SMs": 3,
    "DMA": 4,
}  # of columns, alike in all tables


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments, in the order of the help."""
    _add_what(parser)
    _add_how(parser)
    add_json_file(parser)


def _add_what(parser: argparse.ArgumentParser) -> None:
    """What is measured."""
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


def _add_how(parser: argparse.ArgumentParser) -> None:
    """How long, in which memory, and beside what."""
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
        "--in-place",
        action="store_true",
        help="on GPUs: all-gathers' inputs lie in their outputs (all-reduces, broadcasts and "
        "reductions always run in place)",
    )
    parser.add_argument(
        "--dma",
        type=_several("on", "off"),
        metavar="on,off",
        help="settings of UNJAM_DMA on GPUs, all rows for each: whether copy engines move slices "
        "of large collectives (default: as the environment has it)",
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


def run(options: argparse.Namespace) -> int:
    """Measures, prints tables, writes the file; status 1 if a rank failed or a result was wrong."""
    sweep = _sweep(options)
    console = make_console()
    try:
        if options.gemm:
            rows = _measure_gemm(_gemm_sweep(options), console)
        else:
            rows = _measure(sweep, console)
    except BenchError as error:
        complain(str(error))
        return 1
    if options.json is None:
        return 0
    report = make_report(rows, options.device, ["unjam", *sys.argv[1:]])
    written = write("--json", options.json, lambda: write_report(options.json, report))
    return 0 if written else 1


def _measure(sweep: Sweep, console: Console) -> list[Row]:
    kind = "threads" if sweep.threads else "processes"
    count = len(list(sweep.cases())) * len(sweep.modes) * max(1, len(sweep.dma))
    console.print(
        f"{sweep.ranks} ranks ({kind}), {sweep.dtype}, buffers: {_BUFFERS[sweep.buffers]}\n"
        f"{_counted(count, 'row')}; {sweep.seconds:g} s of repetitions each, or at least "
        f"{FEWEST} of them."
    )

    def tell(seconds: float) -> None:
        console.print(f"This takes about {_span(seconds)}.")

    with measuring(count) as advance:
        rows = run_sweep(sweep, lambda _: advance(1), tell)
    show_rows(console, rows, sweep)
    return rows


def _measure_gemm(sweep: GemmSweep, console: Console) -> list[Row]:
    count = sweep.ways * len(sweep.lanes)
    console.print(f"{_counted(count, 'row')}; the first setting of {len(sweep.lanes)} tells more.")
    started = time.perf_counter()
    told = False

    with measuring(count) as advance:

        def on_row(row: Row) -> None:
            nonlocal told
            if not told:
                seconds = (time.perf_counter() - started) * len(sweep.lanes)
                console.print(f"This takes about {_span(seconds)} in all.")
                told = True
            advance(1)

        rows = run_gemm(sweep, on_row)
    _show_gemm(console, rows, sweep)
    return rows


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _span(seconds: float) -> str:
    """A time that is known roughly."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min"


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
        if options.in_place:
            options.parser.error("argument --in-place: is for --device cuda")
        if options.dma:
            options.parser.error("argument --dma: copy engines are GPUs': add --device cuda")
    elif options.threads:
        options.parser.error("argument --threads: on GPUs every rank is a process")
    elif options.gemm and options.dma:
        options.parser.error("argument --dma: not with --gemm")
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
        in_place=options.in_place,
        dma=tuple(dict.fromkeys(options.dma or ())),
    )


def _gemm_sweep(options: argparse.Namespace) -> GemmSweep:
    return GemmSweep(
        lanes=tuple(options.lanes),
        ranks=options.ranks,
        peer=options.peer,
        limit_s=options.timeout,
        registered=options.registered,
    )


def show_rows(console: Console, rows: list[Row], sweep: Sweep) -> None:
    """A table a collective, and what its words mean."""
    peer = sweep.peer if sweep.peer != "none" else ""
    columns = ["size", "unjam\nµs", "busbw\nGB/s"]
    if sweep.device == "cuda":
        columns[1:1] = ["mode"]
    if peer:
        columns += [f"{peer}\nµs", "busbw\nGB/s ", "ratio", ""]
    columns += ["spread", *(["SMs", "DMA"] if sweep.dma else ["plan"])]
    numbers = [name for name in columns if name not in ("mode", "", "plan")]
    for collective, dma in dict.fromkeys((row["collective"], row.get("dma")) for row in rows):
        setting = "" if dma is None else f", UNJAM_DMA={dma}"
        console.print(f"\n{collective}{setting}", style="bold")
        table = make_table("", columns, numbers, box=None)
        for column in table.columns:
            column.min_width = _WIDTHS.get(str(column.header).partition("\n")[0], 7)
        for row in rows:
            if (row["collective"], row.get("dma")) == (collective, dma):
                table.add_row(*_cells(row, peer, sweep), style=_STYLES[verdict(row)])
        console.print(table)
    console.print()
    for line in legend(peer, rows):
        console.print(line)


def _cells(row: Row, peer: str, sweep: Sweep) -> list[str]:
    cells = [size_text(row["bytes"]), microseconds(row["unjam_us"]), _rate(row["unjam_busbw"])]
    if sweep.device == "cuda":
        cells[1:1] = [row["mode"]]
    spread = f"{100 * row['spread']:.0f}%"
    if peer and row["peer"] is None:
        cells += ["-", "-", "-", ""]
    elif peer:
        cells += [microseconds(row["peer_us"]), _rate(row["peer_busbw"])]
        cells += [f"{row['ratio']:.2f}", verdict(row)]
        spread = f"{100 * row['spread']:.0f}/{100 * row['peer_spread']:.0f}%"
    plan = ", ".join(filter(None, (row["algorithm"], row["protocol"])))
    cells += [spread + ("!" if is_unsure(row) else " ")]
    if sweep.dma:
        return [*cells, str(row["lanes"] or "-"), f"{100 * (row['dma_share'] or 0):.0f}%"]
    return [*cells, plan]


def _rate(gigabytes: float) -> str:
    return f"{gigabytes:.1f}" if gigabytes >= 100 else f"{gigabytes:.3f}"


def legend(peer: str, rows: list[Row]) -> Iterator[str]:
    """What the tables' words mean."""
    yield "µs: the median of the repetitions, of the slowest rank."
    yield (
        "busbw: bus bandwidth as nccl-tests counts it, bytes over time, times 2(n-1)/n of an "
        "all-reduce of n ranks, (n-1)/n of all-gather and reduce-scatter, 1 of the others."
    )
    if peer:
        yield f"ratio: {peer}'s time over unjam's. Above 1 unjam is faster."
        verdicts = [verdict(row) for row in rows if row["peer"] is not None]
        yield (
            "wins, loses: by more than half of both spreads. unjam wins "
            f"{verdicts.count('wins')}, loses {verdicts.count('loses')} of "
            f"{_counted(len(verdicts), 'row')}."
        )
    whose = f" (unjam's/{peer}'s)" if peer else ""
    yield (
        f"spread{whose}: width of the repetitions' middle half, of the median. "
        f"!: over {100 * UNSURE:.0f}%, the row tells little."
    )
    if any(row.get("dma") for row in rows):
        yield (
            "SMs: that an in-stream call holds, a block each; DMA: of the bytes that were sent, "
            "what copy engines moved."
        )
    if not all(row["mode"] == "host" for row in rows):
        yield "host: one call and its wait; device: queued in a stream; async: many outstanding."


def _show_gemm(console: Console, rows: list[Row], sweep: GemmSweep) -> None:
    console.print(
        f"\n{sweep.size}³ bf16 matrix product beside all-reduces of {size_text(sweep.nbytes)}"
        f"{' in registered memory' if sweep.registered else ''}, {sweep.ranks} ranks",
        style="bold",
    )
    columns = ["lanes", "beside", "blocks", "ms", "p10", "p90", "slowdown", "busbw"]
    numbers = [name for name in columns if name != "beside"]
    table = make_table("", columns, numbers, box=None)
    for row in rows:
        if row["beside"] == "alone" and row is not rows[0]:
            table.add_section()
        table.add_row(
            str(row["lanes"]),
            row["beside"] + ("" if row["covered"] else " *"),
            str(row["blocks"] or "-"),
            *(f"{row[name]:.3f}" for name in ("ms", "low_ms", "high_ms", "slowdown")),
            f"{row['busbw']:.0f}",
        )
    console.print(table)
    console.print(
        "\nms: of a product, the median; p10 and p90: a tenth of the measurements is below, above. "
        "slowdown: over the product alone. blocks: that the all-reduce holds. busbw: the "
        "all-reduce's bus bandwidth, GB/s."
    )
    if not all(row["covered"] for row in rows):
        console.print("*: the all-reduces ended before the products.")


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
