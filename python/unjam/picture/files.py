"""The files that pictures are written to by matplotlib: their endings, and what may be amiss."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ENDINGS = (".png", ".svg", ".pdf")
NEEDS_MATPLOTLIB = "pictures need matplotlib: pip install matplotlib"


def amiss(path: str | Path) -> str:
    """Why no picture can be drawn into `path`, as far as its name and matplotlib go; "" else."""
    if Path(path).suffix.lower() not in ENDINGS:
        return f"{path}: the ending must be one of {', '.join(ENDINGS)}"
    return "" if importlib.util.find_spec("matplotlib") is not None else NEEDS_MATPLOTLIB
