"""Limits of the C library, which Python looks at before numbers are cut to C's types.

``tests/python/test_limits.py`` tries them at the library, on both sides of each.
"""

from __future__ import annotations

RANKS = 65_535
"""Of a job (kMaxRanks)."""

PLANNED_RANKS = 65_000
"""Of a group whose plans are checked (kMaxGroupRanks)."""

TIMED_RANKS = 1 << 20
"""Of a group that the clock times (kMostClockRanks)."""

LANES = 32
"""Of a rank (kMaxLanes)."""

CHECKED_SLOTS = 1024
"""Guaranteed slots that the plan checker models (kMaxCheckedSlots)."""

SIMULATOR_THREADS = 1024
"""Of one simulation."""

COUNT = 2**64 - 1
"""Elements that size_t can say; what is too many for a plan is told by the library."""

DELAY_SEED = 2**63 - 1
"""Of UNJAM_DELAY_SEED; the library would drop the highest bit."""
