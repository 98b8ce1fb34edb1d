"""plan --time: what collectives take on a machine, by the clock (docs/guide/clock.md)."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import _limits as limits
from .._config import present_algorithm
from .._errors import InvalidArgument
from .._types import Kind
from ..bench.cases import parse_sizes, size_text
from ..picture.files import amiss
from ._console import make_console, make_table, print_json, print_title
from ._outputs import lacking, write
from ._streams import complain

if TYPE_CHECKING:
    from ..clock import Machine

_STEP = 8  # from size to size
_LARGEST = 1 << 40
_NOT_KNOWN = (
    "A model's times: congestion control, adaptive routing, jitter and other jobs are not in it."
)
_PICTURES = ("sizes", "ranks", "trees", "path")
_ONLY_TIMED = (
    ("machine", "--machine"),
    ("nodes", "--nodes"),
    ("sizes", "--sizes"),
    ("algorithms", "--algorithms"),
    ("path", "--path"),
    ("late", "--late"),
    ("picture", "--picture"),
    ("picture_of", "--picture-of"),
)
_ONLY_CHECKED = (
    ("count", "--count"),
    ("op", "--op"),
    ("algorithm", "--algorithm"),
    ("slots", "--slots"),
    ("hosts", "--hosts"),
    ("list", "--list"),
)


def add_time_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of --time, --machines and --calibrate."""
    timing = parser.add_argument_group("what --time takes")
    timing.add_argument(
        "--machine", metavar="NAME", help="one of --machines, or a file that ends in .toml"
    )
    timing.add_argument(
        "--nodes", metavar="N", help="nodes, or 1:4096 for each doubling (default: 1; or --ranks)"
    )
    timing.add_argument(
        "--sizes",
        metavar="SIZES",
        help=f"bytes of the vector: 1M, 8:1G (by {_STEP}) or 1K,64K (default: 8:1G)",
    )
    timing.add_argument(
        "--algorithms",
        metavar="NAMES",
        help="with commas between (default: auto); also ring_2d and node_trees",
    )
    timing.add_argument(
        "--path", action="store_true", help="the critical path of one case, and the busiest links"
    )
    timing.add_argument(
        "--late", metavar="RANK:US", action="append", help="a rank that begins late; again for more"
    )
    timing.add_argument("--picture", type=Path, metavar="FILE", help="draw it (png, svg or pdf)")
    timing.add_argument(
        "--picture-of",
        choices=_PICTURES,
        help="what is drawn (default: the path with --path; over ranks of several --nodes; sizes)",
    )


def check_mode(options: argparse.Namespace) -> None:
    """Refuses options of the other mode: they would be ignored."""
    timed = options.time is not None
    for name, option in _ONLY_CHECKED if options.check is None else ():
        if getattr(options, name) not in (None, False):
            options.parser.error(f"{option} means nothing without --check")
    for name, option in () if timed else _ONLY_TIMED:
        if getattr(options, name) not in (None, False):
            options.parser.error(f"{option} means nothing without --time")


def run_time(options: argparse.Namespace) -> int:
    """Prints times; status 2 if something asked for cannot be timed."""
    try:
        return _run(options)
    except (InvalidArgument, ValueError) as error:
        complain(f"{error}\nSee: unjam plan --help", "plan")
        return 2


def show_machines(options: argparse.Namespace) -> int:
    """The machines that come with the package."""
    from ..clock import FIELDS, machine_names, read_machine

    machines = [read_machine(name) for name in machine_names()]
    if options.json:
        print_json(
            [
                {
                    "name": machine.name,
                    "about": machine.about,
                    "constants": {
                        name: {"value": c.value, "source": c.source}
                        for name, c in machine.constants.items()
                    },
                }
                for machine in machines
            ]
        )
        return 0
    console = make_console()
    table = make_table("", ["machine", "what it is"])
    for machine in machines:
        table.add_row(machine.name, machine.about)
    console.print(table)
    from ..clock.machine import FOLDER

    console.print(
        f"Each of the {len(FIELDS)} constants stands in its file with its source: {FOLDER}"
    )
    return 0


def run_calibrate(options: argparse.Namespace) -> int:
    """Prints this host as a machine's file."""
    from ..clock.calibrate import calibrate
    from ..clock.machine import write_machine

    console = make_console(stderr=True)
    machine, fit = calibrate()
    for line in fit:
        console.print(line)
    print(write_machine(machine), end="")
    return 0


