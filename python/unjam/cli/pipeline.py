"""pipeline: what schedules of a pipeline take, and which one hides its transfers."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._errors import InvalidArgument
from ..picture.files import amiss
from ..pipeline import (
    SCHEDULES,
    Costs,
    Deadlock,
    Order,
    Run,
    auto,
    eager_1f1b,
    make_order,
    one_f_one_b,
    read_csv,
    signal_bound,
    simulate,
    split_backward,
    write_csv,
)
from ..pipeline.orders import MOST_MICROBATCHES, MOST_STAGES
from ..pipeline.picture import draw
from ..pipeline.picture import text as chart_of
from ._console import make_console, make_table, print_block, print_json, print_title, whole
from ._outputs import file_to_write, write
from ._streams import complain

_STAGES, _MICROBATCHES = 4, 32
_AUTO = "auto"
_MODES = ("overlap", "serial", "fused", "signal")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    shape = parser.add_argument_group("pipeline")
    shape.add_argument(
        "--stages",
        type=whole(1, MOST_STAGES, "number of stages"),
        help=f"how many, one a rank (default: {_STAGES})",
    )
    shape.add_argument(
        "--microbatches",
        type=whole(1, MOST_MICROBATCHES, "number of microbatches"),
        help=f"how many (default: {_MICROBATCHES})",
    )
    shape.add_argument(
        "--schedule",
        choices=(_AUTO, *SCHEDULES),
        help="what computes when (default: auto, which looks at the transfers)",
    )
    shape.add_argument(
        "--split", action="store_true", help="backwards in two parts; auto has them always"
    )
    shape.add_argument(
        "--delay",
        type=_delays,
        metavar="N",
        help="actions between the two parts, one number or one a stage: 0,0,2; with --split",
    )
    shape.add_argument(
        "--ahead",
        type=_times,
        metavar="X",
        help="of eager_1f1b: part of the additional forwards, 0 to 1 (default: 1)",
    )
    shape.add_argument("--file", type=Path, help="a CSV with a line of actions for each rank")
    costs = parser.add_argument_group("costs, in any unit of time")
    for name, text in (
        ("forward", "a forward (default: 1)"),
        ("backward", "a backward in one (default: 2)"),
        ("inputs", "its part for gradients of inputs (default: half)"),
        ("weights", "its part for gradients of weights (default: half)"),
    ):
        costs.add_argument(
            f"--{name}", type=_times, metavar="T", help=f"{text}; one number, or one a stage: 1,2,1"
        )
    costs.add_argument(
        "--transfer",
        type=_times,
        metavar="T",
        help="from a stage to the next; two numbers: forward, backward (default: 0)",
    )
    costs.add_argument(
        "--edge",
        type=_edge,
        action="append",
        metavar="I:J=T",
        help="of one edge, also of one that skips stages: 0:3=0.5; may be repeated",
    )
    costs.add_argument(
        "--mode", choices=_MODES, default="overlap", help="how transfers run (default: overlap)"
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="JSON in place of the table")
    output.add_argument("--chart", action="store_true", help="print who computes when")
    output.add_argument(
        "--picture", type=file_to_write, metavar="FILE", help="draw it (png, svg or pdf)"
    )
    output.add_argument(
        "--csv", type=file_to_write, metavar="FILE", help="write the actions, as torch reads them"
    )


@dataclass(frozen=True)
class _Row:
    """A schedule that has run, or why it cannot."""

    name: str
    mode: str
    run: Run | None
    bound: float
    problem: str = ""

    def as_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {"schedule": self.name, "mode": self.mode}
        if self.run is None:
            return found | {"error": self.problem}
        return found | self.run.as_dict() | {"throughput": self.throughput}

    @property
    def throughput(self) -> float | None:
        """Over the bound's; None where nothing takes time."""
        return self.bound / self.run.time if self.run is not None and self.run.time else None


def run(options: argparse.Namespace) -> int:
    """Simulates and prints; 2 if the input is bad, 1 if the order deadlocks."""
    try:
        _check(options)
        costs = _costs(options)
        order, name, why = _order(options, costs)
        rows = [_run(name, order, costs, options.mode, order)]
        rows += _comparisons(order, costs, rows[0])
    except InvalidArgument as error:
        complain(f"{error}\nSee: unjam pipeline --help", "pipeline")
        return 2
    if options.json:
        print_json(
            {
                "stages": order.stages,
                "microbatches": order.microbatches,
                "signal_bound": rows[0].bound,
                "why": why,
                "rows": [row.as_dict() for row in rows],
            }
        )
    else:
        _show(options, rows, why)
    return 0 if _write(options, order, rows[0]) else 1


def _check(options: argparse.Namespace) -> None:
    """What argparse cannot."""
    if options.file is not None:
        names = ("stages", "microbatches", "schedule", "ahead")
        given = [name for name in names if getattr(options, name) is not None]
        if given:
            raise InvalidArgument(f"--{given[0]} means nothing with --file: leave one of them")
    if options.ahead is not None and options.schedule != "eager_1f1b":
        raise InvalidArgument("--ahead is of eager_1f1b: give --schedule eager_1f1b, too")
    if options.delay is not None and not options.split:
        raise InvalidArgument("--delay is of backwards in two parts: give --split, too")
    if options.split and options.file is None and options.schedule in (None, _AUTO):
        raise InvalidArgument("auto chooses the parts and their delay: leave --split")
    if options.json and options.chart:
        raise InvalidArgument("--chart means nothing with --json: leave one of them")
    if options.picture is not None and (problem := amiss(options.picture)):
        raise InvalidArgument(f"--picture: {problem}")


