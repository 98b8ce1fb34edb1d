"""reshard: plans, and times, who sends what when tensors change their mesh or layout."""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._errors import InvalidArgument
from ._console import make_console, make_table, print_json, print_title, seed_number, whole
from ._outputs import check_picture, file_to_write, write
from ._parser import print_help
from ._streams import complain

if TYPE_CHECKING:
    from ..reshard import Comparison, Plan
    from ..reshard.bench import Timing

_BAR = 24  # characters of a full bar
_MOST_ROWS = 64
_PLANNERS = ("naive", "size", "depth_first", "greedy", "paper", "copies", "plan")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    summary = "the nine cases of the paper, by its planners and by unjam's"
    nine = actions.add_parser("nine", help=summary, description=summary)
    nine.add_argument("--case", type=whole(1, 9, "case"), help="one of them, with its NICs")
    _add_effort(nine)
    summary = "plan what a TOML file asks for: a bar for each NIC and direction"
    plan = actions.add_parser("plan", help=summary, description=summary)
    plan.add_argument("file", type=Path, metavar="FILE", help="meshes, placements and tensors")
    plan.add_argument(
        "--check", action="store_true", help="execute all ranks' plans on the numbers of elements"
    )
    plan.add_argument("--compare", action="store_true", help="plan as the paper does, too")
    plan.add_argument("--list", action="store_true", help="with --json: all bundles")
    _add_effort(plan)
    summary = "carry such a plan out on this machine, ranks as threads, and time it"
    bench = actions.add_parser("bench", help=summary, description=summary)
    bench.add_argument("file", type=Path, metavar="FILE", help="as of plan")
    bench.add_argument(
        "--runs",
        type=whole(1, 10_000, "number of runs"),
        default=5,
        help="beside the first, which is not counted (default: 5)",
    )
    for sub in (nine, plan, bench):
        sub.add_argument("--json", action="store_true", help="print JSON")
        sub.add_argument(
            "--picture", type=file_to_write, metavar="FILE", help="draw it (png, svg or pdf)"
        )
        sub.set_defaults(parser=sub)


def _add_effort(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nodes",
        type=whole(0, 10**9, "number of decisions"),
        default=100_000,
        help="decisions of the depth-first search (default: 100000)",
    )
    parser.add_argument(
        "--tries",
        type=whole(1, 10**6, "number of tries"),
        default=100,
        help="random sets a round of the greedy planner (default: 100)",
    )
    parser.add_argument(
        "--seed", type=seed_number, default=1, help="of the greedy planner's choices (default: 1)"
    )


def run(options: argparse.Namespace) -> int:
    """Prints the plan; status 1 if the check failed, 2 if there is nothing to plan."""
    if options.action is None:
        return print_help(options)
    command = f"reshard {options.action}"
    if options.picture is not None:
        check_picture(options.parser, options.picture)
    try:
        if options.action == "bench":
            return _run_bench(options, command)
        return (_run_nine if options.action == "nine" else _run_plan)(options, command)
    except InvalidArgument as error:
        complain(str(error), command)
        return 2


def _compare(plan: Plan, options: argparse.Namespace) -> Comparison:
    return plan.compare(options.nodes, options.tries, options.seed)


def _run_nine(options: argparse.Namespace, command: str) -> int:
    from .. import reshard

    numbers = range(1, 10) if options.case is None else [options.case]
    plans = {number: reshard.nine(number) for number in numbers}
    rows = {number: _compare(plan, options) for number, plan in plans.items()}
    if options.json:
        print_json([{"case": n, **dataclasses.asdict(row)} for n, row in rows.items()])
    else:
        _print_times({f"{n}": row for n, row in rows.items()}, "case")
        if options.case is not None:
            _print_ports(plans[options.case])
    if options.case is not None:
        return _draw(options, command, plans[options.case], f"Case {options.case} of the paper")
    return _draw_times(options, command, rows)


def _run_plan(options: argparse.Namespace, command: str) -> int:
    from ..reshard import read_request

    if options.list and not options.json:
        options.parser.error("--list means nothing without --json")
    plan = read_request(options.file)
    report: dict[str, Any] = plan.info(options.list)
    checked = plan.check() if options.check else None
    compared = _compare(plan, options) if options.compare else None
    if checked is not None:
        report["checked_elements"] = checked
    if compared is not None:
        report["comparison"] = dataclasses.asdict(compared)
    if options.json:
        print_json(report)
    else:
        _print_plan(options.file.name, report, plan)
        if checked is not None:
            make_console().print(
                f"Checked: {checked:,} elements come to where they are wanted, each once."
            )
        if compared is not None:
            _print_times({"plan": compared}, "")
    return _draw(options, command, plan, options.file.stem)


