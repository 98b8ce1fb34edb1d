"""Where ranks meet before each repetition, outside the timed part."""

from __future__ import annotations

import mmap
import os
import time

_LINE = 8  # words: every rank's count has a cache line of its own


class SharedBarrier:
    """A barrier of processes: one count a rank, in memory that all have mapped.

    Nothing sleeps in it, so ranks leave it as close together as their cores allow; waiting ranks
    yield, because there may be fewer cores than ranks.
    """

    def __init__(self, descriptor: int, rank: int, ranks: int, limit_s: float) -> None:
        """Maps the memory.

        Args:
            descriptor: from :meth:`make`, inherited; stays the caller's.
            rank: this one.
            ranks: how many.
            limit_s: how long :meth:`wait` waits.
        """
        self._counts = memoryview(mmap.mmap(descriptor, ranks * _LINE * 8)).cast("Q")
        self._rank = rank
        self._ranks = ranks
        self._limit_s = limit_s
        self._passed = 0

    @staticmethod
    def make(ranks: int) -> int:
        """Memory for a barrier: a descriptor that belongs to the caller."""
        descriptor = os.memfd_create("unjam-bench-barrier")
        os.truncate(descriptor, ranks * _LINE * 8)
        return descriptor

    def wait(self) -> None:
        """Returns when all ranks have called it as often as this one.

        Raises:
            TimeoutError: a rank did not come; the message names it.
        """
        self._passed += 1
        counts, passed = self._counts, self._passed
        counts[self._rank * _LINE] = passed
        deadline = 0.0
        for other in range(self._ranks):
            while counts[other * _LINE] < passed:
                os.sched_yield()
                if not deadline:
                    deadline = time.monotonic() + self._limit_s
                elif time.monotonic() > deadline:
                    raise TimeoutError(
                        f"rank {other} did not come to a barrier for {self._limit_s:g} s"
                    )
