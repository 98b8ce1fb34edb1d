"""Draws what `build/cuda/gpu/price --only late` measures: Fig. 11 of the DFCCL paper on GPUs.

    python3 bench/late_rank_picture.py PRICE.csv PICTURE.png

Of each collective, by its place in its rank's order of calls: context switches of a lane, and how
many are pending meanwhile; means over rounds and ranks, of those that are in time and of the late.
Needs matplotlib.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_PANELS = (
    ("context_switches_a_lane", "context switches of a lane"),
    ("queue_length", "collectives pending"),
    ("latency_us", "µs from call to end"),
)
_COLORS = {"fixed": "#c8553d", "adaptive": "#2f6db3"}


def means(rows: Iterable[dict[str, str]], column: str) -> dict[tuple[str, bool], list[float]]:
    """A column's means by place in the order of calls: by policy, and whether ranks are late."""
    found: dict[tuple[str, bool], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        late = row["rank"] == row["late_rank"]
        value = float(row[column])
        # (A collective whose end the trace does not tell has a latency of -1.)
        if value >= 0:
            found[row["policy"], late][int(row["position"])].append(value)
    return {which: [fmean(of[place]) for place in sorted(of)] for which, of in found.items()}


def draw(source: Path, target: Path) -> None:
    """Three panels side by side."""
    with source.open(newline="") as file:
        rows = list(csv.DictReader(file))
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (column, title) in zip(figure.subplots(1, len(_PANELS)), _PANELS, strict=True):
        for (policy, late), values in sorted(means(rows, column).items()):
            axes.plot(
                range(1, len(values) + 1),
                values,
                "o--" if late else "o-",
                color=_COLORS[policy],
                markersize=4,
                label=f"{policy}, {'the late rank' if late else 'ranks in time'}",
            )
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel("place in the order of calls")
        axes.set_ylim(bottom=0)
        axes.grid(True, axis="y", color="#e4e4e4")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(target, dpi=130)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Fig. 11 of the DFCCL paper, as measured on GPUs.")
    parser.add_argument("source", type=Path, help="price.csv of tests/gpu/run_all.sh")
    parser.add_argument("target", type=Path, help="the picture, PNG or SVG by its ending")
    options = parser.parse_args()
    draw(options.source, options.target)


if __name__ == "__main__":
    main()