def _run_bench(options: argparse.Namespace, command: str) -> int:
    from ..reshard import read_request
    from ..reshard.bench import time_plan

    plan = read_request(options.file)
    timing = time_plan(plan, options.runs)
    middle = statistics.median(timing.seconds)
    if options.json:
        print_json(
            {
                "digest": plan.digest,
                "ranks": timing.ranks,
                "cores": len(os.sched_getaffinity(0)),
                "bytes": timing.bytes,
                "seconds": timing.seconds,
                "ports": [dataclasses.asdict(port) for port in plan.loads()],
            }
        )
    else:
        _print_bench(options.file.name, plan, timing, middle)
    rate = f"{options.file.stem}: {middle * 1e3:,.2f} ms on {timing.ranks} threads"
    return _draw(options, command, plan, rate)


def _print_bench(name: str, plan: Plan, timing: Timing, middle: float) -> None:
    console = make_console()
    print_title(console, f"{name}: {timing.ranks} ranks, {timing.bytes:,} bytes")
    _print_ports(plan, middle)
    console.print(
        f"Median of {len(timing.seconds)} runs: {middle * 1e3:,.2f} ms, from "
        f"{min(timing.seconds) * 1e3:,.2f} to {max(timing.seconds) * 1e3:,.2f}, of the slowest "
        "rank each."
    )
    console.print(
        f"Ranks are threads on {len(os.sched_getaffinity(0))} cores, and no NIC takes part: "
        "rates are what its ranks' bytes come to.",
        soft_wrap=True,
    )


def _print_plan(name: str, report: dict[str, Any], plan: Plan) -> None:
    console = make_console()
    print_title(console, f"{name}: {report['tensors']:,} tensors in {report['bundles']:,} bundles")
    _print_ports(plan)
    ratio = plan.busiest() / plan.bound() if plan.bound() else 1.0
    console.print(
        f"Bound: {plan.bound():,} bytes through the busiest NIC. Planned: {plan.busiest():,}, "
        f"{ratio:.3f} of that."
    )
    console.print(
        f"Digest {plan.digest}, {report['rounds']:,} rounds, at most "
        f"{report['staging_most']:,} bytes of staging a side."
    )


def _print_ports(plan: Plan, seconds: float | None = None) -> None:
    """seconds: in which all of it was carried out."""
    console = make_console()
    ports = [port for port in plan.loads() if port.out or port.into]
    if not ports:
        console.print("Nothing goes through a NIC.")
        return
    busiest = plan.busiest()
    rate = [] if seconds is None else ["GB/s"]
    columns = ["host", "NIC", "way", "bytes", *rate, "of the busiest"]
    table = make_table("", columns, ["bytes", *rate])
    for port in ports[:_MOST_ROWS]:
        for way, value in (("out", port.out), ("in", port.into)):
            if value:
                bar = "█" * max(1, round(_BAR * value / busiest))
                cells = [] if seconds is None else [f"{value / seconds / 1e9:.3f}"]
                table.add_row(str(port.host), str(port.nic), way, f"{value:,}", *cells, bar)
    console.print(table)
    if len(ports) > _MOST_ROWS:
        console.print(f"{len(ports) - _MOST_ROWS:,} more NICs: --json has them all.")


def _print_times(rows: dict[str, Comparison], head: str) -> None:
    console = make_console()
    print_title(console, "Time, of the bound")
    columns = ["tasks", "naive", "size", "depth", "greedy", "paper", "copies", "unjam"]
    table = make_table("", [head, *columns] if head else columns, columns)
    for name, row in rows.items():
        cells = [f"{row.tasks:,}", *_ratios(row)]
        table.add_row(*([name, *cells] if head else cells))
    console.print(table)
    console.print(
        "In a model with links of one rate and no latency. Nothing was moved.", soft_wrap=True
    )


def _ratios(row: Comparison) -> Sequence[str]:
    if not row.bound:
        return ["1.00"] * len(_PLANNERS)
    return [f"{getattr(row, name) / row.bound:.2f}" for name in _PLANNERS]


def _draw(options: argparse.Namespace, command: str, plan: Plan, title: str) -> int:
    if options.picture is None:
        return 0
    from ..reshard.pictures import draw_loads

    drawn = write(
        "--picture", options.picture, lambda: draw_loads(plan, title, options.picture), command
    )
    return 0 if drawn else 1


def _draw_times(options: argparse.Namespace, command: str, rows: dict[int, Comparison]) -> int:
    if options.picture is None:
        return 0
    from ..reshard.pictures import draw_times

    times = {
        label: [getattr(row, name) / row.bound for row in rows.values()]
        for label, name in (
            ("naive", "naive"),
            ("size", "size"),
            ("paper", "paper"),
            ("copies", "copies"),
            ("unjam", "plan"),
        )
    }
    cases = [f"{n}" for n in rows]
    drawn = write(
        "--picture", options.picture, lambda: draw_times(cases, times, options.picture), command
    )
    return 0 if drawn else 1
