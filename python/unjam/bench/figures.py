"""Medians, spreads, bandwidths."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple


class Figure(NamedTuple):
    """What the repetitions of one case say.

    Attributes:
        us: median time of a repetition, microseconds.
        spread: the middle half's width (third quartile less first) as a fraction of the median.
    """

    us: float
    spread: float


def slowest(times_of_ranks: Sequence[Sequence[int]]) -> list[int]:
    """Time of each repetition: its slowest rank's (a broadcast's root returns early)."""
    return [max(times) for times in zip(*times_of_ranks, strict=True)]


def figure(times_ns: Sequence[int]) -> Figure:
    """Median and spread of the repetitions."""
    middle = median(times_ns)
    low, high = quantile(times_ns, 0.25), quantile(times_ns, 0.75)
    return Figure(middle / 1e3, (high - low) / middle if middle else 0.0)


def quantile(values: Sequence[int], fraction: float) -> float:
    """The value below which `fraction` of the values lie, interpolated."""
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def bandwidth(nbytes: int, factor: float, us: float) -> float:
    """Bus bandwidth in GB/s (10^9 bytes), as nccl-tests prints it."""
    return factor * nbytes / us / 1e3 if us else 0.0
