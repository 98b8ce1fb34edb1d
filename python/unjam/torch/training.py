"""How fast training is beside a peer: ``python -m unjam.torch.training [--device cuda] …``.

Starts the ranks as processes of this machine. Each trains every model twice, once on unjam and once
on the peer, from the same start on the same data: a block of iterations on one, then on the other,
and the other way round in the next round. The first round warms up; so does the first iteration of
each block, which begins on an idle device. Times are of rank 0: training keeps the ranks in step.

* ``iteration``: milliseconds, median of all iterations, first and third quartiles;
* ``speed``: the peer's time over unjam's, of the medians of each round's two blocks;
* ``variation``: standard deviation of the iteration times over their mean; for the peer with the
  interval in which 95 % of its values lie when its blocks are drawn anew, with replacement, and
  for unjam whether it is within, below (steadier), or above;
* ``loss``: of the last iteration.

On a GPU an iteration is what lies between two CUDA events in the stream that trains, and nobody
waits for the device inside a block: so it is in training, where the host runs ahead. A
synchronisation in every iteration would add the host's time to each, for both. Python collects its
garbage between blocks: a full collection takes 130 ms with all of torch in memory, and would be the
slowest iteration of whichever library it falls to.

``--profile`` trains one more block of each under torch.profiler (GPU only): the time in which
kernels of the model run, kernels of the library, kernels of the library alone, and none. What a
library waits for without a kernel counts as none.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from . import _beside
from ._models import MODELS, Training

DRAWS = 10_000
COMMUNICATION = ("nccl", "unjam_")  # in the names of kernels
Interval = tuple[float, float]


@dataclass
class Row:
    """One model, one library."""

    model: str
    what: str
    backend: str
    iteration_ms: list[float]  # first quartile, median, third
    samples_per_s: float
    variation: float
    loss: float
    times_ms: list[list[float]]  # of each block
    profile_ms: dict[str, float] = field(default_factory=dict)  # an iteration's


@dataclass
class Comparison:
    """One model, both libraries."""

    model: str
    speed: list[float]  # first quartile, median, third
    peer_variation: list[float]  # 95 % of the draws
    variation: str  # unjam's: "below" it, "within", "above"


def main(words: list[str] | None = None) -> int:
    """Starts the ranks, or is one of them."""
    words = sys.argv[1:] if words is None else words
    parser = _beside.parser("unjam.torch.training", __doc__)
    parser.add_argument("--models", default=",".join(MODELS), help="with commas")
    parser.add_argument("--blocks", type=int, default=12, help="of each library, that count")
    parser.add_argument("--steps", type=int, default=10, help="iterations of a block, that count")
    parser.add_argument("--batch", type=int, default=0, help="a rank; 0: each model's own")
    parser.add_argument("--small", action="store_true", help="models that a CPU trains at once")
    parser.add_argument("--profile", action="store_true", help="where a GPU's time goes")
    options = _beside.parse(parser, words)
    unknown = [name for name in options.models.split(",") if name not in MODELS]
    if unknown:
        parser.error(f"no model {unknown[0]!r}: there are {', '.join(MODELS)}")
    if options.profile and options.device != "cuda":
        parser.error("--profile looks at a GPU's kernels: it needs --device cuda")
    if options.rank is None:
        return _beside.start("unjam.torch.training", options, words)
    return _rank(options)


def _rank(options: argparse.Namespace) -> int:
    device = _beside.join(options, "unjam")
    rows: list[Row] = []
    comparisons: list[Comparison] = []
    for name in options.models.split(","):
        both = {}
        for backend in ("unjam", options.peer):
            torch.manual_seed(0)
            both[backend] = MODELS[name](backend, device, options.small, options.batch)
        found = _measure(name, both, options, device)
        rows += found
        comparisons.append(compare(*found))
        if options.rank == 0:
            print(f"{name}: {found[0].what}", flush=True)
        del both
    if options.rank == 0:
        _show(rows, comparisons, options)
    dist.destroy_process_group()
    return 0


def _measure(
    name: str, both: dict[str, Training], options: argparse.Namespace, device: torch.device
) -> list[Row]:
    """A row for each library, in the order of ``both``."""
    times: dict[str, list[list[float]]] = {backend: [] for backend in both}
    losses = {}
    for round_ in range(options.blocks + 1):
        for backend in list(both)[:: -1 if round_ % 2 else 1]:
            taken, losses[backend] = _block(both[backend], options.steps, device)
            if round_:
                times[backend].append(taken)
    rows = []
    for backend, training in both.items():
        quartiles = _beside.quartiles(t for block in times[backend] for t in block)
        rows.append(
            Row(
                name,
                training.what,
                backend,
                quartiles,
                1e3 * training.samples / quartiles[1],
                variation(times[backend]),
                losses[backend],
                times[backend],
                _profile(training, options.steps, device) if options.profile else {},
            )
        )
    return rows


def _block(training: Training, steps: int, device: torch.device) -> tuple[list[float], float]:
    """Milliseconds of each iteration but the first, and the last one's loss."""
    clock = _Clock(device)
    gc.collect()
    gc.disable()
    try:
        for _ in range(steps + 1):
            loss = training.step()
            clock.mark()
    finally:
        gc.enable()
    return clock.between(), loss.item()


