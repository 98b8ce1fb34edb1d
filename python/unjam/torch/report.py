"""What process groups wait for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from .. import context
from ._extension import extension


def explain() -> str:
    """What every rank of every job of this process waits for, as text.

    Process groups and unjam's own contexts alike: one line a pending operation, with who has called
    it and who has not. Asks the ranks of other processes, and waits a second at most for each job.
    """
    return context.explain()


def _jobs() -> list[tuple[int, dict[str, Any]]]:
    """(ranks, explanation) of each job that process groups have."""
    found = []
    for world in extension().worlds():
        jobs = [json.loads(text) for text in world.explain()]
        if len(jobs) == 2:  # CPU tensors', and CUDA tensors'
            _name_other_tensors(jobs[0], jobs[1], "CUDA")
            _name_other_tensors(jobs[1], jobs[0], "CPU")
        found += [(world.size, job) for job in jobs]
    return found


def _name_other_tensors(job: dict[str, Any], other: dict[str, Any], kind: str) -> None:
    """Adds to calls of ``job`` who has made them in ``other``, which neither job knows."""
    for rank, call in _pending(job):
        for peer, theirs in _pending(other):
            if (
                peer in call["not_called_by"]
                and rank in theirs["not_called_by"]
                and (call["group"], call["key"]) == (theirs["group"], theirs["key"])
            ):
                words = f"rank {peer} has called {theirs['what']} with {kind} tensors"
                call["instead"] = "; ".join(filter(None, (call["instead"], words)))


def _pending(job: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    return ((rank["rank"], call) for rank in job["ranks"] for call in rank["pending"])


context.explained_too(_jobs)
