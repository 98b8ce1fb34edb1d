"""Makes the pictures and tables of docs/scale.md, with the clock (docs/guide/clock.md).

    PYTHONPATH=python UNJAM_LIBRARY=build/release/libunjam.so python3 tools/scale.py

They redo three figures of an article about NCCL 2.4's double binary trees: the time of short
all-reduces, the bandwidth of long ones, and what both mean for a step of training. Every curve is a
model's. It takes some minutes, most of them for long vectors of many ranks; needs matplotlib.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "scale.md"
IMAGES = ROOT / "docs" / "images"

RULE, LL, SIMPLE = "summit-nccl-2.4", "summit-nccl-2.30-ll", "summit-nccl-2.30"
RING, RING_2D, TREES, FLAT = "ring", "ring_2d", "node_trees", "double_binary_tree"
LEVELS = "hierarchical"
MOST_PLANNED = 65_000  # ranks that a plan can name
SHORT, LONG = 8, 1 << 30
SUMMIT_NODES = 4096  # 24,576 GPUs
PUBLISHED = 180  # "up to", at 24,576 GPUs

# Constants of a ring, and of trees: NCCL chooses protocols by size, so a ring may have LL's latency
# where trees have Simple's.
SETS = {
    "2.4's rule": (RULE, RULE),
    "2.30, LL": (LL, LL),
    "2.30, ring LL, trees Simple": (LL, SIMPLE),
}


@functools.cache
def us(machine: str, nodes: int, nbytes: int, algorithm: str) -> float:
    """Time of an all-reduce."""
    from unjam.clock import read_machine, time_plan

    found = read_machine(machine)
    ranks = nodes * int(found.constants["gpus_per_node"].value)
    return float(time_plan("all_reduce", found, ranks, nbytes, algorithm)["us"])


def gpus(machine: str) -> int:
    from unjam.clock import read_machine

    return int(read_machine(machine).constants["gpus_per_node"].value)


def doublings(first: int, last: int) -> list[int]:
    counts = []
    while first <= last:
        counts.append(first)
        first *= 2
    return counts


def ratio(constants: str, nodes: int, algorithm: str = TREES, nbytes: int = SHORT) -> float:
    """How many times a ring's time is that of another algorithm."""
    ring, other = SETS[constants]
    machine = other if algorithm in (TREES, FLAT, LEVELS) else ring
    return us(ring, nodes, nbytes, RING) / us(machine, nodes, nbytes, algorithm)


LARGEST = 34  # 16 GiB


def crossing(machine: str, nodes: int) -> int:
    """From which power of two bytes on a ring is as fast as trees; 0: there is none."""

    def trees_win(power: int) -> bool:
        return us(machine, nodes, 1 << power, TREES) < us(machine, nodes, 1 << power, RING)

    low, high = 10, LARGEST  # 2^low: trees are faster; 2^high: the ring
    if trees_win(high):
        return 0
    while high - low > 1:
        middle = (low + high) // 2
        if trees_win(middle):
            low = middle
        else:
            high = middle
    return 1 << high


def bus_gb_per_s(machine: str, nodes: int, nbytes: int, algorithm: str) -> float:
    """As nccl-tests count it: what a port would carry if all carried as much."""
    ranks = nodes * gpus(machine)
    return 2 * (ranks - 1) / ranks * nbytes / us(machine, nodes, nbytes, algorithm) / 1e3


@dataclass(frozen=True)
class Step:
    """A step of data-parallel training, and what its gradients are.

    The step takes the forward pass, then the longer of the backward pass and the all-reduces of all
    buckets, one after the other. The times are parameters: they are no measurement of ours.
    """

    forward_ms: float = 60.0
    backward_ms: float = 120.0
    parameters: int = 25_557_032  # ResNet-50, by torchvision's page of its weights
    bucket_bytes: int = 25 << 20  # torch's DistributedDataParallel, unless told otherwise

    def buckets(self) -> list[int]:
        left, found = 4 * self.parameters, []
        while left > 0:
            found.append(min(left, self.bucket_bytes))
            left -= found[-1]
        return found

    def ms(self, machine: str, nodes: int, algorithm: str) -> float:
        times = [us(machine, nodes, nbytes, algorithm) for nbytes in self.buckets()]
        return self.forward_ms + max(self.backward_ms, sum(times) / 1e3)


