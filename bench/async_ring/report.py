"""Pictures and tables of what `async_ring` has measured.

    python3 bench/async_ring/report.py FOLDER [--out FOLDER]

FOLDER has async-ring.json and async-ring-timeline.json, as run.sh leaves them. Prints the table,
and writes report.markdown, bandwidth.png, model.png and timeline.png. Needs matplotlib, NumPy and
rich.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent))
from model import Model, fit_model  # noqa: E402

FIGURES, TIMELINE = "async-ring.json", "async-ring-timeline.json"
_COLORS = {
    "classic": "#7a7a7a",
    "async_2": "#f2b77c",
    "async_4": "#e08a3c",
    "async_8": "#c8553d",
    "nccl": "#4f9d4f",
    "unjam": "#2f6db3",
    "unjam_dma": "#6a3fa0",
}
_TRACE_COLORS = {"transfer": "#2f6db3", "sum": "#c8553d"}


class ReportError(Exception):
    """A file that is not what the program writes."""


@dataclass(frozen=True)
class Figures:
    """The program's JSON, by column and size.

    Args:
        data: all of it.
        cells: what was measured, by (column, bytes).
    """

    data: dict[str, Any]
    cells: dict[tuple[str, int], dict[str, Any]]

    @property
    def columns(self) -> list[dict[str, Any]]:
        """Those that have a figure."""
        there = {name for name, _ in self.cells}
        return [c for c in self.data["columns"] if c["name"] in there]

    @property
    def sizes(self) -> list[int]:
        return sorted({size for _, size in self.cells})

    def us(self, column: str, size: int, key: str = "us_median") -> float | None:
        """A figure in microseconds; None: not measured, or some result was wrong."""
        cell = self.cells.get((column, size))
        if cell is None or cell["wrong"] or key not in cell:
            return None
        return float(cell[key])

    def gbps(self, column: str, size: int, key: str = "us_median") -> float | None:
        """Algorithm bandwidth: bytes of the vector over time, in GB/s (10^9 bytes)."""
        us = self.us(column, size, key)
        return None if us is None else size / us * 1e-3


def read_figures(path: Path) -> Figures:
    """Of a file.

    Raises:
        ReportError: it is not there, or not the program's.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["program"] != "async_ring":
            raise ReportError(f"{path} is of another program")
        cells = {(c["column"], c["bytes"]): c for c in data["cells"]}
        return Figures(data, cells)
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {error.strerror}. Run run.sh first.") from None
    except (KeyError, TypeError, ValueError) as error:
        raise ReportError(f"{path} is not what async_ring writes: {error!r}") from None


def size_text(size: int) -> str:
    """ "64 MiB"."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:g} {unit}"
    return f"{size} B"


def _round(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


Rows = tuple[list[str], list[list[str]]]
"""Head, and rows."""


def _heads(columns: list[dict[str, Any]], brief: bool) -> list[str]:
    """Labels; or names, of which more fit beside each other."""
    return [c["name" if brief else "label"] for c in columns]


def time_rows(figures: Figures, brief: bool = False) -> Rows:
    """Medians in microseconds, and quartiles unless it is to be brief."""
    head = ["bytes", *_heads(figures.columns, brief)]
    rows = []
    for size in figures.sizes:
        row = [size_text(size)]
        for column in figures.columns:
            cell = figures.cells.get((column["name"], size))
            if cell is None:
                row.append("–")
            elif cell["wrong"]:
                row.append("WRONG")
            else:
                low, high = _round(cell["us_q1"]), _round(cell["us_q3"])
                row.append(_round(cell["us_median"]) + ("" if brief else f" [{low}, {high}]"))
        rows.append(row)
    return head, rows


def ratio_rows(figures: Figures, brief: bool = False) -> Rows:
    """The seed's claim, and what it leaves out: how many times faster than the classic ring."""
    columns = [c for c in figures.columns if c["name"] != "classic"]
    rows = []
    for size in figures.sizes:
        classic = figures.us("classic", size)
        row = [size_text(size)]
        for column in columns:
            us = figures.us(column["name"], size)
            row.append("–" if classic is None or us is None else f"{classic / us:.2f}")
        rows.append(row)
    return ["bytes", *_heads(columns, brief)], rows


def stream_rows(figures: Figures) -> Rows:
    """Calls queued in a stream: time to the end, and the time of issuing alone."""
    columns = [
        c
        for c in figures.columns
        if any("stream_us_median" in figures.cells.get((c["name"], s), {}) for s in figures.sizes)
    ]
    head = ["bytes", *(f"{c['label']}, to the end" for c in columns)]
    shows_issue = any(c["name"] == "nccl" for c in columns)
    if shows_issue:
        head.append("NCCL, issue alone, in GB/s")
    rows = []
    for size in figures.sizes:
        row = [size_text(size)]
        row += [_round(figures.us(c["name"], size, "stream_us_median")) for c in columns]
        if shows_issue:
            row.append(_round(figures.gbps("nccl", size, "issue_us_median")))
        rows.append(row)
    return head, rows


