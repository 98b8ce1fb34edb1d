"""Pictures of simulations, through matplotlib: PNG or SVG by the file's ending."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..picture.files import NEEDS_MATPLOTLIB
from ..picture.text import literal
from .errors import InputError
from .job import Job
from .sweeps import Sweep

_COLORS = ("#2f6db3", "#c8553d", "#3b8f5a", "#8a5fb0", "#b58a1b", "#5b6670")


@contextmanager
def _drawing(path: Path, width: float, height: float) -> Iterator[Any]:
    """Gives the axes of a figure, which is written when all is drawn."""
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise InputError("", NEEDS_MATPLOTLIB) from error
    with rc_context({"text.usetex": False}):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure.subplots()
        figure.savefig(path, dpi=130)


def draw_series(sweep: Sweep, path: Path) -> None:
    """A sweep as lines with their intervals."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    with _drawing(path, 8, 5.4) as axes:
        for line, color in zip(sweep.lines, _COLORS * 4, strict=False):
            points = [point for point in line.points if point.high > 0]
            x = [point.x for point in points]
            y = [point.y if point.y > 0 else math.nan for point in points]
            label = f"{line.name}: {line.note}" if line.note else line.name
            axes.plot(x, y, "o-", color=color, label=literal(label), markersize=4)
            low = [max(point.low, point.high / 100) for point in points]
            axes.fill_between(
                x, low, [p.high for p in points], color=color, alpha=0.18, linewidth=0
            )
            none = [point for point in points if point.y == 0]
            axes.plot(
                [p.x for p in none], [p.high for p in none], "v", color=color, mfc="white", zorder=3
            )
        axes.set_xscale("log", base=2 if sweep.counts else 10)
        axes.set_yscale("log")
        if sweep.counts:
            axes.xaxis.set_major_locator(FixedLocator(_ticks(sweep)))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
        if sweep.percent:
            axes.yaxis.set_major_formatter(FuncFormatter(_percent))
            values = [v for line in sweep.lines for p in line.points for v in (p.y, p.high) if v]
            few = bool(values) and max(values) < 20 * min(values)
            # Within two decades there would be one number, or none.
            axes.yaxis.set_minor_formatter(FuncFormatter(_percent if few else lambda y, _: ""))
        axes.set_xlabel(literal(sweep.x_name))
        axes.set_ylabel(literal(sweep.y_name))
        axes.set_title(literal(sweep.title), loc="left", fontsize=11, wrap=True)
        axes.grid(True, which="major", color="#e4e4e4")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.legend(frameon=False, fontsize=9)
        if sweep.percent:
            note = "Bands are 95 % intervals. A triangle: no round hung, so it is at most this."
            axes.annotate(
                note, (1, -0.16), xycoords="axes fraction", ha="right", fontsize=8, color="#5b6670"
            )


def _ticks(sweep: Sweep) -> list[float]:
    """Where points lie, without those whose numbers would run into each other."""
    found: list[float] = []
    for x in sorted({point.x for line in sweep.lines for point in line.points}):
        if not found or x > 1.25 * found[-1]:
            found.append(x)
    return found


def _percent(y: float, _: Any = None) -> str:
    digits = f"{y:e}"[0]
    return f"{100 * y:g} %" if digits in "125" else ""


_CARD = 2.6  # width of a collective


