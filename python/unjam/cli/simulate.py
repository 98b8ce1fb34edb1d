"""simulate: how likely a job deadlocks without unjam (docs/simulator.md)."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

from .. import _limits as limits
from ._console import (
    description_and_bar,
    make_console,
    make_table,
    print_block,
    print_json,
    print_title,
)
from ._outputs import lacking, write
from ._streams import complain

if TYPE_CHECKING:
    from ..simulate import Job, Result, Simulator
    from ..simulate.trace import Trace
    from ..simulate.words import Unit

_PARALLEL = {
    "world": "GPUs in all; checked against the product of the sizes",
    "tp": "tensor-parallel size",
    "dp": "data-parallel size",
    "pp": "pipeline stages",
    "cp": "context-parallel size",
    "ep": "expert-parallel size; divides dp",
    "layers": "of the model",
    "micro-batches": "of an iteration",
    "ddp-buckets": "one all-reduce each",
    "fsdp-units": "two all-gathers and a reduce-scatter each",
    "tp-collectives": "of each TP group, in place of what the layers give",
    "cp-collectives": "of each CP group",
    "ep-collectives": "of each EP group",
    "dp-collectives": "of each DP group",
    "pp-collectives": "of each pair of neighbouring stages (default: none)",
}
_ROUNDS = 32_000
# Options that would be ignored.
_UNUSED = {
    "plot": ("precision", "plain", "cycle"),
    "table1": (
        *("file", "trace", "model", "order", "semantics", "disorder", "sync", "seed"),
        *("precision", "plain", "cycle", "plot", "out"),
        *(name.replace("-", "_") for name in _PARALLEL),
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    source = parser.add_argument_group("what to simulate (one of)")
    source.add_argument("--file", type=Path, metavar="FILE", help="a job as TOML or JSON")
    source.add_argument("--table1", action="store_true", help="the paper's Table 1, beside ours")
    source.add_argument(
        "--trace",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="flight-recorder dumps or profiler traces of a real run, one a rank, or their folder",
    )
    parallel = parser.add_argument_group("or a training job")
    for name, text in _PARALLEL.items():
        parallel.add_argument(f"--{name}", type=int, metavar="N", help=text)
    model = parser.add_argument_group("model")
    model.add_argument("--model", help="single-queue (default) or synchronization")
    model.add_argument("--order", help="interleaved (default) or concatenated")
    model.add_argument("--semantics", help="exact (default), released or both")
    model.add_argument(
        "--disorder",
        type=float,
        metavar="P",
        help="how often a GPU makes a later call before the one that is next: a probability "
        "(default: 0; the paper's Table 1 assumes 1e-9 to 1e-5 without synchronisations)",
    )
    model.add_argument(
        "--sync",
        type=float,
        metavar="P",
        help="how often a GPU synchronises in place of a call: a probability (default: 0)",
    )
    run = parser.add_argument_group("run")
    run.add_argument("--rounds", type=int, metavar="N", help=f"at most (default: {_ROUNDS})")
    run.add_argument("--seed", type=int, metavar="N", help="default: 0, or the file's")
    run.add_argument("--threads", type=int, metavar="N", help="default: one a CPU")
    run.add_argument(
        "--precision", metavar="P", help="stop when the 95 %% interval is ± this: 0.001 or 10%%"
    )
    run.add_argument("--plain", action="store_true", help="use the step-by-step engine")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="JSON in place of tables")
    output.add_argument(
        "--cycle", type=Path, metavar="OUT", help="draw a deadlocked round's cycle (png or svg)"
    )
    output.add_argument(
        "--plot",
        choices=("probabilities", "gpus", "overlap", "cost"),
        help="a picture of many runs, into --out",
    )
    output.add_argument("--out", type=Path, help="of --plot (default: unjam-simulate-PLOT.png)")


def run(options: argparse.Namespace) -> int:
    """Simulates and prints; 2 if the input is bad, 130 after Ctrl-C."""
    from ..simulate import InputError

    try:
        return _run(options)
    except InputError as error:
        complain(f"{_of_options(error, options)}\nSee: unjam simulate --help", "simulate")
        return 2


def _of_options(error: Exception, options: argparse.Namespace) -> str:
    """The error; what is not a file's has dashes, as on the command line."""
    from ..simulate import InputError

    text = str(error)
    if isinstance(error, InputError) and not error.file and error.line is None:
        name = error.field
        if name.isidentifier() and hasattr(options, name):
            return text.replace(name, "--" + name.replace("_", "-"), 1)
    return text


