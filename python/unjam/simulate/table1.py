"""Table 1 of the DFCCL paper, beside what both semantics give."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from .engine import Result, Simulator
from .files import JobFile, read_job

PAPER_ROUNDS = 32_000
Z999 = 3.2905267314918945  # of a two-sided 99.9 % interval


@dataclass(frozen=True)
class Row:
    """A row of the table and what it gave here."""

    file: JobFile
    result: Result

    @property
    def paper(self) -> float:
        return float(self.file.paper["ratio"])

    def differs(self, semantics: str) -> bool:
        """Whether the printed ratio and ours cannot both be chance (99.9 %)."""
        return differ(
            self.paper * PAPER_ROUNDS, PAPER_ROUNDS, self.result.hits(semantics), self.result.rounds
        )

    @property
    def why(self) -> str:
        return str(self.file.paper.get("why", "no explanation is known"))

    def as_dict(self) -> dict[str, Any]:
        found = self.result.as_dict()
        found["paper"] = self.paper
        for kind in ("released", "exact"):
            found[kind]["differs"] = self.differs(kind)
        if self.differs("released") or self.differs("exact"):
            found["why"] = self.why
        return found


def differ(hits_a: float, rounds_a: int, hits_b: float, rounds_b: int, z: float = Z999) -> bool:
    """Whether two measured ratios are further apart than their joint interval."""
    if rounds_a == 0 or rounds_b == 0:
        return False
    pooled = (hits_a + hits_b) / (rounds_a + rounds_b)
    spread = math.sqrt(pooled * (1 - pooled) * (1 / rounds_a + 1 / rounds_b))
    return abs(hits_a / rounds_a - hits_b / rounds_b) > z * spread


def files() -> list[Path]:
    """The ready-made files, in the order of the table."""
    folder = Path(str(resources.files(__package__).joinpath("table1")))
    return sorted(folder.glob("*.toml"))


def run(
    rounds: int = PAPER_ROUNDS,
    threads: int | None = None,
    begin: Callable[[str], Callable[[int], None] | None] | None = None,
) -> Iterator[Row]:
    """Runs row after row; stops after one that was interrupted.

    Args:
        rounds: of each row.
        threads: as for :meth:`Simulator.run`.
        begin: called with a row's name; gives what to call with rounds done.
    """
    for path in files():
        file = read_job(path)
        with Simulator(file.job) as simulator:
            progress = begin(path.stem) if begin else None
            result = simulator.run(rounds, "both", threads, progress=progress)
        yield Row(file, result)
        if result.stopped:
            return
