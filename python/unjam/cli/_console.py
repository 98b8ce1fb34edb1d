"""What the commands share: printing, progress, argument types."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

_PLAIN_WIDTH = 110  # of tables where there is no terminal that says

_MOST_COLUMNS = 7  # of a table that has one row for each thing


def make_console() -> Console:
    """A console on stdout; wide enough for the tables if that is no terminal."""
    console = Console(highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PLAIN_WIDTH)
    return console


def print_json(value: Any) -> None:
    """Plain JSON for other programs: no colours, no wrapping."""
    print(json.dumps(value, indent=2))


def make_table(title: str, columns: Sequence[str], numbers: Sequence[str] = ()) -> Table:
    """An empty table; the columns named in `numbers` are flush right."""
    table = Table(
        title=title or None, title_justify="left", title_style="bold", header_style="bold"
    )
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left")
    return table


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
    """Shows progress: a bar on a terminal, otherwise one line a quarter.

    Gives a function to call with the steps just done, from any thread.
    """
    if console.is_terminal:
        columns = (
            TextColumn("  {task.description}"),
            BarColumn(bar_width=40),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda steps: bar.advance(task, steps)
        return
    done = 0

    def advance(steps: int) -> None:
        nonlocal done
        before, done = 4 * done // total, done + steps
        if 4 * done // total > before:
            console.print(f"  {what}: {done} of {total}")

    yield advance


@contextmanager
def measuring(total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr if that is a terminal, otherwise nothing."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda steps: None
        return
    with progress_bar(console, "measuring", total) as advance:
        yield advance


def microseconds(us: float) -> str:
    """In a table."""
    return f"{us:,.0f}" if us >= 100 else f"{us:.1f}"


def add_json_file(parser: argparse.ArgumentParser) -> None:
    """Declares --json of a benchmark: where the rows go too."""
    parser.add_argument(
        "--json", type=_file_to_write, metavar="FILE", help="write the rows there too"
    )


def _file_to_write(text: str) -> Path:
    file = Path(text)
    if not file.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{file.parent} is not a folder")
    return file


def duration(text: str) -> float:
    """argparse type: seconds, above 0 and below a day."""
    seconds = float(text)
    if not 0 < seconds < 86400:
        raise argparse.ArgumentTypeError(f"{text} is not a time between 0 and a day")
    return seconds


def positive(text: str) -> int:
    """argparse type: an integer of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def natural(text: str) -> int:
    """argparse type: an integer of at least 0."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return number


def rank_count(text: str) -> int:
    """argparse type: 1 to 64 ranks."""
    number = int(text)
    if not 1 <= number <= 64:
        raise argparse.ArgumentTypeError(f"{text} is not a number of ranks from 1 to 64")
    return number


positive.__name__ = natural.__name__ = rank_count.__name__ = "integer"  # for argparse's messages
duration.__name__ = "number"
