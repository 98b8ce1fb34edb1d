"""A run as a picture: a row a rank, time to the right. By matplotlib, or as text by rich."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from .._errors import InvalidArgument
from ..picture.files import amiss
from .actions import KINDS
from .simulate import Run, Span

_COLORS = {"F": "#4269d0", "B": "#3ca951", "I": "#2f8f83", "W": "#efb118"}
_INK = {"F": "white", "B": "white", "I": "white", "W": "#222222"}
_TRANSFER = {False: "#4269d0", True: "#c8553d"}  # activations; gradients

_INCH = 0.15  # of the shortest action
_WIDTHS = 9.0, 14.0  # inches of a picture
_MOST_PANELS = 6  # below each other, where time goes on
_ROW = 0.42  # inches of a rank
_FONT = 6.5
_DIGIT = 0.62 * _FONT / 72  # inches


def draw(run: Run, path: str | Path, title: str = "") -> None:
    """Draws a run: bars are actions with their microbatch, thin lines are messages.

    Args:
        run: what :func:`~unjam.pipeline.simulate` gave.
        path: a .png, .svg or .pdf.
        title: above the picture.

    Raises:
        InvalidArgument: another ending, or matplotlib is missing.
        OSError: the file cannot be written.
    """
    path = Path(path)
    if problem := amiss(path):
        raise InvalidArgument(problem)
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from ..picture.text import literal

    panels, width = _layout(run)
    each = (run.time or 1.0) / panels
    height = panels * (_ROW * len(run.spans) + 0.7) + 0.7
    # The same file each time: no random names, no date.
    with rc_context({"text.usetex": False, "svg.hashsalt": "unjam", "svg.fonttype": "none"}):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        rows: Any = figure.subplots(panels, 1, squeeze=False)
        for panel, axes in enumerate(rows[:, 0]):
            _draw_panel(axes, run, panel * each, (panel + 1) * each, (width - 1) / each)
        rows[0, 0].set_title(literal(title), loc="left", fontsize=11)
        rows[-1, 0].set_xlabel("time", loc="right")
        _legend(figure, run)
        nothing = {"Date": None} if path.suffix.lower() == ".svg" else None
        figure.savefig(path, dpi=130, metadata=nothing)


def _layout(run: Run) -> tuple[int, float]:
    """Into how many panels the time is broken, and their width."""
    shortest = min((span.end - span.start for span in _long(run)), default=1.0)
    inches = _INCH * run.time / shortest
    least, most = _WIDTHS
    panels = min(_MOST_PANELS, max(1, math.ceil(inches / (most - 1) - 1e-9)))
    return panels, min(most, max(least, inches / panels + 1))


def _draw_panel(axes: Any, run: Run, start: float, end: float, scale: float) -> None:
    """What runs between two times; `scale`: inches a unit of time."""
    for rank, row in enumerate(run.spans):
        spans = [span for span in row if span.start < end and span.end > start]
        _draw_row(axes, rank, spans, scale, start, end)
    _draw_hops(axes, run, start, end)
    axes.set_xlim(start, end)
    axes.set_ylim(len(run.spans) - 0.5, -0.5)
    axes.set_yticks(range(len(run.spans)), [_name(run, r) for r in range(len(run.spans))])
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _long(run: Run) -> Iterator[Span]:
    """The actions that take time."""
    return (span for row in run.spans for span in row if span.end > span.start)


def _name(run: Run, rank: int) -> str:
    """Its rank if it has several stages."""
    stages = [stage for stage, where in enumerate(run.order.rank_of) if where == rank]
    return f"stage {stages[0]}" if len(stages) == 1 else f"rank {rank}"


def _draw_row(
    axes: Any, rank: int, row: Sequence[Span], scale: float, first: float, last: float
) -> None:
    axes.broken_barh(
        [(span.start, span.end - span.start) for span in row],
        (rank - 0.36, 0.72),
        facecolors=[_COLORS[span.action.kind] for span in row],
        edgecolor="white",
        linewidth=0.4,
    )
    for span in row:
        label = str(span.action.microbatch)
        middle = (span.start + span.end) / 2
        narrow = (span.end - span.start) * scale < (len(label) + 0.4) * _DIGIT
        if narrow or not first <= middle < last:  # a bar may be in two panels
            continue
        text = axes.text(
            middle,
            rank,
            label,
            ha="center",
            va="center",
            fontsize=_FONT,
            color=_INK[span.action.kind],
            clip_on=True,
        )
        text.set_in_layout(False)  # there may be thousands


def _draw_hops(axes: Any, run: Run, first: float, last: float) -> None:
    """From the end of what gave it to where it is needed."""
    from matplotlib.collections import LineCollection

    rank_of = run.order.rank_of
    for gradient, color in _TRANSFER.items():
        lines = []
        for message, start, end in run.hops:
            shown = start < end and start < last and end > first
            if shown and message.is_gradient is gradient:
                a, b = rank_of[message.source], rank_of[message.target]
                down = 0.36 if b > a else -0.36
                lines.append([(start, a + down), (end, b - down)])
        axes.add_collection(LineCollection(lines, colors=color, linewidths=0.7, alpha=0.7))


def _legend(figure: Any, run: Run) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    kinds = {span.action.kind for row in run.spans for span in row}
    entries: list[Any] = [
        Patch(facecolor=_COLORS[kind], label=words)
        for kind, words in KINDS.items()
        if kind in kinds
    ]
    for gradient, words in ((False, "activation on its way"), (True, "gradient on its way")):
        if any(hop.message.is_gradient is gradient and hop.end > hop.start for hop in run.hops):
            entries.append(Line2D([], [], color=_TRANSFER[gradient], linewidth=1.2, label=words))
    figure.legend(handles=entries, loc="outside lower left", ncols=6, fontsize=8.5, frameon=False)


# ---- text ----

_STYLES = {
    "F": "white on blue",
    "B": "white on green",
    "I": "white on dark_cyan",
    "W": "black on yellow",
}
_IDLE = "."
_MOST_BANDS = 8


def text(run: Run, width: int = 80) -> Iterable[Text]:
    """A run as lines of text: the kind of action, with its microbatch where there is room.

    The time axis is broken where a line ends, up to eight times: then the shortest action has a
    character at least. Longer runs have several actions in a character; it shows the one that takes
    most of it.

    Args:
        run: what :func:`~unjam.pipeline.simulate` gave.
        width: characters of a line, at least 40.
    """
    names = [_name(run, rank) for rank in range(len(run.spans))]
    margin = max(map(len, names)) + 1
    columns = max(40, width) - margin
    shortest = min((span.end - span.start for span in _long(run)), default=1.0)
    needed = max(1, math.ceil(run.time / shortest - 1e-9))
    each = min(4, columns // needed)
    if each:  # perhaps room for numbers
        unit, total = shortest / each, needed * each
    elif needed <= _MOST_BANDS * columns:
        unit, total = shortest, needed
    else:
        unit, total = run.time / columns, columns
    cells = [_cells(row, unit, total) for row in run.spans]
    columns = math.ceil(total / math.ceil(total / columns))  # bands alike
    for first in range(0, total, columns):
        if first:
            yield Text("")
        yield Text(" " * margin) + _axis(first, min(columns, total - first), unit, each)
        for name, row in zip(names, cells, strict=True):
            line = Text(name.ljust(margin))
            for character, kind in row[first : first + columns]:
                line.append(character, _STYLES.get(kind, ""))
            yield line


def _cells(row: Sequence[Span], unit: float, total: int) -> list[tuple[str, str]]:
    """Of each column the character and the kind."""
    shares: list[dict[str, float]] = [{} for _ in range(total)]
    labels: dict[int, str] = {}
    for action, start, end in row:
        first, last = int(start / unit + 1e-9), min(total, math.ceil(end / unit - 1e-9))
        for column in range(first, last):
            share = min(end, (column + 1) * unit) - max(start, column * unit)
            shares[column][action.kind] = shares[column].get(action.kind, 0.0) + share
        label = f"{action.kind}{action.microbatch}"
        if last - first > len(label):
            label = label.ljust(last - first)
            labels.update({first + place: one for place, one in enumerate(label)})
    found = []
    for column, share in enumerate(shares):
        idle = unit - sum(share.values())
        kind = max(share, key=lambda kind: share[kind]) if share else ""
        if not kind or share[kind] < idle - 1e-9:
            found.append((_IDLE, ""))
        else:
            found.append((labels.get(column, kind), kind))
    return found


def _axis(first: int, columns: int, unit: float, each: int) -> Text:
    """Times above the columns where they begin."""
    line = ""
    step = 20 // (each or 1) * (each or 1)
    for column in range(-first % step, columns, step):
        line = line.ljust(column) + f"{(first + column) * unit:.4g}"
    return Text(line[:columns], "dim")
