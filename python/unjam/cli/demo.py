"""demo: the DFCCL paper's two programs: they deadlock one at a time, and complete with unjam."""

from __future__ import annotations

import argparse
import os
import random
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from .. import gloo_program, programs
from ..cuda import gpus
from ..picture import draw, file_for
from ..programs import HoldTry, Part, Program
from ..timeline import Timeline, condensed, make_timeline
from . import _cuda_demo
from ._console import (
    make_console,
    make_table,
    positive,
    print_block,
    progress_bar,
    rank_count,
    seed_number,
)
from ._outputs import lacking, write

_TRACE_EVENTS = 65536
_MOST_RANKS = 64  # threads, each of which waits for all others
_DRIVER = Path("/proc/driver/nvidia")  # where there is one
_NUMBERS = [
    "iterations",
    "results\nright",
    "ms an\niteration",
    "preempted\na call",
    "engine left,\na rank",
]
_TRACED = 4  # of each half of the picture; the quickest is drawn: others may use the machine
_GLOO_ITERATIONS = 20  # at most, in one order
_GLOO_RANKS = 8  # with more, fewer iterations
_GLOO_FEWEST = 2
_GLOO_LIMIT_S = 10.0  # for those in disorder


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
    if options.ranks is not None and options.ranks > _MOST_RANKS:
        options.parser.error(
            f"--ranks: a demo of more than {_MOST_RANKS} takes too long; take fewer"
        )
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
    say()
    say("[bold]unjam demo[/], " + f"seed {demo.seed}", markup=True)
    say()
    block = partial(print_block, demo.console, indent=0)
    block(
        f"{demo.ranks} ranks, threads of this process on {len(os.sched_getaffinity(0))} cores, "
        f"call the same {len(programs.SIZES)} all-reduces, {programs.size_text(programs.SIZES[0])} "
        f"to {programs.size_text(programs.SIZES[-1])}, each rank in its own random order."
    )
    block("program 1: all calls at once, then wait.", indent=2)
    block("program 2: with a device synchronisation between the calls.", indent=2)
    block(
        "These are the test programs of the DFCCL paper (Sec. 6.1), where NCCL deadlocked every "
        "time."
    )
    say()
    hold_ok = _show_hold(demo)
    parts = _show_unjam(demo)
    _show_gloo(demo, parts)
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
    block = partial(print_block, demo.console)
    block('[bold]1. One collective at a time, in call order[/] (policy "hold")', 0, markup=True)
    block(
        "As NCCL does in one stream: a rank that has started a collective holds its engine until "
        "all others have joined in."
    )
    good = True
    for number, device_sync in ((1, False), (2, True)):
        tries = [
            programs.try_hold(demo.ranks, demo.seed + place, device_sync)
            for place in range(demo.tries)
        ]
        deadlocks = [one for one in tries if one.deadlocked]
        block(
            f"program {number}: [bold red]deadlocked in {len(deadlocks)} of {len(tries)} tries[/]",
            markup=True,
        )
        problems = [one.problem for one in deadlocks if one.problem]
        good = good and bool(deadlocks) and not problems
        if deadlocks:
            first = deadlocks[0]
            cycle = programs.cycle_text(first.cycle)
            block(f"the first, named after {1e3 * first.seconds:.0f} ms: {cycle}", 5)
        for problem in problems:
            block(f"but a cycle that was named is not a true one: {problem}", 5, style="red")
    if good:
        block(
            "Every cycle named was checked against the order in which the ranks made their calls."
        )
    demo.console.print()
    return good


# ---- 2: unjam ----


def _show_unjam(demo: _Demo) -> dict[str, Part]:
    """Gives what program 1 came to, by order."""
    block = partial(print_block, demo.console)
    block("[bold]2. The same programs with unjam[/]", 0, markup=True)
    block(
        "An engine that waits too long for a peer sets the collective aside and takes up another "
        "one. One that has nothing to do leaves, so that a device synchronisation returns. The "
        "same work in one order on all ranks, in turn with it, tells what the disorder costs."
    )
    demo.console.print()
    table = make_table("", ["program", "calls", *_NUMBERS], _NUMBERS, box=None)
    costs = []
    of_program: dict[int, dict[str, Part]] = {}
    for number, device_sync in ((1, False), (2, True)):
        parts = of_program[number] = _run_program(demo, number, device_sync)
        for order, words in (("random", "own order"), ("consistent", "one order")):
            _add_row(table, number, words, parts[order], demo.ranks)
        ratio = parts["random"].seconds / parts["consistent"].seconds
        costs.append(f"{ratio:.2f} (program {number})")
    demo.console.print(Padding(table, (0, 0, 0, 3)))
    demo.console.print()
    block(
        "[bold green]All complete, and every result right to the last bit on every rank.[/]",
        markup=True,
    )
    block(f"Cost of disorder, time in own order over time in one order: {', '.join(costs)}.")
    block(
        "Preempted: how often an engine set a call aside to look at another one. That is how it "
        "waits, in one order as well: a look often takes less than a microsecond where nothing has "
        "come, and with more ranks than cores a peer that it waits for seldom runs just then."
    )
    demo.console.print()
    return of_program[1]


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
    calls = part.iterations * len(programs.SIZES)
    table.add_row(
        str(number),
        words,
        f"{part.iterations:,}",
        f"{part.results:,}",
        f"{part.ms_per_iteration:.1f}",
        f"{part.per_block(part.stats.preemptions) / calls:,.1f}",
        f"{part.stats.quits / ranks:,.0f}",
    )


