"""Where ranks call operations in different orders: harmless here, a hang under NCCL.

An operation is one use of one key of one group. Two that two ranks have both called cross if the
two ranks called them in different orders.
"""

from __future__ import annotations

import atexit
import itertools
import json
import sys
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ._extension import extension


@dataclass(frozen=True)
class Crossing:
    """Ranks ``rank`` and ``other`` called ``first`` and ``second`` in different orders.

    Each is (group, key, use, what): the use-th call, from 0, under that key.
    """

    rank: int
    other: int
    first: tuple[str, str, int, str]
    second: tuple[str, str, int, str]

    def __str__(self) -> str:
        first, second = (_text(call) for call in (self.first, self.second))
        return (
            f"rank {self.rank} calls {first} before {second}; rank {self.other} calls them the "
            "other way round"
        )


_uses: dict[tuple[str, str], int] = defaultdict(int)
_comparisons = itertools.count()
_mode = "off"


def check_order(mode: str = "warn") -> list[Crossing]:
    """Records the order of this rank's calls, and compares it with the other ranks'.

    Call it once after ``init_process_group`` on all ranks, which starts recording, and again on all
    ranks (each at its own time, but as often on each) to compare what was called since. With
    "warn", rank 0 prints the crossings, and what was recorded last is compared when the process
    ends. unjam runs crossed calls; NCCL can hang on them.

    Args:
        mode: "warn": rank 0 prints them on standard error; "list": they are only returned; "off":
            recording ends.

    Returns:
        On rank 0 the crossings since the last call, at most 100; elsewhere an empty list.
    """
    global _mode
    if mode not in ("warn", "list", "off"):
        raise ValueError(f'mode is {mode!r}: it is "warn", "list" or "off"')
    recorded = _mode != "off"
    crossings = _compare(timedelta(minutes=5)) if recorded else []
    if mode == "warn" and not recorded:
        atexit.register(_at_exit)
    _mode = mode
    extension().log_calls(mode != "off")
    if mode == "warn":
        _print(crossings)
    return crossings


def _take() -> list[tuple[str, str, int, str]]:
    """This rank's calls since the last time, each with its number among those of its key."""
    calls = []
    for group, key, what in extension().take_calls():
        if what in ("send", "recv", "recv from any source"):
            continue  # they concern two ranks only; their tags order them
        number = _uses[group, key]
        _uses[group, key] += 1
        calls.append((group, key, number, what))
    return calls


def _compare(patience: timedelta) -> list[Crossing]:
    """Every rank tells what it called; rank 0 reads it all, and waits so long for it."""
    store = dist.distributed_c10d._get_default_store()
    rank, size = dist.get_rank(), dist.get_world_size()
    prefix = f"unjam/order/{next(_comparisons)}"
    store.set(f"{prefix}/{rank}", json.dumps(_take()))
    if rank != 0:
        return []
    store.wait([f"{prefix}/{r}" for r in range(size)], patience)
    calls = [
        [tuple(call) for call in json.loads(store.get(f"{prefix}/{r}").decode())]
        for r in range(size)
    ]
    return crossings(calls)


def crossings(calls: list[list[Any]], limit: int = 100) -> list[Crossing]:
    """The neighbouring pairs among what two ranks both called that are in different orders."""
    places = [{call: i for i, call in enumerate(own)} for own in calls]
    found = []
    for rank, other in itertools.combinations(range(len(calls)), 2):
        common = [call for call in calls[rank] if call in places[other]]
        for first, second in itertools.pairwise(common):
            if places[other][first] > places[other][second]:
                found.append(Crossing(rank, other, first, second))
                if len(found) == limit:
                    return found
    return found


def _print(found: list[Crossing]) -> None:
    for crossing in found:
        print(f"unjam: order: {crossing}", file=sys.stderr, flush=True)


def _at_exit() -> None:
    if _mode == "warn" and dist.is_initialized():
        with suppress(RuntimeError):  # a rank has ended without telling
            _print(_compare(timedelta(seconds=5)))


def _text(call: tuple[str, str, int, str]) -> str:
    group, key, number, what = call
    return f"{what} (use {number + 1} of key {key!r} of group {group!r})"
