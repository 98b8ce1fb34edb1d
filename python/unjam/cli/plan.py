"""plan: checks a collective's plans by symbolic execution of all ranks."""

from __future__ import annotations

import argparse
from ctypes import c_int
from typing import Any

from .. import _limits as limits
from .._config import algorithms
from .._errors import InvalidArgument
from .._lib import library, read_json
from .._types import DType, Kind, Op, dtype_of, kind_of, op_of
from ._console import cell, lane_count, make_console, make_table, print_json, print_title, whole


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    kinds = [kind.label for kind in Kind]
    parser.add_argument(
        "--check",
        metavar="KIND",
        required=True,
        type=lambda text: text.lower().replace("-", "_"),
        choices=kinds,
        help=f"collective to plan and check: {', '.join(kinds)}",
    )
    parser.add_argument(
        "--ranks",
        type=whole(1, limits.PLANNED_RANKS, "number of ranks"),
        help=f"group size, 1 to {limits.PLANNED_RANKS:,} (default: 8; of send_recv always 2)",
    )
    parser.add_argument(
        "--hosts",
        type=whole(1, limits.PLANNED_RANKS, "number of hosts"),
        default=1,
        help="hosts that the ranks are on, one after the other (default: 1)",
    )
    parser.add_argument(
        "--count",
        type=whole(0, limits.COUNT),
        default=1 << 18,
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
    parser.add_argument("--op", choices=[op.label for op in Op], default="sum")
    parser.add_argument(
        "--root",
        type=whole(0, limits.PLANNED_RANKS - 1),
        default=0,
        help="root's rank in the group; of send_recv the sender",
    )
    parser.add_argument(
        "--algorithm",
        metavar="NAME",
        help="one of UNJAM_ALGORITHM's, see `unjam env UNJAM_ALGORITHM` (default: auto)",
    )
    parser.add_argument("--lanes", type=lane_count, default=1, help="blocks a rank (default: 1)")
    parser.add_argument(
        "--slots",
        type=whole(1, limits.CHECKED_SLOTS),
        default=5,
        help="guaranteed slots of a connector (default: 5)",
    )
    parser.add_argument("--list", action="store_true", help="list every rank's primitives too")
    parser.add_argument("--json", action="store_true", help="print JSON")


def hosts_of(ranks: int, hosts: int) -> list[int]:
    """Of each rank its host, for consecutive ranks, the same number on each, or one more."""
    return [rank * hosts // ranks for rank in range(ranks)]


def check_plan(options: argparse.Namespace) -> dict[str, Any]:
    """What the plan checker says, as the C API's JSON."""
    lib = library()
    names = algorithms()
    number = names.get(options.algorithm or "auto")
    if number is None:
        raise InvalidArgument(f"--algorithm {options.algorithm}: choose one of {', '.join(names)}")
    ranks, hosts = options.ranks, options.hosts
    host_of = None if hosts == 1 else (c_int * ranks)(*hosts_of(ranks, hosts))
    report: dict[str, Any] = read_json(
        lambda buffer, size, needed: lib.unjamPlanCheckOnHosts(
            kind_of(options.check),
            dtype_of(options.dtype),
            op_of(options.op),
            options.count,
            options.ranks,
            host_of,
            options.root,
            number,
            options.lanes,
            options.slots,
            int(options.list),
            buffer,
            size,
            needed,
        )
    )
    return report


def run(options: argparse.Namespace) -> int:
    """Prints the report; status 1 if a proof failed."""
    if options.ranks is None:
        options.ranks = 2 if options.check == "send_recv" else 8
    if options.root >= options.ranks:
        options.parser.error(f"--root {options.root} is not a rank of {options.ranks}")
    if options.hosts > options.ranks:
        options.parser.error(f"--hosts {options.hosts}: there are {options.ranks} ranks")
    report = check_plan(options)
    if options.json:
        print_json(report)
        return 0 if report["ok"] else 1
    console = make_console()
    print_title(
        console,
        f"{options.check} of {options.count:,} {options.dtype} over {options.ranks:,} ranks"
        + (f" on {options.hosts:,} hosts" if options.hosts > 1 else ""),
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
