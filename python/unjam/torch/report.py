"""What process groups wait for."""

from __future__ import annotations

import json

from .. import context
from ._extension import extension


def explain() -> str:
    """What every rank of every job of this process waits for, as text.

    Process groups and unjam's own contexts alike: one line a pending operation, with who has called
    it and who has not. Asks the ranks of other processes, and waits a second at most for each job.
    """
    return context.explain()


def _jobs() -> list[tuple[int, dict]]:
    """(ranks, explanation) of each job that process groups have."""
    return [
        (world.size, json.loads(text)) for world in extension().worlds() for text in world.explain()
    ]


context.explained_too(_jobs)
