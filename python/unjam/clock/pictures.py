"""Pictures of what the clock says, through matplotlib: the file's ending chooses the format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

from ..bench.cases import size_text
from ..picture import color_of
from ..picture.text import literal

Row = dict[str, Any]


@contextmanager
def drawing(path: Path, width: float, height: float, panels: int = 1) -> Iterator[Any]:
    """Gives the axes of a figure, side by side, which is written when all is drawn."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # The same file each time: no random names, no date.
    with rc_context({"text.usetex": False, "svg.hashsalt": "unjam", "svg.fonttype": "none"}):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure.subplots(1, panels, squeeze=False)[0]
        nothing = {"Date": None} if path.suffix.lower() == ".svg" else None
        figure.savefig(path, dpi=130, metadata=nothing)


def plain(axes: Any, title: str) -> None:
    """The looks that all have."""
    axes.set_title(literal(title), loc="left", fontsize=11)
    axes.grid(True, which="major", color="#e4e4e4")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _lines(rows: Sequence[Row], by: str) -> dict[str, list[Row]]:
    lines: dict[str, list[Row]] = {}
    for row in rows:
        lines.setdefault(row["asked"], []).append(row)
    return {name: sorted(line, key=lambda row: row[by]) for name, line in lines.items()}


def _draw_lines(axes: Any, rows: Sequence[Row], by: str) -> None:
    for place, (name, line) in enumerate(_lines(rows, by).items()):
        x = [row[by] for row in line]
        y = [row["us"] for row in line]
        if name == "auto":  # the selector's choice: a broad band behind the others
            axes.plot(x, y, "-", color="#cccccc", linewidth=9, label="the selector's choice")
            _name_choices(axes, line, by)
        else:
            axes.plot(x, y, "o-", color=color_of(place), label=name, markersize=4)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylabel("us")
    axes.legend(frameon=False, fontsize=9)


def _name_choices(axes: Any, line: list[Row], by: str) -> None:
    for name, group in groupby(line, key=lambda row: row["algorithm"]):
        first = next(group)
        axes.annotate(
            name, (first[by], first["us"]), (0, 7), textcoords="offset points", fontsize=8,
            color="#555555",
        )  # fmt: skip


def draw_sizes(rows: Sequence[Row], title: str, path: Path) -> None:
    """Time over size: a line an algorithm, the selector's choice as a band.

    Args:
        rows: what :func:`unjam.clock.time_plan` gave, each with ``asked`` and ``size``.
        title: above the picture.
        path: a .png, .svg or .pdf.
    """
    counts = sorted({row["ranks"] for row in rows})
    from matplotlib.ticker import NullLocator

    with drawing(path, 8, 5.2) as (axes,):
        _draw_lines(axes, [row for row in rows if row["ranks"] == counts[0]], "size")
        sizes = sorted({row["size"] for row in rows})
        axes.set_xticks(sizes, [size_text(size) for size in sizes], rotation=30, fontsize=8)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("size of the vector")
        plain(axes, f"{title}, {counts[0]:,} ranks")


def draw_ranks(rows: Sequence[Row], title: str, path: Path) -> None:
    """Time over ranks: as :func:`draw_sizes`, of one size."""
    from matplotlib.ticker import NullLocator

    with drawing(path, 8, 5.2) as (axes,):
        _draw_lines(axes, rows, "ranks")
        counts = sorted({row["ranks"] for row in rows})
        axes.set_xticks(counts, [f"{count:,}" for count in counts], rotation=45, fontsize=8)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("ranks")
        plain(axes, f"{title}, {size_text(rows[0]['size'])}")


