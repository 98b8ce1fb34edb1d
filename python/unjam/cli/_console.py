"""What the commands share: printing, progress, argument types."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.box import HEAVY_HEAD, Box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from .. import _limits as limits
from .._texts import printable
from ._outputs import file_to_write

_PLAIN_WIDTH = 80  # where there is no terminal that says

_MOST_COLUMNS = 7  # of a table that has one row for each thing


class _Console(Console):
    """Prints texts as they are: [words] in names are no markup, :words: no pictures."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Also of the cells and titles of tables."""
        return super().render_str(printable(text), **options)


def make_console(stderr: bool = False, plain_width: int = _PLAIN_WIDTH) -> Console:
    """A console on stdout, or on stderr; wide enough for the tables if that is no terminal.

    It shows strings as they are. Our own words may have markup, where ``print`` is told so.
    """
    settings: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}
    console = _Console(stderr=stderr, **settings)
    if not console.is_terminal:
        console = _Console(stderr=stderr, width=plain_width, **settings)
    return console


def print_json(value: Any) -> None:
    """Plain JSON for other programs: no colours, no wrapping."""
    print(json.dumps(value, indent=2))


def make_table(
    title: str, columns: Sequence[str], numbers: Sequence[str] = (), box: Box | None = HEAVY_HEAD
) -> Table:
    """An empty table; the columns named in `numbers` are flush right, `box` is its lines."""
    table = Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        header_style="bold",
        box=box,
        pad_edge=box is not None,
        collapse_padding=box is None,
    )
    for column in columns:
        # What is too long for a line goes on in the next: nothing is cut off.
        justify: Any = "right" if column in numbers else "left"
        table.add_column(column, justify=justify, overflow="fold")
    return table


def print_block(
    console: Console, text: str, indent: int = 3, markup: bool = False, style: str = ""
) -> None:
    """A paragraph, broken where the console ends; all its lines are indented alike."""
    shown = Text.from_markup(printable(text)) if markup else Text(printable(text))
    shown.stylize(style)
    for line in shown.wrap(console, max(20, console.width - indent)):
        console.print(Text(" " * indent) + line)


def print_title(console: Console, title: str) -> None:
    """Above a table, and as long as it is: a table's own is broken at the table's width."""
    console.print(title, style="bold", soft_wrap=True)


def pairs_table(title: str, values: Mapping[str, Any]) -> Table:
    """Two columns: name and value."""
    table = make_table(title, ["name", "value"], ["value"])
    for name, value in values.items():
        table.add_row(name, cell(value))
    return table


def rows_table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """One row for each mapping, or one column for each if they have many names."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    if len(columns) > _MOST_COLUMNS:
        first, *names = columns
        heads = [f"{first} {cell(row.get(first))}" for row in rows]
        table = make_table(title, ["name", *heads], heads)
        for name in names:
            table.add_row(name, *(cell(row.get(name)) for row in rows))
        return table
    numbers = [
        name for name in columns if all(isinstance(row.get(name, 0), (int, float)) for row in rows)
    ]
    table = make_table(title, columns, numbers)
    for row in rows:
        table.add_row(*(cell(row.get(name)) for name in columns))
    return table


def cell(value: Any) -> str:
    """A value as a table shows it: whole numbers grouped, nothing for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, (dict, list)):
        return json.dumps(value)
    return str(value)


@contextmanager
def progress_bar(console: Console, what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows progress: a bar on a terminal, which is gone at the end; elsewhere nothing.

    Gives a function to call with the steps just done, from any thread.
    """
    if not console.is_terminal:
        yield lambda steps: None
        return
    columns = (*description_and_bar(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda steps: bar.advance(task, steps)


def description_and_bar() -> tuple[ProgressColumn, ...]:
    """The first columns of a progress bar; a description may be a user's text."""
    return TextColumn("   {task.description}", markup=False), BarColumn(bar_width=40)


@contextmanager
def measuring(total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr if that is a terminal, otherwise nothing."""
    with progress_bar(make_console(stderr=True), "measuring", total) as advance:
        yield advance


def microseconds(us: float) -> str:
    """In a table."""
    return f"{us:,.0f}" if us >= 100 else f"{us:.1f}"


def add_json_file(parser: argparse.ArgumentParser) -> None:
    """Declares --json of a benchmark: where the rows go too."""
    parser.add_argument(
        "--json", type=file_to_write, metavar="FILE", help="write the rows there too"
    )


def duration(text: str) -> float:
    """argparse type: seconds, above 0 and below a day."""
    seconds = float(text)
    if not 0 < seconds < 86400:
        raise argparse.ArgumentTypeError(f"{text} is not a time between 0 and a day")
    return seconds


def whole(least: int, most: int, of: str = "number") -> Callable[[str], int]:
    """argparse type: a whole number in a range.

    Everything that goes on to the library has one: in C a number beyond its type's range would be
    cut to another valid number.
    """

    def parse(text: str) -> int:
        number = int(text)
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{text} is not a {of} from {least} to {most}")
        return number

    parse.__name__ = "integer"  # for argparse's messages
    return parse


_MOST = 2**31 - 1  # of what is only counted; larger numbers than anybody waits for

positive = whole(1, _MOST)
natural = whole(0, _MOST)
seed_number = whole(0, 2**62, "seed")  # what is added to it still fits C's types
lane_count = whole(1, limits.LANES, "number of lanes")
rank_count = whole(1, limits.RANKS, "number of ranks")
duration.__name__ = "number"  # for argparse's messages
