"""demo: the DFCCL paper's two programs: they deadlock one at a time, and complete with unjam."""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from .. import programs
from ..cuda import gpus
from ..picture import draw, file_for
from ..programs import HoldTry, Part, Program
from ..timeline import Timeline, make_timeline
from . import _cuda_demo
from ._console import make_console, make_table, positive, progress_bar, rank_count, seed_number
from ._outputs import lacking, write

_TRACE_EVENTS = 65536
_DRIVER = Path("/proc/driver/nvidia")  # where there is one
_NUMBERS = [
    "iterations",
    "results\nright",
    "ms per\niteration",
    "preemptions\nper block",
    "context loads\nper block",
    "quits\nper rank",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument(
        "--device",
        choices=("auto", "host", "cuda"),
        default="auto",
        help="auto: GPUs if there are at least two and unjam's CUDA part, otherwise the host, and "
        "then a single GPU, which ranks share",
    )
    parser.add_argument(
        "--ranks",
        type=rank_count,
        default=None,
        help="threads on the host (default: 8); on CUDA a GPU each, or all share a single one "
        "(default: as many as GPUs, 2 to 4)",
    )
    parser.add_argument(
        "--iterations", type=positive, default=None, help="of each program and order (default: 200)"
    )
    parser.add_argument("--seed", type=seed_number, default=None, help="of call orders and data")
    parser.add_argument(
        "--tries", type=positive, default=None, help="to deadlock each program (default: 10)"
    )
    parser.add_argument(
        "--out",
        default="unjam-demo-timeline.png",
        help="the picture: .png, .svg, .pdf or .html (default: ./unjam-demo-timeline.png)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="20 iterations and 3 tries, for a first check"
    )


@dataclass
class _Demo:
    """The settings of one run, and where it prints."""

    console: Console
    ranks: int
    iterations: int
    seed: int
    tries: int
    out: str


def run(options: argparse.Namespace) -> int:
    """Shows the deadlock, then unjam, then draws both; status 1 if either is not as it must be."""
    started = time.perf_counter()
    if options.ranks is not None and options.ranks < 2:
        options.parser.error("--ranks: one rank alone cannot deadlock; take at least 2")
    if not options.out.lower().endswith((".png", ".svg", ".pdf", ".html")):
        options.parser.error("argument --out: a picture must end in .png, .svg, .pdf or .html")
    if options.device == "cuda" or (options.device == "auto" and not gpus.lacking(2)):
        return _cuda_demo.run(options)
    if problem := _lacking_picture(file_for(options.out)):
        options.parser.error(f"argument --out: {problem}")
    demo = _Demo(
        console=make_console(),
        ranks=options.ranks or 8,
        iterations=options.iterations or (20 if options.quick else 200),
        seed=random.randrange(1_000_000) if options.seed is None else options.seed,
        tries=options.tries or (3 if options.quick else 10),
        out=options.out,
    )
    say = demo.console.print
    say(
        f"\n[bold]unjam demo[/]: {demo.ranks} ranks (threads of this process, each with its own "
        "engine), seed "
        f"{demo.seed}\n\n"
        f"Every rank calls the same {len(programs.SIZES)} all-reduces, "
        f"{programs.size_text(programs.SIZES[0])} to {programs.size_text(programs.SIZES[-1])}, but "
        "each in its own random order:\n"
        "  [bold]program 1[/]  all calls at once, then wait;\n"
        "  [bold]program 2[/]  with a device synchronisation between the calls.\n"
        "These are the test programs of the DFCCL paper (Sec. 6.1), where NCCL deadlocked every "
        "time.\n",
        markup=True,
    )
    hold_ok = _show_hold(demo)
    _show_unjam(demo)
    drawn = _show_picture(demo)
    say(f"Done in {time.perf_counter() - started:.0f} s. Again: unjam demo --seed {demo.seed}\n")
    status = 0 if hold_ok and drawn else 1
    if options.device == "auto":
        lack = gpus.lacking(2, shared=True)
        if not lack:
            options.ranks = None  # that was the host's
            status = _cuda_demo.run(options) or status
        elif _DRIVER.exists():
            # On one line, for whoever looks for it.
            say(
                f"Left out, though there is an NVIDIA driver: the part on GPUs. {lack}; then: "
                "unjam demo --device cuda",
                soft_wrap=True,
            )
    return status


def _lacking_picture(path: Path) -> str:
    """Why the picture cannot be written; makes its folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        return f"the folder {path.parent} cannot be made: {error}"
    return lacking(path)


# ---- 1: hold and wait ----


def _show_hold(demo: _Demo) -> bool:
    say = demo.console.print
    say(
        '[bold]1. One collective at a time, in call order[/] (policy "hold": as NCCL does in one '
        "stream)\n"
        "   A rank that has started a collective holds its engine until all others have joined in.",
        markup=True,
    )
    good = True
    for number, device_sync in ((1, False), (2, True)):
        tries = [
            programs.try_hold(demo.ranks, demo.seed + place, device_sync)
            for place in range(demo.tries)
        ]
        deadlocks = [one for one in tries if one.deadlocked]
        say(
            f"   program {number}: [bold red]deadlocked in {len(deadlocks)} of {len(tries)} "
            "tries[/]",
            markup=True,
        )
        problems = [one.problem for one in deadlocks if one.problem]
        good = good and bool(deadlocks) and not problems
        if deadlocks:
            _say_cycle(demo, deadlocks[0])
        for problem in problems:
            say(f"     but a cycle that was named is not a true one: {problem}", style="red")
    say(
        "   Every cycle named was checked against the order in which the ranks made their calls.\n"
        if good
        else ""
    )
    return good


def _say_cycle(demo: _Demo, one: HoldTry) -> None:
    words = f"the first, named after {1e3 * one.seconds:.0f} ms: {programs.cycle_text(one.cycle)}"
    demo.console.print(Padding(words, (0, 0, 0, 5), expand=False))


# ---- 2: unjam ----


def _show_unjam(demo: _Demo) -> None:
    demo.console.print(
        "[bold]2. The same programs with unjam[/]\n"
        "   An engine that waits too long for a peer sets the collective aside and takes up "
        "another one;\n   one that has nothing to do quits, so that a device synchronisation "
        "returns. The same work in\n   one order on all ranks, run in turn with it, tells what the "
        "disorder costs.",
        markup=True,
    )
    table = make_table(
        "",
        ["program", "calls", *_NUMBERS],
        _NUMBERS,
    )
    costs = []
    for number, device_sync in ((1, False), (2, True)):
        parts = _run_program(demo, number, device_sync)
        for order, words in (("random", "own order"), ("consistent", "one order")):
            _add_row(table, number, words, parts[order], demo.ranks)
        table.add_section()
        ratio = parts["random"].seconds / parts["consistent"].seconds
        costs.append(f"{ratio:.2f} (program {number})")
    demo.console.print(table)
    demo.console.print(
        "   [bold green]All complete, and every result right to the last bit on every rank.[/]\n"
        f"   Cost of disorder, time in random order over time in one order: {', '.join(costs)}.\n",
        markup=True,
    )


def _run_program(demo: _Demo, number: int, device_sync: bool) -> dict[str, Part]:
    program = Program(
        ranks=demo.ranks,
        iterations=demo.iterations,
        seed=demo.seed,
        device_sync=device_sync,
        orders=("random", "consistent"),
        digest=False,
    )
    with progress_bar(demo.console, f"program {number}", 2 * demo.iterations) as advance:
        return programs.run(program, advance)


def _add_row(table: Table, number: int, words: str, part: Part, ranks: int) -> None:
    table.add_row(
        str(number),
        words,
        f"{part.iterations:,}",
        f"{part.results:,}",
        f"{part.ms_per_iteration:.1f}",
        f"{part.per_block(part.stats.preemptions):,.0f}",
        f"{part.per_block(part.stats.context_loads):,.0f}",
        f"{part.stats.quits / ranks:,.0f}",
    )


# ---- 3: the picture ----


def _show_picture(demo: _Demo) -> bool:
    """Whether it could be written."""
    timelines = [_hold_timeline(demo), _unjam_timeline(demo)]
    path = file_for(demo.out)
    if not write("--out", path, lambda: draw(timelines, path), "demo"):
        return False
    demo.console.print(
        "[bold]3. Who ran what when[/], in one iteration of program 1 of each kind", markup=True
    )
    demo.console.print(f"   {path.resolve()}\n", soft_wrap=True)
    return True


def _keys() -> list[tuple[str, str]]:
    names = programs.key_names(len(programs.SIZES))
    return [
        (key, f"{key}: {programs.size_text(size)}")
        for key, size in zip(names, programs.SIZES, strict=True)
    ]


def _hold_timeline(demo: _Demo) -> Timeline:
    one = programs.try_hold(demo.ranks, demo.seed, trace_events=_TRACE_EVENTS)
    title = "One at a time, in call order: "
    title += "deadlock, every rank is stuck" if one.deadlocked else "this time it went well"
    timeline = make_timeline(title, _keys(), one.traces, end_ns=one.ended_ns)
    stuck = {
        row.rank: span.key for row in timeline.rows for span in row.spans if span.end == "open"
    }
    in_cycle = {edge.rank: edge.waits_for for edge in one.cycle}
    for row in timeline.rows:
        key = stuck.get(row.rank)
        if key is None:
            continue
        others = [rank for rank in stuck if stuck[rank] != key]
        awaited = in_cycle.get(row.rank, others[0] if others else None)
        row.note = f"runs {key}" + ("" if awaited is None else f", waits for rank {awaited}")
        if row.rank in in_cycle:
            row.note += " (in the cycle)"
    return timeline


def _unjam_timeline(demo: _Demo) -> Timeline:
    traces = programs.trace_iteration(demo.ranks, demo.seed, _TRACE_EVENTS)
    timeline = make_timeline("", _keys(), traces, use=programs.TRACED_USE)
    timeline.title = (
        f"unjam, each rank in its own random order: complete after {timeline.milliseconds:.1f} ms, "
        f"with {timeline.count('preempt'):,} preemptions"
    )
    return timeline