def _costs(options: argparse.Namespace) -> Costs:
    given: dict[str, Any] = {
        name: times[0] if len(times) == 1 else times
        for name in ("forward", "backward", "inputs", "weights", "transfer")
        if (times := getattr(options, name)) is not None
    }
    return Costs(**given, edges=dict(options.edge or ()))


def _order(options: argparse.Namespace, costs: Costs) -> tuple[Order, str, str]:
    """The order asked for, its name, and why it was chosen."""
    if options.file is not None:
        order, name = read_csv(options.file), options.file.name
    else:
        stages = options.stages or _STAGES
        microbatches = options.microbatches or _MICROBATCHES
        if options.schedule in (None, _AUTO):
            choice = auto(stages, microbatches, costs)
            return choice.order, _split_name(choice.name, choice.delays), choice.why
        name = options.schedule
        if options.ahead is None:
            order = make_order(name, stages, microbatches)
        else:
            if len(options.ahead) != 1:
                raise InvalidArgument("--ahead: give one number")
            order = eager_1f1b(stages, microbatches, options.ahead[0])
            name += f", {options.ahead[0]:g} ahead"
    if options.split:
        delay = [0] if options.delay is None else options.delay
        order = split_backward(order, delay[0] if len(delay) == 1 else delay)
        name = _split_name(name, delay)
    return order, name, ""


def _split_name(name: str, delays: Any) -> str:
    if not any(delays):
        return f"{name}, I/W"
    if len(set(delays)) == 1:
        return f"{name}, I/W +{delays[0]}"
    return f"{name}, I/W late" if any(delays[:-1]) else f"{name}, I/W last +{delays[-1]}"


def _run(name: str, order: Order, costs: Costs, mode: str, of: Order) -> _Row:
    bound = signal_bound(of.stages, of.microbatches, costs)
    if order is of:
        return _Row(name, mode, simulate(order, costs, mode), bound)
    try:
        return _Row(name, mode, simulate(order, costs, mode), bound)
    except Deadlock as error:
        return _Row(name, mode, None, bound, str(error))


def _comparisons(order: Order, costs: Costs, asked: _Row) -> list[_Row]:
    """What one would otherwise have."""
    plain = one_f_one_b(order.stages, order.microbatches)
    eager = eager_1f1b(order.stages, order.microbatches)
    several = [
        ("1f1b", plain, "serial"),
        ("1f1b", plain, "fused"),
        ("1f1b", plain, "overlap"),
        ("1f1b, I/W", split_backward(plain), "overlap"),
        ("eager_1f1b", eager, "overlap"),
        ("eager_1f1b, I/W", split_backward(eager), "overlap"),
    ]
    return [
        _run(name, other, costs, mode, order)
        for name, other, mode in several
        if (other.rows, mode) != (order.rows, asked.mode)
    ]


def _show(options: argparse.Namespace, rows: list[_Row], why: str) -> None:
    console = make_console()
    first = rows[0].run
    assert first is not None
    order = first.order
    print_title(
        console,
        f"{rows[0].name}: {order.stages:,} stages, {order.microbatches:,} microbatches",
    )
    if why:
        print_block(console, f"{why}.", indent=0)
    console.print()
    numbers = ["of the bound", "live", "bubble"]
    table = make_table("", ["schedule", "transfers", *numbers], numbers, box=None)
    for place, row in enumerate(rows):
        if row.run is None:
            table.add_row(row.name, row.mode, "deadlocks", "", "")
        else:
            table.add_row(
                row.name,
                row.mode,
                "" if row.throughput is None else f"{row.throughput:.3f}",
                f"{row.run.live[0]:,}",
                f"{100 * row.run.bubble:.1f} %",
            )
        if place == 0:
            table.add_section()
    console.print(table)
    console.print()
    for line in (
        f"Bound: 1f1b with transfers that take no time; it ends at {rows[0].bound:g}, the first "
        f"row at {first.time:g}.",
        "Live: of how many microbatches the first stage keeps activations at once.",
        "Bubble: the part of the time in which stages do not compute.",
        "I/W: backwards in two parts; +2: the second comes 2 actions later; last: of the last "
        "stage.",
    ):
        print_block(console, line, indent=0)
    if options.chart:
        console.print()
        for line in chart_of(first, console.width):
            console.print(line, soft_wrap=True)


def _write(options: argparse.Namespace, order: Order, row: _Row) -> bool:
    """Whether the files that were asked for could be written."""
    done = True
    run = row.run
    if options.csv is not None:
        done &= write("--csv", options.csv, lambda: write_csv(order, options.csv), "pipeline")
    if options.picture is not None and run is not None:
        title = f"{row.name}, {row.mode}"
        drawn = write(
            "--picture", options.picture, lambda: draw(run, options.picture, title), "pipeline"
        )
        if drawn:
            complain(f"drawn: {options.picture}", "pipeline")
        done &= drawn
    return done


def _times(text: str) -> list[float]:
    return [float(word) for word in text.split(",")]


def _delays(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _edge(text: str) -> tuple[tuple[int, int], Any]:
    stages, equals, times = text.partition("=")
    i, colon, j = stages.partition(":")
    if not equals or not colon:
        raise argparse.ArgumentTypeError(f"{text} is no edge: give it as 0:3=0.5")
    found = _times(times)
    if len(found) > 2:
        raise argparse.ArgumentTypeError(f"{text}: give one time, or two for forward and backward")
    return (int(i), int(j)), found[0] if len(found) == 1 else (found[0], found[1])


_times.__name__ = "number"  # for argparse's messages
_delays.__name__ = "number of actions"
_edge.__name__ = "edge"
