"""The parent's side of ``unjam bench --gemm``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import unjam

from . import messages
from .figures import quantile
from .job import Job
from .rows import Row


@dataclass(frozen=True)
class GemmSweep:
    """What to measure.

    Attributes:
        lanes: unjam's, one setting after the other; NCCL has as many channels. A block each.
        ranks: how many, a GPU each.
        peer: "nccl" or "none".
        size: rows and columns of the bf16 product.
        nbytes: of an all-reduce.
        times: measurements of each kind and setting.
        limit_s: the longest that a setting may take.
        registered: what is reduced lies in memory that is registered with unjam (of NCCL's calls,
            too, to which that is nothing).
    """

    lanes: tuple[int, ...]
    ranks: int
    peer: str = "nccl"
    size: int = 8192
    nbytes: int = 1 << 30
    times: int = 7
    limit_s: float = 120.0
    registered: bool = False

    @property
    def ways(self) -> int:
        """Rows of a setting: alone, and beside calls that move data, and that wait."""
        return 5 if self.peer == "none" else 7


def run_gemm(sweep: GemmSweep, on_row: Callable[[Row], object]) -> list[Row]:
    """A row for each setting of lanes and each way of communicating.

    Raises:
        BenchError: a rank died, hung or failed.
    """
    rows: list[Row] = []
    for lanes in sweep.lanes:
        # NCCL reads this once, as its first communicator is made: so each setting has its own job.
        channels = {name: str(lanes) for name in ("NCCL_MIN_CTAS", "NCCL_MAX_CTAS")}
        with Job(
            sweep.ranks, sweep.peer, sweep.limit_s, device="cuda", environment=channels
        ) as job:
            answers: list[list[Any]] = job.ask(
                messages.Gemm(
                    unjam.unique_id(),
                    lanes,
                    sweep.size,
                    sweep.nbytes,
                    sweep.times,
                    sweep.registered,
                )
            )
        for row in make_rows(sweep, lanes, answers):
            rows.append(row)
            on_row(row)
    return rows


def make_rows(sweep: GemmSweep, lanes: int, answers: list[list[Any]]) -> list[Row]:
    """Rows of one setting, from each rank's ``gemm.Answer``: the slowest rank of a measurement."""
    rows = []
    alone = 0.0
    for ways in zip(*answers, strict=True):
        times = [max(of_ranks) for of_ranks in zip(*(way.ms for way in ways), strict=True)]
        ms = median(times)
        if ways[0].name == "alone":
            alone = ms
        nanoseconds = [round(1e6 * one) for one in times]
        rows.append(
            {
                "lanes": lanes,
                "ranks": sweep.ranks,
                "bytes": sweep.nbytes,
                "size": sweep.size,
                "beside": ways[0].name,
                "buffers": "registered" if sweep.registered else "own",
                "ms": round(ms, 4),
                "low_ms": round(1e-6 * quantile(nanoseconds, 0.1), 4),
                "high_ms": round(1e-6 * quantile(nanoseconds, 0.9), 4),
                "slowdown": round(ms / alone, 3) if alone else None,
                "busbw": round(min(way.busbw for way in ways), 1),
                "covered": all(way.covered for way in ways),
                "blocks": max(way.blocks for way in ways),
            }
        )
    return rows