def _run(options: argparse.Namespace) -> int:
    from ..simulate import InputError, Precision, Simulator, engine
    from ..simulate.job import MOST_ROUNDS, SEMANTICS, whole

    precision = Precision.parse(options.precision) if options.precision else None
    if options.threads is not None:
        whole("--threads", options.threads, 1, limits.SIMULATOR_THREADS)
    if options.rounds is not None:
        whole("--rounds", options.rounds, 1, MOST_ROUNDS)
    if options.out is not None and not options.plot and not options.table1:
        raise InputError("--out", "is where --plot draws, which is not given")
    if options.plot and options.out is None:
        options.out = Path(f"unjam-simulate-{options.plot}.png")
    for option, path in (("--cycle", options.cycle), ("--out", options.out)):
        if path is not None:
            _check_picture(option, path)
    if options.semantics is not None and options.semantics not in SEMANTICS:
        raise InputError("semantics", f"{options.semantics!r} is none of {', '.join(SEMANTICS)}")
    for mode, unused in _UNUSED.items():
        given = [name for name in unused if getattr(options, name) not in (None, False)]
        if getattr(options, mode) and given:
            raise InputError("--" + given[0].replace("_", "-"), f"means nothing with --{mode}")
    if options.table1:
        return _table1(options)
    job, file_rounds, file_semantics, trace, unit = _job(options)
    rounds = options.rounds or file_rounds or _ROUNDS
    semantics = options.semantics or file_semantics or "exact"
    if options.plot:
        return _plot(options, job, rounds, semantics, unit)
    with Simulator(job) as simulator, _progress(rounds) as begin:
        result = simulator.run(
            rounds,
            semantics,
            options.threads or engine.default_threads(),
            plain=options.plain,
            precision=precision,
            progress=begin(job.name or job.model),
        )
        witness = _witness(simulator, result, options.plain)
    bound = trace is not None and trace.bounds(job)
    sentences = _sentences(result, unit, trace, measured=options.disorder is None)
    if options.json:
        found = result.as_dict() | {"in_words": sentences}
        if witness:
            found["round"] = witness
        if trace is not None:
            found["trace"] = trace.as_dict() | {"upper_limit": trace.bounds(job)}
        print_json(found)
    else:
        _show(result, witness, sentences, trace, bound)
    # Last: the figures are there whatever becomes of the picture.
    drawn = not options.cycle or _draw_cycle(options.cycle, job, result, witness)
    if result.stopped == "interrupted":
        return 130
    return 0 if drawn else 1


def _check_picture(option: str, path: Path) -> None:
    from ..picture.files import NEEDS_MATPLOTLIB
    from ..simulate import InputError

    if path.suffix.lower() not in (".png", ".svg"):
        raise InputError(option, f"{path}: the ending must be .png or .svg")
    if problem := lacking(path):
        raise InputError(option, problem)
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError(option, NEEDS_MATPLOTLIB)


def _job(
    options: argparse.Namespace,
) -> tuple[Job, int | None, str | None, Trace | None, Unit]:
    """The job, its file's rounds and semantics, the trace it comes from, and what a round is."""
    from ..simulate import InputError, Parallel, read_job
    from ..simulate.trace import read_traces
    from ..simulate.words import ITERATION, ROUND, TRACED

    overrides = {
        name: getattr(options, name)
        for name in ("model", "order", "disorder", "sync", "seed")
        if getattr(options, name) is not None
    }
    sizes = {
        name.replace("-", "_"): getattr(options, name.replace("-", "_"))
        for name in _PARALLEL
        if getattr(options, name.replace("-", "_")) is not None
    }
    sources = [bool(options.file), bool(options.trace), bool(sizes)]
    if sum(sources) != 1:
        raise InputError(
            "", "give one of --file, --table1, --trace, or a training job such as --tp 4 --dp 4 "
            "--layers 24 --ddp-buckets 40"
        )  # fmt: skip
    if "sync" in overrides and overrides["sync"] and "model" not in overrides and not options.file:
        overrides["model"] = "synchronization"
    if options.file:
        file = read_job(options.file, **overrides)
        unit = ITERATION if file.is_training else ROUND
        return file.job, file.rounds, file.semantics, None, unit
    if options.trace:
        trace = read_traces(options.trace)
        return trace.job(**overrides), None, None, trace, TRACED
    try:
        return Parallel(**sizes).job(**overrides), None, None, None, ITERATION
    except InputError as error:
        # Options have no tables.
        prefix, _, name = error.field.partition("parallel.")
        if not prefix and name:
            raise InputError("--" + name.replace("_", "-"), error.reason) from error
        raise