def model_rows(figures: Figures, model: Model) -> Rows:
    """Predictions beside what was measured, from 1 MiB."""
    head = ["bytes", "column", "predicted µs", "measured µs", "measured / predicted"]
    rows = []
    for size in figures.sizes:
        if size < 1 << 20:
            continue
        for column in figures.columns:
            predicted = model.column_us(column["name"], size)
            us = figures.us(column["name"], size)
            if predicted is None or us is None:
                continue
            rows.append(
                [
                    size_text(size),
                    column["label"],
                    _round(predicted),
                    _round(us),
                    f"{us / predicted:.2f}",
                ]
            )
    return head, rows


def line_rows(model: Model) -> Rows:
    """The model's lines."""
    lines = {
        "copy inside a GPU": model.copy_local,
        "pull from the previous GPU": model.copy_peer,
        "ncclSend and ncclRecv": model.send_receive,
        "addition": model.add,
        "cudaMalloc and cudaFree": model.allocate,
    }
    rows = [
        [name, f"{line.alpha:.1f}", f"{line.rate:.0f}"]
        for name, line in lines.items()
        if line is not None
    ]
    rows.append(["step of the hosts", f"{model.step:.1f}", "–"])
    rows.append(["launch and wait", f"{model.synchronize:.1f}", "–"])
    return ["what", "µs a piece", "GB/s"], rows


def overlap_rows(figures: Figures) -> Rows:
    """How much of the sums' time has a transfer beside it."""
    head = ["batches", "bytes", "sums beside transfers", "transfers µs", "sums µs"]
    rows = [
        [
            str(o["batches"]),
            size_text(o["bytes"]),
            "WRONG" if o["wrong"] else f"{o['share'] * 100:.0f} %",
            _round(o["copy_us"]),
            _round(o["sum_us"]),
        ]
        for o in figures.data["overlaps"]
    ]
    return head, rows


def markdown(rows: Rows) -> str:
    """A table."""
    head, body = rows
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def report_text(figures: Figures, model: Model | None) -> str:
    """report.markdown."""
    data = figures.data
    devices = ", ".join(data["devices"])
    parts = [
        "# Ring all-reduces\n",
        f"{data['ranks']} ranks, {data['dtype']}: {devices}. NCCL {data['nccl']}, CUDA driver "
        f"{data['cuda_driver']}. Measured {data['date']}, commit {data['commit'] or 'unknown'}.\n",
    ]
    checked = sum(c["checked"] for c in data["cells"])
    wrong = sorted({c["column"] for c in data["cells"] if c["wrong"]})
    words = f"Wrong ones: {', '.join(wrong)}." if wrong else "All were right."
    parts.append(f"{checked} results were compared with a separate sum. {words}\n")
    for column in data["columns"]:
        if column["not_measured"]:
            parts.append(f"Not measured: {column['label']}: {column['not_measured']}.\n")
    parts += [f"Note: {note}.\n" for note in data["notes"]]
    parts += [
        "## Times of a call\n",
        "Medians and quartiles in µs, until the stream is done, at the slowest rank.\n",
        markdown(time_rows(figures)),
        "![algorithm bandwidth over size](bandwidth.png)\n",
        "## Beside the classic ring\n",
        "How many times faster than the classic ring with memory of each call.\n",
        markdown(ratio_rows(figures)),
        "## Calls in a row\n",
        "µs a call, by events. The last column divides by the time of issuing alone.\n",
        markdown(stream_rows(figures)),
    ]
    if data["overlaps"]:
        parts += [
            "## Overlap\n",
            markdown(overlap_rows(figures)),
            "![timeline of one call](timeline.png)\n",
        ]
    if model is not None:
        parts += [
            "## Model\n",
            markdown(line_rows(model)),
            markdown(model_rows(figures, model)),
            "![predictions](model.png)\n",
        ]
    return "\n".join(parts)