# ---- 3: gloo ----


def _show_gloo(demo: _Demo, parts: dict[str, Part]) -> None:
    """Program 1 with a library that others wrote, beside what it came to with unjam."""
    block = partial(print_block, demo.console)
    block("[bold]3. Program 1 with gloo[/], PyTorch's library for CPUs", 0, markup=True)
    if lack := gloo_program.lacking():
        block(f"Left out: {lack}; then unjam demo again.")
        demo.console.print()
        return
    most = max(_GLOO_FEWEST, _GLOO_ITERATIONS * _GLOO_RANKS // max(demo.ranks, _GLOO_RANKS))
    block("Trying PyTorch's gloo (some seconds).")
    try:
        found = gloo_program.try_gloo(
            demo.ranks, demo.seed, min(demo.iterations, most), _GLOO_LIMIT_S
        )
    except (OSError, RuntimeError) as error:
        block(f"Left out: {error}")
        demo.console.print()
        return
    ours = parts["random"].ms_per_iteration
    block(
        f"gloo, one order on all ranks: {found.ms_per_iteration:.1f} ms an iteration, through "
        f"sockets; unjam, any order: {ours:.1f} ms, through shared memory. That is "
        f"{found.ms_per_iteration / ours:.1f} times gloo's speed, with {found.iterations} and "
        f"{parts['random'].iterations} iterations, one library after the other."
    )
    block("gloo, each rank in its own order: " + _GLOO_ENDS[found.end], markup=True)
    if found.end == "hung":
        block(f"It was ended after {found.limit_s:.0f} s.", 5)
    elif found.words:
        block(f"{'its end' if found.end == 'failed' else 'its words'}: {found.words}", 5)
    block(
        "One process group, as unjam has one group. gloo matches calls by their order in it; a "
        "process group for each all-reduce, with threads of its own, lets gloo complete them."
    )
    demo.console.print()


_GLOO_ENDS = {
    "broke": "[bold red]it ended the process[/].",
    "hung": "[bold red]it hung[/].",
    "wrong": "[bold red]wrong results[/], without an error.",
    "completed": "this time it went well.",
    "failed": "its process ended for another reason.",
}


# ---- 4: the picture ----


def _show_picture(demo: _Demo) -> bool:
    """Whether it could be written."""
    timelines = [_hold_timeline(demo), _unjam_timeline(demo)]
    path = file_for(demo.out)
    if not write("--out", path, lambda: draw(timelines, path), "demo"):
        return False
    print_block(
        demo.console,
        "[bold]4. Who had what in hand, when[/]: program 1, the quickest of "
        f"{_TRACED} iterations of each kind",
        indent=0,
        markup=True,
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
    tries = [
        programs.try_hold(demo.ranks, demo.seed, trace_events=_TRACE_EVENTS) for _ in range(_TRACED)
    ]
    one = min(tries, key=lambda one: (not one.deadlocked, _shown_until(one) - _begin(one)))
    title = "One collective at a time, in call order: "
    title += "deadlock" if one.deadlocked else "this time it went well"
    timeline = make_timeline(title, _keys(), one.traces, end_ns=_shown_until(one))
    stuck = {
        row.rank: span.key for row in timeline.rows for span in row.spans if span.end == "open"
    }
    in_cycle = {edge.rank: edge.waits_for for edge in one.cycle}
    for row in timeline.rows:
        row.gaps = []  # of engines that have not begun
        if key := stuck.get(row.rank):
            row.note = f"holds {key}"
            if row.rank in in_cycle:
                row.note += f", waits for rank {in_cycle[row.rank]}"
    if one.deadlocked:
        timeline.waits = list(in_cycle.items())
        timeline.caption = (
            "Every rank has begun a collective and holds it until all others join in. Those of the "
            "arrows wait for each other in a circle: for ever."
        )
    return timeline


def _begin(one: HoldTry) -> int:
    return min((event.time_ns for trace in one.traces for event in trace), default=one.ended_ns)


def _shown_until(one: HoldTry) -> int:
    """So that what stands for ever takes the larger part of the picture, and the start is seen."""
    last = max((event.time_ns for trace in one.traces for event in trace), default=one.ended_ns)
    if not one.deadlocked:
        return one.ended_ns
    return min(one.ended_ns, last + 2 * (last - _begin(one)))


def _unjam_timeline(demo: _Demo) -> Timeline:
    first, last = programs.TRACED_USE, programs.TRACED_USE + _TRACED
    traces = programs.trace_iteration(demo.ranks, demo.seed, _TRACE_EVENTS, iterations=last)
    found = [make_timeline("", _keys(), traces, use=use) for use in range(first, last)]
    timeline = condensed(min(found, key=lambda one: one.end_ns - one.start_ns))
    timeline.title = (
        "unjam, the same calls, each rank in its own order: all done after "
        f"{timeline.milliseconds:.1f} ms"
    )
    timeline.caption = (
        "A rank whose peers are late sets a collective aside and takes up another (the colour "
        "changes). White: it waits, or has no core."
    )
    return timeline