# ---- tables ----


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def ratios_table() -> str:
    rows = [
        [f"{6 * nodes:,}", *(f"{ratio(name, nodes):,.1f}" for name in SETS)]
        for nodes in doublings(8, SUMMIT_NODES)
    ]
    return table(["GPUs", *SETS], rows)


def crossings_table() -> str:
    from unjam.bench.cases import size_text

    def text(machine: str, nodes: int) -> str:
        nbytes = crossing(machine, nodes)
        return size_text(nbytes) if nbytes else "none"

    rows = [
        [f"{6 * nodes:,}", text(RULE, nodes), text(SIMPLE, nodes)] for nodes in (2, 8, 32, 128, 512)
    ]
    return table(["GPUs", "2.4's rule", "2.30, Simple"], rows)


def bandwidth_table() -> str:
    rows = [
        [
            f"{6 * nodes:,}",
            *(f"{bus_gb_per_s(SIMPLE, nodes, LONG, name):.1f}" for name in (RING, RING_2D, TREES)),
            f"{bus_gb_per_s(SIMPLE, nodes, LONG, FLAT):.1f}" if nodes <= 128 else "",
            f"{bus_gb_per_s(SIMPLE, nodes, LONG, LEVELS):.1f}" if nodes <= 512 else "",
        ]
        for nodes in (2, 8, 32, 128, 512, 2048)
    ]
    return table(["GPUs", *(WORDS[name] for name in (RING, RING_2D, TREES, FLAT, LEVELS))], rows)


TABLES: dict[str, Callable[[], str]] = {
    "ratios": ratios_table,
    "crossings": crossings_table,
    "bandwidth": bandwidth_table,
}

# ---- pictures ----

WORDS = {
    RING: "ring",
    RING_2D: "2D ring",
    TREES: "trees of nodes",
    FLAT: "trees of ranks",
    LEVELS: "two levels",
}


def _curve(axes: Any, x: Sequence[int], y: Sequence[float], name: str, place: int, **style: Any):  # noqa: ANN202
    from unjam.picture import color_of

    axes.plot(x, y, marker="o", markersize=3.5, color=color_of(place), label=name, **style)


def _over_gpus(axes: Any, title: str, counts: Sequence[int], y: str) -> None:
    from matplotlib.ticker import NullLocator

    from unjam.clock.pictures import plain

    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [f"{count:,}" for count in counts], rotation=45, fontsize=7)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("GPUs")
    axes.set_ylabel(y)
    axes.legend(frameon=False, fontsize=8)
    plain(axes, title)


def draw_latency(path: Path) -> None:
    """The article's Fig. 3."""
    from unjam.clock.pictures import drawing

    nodes = doublings(1, SUMMIT_NODES)
    counts = [6 * n for n in nodes]
    with drawing(path, 11, 4.6, panels=2) as (times, ratios):
        for place, name in enumerate((RING, RING_2D, TREES)):
            for machine, words, style in ((RULE, "2.4's rule", "-"), (LL, "2.30, LL", "--")):
                y = [us(machine, n, SHORT, name) for n in nodes]
                _curve(times, counts, y, f"{WORDS[name]}, {words}", place, linestyle=style)
        y = [us(LL, n, SHORT, LEVELS) for n in nodes]
        _curve(times, counts, y, f"{WORDS[LEVELS]}, 2.30, LL", 4, linestyle="--")
        times.set_yscale("log")
        _over_gpus(times, "Model: all-reduce of 8 bytes on Summit", counts, "us")
        for place, constants in enumerate(SETS):
            y = [ratio(constants, n) for n in nodes[1:]]
            _curve(ratios, counts[1:], y, constants, place)
        ratios.plot([counts[-1]], [PUBLISHED], "k*", markersize=10, label="published, up to")
        ratios.set_yscale("log")
        _over_gpus(ratios, "Model: ring's time over trees'", counts[1:], "times")