def _figure(title: str, width: float = 9, height: float = 5) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontsize=10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _size_axis(axes: Any, sizes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    ticks = sizes[::3]
    axes.set_xticks(ticks, [size_text(s) for s in ticks], fontsize=8)
    axes.set_xticks([], minor=True)
    axes.grid(True, color="#e4e4e4")
    axes.set_ylim(bottom=0)


def draw_bandwidth(figures: Figures, target: Path) -> None:
    """The S curves: algorithm bandwidth over size, with quartiles."""
    figure, axes = _figure("all-reduce of float32: algorithm bandwidth, GB/s")
    for column in figures.columns:
        name = column["name"]
        sizes = [s for s in figures.sizes if figures.us(name, s) is not None]
        if not sizes:
            continue
        kept = name.endswith("_kept")
        color = _COLORS.get(name.removesuffix("_kept"), "#000000")
        middle = [figures.gbps(name, s) for s in sizes]
        low = [figures.gbps(name, s, "us_q3") for s in sizes]
        high = [figures.gbps(name, s, "us_q1") for s in sizes]
        axes.plot(
            sizes, middle, "--" if kept else "-", color=color, marker="o", markersize=3,
            linewidth=1.2, label=column["label"],
        )  # fmt: skip
        axes.fill_between(sizes, low, high, color=color, alpha=0.15, linewidth=0)
    _size_axis(axes, figures.sizes)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(target, dpi=130)


def draw_model(figures: Figures, model: Model, target: Path) -> None:
    """Measured points on predicted curves, for the rings with memory of each call."""
    figure, axes = _figure("predicted (lines) and measured (points): algorithm bandwidth, GB/s")
    for column in figures.columns:
        name = column["name"]
        predicted = [(s, model.column_us(name, s)) for s in figures.sizes]
        curve = [(s, s / us * 1e-3) for s, us in predicted if us is not None]
        if not curve or name.endswith("_kept"):
            continue
        color = _COLORS.get(name, "#000000")
        axes.plot(*zip(*curve, strict=True), color=color, linewidth=1.2, label=column["label"])
        measured = [(s, g) for s in figures.sizes if (g := figures.gbps(name, s)) is not None]
        if measured:
            axes.plot(*zip(*measured, strict=True), "o", color=color, markersize=4)
    _size_axis(axes, figures.sizes)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(target, dpi=130)


def draw_timeline(trace: dict[str, Any], target: Path) -> None:
    """Transfers and sums of one call, a row for each GPU's stream."""
    pieces = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    rows = sorted({(e["pid"], e["tid"]) for e in pieces})
    other = trace["otherData"]
    title = (
        f"{size_text(other['bytes'])} in {other['batches']} batches: "
        f"{other['overlap_share'] * 100:.0f} % of the sums' time is beside a transfer"
    )
    figure, axes = _figure(title, 11, 1.2 + 0.5 * len(rows))
    begin = min((e["ts"] for e in pieces), default=0)
    for place, row in enumerate(rows):
        for kind, color in _TRACE_COLORS.items():
            spans = [
                (e["ts"] - begin, e["dur"])
                for e in pieces
                if (e["pid"], e["tid"]) == row and e["cat"] == kind
            ]
            axes.broken_barh(
                spans, (place - 0.4, 0.8), color=color, edgecolor="white", linewidth=0.4
            )
    axes.set_yticks(range(len(rows)), [f"GPU {pid}, stream {tid}" for pid, tid in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("µs")
    handles = [Patch(color=color, label=kind) for kind, color in _TRACE_COLORS.items()]
    axes.legend(handles=handles, frameon=False, fontsize=8, loc="upper right", ncols=2)
    figure.savefig(target, dpi=130)


def print_rows(console: Console, title: str, rows: Rows) -> None:
    """On a terminal."""
    head, body = rows
    table = Table(title=title, title_justify="left")
    for name in head:
        table.add_column(name, justify="right")
    for row in body:
        table.add_row(*row)
    console.print(table)


def write_report(source: Path, target: Path, console: Console) -> None:
    """All of it.

    Raises:
        ReportError: `source` has no figures.
    """
    figures = read_figures(source / FIGURES)
    model = None
    try:
        model = fit_model(figures.data["ranks"], figures.data["probes"])
    except ValueError as error:
        console.print(f"no model: {error}")
    target.mkdir(parents=True, exist_ok=True)
    (target / "report.markdown").write_text(report_text(figures, model), encoding="utf-8")
    draw_bandwidth(figures, target / "bandwidth.png")
    if model is not None:
        draw_model(figures, model, target / "model.png")
    if (source / TIMELINE).is_file():
        try:
            trace = json.loads((source / TIMELINE).read_text(encoding="utf-8"))
            draw_timeline(trace, target / "timeline.png")
        except (KeyError, TypeError, ValueError) as error:
            raise ReportError(f"{source / TIMELINE} is no timeline: {error!r}") from None
    print_rows(console, "µs, medians", time_rows(figures, brief=True))
    print_rows(console, "times faster than the classic ring", ratio_rows(figures, brief=True))
    if model is not None:
        print_rows(console, "model", line_rows(model))
    console.print(f"wrote {target / 'report.markdown'} and pictures", soft_wrap=True)


def main() -> int:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Pictures and tables of async_ring's figures.")
    parser.add_argument("folder", type=Path, help="what run.sh has filled")
    parser.add_argument("--out", type=Path, help="for the report; default: the same folder")
    options = parser.parse_args()
    try:
        write_report(options.folder, options.out or options.folder, Console())
    except ReportError as error:
        print(f"report.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