def draw_trees(ranks: int, path: Path) -> None:
    """Both trees of a double binary tree, as its plans have them.

    Args:
        ranks: 2 to 64.
        path: a .png, .svg or .pdf.
    """
    with drawing(path, max(6.0, 0.36 * ranks), 3.4, panels=1) as (axes,):
        for tree in (0, 1):
            parents, depths = _tree(ranks, tree)
            color = color_of(2 * tree)
            # One upwards, one downwards, with the leaves of both in the middle.
            sign = 1 if tree == 0 else -1
            deepest = max(depths)
            y = [sign * (deepest - depth + 0.5) for depth in depths]
            for rank, parent in enumerate(parents):
                if parent is not None:
                    axes.plot([rank, parent], [y[rank], y[parent]], "-", color=color, linewidth=1.2)
            for rank in range(ranks):
                axes.text(
                    rank, y[rank], str(rank), ha="center", va="center", fontsize=8, color="white",
                    bbox={"boxstyle": "circle,pad=0.25", "facecolor": color, "edgecolor": "none"},
                )  # fmt: skip
        axes.set_title(f"Both trees of {ranks} ranks", loc="left", fontsize=11)
        axes.margins(0.04, 0.14)
        axes.axis("off")


def _tree(ranks: int, tree: int) -> tuple[list[int | None], list[int]]:
    """Of each rank its parent, and its depth, from the plans themselves."""
    from ..cli import make_parser, plan

    words = ["plan", "--check", "broadcast" if ranks == 1 else "all_reduce", "--ranks", str(ranks)]
    words += ["--algorithm", "double_binary_tree", "--lanes", "3", "--list"]
    programs = plan.check_plan(make_parser().parse_args(words))["programs"]
    parents: list[int | None] = [None] * ranks
    for program in programs:
        for primitive in program["primitives"]:
            up = primitive["contribute"] and not primitive["finish"]
            if up and primitive["part"] == tree:
                (parents[program["rank"]],) = primitive["send_peers"]
    depths = []
    for rank in range(ranks):
        depth, at = 0, parents[rank]
        while at is not None:
            depth, at = depth + 1, parents[at]
        depths.append(depth)
    return parents, depths


# Of a hop: what, its field, and its colours on a link and in the network.
_PARTS = (
    ("waiting for a processor", "processor_us", "#9498a0", "#9498a0"),
    ("latency", "latency_us", "#97bbf5", "#9c6b4e"),
    ("bytes", "bytes_us", "#efb118", "#ff725c"),
    ("queueing", "queue_us", "#6cc5b0", "#a463f2"),
)


def draw_path(row: Row, title: str, path: Path) -> None:
    """The critical path as a timeline: a row a slice, what it came by, and itself.

    Args:
        row: what :func:`unjam.clock.time_plan` gave, with its path.
        title: above the picture.
        path: a .png, .svg or .pdf.
    """
    most = 48
    slices = row["path"]["slices"]
    shown = slices if len(slices) <= most else [*slices[: most // 2], *slices[-most // 2 :]]
    with drawing(path, 9, 1.6 + 0.2 * len(shown)) as (axes,):
        seen: set[str] = set()

        def bar(place: int, begin: float, width: float, what: str, color: str) -> None:
            axes.barh(place, width, left=begin, height=0.7, color=color,
                      label=None if what in seen else what)  # fmt: skip
            seen.add(what)

        for place, item in enumerate(shown):
            end = item["start_us"]
            way = item.get("way", "")
            for what, name, *colors in _PARTS:
                width = item.get(name, 0.0)
                if width > 0:
                    label = what if name == "processor_us" else f"{way}, {what}"
                    bar(place, end - width, width, label, colors[way == "network"])
                    end -= width
            bar(place, item["start_us"], item["end_us"] - item["start_us"], "slice", color_of(0))
        axes.set_yticks(
            range(len(shown)), [f"rank {i['rank']}: {i['does']}" for i in shown], fontsize=7
        )
        axes.invert_yaxis()
        axes.set_xlabel("us")
        left = row["path"]["left_out"] + len(slices) - len(shown)
        note = f", {left:,} slices in the middle left out" if left else ""
        plain(axes, f"{title}: {row['algorithm']}, {row['ranks']:,} ranks{note}")
        axes.legend(frameon=False, fontsize=8)
