"""Counters of a context."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Stats:
    """Counters of one rank since its context began, summed over its lanes (blocks).

    ``later - earlier`` gives what happened between two snapshots; ``a + b`` sums ranks.

    Attributes:
        submitted: invocations.
        completed: invocations that ended, in error too.
        pending: invocations now.
        preemptions: times that a collective gave way because a wait passed its threshold.
        quantum_switches: times that a progressing collective gave way after its turn.
        context_loads: contexts loaded into an engine: the context switches.
        context_saves: contexts saved; lazily, only those that had changed.
        spins: failed polls.
        slices: executions of a primitive that moved data.
        bytes_sent: payload sent to peers.
        borrowed: slices that went through a pool slot.
        starts: engine starts.
        quits: voluntary quits of an engine.
        residency_quits: those of them because the longest stay was over.
        lanes: blocks of the rank.
        idle_quits: quits because nothing was pending.
        stuck_quits: quits because nothing of what was pending could move. (The rest of the quits
            were called away.)
    """

    submitted: int = 0
    completed: int = 0
    pending: int = 0
    preemptions: int = 0
    quantum_switches: int = 0
    context_loads: int = 0
    context_saves: int = 0
    spins: int = 0
    slices: int = 0
    bytes_sent: int = 0
    borrowed: int = 0
    starts: int = 0
    quits: int = 0
    residency_quits: int = 0
    lanes: int = 0
    idle_quits: int = 0
    stuck_quits: int = 0

    @property
    def preemptions_per_block(self) -> float:
        """Preemptions for each block, as the paper counts them."""
        return self.preemptions / self.lanes if self.lanes else 0.0

    def __sub__(self, earlier: Stats) -> Stats:
        return self._combine(earlier, -1)

    def __add__(self, other: Stats) -> Stats:
        return self._combine(other, 1)

    def _combine(self, other: Stats, sign: int) -> Stats:
        values = {
            field.name: getattr(self, field.name) + sign * getattr(other, field.name)
            for field in fields(self)
        }
        if sign < 0:  # states, not counters
            values["pending"] = self.pending
            values["lanes"] = self.lanes
        return Stats(**values)

    @classmethod
    def from_struct(cls, struct: Any) -> Stats:
        """From the C API's struct."""
        return cls(**{field.name: getattr(struct, field.name) for field in fields(cls)})
