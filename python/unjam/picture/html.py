"""Timelines as one HTML file with inline SVG: needs no library and no network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape as escape_markup
from pathlib import Path

from .._texts import printable
from ..timeline import RankRow, Timeline
from . import color_of

_LEFT, _WIDTH, _ROW = 70, 1100, 26

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>unjam: who ran what when</title>
<style>
body {{ font: 14px/1.4 system-ui, sans-serif; margin: 2em; color: #222; }}
svg {{ display: block; margin: .3em 0 1.6em; }}
text {{ font: 12px system-ui, sans-serif; fill: #333; }}
text, h3, .key span {{ white-space: pre-wrap; }}
.key i {{ display: inline-block; width: 12px; height: 12px; margin: 0 5px 0 14px; }}
</style>
{body}
<p class="key">{legend}<br>black line: preempted · triangle: done · grey: the engine has quit ·
hatched: stuck · point at a bar for its times</p>
</html>
"""


def draw_html(timelines: Sequence[Timeline], path: Path) -> None:
    """One drawing a timeline, with the times of a bar as its tooltip."""
    legend = "".join(
        f'<i style="background:{color_of(place)}"></i><span>{escape(label)}</span>'
        for place, (_, label) in enumerate(timelines[-1].keys)
    )
    body = "\n".join(_svg(timeline) for timeline in timelines)
    path.write_text(_PAGE.format(body=body, legend=legend), encoding="utf-8")


def escape(text: str) -> str:
    """A user's text, shown as it is."""
    return escape_markup(printable(text))


def _note_ns(row: RankRow) -> int:
    return max((span.start_ns for span in row.spans), default=0)


def _svg(timeline: Timeline) -> str:
    colors = {key: color_of(place) for place, (key, _) in enumerate(timeline.keys)}
    labels = dict(timeline.keys)
    height = _ROW * len(timeline.rows)
    scale = _WIDTH / (timeline.end_ns - timeline.start_ns)
    parts = [
        f"<h3>{escape(timeline.title)}</h3>",
        f'<svg width="{_LEFT + _WIDTH + 20}" height="{height + 24}">',
        '<defs><pattern id="stuck" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><rect width="2.5" height="6" fill="#fff" opacity=".7"/>'
        "</pattern></defs>",
    ]

    def x(time_ns: int) -> float:
        return _LEFT + (time_ns - timeline.start_ns) * scale

    def box(start: int, end: int, top: float, tall: float, fill: str, title: str = "") -> str:
        tip = f"<title>{escape(title)}</title>" if title else ""
        return (
            f'<rect x="{x(start):.2f}" y="{top:.1f}" width="{(end - start) * scale:.2f}" '
            f'height="{tall:.1f}" fill="{fill}">{tip}</rect>'
        )

    for place, row in enumerate(timeline.rows):
        top = place * _ROW
        tall = (_ROW - 5) / row.lanes
        parts.append(f'<text x="4" y="{top + 16}">rank {row.rank}</text>')
        for gap in row.gaps:
            y = top + gap.lane * tall + 0.4 * tall
            parts.append(box(gap.start_ns, gap.end_ns, y, 0.2 * tall, "#e0e0e0", "engine has quit"))
        for span in row.spans:
            y = top + span.lane * tall
            start = (span.start_ns - timeline.start_ns) * 1e-6
            end = (span.end_ns - timeline.start_ns) * 1e-6
            title = f"{labels[span.key]}: {start:.3f} to {end:.3f} ms, then {span.end}"
            fill = colors[span.key]
            parts.append(box(span.start_ns, span.end_ns, y, tall, fill, title))
            if span.end == "open":
                parts.append(box(span.start_ns, span.end_ns, y, tall, "url(#stuck)", title))
            elif span.end == "preempt":
                parts.append(
                    f'<line x1="{x(span.end_ns):.2f}" x2="{x(span.end_ns):.2f}" y1="{y:.1f}" '
                    f'y2="{y + tall:.1f}" stroke="#111" stroke-width=".7"/>'
                )
        if row.note:
            parts.append(
                f'<text x="{x(_note_ns(row)) + 6:.1f}" y="{top + 15}" stroke="#fff" '
                'stroke-width="4" '
                f'paint-order="stroke">{escape(row.note)}</text>'
            )
        for time_ns, key in row.done:
            left = x(time_ns)
            points = f"{left - 3:.1f},{top + 27} {left + 3:.1f},{top + 27} {left:.1f},{top + 20}"
            tip = escape(f"{labels[key]}: done")
            parts.append(f'<polygon points="{points}" fill="#111"><title>{tip}</title></polygon>')
    parts.append(f'<text x="{_LEFT}" y="{height + 14}">0</text>')
    parts.append(
        f'<text x="{_LEFT + _WIDTH}" y="{height + 14}" text-anchor="end">'
        f"{timeline.milliseconds:.2f} ms</text></svg>"
    )
    if timeline.caption:
        parts.append(f"<p>{escape(timeline.caption)}</p>")
    return "\n".join(parts)
