"""How long the rings should take: an alpha-beta-gamma model of probes.

A transfer of S bytes takes alpha + beta S, an addition alpha' + gamma S. Each line is fitted to
what the program `async_ring` measures of that one thing alone ("probes" in its JSON). The formulas
below put the lines together as the rings do. No figure of a ring itself goes into them, so where
prediction and measurement differ, the parts disturb each other.

Times are microseconds, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Line:
    """alpha + beta x bytes."""

    alpha: float
    beta: float

    def us(self, size: float) -> float:
        return self.alpha + self.beta * size

    @property
    def rate(self) -> float:
        """GB/s (10^9 bytes) of large sizes."""
        return float("inf") if self.beta == 0 else 1e-3 / self.beta


def fit_line(points: Iterable[tuple[float, float]]) -> Line:
    """The line through (bytes, µs) with the least sum of squared *relative* errors.

    Neither part is negative. Relative, for a large transfer's percent would hide a latency.

    Raises:
        ValueError: fewer than two sizes, or a time that is not positive.
    """
    pairs = sorted(points)
    size = np.array([x for x, _ in pairs], dtype=float)
    us = np.array([t for _, t in pairs], dtype=float)
    if len(set(size)) < 2 or (us <= 0).any():
        raise ValueError("a line needs positive times of at least two sizes")
    one, slope = 1 / us, size / us
    (alpha, beta), *_ = np.linalg.lstsq(
        np.stack([one, slope], axis=1), np.ones_like(us), rcond=None
    )
    if alpha < 0:
        return Line(0.0, float(slope.sum() / (slope @ slope)))
    if beta < 0:
        return Line(float(one.sum() / (one @ one)), 0.0)
    return Line(float(alpha), float(beta))


@dataclass(frozen=True)
class Model:
    """A machine of `ranks` GPUs.

    Args:
        copy_local: a copy inside a GPU.
        copy_peer: a copy from the previous rank, while all ranks make one.
        add: the addition kernel.
        send_receive: a group of ncclSend and ncclRecv; None without NCCL.
        allocate: cudaMalloc and cudaFree.
        step: what the hosts need for a step of the asynchronous ring, whatever it moves.
        synchronize: a launch, and the wait for it.
    """

    ranks: int
    copy_local: Line
    copy_peer: Line
    add: Line
    allocate: Line
    step: float
    synchronize: float
    send_receive: Line | None = None

    def classic_us(self, size: float, kept: bool) -> float | None:
        """The classic ring: nothing beside anything. None: nothing is known of sends.

        copy(S) + (n - 1) (2 send(S/n) + add(S/n)), and the allocation in the call.
        """
        if self.send_receive is None:
            return None
        chunk = size / self.ranks
        moved = 2 * self.send_receive.us(chunk) + self.add.us(chunk)
        return (
            self.copy_local.us(size)
            + (self.ranks - 1) * moved
            + self.synchronize
            + (0 if kept else self.allocate.us(chunk))
        )

    def async_us(self, size: float, batches: int, kept: bool) -> float:
        """The asynchronous ring: an addition beside the next chunk's transfer.

        With R = (n - 1) batches, c = S/(n batches), t = max(pull(c), step), a = add(c):
        copy(S) + max(2 R t, (R + 1) t + (R - 1) a, (R - batches + 2) t + R a), and two allocations
        in the call. Either transfers set the pace; or the all-gather waits in its stream for the
        last addition but one, or for the chunk of the last one.
        """
        chunk = size / (self.ranks * batches)
        rounds = (self.ranks - 1) * batches
        pull = max(self.copy_peer.us(chunk), self.step)
        add = self.add.us(chunk)
        moved = max(
            2 * rounds * pull,
            (rounds + 1) * pull + (rounds - 1) * add,
            (rounds - batches + 2) * pull + rounds * add,
        )
        return (
            self.copy_local.us(size)
            + moved
            + self.synchronize
            + (0 if kept else 2 * self.allocate.us(chunk))
        )

    def column_us(self, column: str, size: float) -> float | None:
        """Of a column of the table; None: it is none of the rings."""
        kept = column.endswith("_kept")
        name = column.removesuffix("_kept")
        if name == "classic":
            return self.classic_us(size, kept)
        if name.startswith("async_"):
            return self.async_us(size, int(name.removeprefix("async_")), kept)
        return None


def fit_model(ranks: int, probes: Sequence[dict[str, Any]]) -> Model:
    """From the "probes" of the program's JSON.

    Raises:
        ValueError: a probe is missing, or there are too few of it.
    """

    def points(kind: str) -> list[tuple[float, float]]:
        return [(p["bytes"], p["us_median"]) for p in probes if p["kind"] == kind]

    def line(kind: str) -> Line:
        try:
            return fit_line(points(kind))
        except ValueError as error:
            raise ValueError(f"probe {kind}: {error}") from None

    def single(kind: str) -> float:
        found = points(kind)
        if not found:
            raise ValueError(f"probe {kind} is missing")
        return found[0][1]

    return Model(
        ranks=ranks,
        copy_local=line("copy_local"),
        copy_peer=line("copy_peer"),
        add=line("add"),
        allocate=line("allocate"),
        step=single("step"),
        synchronize=single("synchronize"),
        send_receive=line("send_receive") if points("send_receive") else None,
    )