class _Clock:
    """Times between marks: CUDA events in the current stream, or the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.marks: list[float | torch.cuda.Event] = []

    def mark(self) -> None:
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(1e3 * time.perf_counter())

    def between(self) -> list[float]:
        pairs = zip(self.marks[:-1], self.marks[1:], strict=True)
        if not self.on_gpu:
            return [b - a for a, b in pairs]
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in pairs]


def variation(blocks: list[list[float]]) -> float:
    """Standard deviation of all the blocks' times over their mean."""
    times = np.concatenate(blocks)
    return float(times.std() / times.mean())


def compare(ours: Row, peers: Row) -> Comparison:
    """What two rows say beside each other."""
    medians = [np.median(row.times_ms, axis=1) for row in (ours, peers)]
    # Whole blocks are drawn: iterations of one block have the machine's mood in common.
    dice, blocks = np.random.default_rng(0), np.asarray(peers.times_ms)
    drawn = blocks[dice.integers(len(blocks), size=(DRAWS, len(blocks)))].reshape(DRAWS, -1)
    low, high = np.quantile(drawn.std(axis=1) / drawn.mean(axis=1), [0.025, 0.975])
    return Comparison(
        ours.model,
        _beside.quartiles(float(ratio) for ratio in medians[1] / medians[0]),
        [float(low), float(high)],
        "below" if ours.variation < low else "above" if ours.variation > high else "within",
    )


def _profile(training: Training, steps: int, device: torch.device) -> dict[str, float]:
    """Milliseconds of an iteration, by what the GPU does."""
    from torch.profiler import ProfilerActivity, profile

    training.step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as found:
        for _ in range(steps):
            training.step()
        torch.cuda.synchronize()
    kernels = [
        (event.name, (event.time_range.start, event.time_range.end))
        for event in found.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return {what: us / steps / 1e3 for what, us in shares(kernels).items()}


def shares(kernels: list[tuple[str, Interval]]) -> dict[str, float]:
    """How long kernels of the model and of the library run, from (name, (start, end)).

    Several at a time count once.
    """
    if not kernels:
        return {}
    library = [k for name, k in kernels if any(word in name.lower() for word in COMMUNICATION)]
    model = [k for name, k in kernels if not any(word in name.lower() for word in COMMUNICATION)]
    compute, busy = _length(model), _length([k for _, k in kernels])
    whole = max(end for _, (_, end) in kernels) - min(start for _, (start, _) in kernels)
    return {
        "model": compute,
        "library": _length(library),
        "library alone": busy - compute,
        "none": whole - busy,
    }


def _length(intervals: Iterable[Interval]) -> float:
    """Of what they cover."""
    covered, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered


def _show(rows: list[Row], comparisons: list[Comparison], options: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"training, {options.ranks} ranks, {options.device}")
    for column in ("model", "backend", "iteration ms", "samples/s", "speed", "variation", "loss"):
        table.add_column(column, justify="left" if column in ("model", "backend") else "right")
    beside = {c.model: c for c in comparisons}
    for row in rows:
        c, ours = beside[row.model], row.backend == "unjam"
        low, high = c.peer_variation
        table.add_row(
            row.model if ours else "",
            row.backend,
            _spread(row.iteration_ms, 2),
            f"{row.samples_per_s:.1f}",
            _spread(c.speed, 3) if ours else "1",
            f"{row.variation:.3f} " + (c.variation if ours else f"({low:.3f}-{high:.3f})"),
            f"{row.loss:.4f}",
        )
    console = Console(width=100)
    console.print(table)
    for row in rows:
        if row.profile_ms:
            parts = ", ".join(f"{what} {ms:.2f}" for what, ms in row.profile_ms.items())
            console.print(f"{row.model} on {row.backend}, kernels, ms an iteration: {parts}")
    command = (
        f"python -m unjam.torch.training --ranks {options.ranks} --device {options.device} "
        f"--peer {options.peer} --models {options.models} --blocks {options.blocks} "
        f"--steps {options.steps}"
        + (f" --batch {options.batch}" if options.batch else "")
        + (" --small" if options.small else "")
    )
    comparing = [asdict(c) for c in comparisons]
    _beside.write(options, command, [asdict(row) for row in rows], comparisons=comparing)


def _spread(q: list[float], digits: int) -> str:
    return f"{q[1]:.{digits}f} ({q[0]:.{digits}f}-{q[2]:.{digits}f})"


if __name__ == "__main__":
    sys.exit(main())