def draw_many(path: Path) -> None:
    """The same to 131,072 GPUs, of nodes with eight."""
    from unjam.clock.pictures import drawing

    machine = "hgx-nccl-2.30-ll"
    nodes = doublings(1, 16384)
    counts = [8 * n for n in nodes]
    with drawing(path, 8, 4.6) as (axes,):
        for place, name in enumerate((RING, RING_2D, TREES, FLAT)):
            _curve(axes, counts, [us(machine, n, SHORT, name) for n in nodes], WORDS[name], place)
        fewer = [n for n in nodes if 8 * n <= MOST_PLANNED]
        y = [us(machine, n, SHORT, LEVELS) for n in fewer]
        _curve(axes, [8 * n for n in fewer], y, WORDS[LEVELS], 4)
        axes.set_yscale("log")
        _over_gpus(axes, "Model: all-reduce of 8 bytes on HGX H100, NCCL 2.30, LL", counts, "us")


def draw_bandwidth(path: Path) -> None:
    """The article's Fig. 4."""
    from matplotlib.ticker import NullLocator

    from unjam.bench.cases import size_text
    from unjam.clock.pictures import drawing, plain

    with drawing(path, 11, 4.6, panels=2) as (sizes_axes, gpus_axes):
        sizes, nodes = [1 << k for k in range(16, 31, 2)], 128
        for place, name in enumerate((RING, RING_2D, TREES, FLAT, LEVELS)):
            y = [bus_gb_per_s(SIMPLE, nodes, size, name) for size in sizes]
            _curve(sizes_axes, sizes, y, WORDS[name], place)
        sizes_axes.set_xscale("log", base=2)
        sizes_axes.set_xticks(sizes, [size_text(s) for s in sizes], rotation=45, fontsize=7)
        sizes_axes.xaxis.set_minor_locator(NullLocator())
        sizes_axes.set_ylabel("bus bandwidth, GB/s")
        sizes_axes.legend(frameon=False, fontsize=8)
        plain(sizes_axes, f"Model: {6 * nodes} GPUs of Summit, NCCL 2.30, Simple")
        counts = (2, 8, 32, 128, 512, 2048)
        for place, name in enumerate((RING, RING_2D, TREES)):
            y = [bus_gb_per_s(SIMPLE, n, LONG, name) for n in counts]
            _curve(gpus_axes, [6 * n for n in counts], y, WORDS[name], place)
        fewer = counts[:-1]
        y = [bus_gb_per_s(SIMPLE, n, LONG, LEVELS) for n in fewer]
        _curve(gpus_axes, [6 * n for n in fewer], y, WORDS[LEVELS], 4)
        gpus_axes.axhline(25, color="#999999", linestyle=":", label="a node's port")
        gpus_axes.set_ylim(0, 50)
        _over_gpus(gpus_axes, "Model: all-reduce of 1 GiB", [6 * n for n in counts], "GB/s")


def draw_training(path: Path) -> None:
    """The article's Fig. 5."""
    from unjam.clock.pictures import drawing

    nodes = doublings(2, SUMMIT_NODES)
    counts = [6 * n for n in nodes]
    step = Step()
    with drawing(path, 8, 4.6) as (axes,):
        for place, name in ((1, RING_2D), (2, TREES)):
            for machine, words, style in (
                (RULE, "2.4's rule", "-"),
                (SIMPLE, "2.30, Simple", "--"),
            ):
                y = [step.ms(machine, n, RING) / step.ms(machine, n, name) for n in nodes]
                _curve(axes, counts, y, f"{WORDS[name]}, {words}", place, linestyle=style)
        _over_gpus(axes, "Model: how many times a step takes with rings", counts, "times")


def draw_trees(path: Path) -> None:
    """The article's Figs. 1 and 2."""
    from unjam.clock import pictures

    pictures.draw_trees(32, path)


PICTURES: dict[str, Callable[[Path], None]] = {
    "scale-trees.svg": draw_trees,
    "scale-latency.svg": draw_latency,
    "scale-many.svg": draw_many,
    "scale-training.svg": draw_training,
    "scale-bandwidth.svg": draw_bandwidth,
}


def with_tables(text: str) -> str:
    """The page with its tables as the clock has them."""
    for name, make in TABLES.items():
        pattern = rf"(<!-- generated: {name} -->\n).*?(<!-- end of what is generated -->)"
        made = f"\n{make()}\n\n"
        text, found = re.subn(pattern, lambda m: m[1] + made + m[2], text, flags=re.S)  # noqa: B023
        if found != 1:
            raise ValueError(f"{PAGE} has no place for the table {name}")
    return text


def main() -> int:
    for name, draw in PICTURES.items():
        draw(IMAGES / name)
        print(f"docs/images/{name}", flush=True)
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(PAGE.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
