"""plan: checks a collective's plans by symbolic execution, or says what they take on a machine."""

from __future__ import annotations

import argparse
from ctypes import c_int
from typing import Any

from .. import _limits as limits
from .._config import algorithms, number_of_algorithm
from .._errors import InvalidArgument
from .._lib import library, read_json
from .._types import DType, Kind, Op, dtype_of, kind_of, op_of
from ._console import cell, lane_count, make_console, make_table, print_json, print_title, whole
from ._plan_time import add_time_arguments, check_mode, run_calibrate, run_time, show_machines

_COUNT = 1 << 18  # elements
_SLOTS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    kinds = [kind.label for kind in Kind]
    modes = parser.add_mutually_exclusive_group(required=True)
    for mode, text in (("--check", "to plan and check"), ("--time", "to time on a --machine")):
        modes.add_argument(
            mode,
            metavar="KIND",
            type=lambda text: text.lower().replace("-", "_"),
            choices=kinds,
            help=f"collective {text}: {', '.join(kinds)}",
        )
    modes.add_argument("--machines", action="store_true", help="list the machines that there are")
    modes.add_argument(
        "--calibrate", action="store_true", help="print this host as a machine's file, by runs"
    )
    parser.add_argument(
        "--ranks",
        type=whole(1, limits.TIMED_RANKS, "number of ranks"),
        help=f"group size, 1 to {limits.PLANNED_RANKS:,}, of --time to {limits.TIMED_RANKS:,} "
        "(default: 8; of send_recv always 2)",
    )
    parser.add_argument(
        "--hosts",
        type=whole(1, limits.PLANNED_RANKS, "number of hosts"),
        help="hosts that the ranks are on, one after the other (default: 1)",
    )
    parser.add_argument(
        "--count",
        type=whole(0, limits.COUNT),
        help="elements (default: 262144, 1 MiB of float32)",
    )
    dtypes = [d.label for d in DType]
    parser.add_argument(
        "--dtype",
        metavar="TYPE",
        choices=dtypes,
        default="float32",
        help=f"{', '.join(dtypes)} (default: float32)",
    )
    parser.add_argument("--op", choices=[op.label for op in Op], help="operator (default: sum)")
    parser.add_argument(
        "--root",
        type=whole(0, limits.TIMED_RANKS - 1),
        default=0,
        help="root's rank in the group; of send_recv the sender",
    )
    parser.add_argument(
        "--algorithm",
        metavar="NAME",
        help="one of UNJAM_ALGORITHM's, see `unjam env UNJAM_ALGORITHM` (default: auto)",
    )
    parser.add_argument(
        "--lanes", type=lane_count, help="blocks a rank (default: 1; the machine's)"
    )
    parser.add_argument(
        "--slots",
        type=whole(1, limits.CHECKED_SLOTS),
        help="guaranteed slots of a connector (default: 5)",
    )
    parser.add_argument("--list", action="store_true", help="list every rank's primitives too")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_time_arguments(parser)


def hosts_of(ranks: int, hosts: int) -> list[int]:
    """Of each rank its host, for consecutive ranks, the same number on each, or one more."""
    return [rank * hosts // ranks for rank in range(ranks)]


def check_plan(options: argparse.Namespace) -> dict[str, Any]:
    """What the plan checker says, as the C API's JSON."""
    count = _COUNT if options.count is None else options.count
    lib = library()
    number = number_of_algorithm(options.algorithm or "auto")
    if number is None:
        choices = ", ".join(algorithms())
        raise InvalidArgument(f"--algorithm {options.algorithm}: choose one of {choices}")
    ranks, hosts = options.ranks, options.hosts or 1
    host_of = None if hosts == 1 else (c_int * ranks)(*hosts_of(ranks, hosts))
    report: dict[str, Any] = read_json(
        lambda buffer, size, needed: lib.unjamPlanCheckOnHosts(
            kind_of(options.check),
            dtype_of(options.dtype),
            op_of(options.op or Op.SUM.label),
            count,
            options.ranks,
            host_of,
            options.root,
            number,
            options.lanes or 1,
            options.slots or _SLOTS,
            int(options.list),
            buffer,
            size,
            needed,
        )
    )
    return report


def run(options: argparse.Namespace) -> int:
    """Prints the report; status 1 if a proof failed, 2 if something asked for cannot be timed."""
    check_mode(options)
    if options.machines:
        return show_machines(options)
    if options.calibrate:
        return run_calibrate(options)
    if options.time is not None:
        return run_time(options)
    if (options.ranks or 0) > limits.PLANNED_RANKS:
        options.parser.error(
            f"argument --ranks: {options.ranks} is not a number of ranks from 1 to "
            f"{limits.PLANNED_RANKS}"
        )
    if options.ranks is None:
        options.ranks = 2 if options.check == "send_recv" else 8
    if options.root >= options.ranks:
        options.parser.error(f"--root {options.root} is not a rank of {options.ranks}")
    if (options.hosts or 1) > options.ranks:
        options.parser.error(f"--hosts {options.hosts}: there are {options.ranks} ranks")
    report = check_plan(options)
    if options.json:
        print_json(report)
        return 0 if report["ok"] else 1
    console = make_console()
    print_title(
        console,
        f"{options.check} of {report['count']:,} {options.dtype} over {options.ranks:,} ranks"
        + (f" on {options.hosts:,} hosts" if (options.hosts or 1) > 1 else ""),
    )
    table = make_table("", ["property", "value"], ["value"])
    for name, value in report.items():
        if not isinstance(value, list):
            table.add_row(name.replace("_", " "), cell(value))
    console.print(table)
    for program in report.get("programs", ()):
        console.print(f"rank {program['rank']}", style="bold")
        for primitive in program["primitives"]:
            console.print(f"  {primitive['text']}", soft_wrap=True)
    if report["ok"]:
        console.print(
            "The result is right on every rank, and no rank's plan can block itself within the "
            "guaranteed slots."
        )
        return 0
    console.print(f"The check failed: {report.get('error', '')}", style="bold red")
    return 1