def parse_nodes(text: str, most: int) -> list[int]:
    """Counts from "64", or "1:4096" by doubling.

    Raises:
        ValueError: not of that form, or out of range.
    """
    if not re.fullmatch(r"\d{1,12}(:\d{1,12})?", text):
        raise ValueError(f"--nodes {text}: write 64, or 1:4096 for each doubling")
    low, _, high = text.partition(":")
    first, last = int(low), int(high or low)
    if not 1 <= first <= last <= most:
        raise ValueError(f"--nodes {text}: give 1 to {most:,} nodes of this machine")
    counts = []
    while first <= last:
        counts.append(first)
        first *= 2
    return counts


def parse_late(texts: Sequence[str] | None) -> dict[int, float]:
    """Ranks and microseconds from "3:100".

    Raises:
        ValueError: not of that form.
    """
    late = {}
    for text in texts or ():
        match = re.fullmatch(r"(\d{1,9}):(\d{1,9}(?:\.\d{1,9})?)", text)
        if match is None:
            raise ValueError(f"--late {text}: write RANK:US, such as 3:100")
        late[int(match[1])] = float(match[2])
    return late


def _ranks(options: argparse.Namespace, machine: Machine) -> list[int]:
    gpus = int(machine.constants["gpus_per_node"].value)
    if options.ranks is not None and options.nodes is not None:
        raise ValueError("give --nodes or --ranks, not both")
    if options.ranks is not None:
        return [options.ranks]
    return [gpus * n for n in parse_nodes(options.nodes or "1", limits.TIMED_RANKS // gpus)]


def _algorithms(text: str | None, kind: str) -> list[str]:
    from ..clock import algorithms_for

    names = [present_algorithm(name.strip()) for name in (text or "auto").split(",")]
    known = ["auto", *algorithms_for(kind)]
    for name in names:
        if name not in known:
            raise ValueError(f"--algorithms {name}: choose of {', '.join(known)}")
    return list(dict.fromkeys(names))


def _run(options: argparse.Namespace) -> int:
    from ..clock import read_machine, time_plan

    if options.machine is None:
        raise ValueError("--time needs a --machine: `unjam plan --machines` lists them")
    machine = read_machine(options.machine)
    ranks = _ranks(options, machine)
    default = "4" if options.time == Kind.BARRIER.label else "8:1G"
    if options.sizes is None and (options.path or len(ranks) > 1):
        default = "4" if options.time == Kind.BARRIER.label else "1M"
    try:
        sizes = parse_sizes(options.sizes or default, _STEP)
    except ValueError as error:
        raise ValueError(f"--sizes: {error}") from error
    if sizes[-1] > _LARGEST:
        raise ValueError(f"--sizes: at most {size_text(_LARGEST)}")
    names = _algorithms(options.algorithms, options.time)
    late = parse_late(options.late)
    for rank in late:
        if rank >= min(ranks):
            raise ValueError(f"--late {rank}: there are {min(ranks)} ranks")
    drawn = options.picture_of or (
        "path" if options.path else "ranks" if len(ranks) > 1 else "sizes"
    )
    if options.path and (len(sizes) > 1 or len(ranks) > 1 or len(names) > 1):
        raise ValueError("--path is of one case: give one size, one --nodes and one algorithm")
    _check_picture(options, drawn, ranks, sizes)
    rows = []
    for count in ranks:
        for size in sizes:
            found: dict[str, dict[str, Any]] = {}
            for name in sorted(names, key=lambda name: name != "auto"):
                if name in found:  # it is the selector's choice
                    continue
                row = time_plan(
                    options.time,
                    machine,
                    count,
                    size,
                    name,
                    dtype=options.dtype,
                    root=options.root,
                    lanes=options.lanes,
                    path=options.path,
                    late=late,
                )
                found[name] = row
                found.setdefault(row["algorithm"], row)
            rows += [found[name] | {"asked": name, "size": size} for name in names]
    if options.json:
        print_json({"machine": machine.name, "not_known": _NOT_KNOWN, "times": rows})
    else:
        _show(options, machine, rows, names)
    if options.picture is None:
        return 0
    from ..clock import pictures

    title = f"{options.time} on {machine.name}, model"
    drawings = {
        "sizes": lambda: pictures.draw_sizes(rows, title, options.picture),
        "ranks": lambda: pictures.draw_ranks(rows, title, options.picture),
        "trees": lambda: pictures.draw_trees(ranks[0], options.picture),
        "path": lambda: pictures.draw_path(rows[0], title, options.picture),
    }
    return 0 if write("--picture", options.picture, drawings[drawn], "plan") else 1


def _check_picture(
    options: argparse.Namespace, drawn: str, ranks: list[int], sizes: list[int]
) -> None:
    if options.picture is None:
        if options.picture_of is not None:
            raise ValueError("--picture-of needs a --picture to draw to")
        return
    if problem := amiss(options.picture) or lacking(options.picture):
        raise ValueError(f"--picture: {problem}")
    if drawn == "trees" and ranks[0] > 64:
        raise ValueError(f"--picture-of trees: {ranks[0]} ranks are too many to draw, give 2 to 64")
    if drawn == "path" and not options.path:
        raise ValueError("--picture-of path needs --path")
    if drawn == "ranks" and len(sizes) > 1:
        raise ValueError("--picture-of ranks is of one size: give --sizes 1M")


def _show(
    options: argparse.Namespace,
    machine: Machine,
    rows: list[dict[str, Any]],
    names: list[str],
) -> None:
    console = make_console()
    print_title(console, f"{options.time} on {machine.name}")
    console.print(machine.about)
    table = make_table("", ["ranks", "size", *names], ["ranks", "size", *names])
    cases = {(row["ranks"], row["size"]): {} for row in rows}
    for row in rows:
        cases[row["ranks"], row["size"]][row["asked"]] = row
    for (ranks, _), found in cases.items():
        best = min(row["us"] for row in found.values())
        cells = []
        for name in names:
            row = found[name]
            text = time_text(row["us"])
            if name == "auto":
                text += f" ({row['algorithm']})"
            elif len(names) > 1 and row["us"] == best:
                text += " *"
            cells.append(text)
        # Of kinds with a block for each rank, what so many whole elements are.
        timed = next(iter(found.values()))["bytes"]
        table.add_row(f"{ranks:,}", size_text(timed), *cells)
    console.print(table)
    if len(names) > 1:
        console.print("*: the least of these.")
    if any(not row["exact"] for row in rows):
        console.print(
            "Rings: as if all leaves were full, and all parts as long as the longest one."
        )
    if options.path:
        _show_path(console, rows[0])
    console.print(_NOT_KNOWN)


def _show_path(console: Any, row: dict[str, Any]) -> None:
    path = row["path"]
    shares = make_table("", ["where the time goes", "us", "share"], ["us", "share"])
    for share in path["shares"]:
        shares.add_row(share["what"], f"{share['us']:,.2f}", f"{100 * share['share']:.1f} %")
    console.print(shares)
    links = make_table("", ["busiest of its class", "which", "busy"], ["which", "busy"])
    for use in row["busiest"]:
        links.add_row(
            use["class"].replace("_", " "),
            f"{use['port']:,} of {use['of']:,}",
            f"{100 * use['share']:.1f} %",
        )
    console.print(links)
    most = 24
    slices = path["slices"]
    shown = slices if len(slices) <= most else [*slices[: most // 2], *slices[-most // 2 :]]
    table = make_table(
        "", ["at us", "rank", "does", "after", "way", "took us"], ["at us", "rank", "took us"]
    )
    for place, item in enumerate(shown):
        if len(slices) > most and place == most // 2:
            left = path["left_out"] + len(slices) - most
            table.add_row("…", "", f"{left:,} slices", "", "", "")
        after = {"start": "the start", "own": "its last slice"}.get(item["cause"])
        took = item["end_us"] - item["start_us"] + item["processor_us"]
        took += sum(item.get(name, 0.0) for name in ("queue_us", "bytes_us", "latency_us"))
        table.add_row(
            f"{item['start_us']:,.2f}",
            f"{item['rank']:,}",
            item["does"],
            after or f"{item['cause']} from {item['peer']}",
            item.get("way", ""),
            f"{took:,.2f}",
        )
    console.print(table)


def time_text(us: float) -> str:
    """A time as people read it: "12.3 us", "4.56 ms"."""
    for unit, name in ((1e6, "s"), (1e3, "ms")):
        if us >= unit:
            return f"{us / unit:.3g} {name}" if us < 100 * unit else f"{us / unit:,.0f} {name}"
    return f"{us:.3g} us" if us < 100 else f"{us:,.0f} us"