def _witness(simulator: Simulator, result: Result, plain: bool) -> dict[str, Any] | None:
    """A round that deadlocked, if one did."""
    number = result.first_exact if "exact" in result.kinds else result.first_released
    if number is None:
        number = result.first_released
    return None if number is None else simulator.round(number, plain)


def _percent(value: float) -> str:
    percent = 100 * value
    return f"{percent:.2f}" if percent >= 0.1 or percent == 0 else f"{percent:.2g}"


def _interval(result: Result, kind: str) -> str:
    from ..simulate import wilson

    low, high = wilson(result.hits(kind), result.rounds)
    return f"{_percent(low)} to {_percent(high)}"


def _ratio(result: Result, kind: str) -> str:
    return _percent(result.hits(kind) / result.rounds) if result.rounds else "?"


def _sentences(result: Result, unit: Unit, trace: Trace | None, measured: bool) -> list[str]:
    """What comes out, for people; `measured`: the disorder is the trace's, if there is one."""
    from ..simulate import words

    found = []
    bound = trace is not None and trace.bounds(result.job)
    condition = ""
    if trace is not None and trace.cycle:
        found.append("This very run deadlocks in one queue a GPU: its orders hold a cycle (below).")
    elif trace is not None and trace.hang:
        found.append("This run hangs in one queue a GPU: its ranks stand in a cycle (below).")
    if trace is not None and measured and trace.skips == 0 and not bound:
        found.append("The trace is too short to tell how often such a run hangs.")
        condition = f"if disorder were {words.short(result.job.disorder)}: "
    if trace is not None and not measured and not result.job.disorder:
        condition = "in the reference order, without disorder: "
    for kind in result.kinds:
        text = words.verdict(result, kind, unit, bound)
        if kind == "released" or condition:
            text = text[0].lower() + text[1:]
        if kind == "released":
            text = f"by the rule of the paper's released code: {text}"
        text = condition + text
        found.append(text[0].upper() + text[1:])
    if unit.note:
        found.append(unit.note)
    if trace is None or (not measured and result.job.disorder):
        found.append(words.assumption(result))
    return found


def _show(
    result: Result,
    witness: dict[str, Any] | None,
    sentences: list[str],
    trace: Trace | None,
    bound: bool,
) -> None:
    from ..simulate.words import short

    console = make_console()
    job = result.job
    for place, sentence in enumerate(sentences):
        console.print(sentence, style="bold" if place == 0 else None)
    console.print()
    if trace is not None:
        for line in trace.summary(job):
            text = line.lstrip()
            print_block(console, text, indent=len(line) - len(text))
        console.print()
    title = f"{job.name or 'job'}: {job.gpus:,} GPUs, {len(job.groups):,} groups, " + (
        f"{job.invocations:,} invocations a round"
    )
    numbers = ["deadlocks", "rounds", "percent", "95 % interval"]
    print_title(console, title)
    table = make_table("", ["semantics", *numbers], numbers)
    for kind in result.kinds:
        table.add_row(
            kind,
            f"{result.hits(kind):,}",
            f"{result.rounds:,}",
            ("at most " if bound else "") + _ratio(result, kind),
            _interval(result, kind),
        )
    console.print(table)
    console.print(
        f"{job.model}, {job.order} order, disorder {short(job.disorder)}"
        + (f", synchronisation {short(job.sync)}" if job.model == "synchronization" else "")
        + f", seed {job.seed}"
    )
    console.print(
        f"{result.seconds:.2f} s"
        + (f", {result.rounds / result.seconds:,.0f} rounds/s" if result.seconds else "")
        + (f"; stopped: {result.stopped}" if result.stopped else "")
    )
    if witness:
        console.print()
        for line in describe_witness(witness, result.kinds, job):
            console.print(line, soft_wrap=True)


def describe_witness(
    witness: dict[str, Any], kinds: tuple[str, ...], job: Job | None = None
) -> Iterator[str]:
    """Who waits for whom, in words."""
    for kind in kinds:
        verdict = witness[kind]
        if not verdict["deadlock"]:
            continue
        name = "cycle" if kind == "exact" else "what the released code counts"
        yield f"Round {witness['round']}, {name}:"
        for wait in verdict["waits"]:
            group = wait["group"]
            label = job.groups[group].name if job is not None else ""
            yield (
                f"  GPU {wait['gpu']} waits in collective {wait['index']} of group {group}"
                + (f" ({label})" if label else "")
                + f" for GPU {wait['on']}"
            )


