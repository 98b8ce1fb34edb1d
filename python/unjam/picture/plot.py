"""Timelines through matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from ..timeline import RankRow, Timeline
from . import color_of
from .text import literal

_ROW = 0.78  # height of a rank's row, of 1
_LETTER = 0.015  # spans wider than this part of the panel show their key


@rc_context({"text.usetex": False})
def draw_plot(timelines: Sequence[Timeline], path: Path) -> None:
    """One panel a timeline, one row a rank; the file's ending chooses the format."""
    heights = [_row_inches(timeline) * len(timeline.rows) + 0.9 for timeline in timelines]
    figure = Figure(figsize=(12, sum(heights) + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels: Any = figure.subplots(
        len(timelines), 1, squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    for axes, timeline in zip(panels[:, 0], timelines, strict=True):
        _panel(axes, timeline)
    _legend(figure, timelines[-1])
    figure.savefig(path, dpi=130)


def _row_inches(timeline: Timeline) -> float:
    return 0.34 if len(timeline.rows) <= 16 else 0.2


def _panel(axes: Any, timeline: Timeline) -> None:
    colors = {key: color_of(place) for place, (key, _) in enumerate(timeline.keys)}
    axes.set_title(literal(timeline.title), loc="left", fontsize=11, wrap=True)
    axes.set_xlim(0, timeline.milliseconds)
    axes.set_ylim(len(timeline.rows) - 0.5, -0.5)
    axes.set_yticks(range(len(timeline.rows)), [f"rank {row.rank}" for row in timeline.rows])
    axes.set_xlabel("ms", loc="right", labelpad=-6)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    for place, row in enumerate(timeline.rows):
        _row(axes, timeline, row, place, colors)


def _row(axes: Any, timeline: Timeline, row: RankRow, place: int, colors: dict[str, str]) -> None:
    height = _ROW / row.lanes
    zero = timeline.start_ns

    def bottom(lane: int) -> float:
        return place - _ROW / 2 + lane * height

    for lane in range(row.lanes):
        gaps = [gap for gap in row.gaps if gap.lane == lane]
        axes.broken_barh(
            [((g.start_ns - zero) * 1e-6, (g.end_ns - g.start_ns) * 1e-6) for g in gaps],
            (bottom(lane) + 0.4 * height, 0.2 * height),
            facecolors="#e4e4e4",
        )
        for stuck in (False, True):
            spans = [s for s in row.spans if s.lane == lane and (s.end == "open") is stuck]
            axes.broken_barh(
                [((s.start_ns - zero) * 1e-6, (s.end_ns - s.start_ns) * 1e-6) for s in spans],
                (bottom(lane), height),
                facecolors=[colors[s.key] for s in spans],
                hatch="////" if stuck else None,
                edgecolor="white" if stuck else "none",
                linewidth=0,
            )
        for end, color, width in (("preempt", "#111111", 0.7), ("finish", "#ffffff", 1.6)):
            times = [s.end_ns for s in row.spans if s.lane == lane and s.end == end]
            axes.vlines(
                [(time - zero) * 1e-6 for time in times],
                bottom(lane),
                bottom(lane) + height,
                colors=color,
                linewidth=width,
            )
        for span in row.spans:
            width = span.end_ns - span.start_ns
            if span.lane == lane and width > _LETTER * (timeline.end_ns - zero) and not row.note:
                middle = ((span.start_ns + span.end_ns) / 2 - zero) * 1e-6
                axes.text(
                    middle,
                    bottom(lane) + height / 2,
                    literal(span.key),
                    ha="center",
                    va="center",
                    fontsize=7.5 if len(timeline.rows) <= 16 else 5,
                    color="white",
                )
    if row.note:
        start = max((span.start_ns - zero for span in row.spans), default=0)
        late = start > 0.7 * (timeline.end_ns - zero)
        space = 0.006 * timeline.milliseconds
        text = axes.text(
            start * 1e-6 + (-space if late else space),
            place,
            literal(row.note),
            ha="right" if late else "left",
            va="center",
            fontsize=8.5 if len(timeline.rows) <= 16 else 6,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5},
        )
        text.set_in_layout(False)


def _legend(figure: Figure, timeline: Timeline) -> None:
    entries: list[Any] = [
        Patch(facecolor=color_of(place), label=str(place)) for place in range(len(timeline.keys))
    ]
    entries += [
        Line2D([], [], color="#111111", linewidth=0.9, label="preempted", marker="|", ls=""),
        Line2D([], [], color="#cccccc", linewidth=3, label="engine has quit"),
        Patch(facecolor="#999999", hatch="////", edgecolor="white", label="stuck"),
    ]
    legend = figure.legend(
        handles=entries, loc="outside lower center", ncols=6, fontsize=8.5, frameon=False
    )
    # Afterwards: labels that begin with "_" would be left out.
    for text, (_, label) in zip(legend.get_texts(), timeline.keys, strict=False):
        text.set_text(literal(label))
