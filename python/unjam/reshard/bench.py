"""How long a plan's run takes on this machine: ranks as threads, host memory."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._errors import InvalidArgument
from .._types import DType
from ..context import Context
from ..threads import launch
from .plan import Plan

MOST_BYTES = 4 << 30  # of all ranks' parts together
MOST_RANKS = 256


@dataclass(frozen=True)
class Timing:
    """Seconds of runs, each that of the slowest rank.

    Attributes:
        ranks: of the job.
        bytes: of all destination parts.
        seconds: of each run after the first, which is not counted.
    """

    ranks: int
    bytes: int
    seconds: list[float]


def time_plan(plan: Plan, runs: int) -> Timing:
    """Carries a plan out in a job of its own, whose ranks are threads of this process.

    Raises:
        InvalidArgument: too many ranks, or too much memory.
    """
    ranks = max(plan.ranks()) + 1
    if ranks > MOST_RANKS:
        raise InvalidArgument(
            f"the plan has ranks up to {ranks - 1}: this takes at most {MOST_RANKS}"
        )
    parts = [_shapes(plan, rank) for rank in range(ranks)]
    wanted = sum(_bytes(part, "dst") for part in parts)
    everything = wanted + sum(_bytes(part, "src") for part in parts)
    if everything > MOST_BYTES:
        raise InvalidArgument(
            f"all ranks' parts have {everything:,} bytes: this takes at most {MOST_BYTES:,}"
        )
    ends: list[list[float]] = [[] for _ in range(ranks)]

    def rank_main(context: Context) -> None:
        group = context.group()
        src, dst = (_parts(parts[context.rank], side) for side in ("src", "dst"))
        for _ in range(runs + 1):
            group.barrier(key="begin").wait()
            begun = time.perf_counter()
            plan.run(group, src=src, dst=dst, key="bench").wait()
            ends[context.rank].append(time.perf_counter() - begun)

    launch(ranks, rank_main, device="host")
    seconds = [max(each[run] for each in ends) for run in range(1, runs + 1)]
    return Timing(ranks, wanted, seconds)


_Shapes = dict[str, dict[str, tuple[list[int], DType]]]


def _shapes(plan: Plan, rank: int) -> _Shapes:
    """Of each side and name the part's shape and type."""
    types = plan.dtypes()
    found: _Shapes = {"src": {}, "dst": {}}
    for tensor in plan.rank(rank)["tensors"] if rank in plan.ranks() else []:
        for side, dtype in zip(("src", "dst"), types[tensor["name"]], strict=True):
            if tensor[side] is not None:
                found[side][tensor["name"]] = (tensor[side], dtype)
    return found


def _bytes(part: _Shapes, side: str) -> int:
    return sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in part[side].values())


def _parts(part: _Shapes, side: str) -> dict[str, Any]:
    """Words of as many bytes: NumPy has not all types, and their values do not matter."""
    return {name: np.zeros(shape, _WORDS[dtype]) for name, (shape, dtype) in part[side].items()}


_WORDS = {
    dtype: np.dtype(dtype.label)
    if dtype.label in ("float16", "float32", "float64") or "int" in dtype.label
    else np.dtype(f"uint{8 * dtype.itemsize}")
    for dtype in DType
}