def _draw_cycle(path: Path, job: Job, result: Result, witness: dict[str, Any] | None) -> bool:
    """False if it cannot be written."""
    from ..simulate.pictures import draw_cycle

    kind = next((k for k in result.kinds if witness and witness[k]["deadlock"]), None)
    if witness is None or kind is None:
        complain("no round deadlocked, so there is no cycle to draw", "simulate")
        return True
    return _draw("--cycle", path, lambda: draw_cycle(witness, kind, job, path))


def _draw(option: str, path: Path, drawing: Callable[[], None]) -> bool:
    if not write(option, path, drawing, "simulate"):
        return False
    complain(f"drawn: {path}", "simulate")
    return True


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], Callable[[int], None] | None]]:
    """A bar on stderr, if that is a terminal; gives a function that starts it for a name."""
    console = make_console(stderr=True)
    if not console.is_terminal:
        yield lambda name: None
        return
    columns = (*description_and_bar(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        tasks: list[Any] = []

        def begin(name: str) -> Callable[[int], None]:
            for old in tasks:
                bar.remove_task(old)
            tasks[:] = [bar.add_task(name, total=total)]
            return lambda rounds: bar.advance(tasks[0], rounds)

        yield begin


def _table1(options: argparse.Namespace) -> int:
    from ..simulate import table1
    from ..simulate.words import short

    rounds = options.rounds or table1.PAPER_ROUNDS
    start, cpu = time.perf_counter(), time.process_time()
    with _progress(rounds) as begin:
        rows = list(table1.run(rounds, options.threads, begin))
    interrupted = bool(rows and rows[-1].result.stopped)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    if options.json:
        print_json(
            {"rows": [row.as_dict() for row in rows], "seconds": seconds, "cpu_seconds": cpu}
        )
        return 130 if interrupted else 0
    console = make_console()
    off = {kind: sum(row.differs(kind) for row in rows) for kind in ("released", "exact")}
    console.print(
        f"Of {len(rows)} ratios in the paper's Table 1, {off['released']} are not what its "
        f"released code's rule gives here, and {off['exact']} not what its definition gives.",
        style="bold",
    )
    console.print(
        "Percent of rounds that hang, with 95 % intervals. Rows with one probability are of the "
        "single-queue model, those with two of the synchronisation model.\n"
    )
    numbers = ["paper", "released", "95 %", "exact", "95 % "]
    columns = ["GPUs", "disorder/sync", *numbers, ""]
    table = make_table("", columns, numbers, box=None)
    notes: dict[str, str] = {}
    for row in rows:
        job, result = row.file.job, row.result
        marks = ""
        if row.differs("released") or row.differs("exact"):
            marks = notes.setdefault(row.why, f"[{chr(ord('a') + len(notes))}]")
        cells = []
        for kind in ("released", "exact"):
            star = "*" if row.differs(kind) else " "
            interval = _interval(result, kind).replace(" to ", "–")
            cells += [_ratio(result, kind) + star, interval]
        probabilities = short(job.disorder) + (f"/{short(job.sync)}" if job.sync else "")
        table.add_row(job.name, probabilities, _percent(row.paper), *cells, marks)
    console.print(table)
    console.print("* further from the paper's figure than the joint 99.9 % interval")
    for why, mark in notes.items():
        console.print(f"{mark} {why}")
    console.print(
        f"{rounds:,} rounds a row, {sum(row.result.rounds for row in rows):,} in all: "
        f"{seconds:.1f} s ({cpu:.1f} s of CPU)" + ("; interrupted" if interrupted else "")
    )
    return 130 if interrupted else 0


def _plot(options: argparse.Namespace, job: Job, rounds: int, semantics: str, unit: Unit) -> int:
    from ..simulate import sweeps
    from ..simulate.pictures import draw_series

    kind = "released" if semantics == "released" else "exact"
    with _progress(rounds) as begin:
        sweep = sweeps.sweep(options.plot, job, rounds, kind, options.threads, begin, unit.one)
    if options.json:
        print_json(dataclasses.asdict(sweep))
    else:
        console = make_console()
        numbers = [sweep.x_name, sweep.y_short, "low", "high"]
        print_title(console, sweep.title)
        table = make_table("", ["series", *numbers], numbers)
        for line in sweep.lines:
            for point in line.points:
                table.add_row(
                    line.name,
                    f"{point.x:g}",
                    *(f"{v:.4g}" for v in (point.y, point.low, point.high)),
                )
        console.print(table)
        for line in sweep.lines:
            if line.note:
                console.print(f"{line.name}: {line.note}")
    drawn = _draw("--out", options.out, lambda: draw_series(sweep, options.out))
    if sweep.interrupted:
        return 130
    return 0 if drawn else 1
