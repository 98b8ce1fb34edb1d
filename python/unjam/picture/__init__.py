"""Timelines as pictures: PNG (or SVG, PDF) through matplotlib, or one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .._errors import InvalidArgument
from ..timeline import Timeline

PALETTE = (
    "#4269d0",
    "#efb118",
    "#ff725c",
    "#6cc5b0",
    "#3ca951",
    "#a463f2",
    "#97bbf5",
    "#9c6b4e",
    "#ff8ab7",
    "#9498a0",
)


def color_of(place: int) -> str:
    """Colour of the key at that place of the legend."""
    return PALETTE[place % len(PALETTE)]


def file_for(path: str | Path) -> Path:
    """The file that :func:`draw` writes for `path`: without matplotlib an ``.html`` beside it."""
    path = Path(path)
    if path.suffix.lower() == ".html":
        return path
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return path.with_suffix(".html")
    return path


def draw(timelines: Sequence[Timeline], path: str | Path) -> Path:
    """Draws timelines below each other; the file's ending says how.

    Args:
        timelines: at least one.
        path: ``.html`` needs nothing; ``.png``, ``.svg`` and ``.pdf`` need matplotlib, and become
            an ``.html`` beside it if that is missing.

    Returns:
        The file written.

    Raises:
        InvalidArgument: an ending that is none of these.
    """
    path = Path(path)
    kind = path.suffix.lower()
    if kind not in (".png", ".svg", ".pdf", ".html"):
        raise InvalidArgument(f"{path}: a picture must end in .png, .svg, .pdf or .html")
    path.parent.mkdir(parents=True, exist_ok=True)
    path = file_for(path)
    if path.suffix.lower() != ".html":
        try:
            from .plot import draw_plot
        except ImportError:
            path = path.with_suffix(".html")
        else:
            draw_plot(timelines, path)
            return path
    from .html import draw_html

    draw_html(timelines, path)
    return path
