"""Pictures of simulations, through matplotlib: PNG or SVG by the file's ending."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..picture.text import literal
from .errors import InputError
from .job import Job
from .sweeps import Sweep

NEEDS_MATPLOTLIB = "pictures need matplotlib: pip install matplotlib"

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
    with _drawing(path, 8, 5) as axes:
        for line, color in zip(sweep.lines, _COLORS * 4, strict=False):
            points = [point for point in line.points if point.high > 0]
            x = [point.x for point in points]
            y = [point.y if point.y > 0 else math.nan for point in points]
            axes.plot(x, y, "o-", color=color, label=literal(line.name), markersize=4)
            low = [max(point.low, point.high / 100) for point in points]
            axes.fill_between(
                x, low, [p.high for p in points], color=color, alpha=0.18, linewidth=0
            )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel(literal(sweep.x_name))
        axes.set_ylabel(literal(sweep.y_name))
        axes.set_title(literal(sweep.title), loc="left", fontsize=11, wrap=True)
        axes.grid(True, which="major", color="#e4e4e4")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.legend(frameon=False)


def draw_cycle(round_found: dict[str, Any], kind: str, job: Job, path: Path) -> None:
    """Who waits for whom in one deadlocked round: GPUs in a ring, an arrow for each wait."""
    waits = round_found[kind]["waits"]
    gpus = list(dict.fromkeys(gpu for wait in waits for gpu in (wait["gpu"], wait["on"])))
    with _drawing(path, 7.5, 6.5) as axes:
        axes.set_aspect("equal")
        axes.axis("off")
        place = {
            gpu: (
                math.sin(2 * math.pi * i / len(gpus)),
                math.cos(2 * math.pi * i / len(gpus)),
            )
            for i, gpu in enumerate(gpus)
        }
        for wait in waits:
            (x0, y0), (x1, y1) = place[wait["gpu"]], place[wait["on"]]
            axes.annotate(
                "",
                (x1, y1),
                (x0, y0),
                arrowprops={
                    "arrowstyle": "-|>",
                    "color": _COLORS[1],
                    "linewidth": 1.6,
                    "shrinkA": 26,
                    "shrinkB": 26,
                    "connectionstyle": "arc3,rad=0.25",
                },
            )
            # Beside the middle of the arc, which bends to the left of its direction.
            bend = 0.17 * (1.9 if len(gpus) == 2 else 1.0)
            label = literal(job.groups[wait["group"]].name)
            text = axes.text(
                (x0 + x1) / 2 + bend * (y1 - y0),
                (y0 + y1) / 2 - bend * (x1 - x0),
                f"{label + ' ' if label else ''}group {wait['group']}\ncollective {wait['index']}",
                ha="center",
                va="center",
                fontsize=8.5,
                bbox={"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": "#d0d0d0"},
            )
            text.set_in_layout(False)  # long names would leave no room for the axes
        for gpu, (x, y) in place.items():
            axes.text(
                x,
                y,
                f"GPU {gpu}",
                ha="center",
                va="center",
                fontsize=10,
                color="white",
                bbox={"boxstyle": "circle,pad=0.55", "facecolor": _COLORS[0], "edgecolor": "none"},
            )
        what = "wait-for cycle" if kind == "exact" else "what the released code counts"
        axes.set_title(
            f"Round {round_found['round']}: {what}\n(an arrow: waits in that collective for)",
            fontsize=11,
        )
        axes.set_xlim(-1.45, 1.45)
        axes.set_ylim(-1.35, 1.35)