def draw_cycle(round_found: dict[str, Any], kind: str, job: Job, path: Path) -> None:
    """Who waits for whom in one deadlocked round.

    A row a GPU: what it stands in, and what others wait for it to call. An arrow leads from a
    collective that somebody stands in to the same collective in the row of who has not called it.
    """
    waits = round_found[kind]["waits"]
    gpus = list(dict.fromkeys(gpu for wait in waits for gpu in (wait["gpu"], wait["on"])))
    what = list(dict.fromkeys((wait["group"], wait["index"]) for wait in waits))
    colors = {one: _COLORS[place % len(_COLORS)] for place, one in enumerate(what)}

    def unique(gpu: int, role: str) -> list[tuple[int, int]]:
        return list(dict.fromkeys((w["group"], w["index"]) for w in waits if w[role] == gpu))

    stands = {gpu: unique(gpu, "gpu") for gpu in gpus}
    lacks = {gpu: unique(gpu, "on") for gpu in gpus}
    left = max(1, *(len(those) for those in stands.values()))
    right = max(1, *(len(those) for those in lacks.values()))
    middle = left * (_CARD + 0.2) + 1.6  # between the two: room for arrows
    width = middle + right * (_CARD + 0.2)

    with _drawing(path, max(7.5, 0.95 * (width + 1.2)), 1.4 + 0.95 * len(gpus)) as axes:
        axes.axis("off")
        axes.set_xlim(-1.2, width)
        axes.set_ylim(len(gpus) + 0.05, -0.9)
        places: dict[tuple[str, int, tuple[int, int]], tuple[float, float]] = {}
        for row, gpu in enumerate(gpus):
            axes.text(-1.15, row, f"GPU {gpu}", va="center", fontsize=11, weight="bold")
            axes.plot([-0.1, width - 0.2], [row, row], color="#d9dde0", linewidth=2, zorder=0)
            for role, those, first in (("gpu", stands, 0.0), ("on", lacks, middle)):
                for place, one in enumerate(those[gpu]):
                    x = first + place * (_CARD + 0.2)
                    _card(axes, x, row, one, job, colors[one], is_running=role == "gpu")
                    places[role, gpu, one] = (x, row)
            if not stands[gpu]:
                axes.text(0.1, row, "runs on", va="center", fontsize=9, backgroundcolor="white")
        for wait in waits:
            one = (wait["group"], wait["index"])
            x0, y0 = places["gpu", wait["gpu"], one]
            x1, y1 = places["on", wait["on"], one]
            axes.annotate(
                "",
                (x1, y1),
                (x0 + _CARD, y0),
                arrowprops={
                    "arrowstyle": "-|>",
                    "color": colors[one],
                    "linewidth": 1.8,
                    "shrinkA": 2,
                    "shrinkB": 2,
                },
            )
        stops = "stands in" if job.model == "single-queue" else "has called, then synchronises"
        lacking = "has not called yet" + (", as it stands" if kind == "exact" else "")
        for x, head in ((0.0, stops), (middle, lacking)):
            axes.text(x, -0.62, head, va="center", fontsize=10, color="#5b6670")
        axes.set_title(_cycle_title(round_found["round"], kind, len(gpus)), loc="left", fontsize=11)
        axes.text(-1.15, len(gpus) - 0.25, _story(waits, kind), va="center", fontsize=9)


def _card(
    axes: Any, x: float, row: int, one: tuple[int, int], job: Job, color: str, is_running: bool
) -> None:
    from matplotlib.patches import FancyBboxPatch

    axes.add_patch(
        FancyBboxPatch(
            (x, row - 0.3),
            _CARD,
            0.6,
            boxstyle="round,pad=0,rounding_size=0.08",
            facecolor=color if is_running else "white",
            edgecolor=color,
            linewidth=1.6,
            linestyle="-" if is_running else "--",
        )
    )
    group, index = one
    name = literal(job.groups[group].name)
    label = f"{name + ' ' if name else ''}group {group}\ncollective {index}"
    text = axes.text(
        x + _CARD / 2,
        row,
        label,
        ha="center",
        va="center",
        fontsize=9 if len(name) < 16 else 6,
        color="white" if is_running else color,
    )
    text.set_in_layout(False)  # long names would leave no room for the axes


def _cycle_title(number: int, kind: str, gpus: int) -> str:
    if kind == "exact":
        return f"Round {number}: {gpus} GPUs wait for each other in a circle"
    return f"Round {number}: what the released code counts as a deadlock"


def _story(waits: list[dict[str, Any]], kind: str) -> str:
    """The first arrow in words."""
    first = waits[0]
    words = (
        f"An arrow: GPU {first['gpu']} waits until GPU {first['on']} calls collective "
        f"{first['index']} of group {first['group']}, too."
    )
    return words + (" So nobody moves." if kind == "exact" else "")
