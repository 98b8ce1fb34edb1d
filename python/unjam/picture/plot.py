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
_LETTER = 0.012  # spans wider than this part of the panel show their key
_CIRCLE = "#c0182c"


@rc_context({"text.usetex": False})
def draw_plot(timelines: Sequence[Timeline], path: Path) -> None:
    """One panel a timeline, one row a rank; the file's ending chooses the format."""
    heights = [
        _row_inches(timeline) * len(timeline.rows) + 0.9 + 0.3 * bool(timeline.caption)
        for timeline in timelines
    ]
    figure = Figure(figsize=(11, sum(heights) + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    layout: Any = figure.get_layout_engine()
    layout.set(h_pad=0.12)  # captions are not part of it
    panels: Any = figure.subplots(
        len(timelines), 1, squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    for axes, timeline in zip(panels[:, 0], timelines, strict=True):
        _panel(axes, timeline)
    _legend(figure, timelines)
    figure.savefig(path, dpi=130)


def _row_inches(timeline: Timeline) -> float:
    return 0.42 if len(timeline.rows) <= 16 else 0.2


def _panel(axes: Any, timeline: Timeline) -> None:
    colors = {key: color_of(place) for place, (key, _) in enumerate(timeline.keys)}
    axes.set_title(literal(timeline.title), loc="left", fontsize=11, pad=10, wrap=True)
    axes.set_xlim(0, timeline.milliseconds)
    axes.set_ylim(len(timeline.rows) - 0.5, -0.5)
    axes.set_yticks(range(len(timeline.rows)), [f"rank {row.rank}" for row in timeline.rows])
    axes.set_xlabel("ms", loc="right", labelpad=-6)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    for place, row in enumerate(timeline.rows):
        _row(axes, timeline, row, place, colors)
    if timeline.caption:
        axes.set_xlabel("ms", loc="right", labelpad=0)
        caption = axes.annotate(
            literal(timeline.caption),
            (0, 0),
            (0, -20),
            xycoords="axes fraction",
            textcoords="offset points",
            va="top",
            fontsize=9.5,
            color="#444444",
        )
        caption.set_in_layout(False)  # long ones would leave no room for the bars
    _circle(axes, timeline)


def _circle(axes: Any, timeline: Timeline) -> None:
    """Arrows from who waits to whom it waits for, at the right."""
    places = {row.rank: place for place, row in enumerate(timeline.rows)}
    x = timeline.milliseconds
    for rank, other in timeline.waits:
        arrow = axes.annotate(
            "",
            (0.96 * x, places[other]),
            (0.96 * x, places[rank]),
            arrowprops={
                "arrowstyle": "-|>",
                "color": _CIRCLE,
                "linewidth": 2.2,
                "mutation_scale": 16,
                # Downwards on one side, upwards on the other, so that two make a circle.
                "connectionstyle": "arc3,rad=-0.25",
            },
        )
        arrow.set_in_layout(False)


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
                    fontsize=9 if len(timeline.rows) <= 16 else 5,
                    color="white",
                )
        ends = axes.plot(
            [(time - zero) * 1e-6 for time, _ in row.done],
            [place + _ROW / 2] * len(row.done),
            "^",
            color="#111111",
            markersize=4.5,
            clip_on=False,
        )
        ends[0].set_in_layout(False)
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


def _legend(figure: Figure, timelines: Sequence[Timeline]) -> None:
    keys = timelines[-1].keys
    rows = [row for timeline in timelines for row in timeline.rows]
    ends = {span.end for row in rows for span in row.spans}
    entries: list[Any] = [
        Patch(facecolor=color_of(place), label=str(place)) for place in range(len(keys))
    ]
    if "preempt" in ends:
        entries.append(
            Line2D([], [], color="#111111", linewidth=0.9, label="preempted", marker="|", ls="")
        )
    if any(row.done for row in rows):
        entries.append(Line2D([], [], color="#111111", label="done", marker="^", ls=""))
    if any(row.gaps for row in rows):
        entries.append(Line2D([], [], color="#cccccc", linewidth=3, label="engine has quit"))
    if "open" in ends:
        entries.append(Patch(facecolor="#999999", hatch="////", edgecolor="white", label="stuck"))
    if any(timeline.waits for timeline in timelines):
        entries.append(Line2D([], [], color=_CIRCLE, linewidth=2.2, label="waits for"))
    legend = figure.legend(
        handles=entries, loc="outside lower center", ncols=6, fontsize=8.5, frameon=False
    )
    # Afterwards: labels that begin with "_" would be left out.
    for text, (_, label) in zip(legend.get_texts(), keys, strict=False):
        text.set_text(literal(label))
