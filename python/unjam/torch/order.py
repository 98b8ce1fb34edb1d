"""Where ranks call operations in different orders: harmless here, a hang under NCCL.

An operation is one use of one key of one group; a send and its receive are one. Two that two ranks
have both called cross if the two ranks called them in different orders. Where no two cross, more
can still stand in a circle, each before the next on some rank. Sends and receives that no
collective separates count as one batch: their order among each other says nothing.

Calls of one key meet in the order in which each rank makes them, so crossed calls of one key do
not show as such: if they are of one size, they meet the wrong ones, and nobody is told. What can be
seen is that two ranks make calls that meet at the same places of the program, with tensors of the
same shapes, but each rank in another order.
"""

from __future__ import annotations

import atexit
import hashlib
import itertools
import json
import os
import sys
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any

import torch.distributed as dist

from . import _internals
from ._extension import extension
from ._store import wait_for

Call = tuple[str, str, int, str]
# A rank also tells what of a call the ranks agree on, its first tensor, and where it was made.
Mark = tuple[str, str, str]
_BETWEEN_TWO = "send from rank "


@dataclass(frozen=True)
class Crossing:
    """Ranks ``rank`` and ``other`` called ``first`` and ``second`` in different orders.

    Each is (group, key, use, what): the use-th call, from 0, under that key.
    """

    rank: int
    other: int
    first: Call
    second: Call

    def __str__(self) -> str:
        first, second = (_text(call) for call in (self.first, self.second))
        return (
            f"rank {self.rank} calls {first} before {second}; rank {self.other} calls them the "
            "other way round"
        )


@dataclass(frozen=True)
class Cycle:
    """A circle of operations, no two of which cross: each stands before the next on some rank.

    ``steps`` are (rank, first, second): this rank called ``first`` before ``second``, which is the
    next step's ``first``; the last step's ``second`` is the first one's ``first``.
    """

    steps: tuple[tuple[int, Call, Call], ...]

    def __str__(self) -> str:
        steps = [f"rank {rank} calls {_text(a)} before {_text(b)}" for rank, a, b in self.steps]
        return "; ".join(steps) + ": a circle"


@dataclass(frozen=True)
class Mixed:
    """Calls of one key that seem to meet the wrong ones.

    ``rank`` and ``other`` make them at the same places, in different orders. ``uses`` are (call,
    place on ``rank``, place on ``other``): of uses of the key that meet. What one rank calls at a
    place, the other one calls there, too, as another use.
    """

    rank: int
    other: int
    uses: tuple[tuple[Call, str, str], ...]

    def __str__(self) -> str:
        group, key, _, what = self.uses[0][0]
        uses = "; ".join(
            f"in use {call[2] + 1} rank {self.rank} calls {here}, rank {self.other} {there}"
            for call, here, there in self.uses
        )
        return (
            f"ranks {self.rank} and {self.other} seem to make calls of {what} (key {key!r} of "
            f"group {group!r}) in different orders, so results are mixed up: {uses}. Give each "
            'call a key of its own: with unjam.key("name")'
        )


_uses: dict[tuple[str, str, str], int] = defaultdict(int)
_comparisons = itertools.count()
_mode = "off"


Finding = Crossing | Cycle | Mixed


def check_order(mode: str = "warn") -> list[Finding]:
    """Records the order of this rank's calls, and compares it with the other ranks'.

    Call it once after ``init_process_group`` on all ranks, which starts recording, and again on all
    ranks (each at its own time, but as often on each) to compare what was called since. With
    "warn", rank 0 prints the crossings, and what was recorded last is compared when the process
    ends. unjam runs crossed calls; NCCL can hang on them.

    Of calls under one key, or without any, it finds those that meet the wrong ones where ranks make
    them at the same lines of the program, or with tensors of the same shapes, in different orders.
    It does not where nothing tells them apart: calls of one line, in a loop, with tensors of one
    shape, or calls that no Python code makes. Ranks that share out different lines by turns on
    purpose are reported, too.

    Args:
        mode: "warn": rank 0 prints them on standard error; "list": they are only returned; "off":
            recording ends.

    Returns:
        On rank 0 the crossings since the last call, circles of operations that do not cross, and
        calls of one key that seem to be mixed up, at most 100; elsewhere an empty list.
    """
    global _mode
    if mode not in ("warn", "list", "off"):
        raise ValueError(f'mode is {mode!r}: it is "warn", "list" or "off"')
    recorded = _mode != "off"
    crossings = _compare(timedelta(minutes=5)) if recorded else []
    if mode == "warn" and not recorded:
        atexit.register(_at_exit)
    _mode = mode
    extension().log_calls(mode != "off", _call_site if mode != "off" else None)
    if mode == "warn":
        _print(crossings)
    return crossings


def _call_site() -> str:
    """Where in the program the caller is: its line, and a digest of those that have led there.

    Lines of torch and of unjam are left out, and folders, which need not be the same on all ranks.
    """
    lines = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in ("torch", "unjam"):
            lines.append(f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}")
        frame = frame.f_back
    if not lines:
        return ""
    return f"{lines[0]} ({hashlib.sha256(' '.join(lines).encode()).hexdigest()[:6]})"


def _take() -> tuple[list[Call], list[Mark]]:
    """This rank's calls since the last time, each with its number among those of its key."""
    calls, marks = [], []
    for group, key, what, source, destination, *mark in extension().take_calls():
        if what == "recv from any source":
            continue  # which send it is, the caller does not say
        if 0 <= source == destination:
            continue  # nobody else has it
        if source >= 0:
            what = f"{_BETWEEN_TWO}{source} to rank {destination}"  # noqa: PLW2901 - on both ends
        counted = (group, key, what if source >= 0 else "")
        calls.append((group, key, _uses[counted], what))
        marks.append(tuple(mark))
        _uses[counted] += 1
    return calls, marks


def _compare(patience: timedelta) -> list[Finding]:
    """Every rank tells what it called; rank 0 reads it all, and waits so long for it."""
    store = _internals.default_store()
    rank, size = dist.get_rank(), dist.get_world_size()
    prefix = f"unjam/order/{next(_comparisons)}"
    store.set(f"{prefix}/{rank}", json.dumps(_take()))
    if rank != 0:
        return []
    wait_for(store, [f"{prefix}/{r}" for r in range(size)], patience)
    told = [json.loads(store.get(f"{prefix}/{r}").decode()) for r in range(size)]
    calls = [[tuple(call) for call in own] for own, _ in told]
    marks = [[tuple(mark) for mark in own] for _, own in told]
    found: list[Finding] = [*found_in(calls)]
    return found + mixed(calls, marks, 100 - len(found))


def mixed(calls: list[list[Call]], marks: list[list[Mark]], limit: int = 100) -> list[Mixed]:
    """Calls of one key whose places two ranks come to in different orders.

    Uses of a key are steps from a place on one rank to that on the other. Where such steps lead
    back to where they began, both ranks come to all these places, in different orders. (Where they
    do not, ranks merely call at places of their own, as in ``if rank == 0: … else: …``.)
    """
    found: list[Mixed] = []
    known = [dict(zip(own, of, strict=True)) for own, of in zip(calls, marks, strict=True)]
    for rank, other in itertools.combinations(range(len(calls)), 2):
        # Two calls are taken for each other where all of this is the same.
        steps: dict[Any, dict[Any, dict[Any, Call]]] = defaultdict(lambda: defaultdict(dict))
        for call in calls[rank]:
            if call[3].startswith(_BETWEEN_TWO) or call not in known[other]:
                continue
            (rest, here, at), (_, there, other_at) = known[rank][call], known[other][call]
            alike = (call[0], call[1], call[3], rest)
            if (here, at) != (there, other_at):
                steps[alike][(at, here)].setdefault((other_at, there), call)
        for after in steps.values():
            for tangle in _tangles(after):
                if len(found) >= limit:
                    return found
                circle = _shortest(after, tangle).steps
                uses = sorted((call, _place(a), _place(b)) for call, a, b in circle)
                found.append(Mixed(rank, other, tuple(uses)))
    return found


def _place(place: tuple[str, str]) -> str:
    at, tensor = place
    return f"at {at or 'a place outside of Python'} with {tensor or 'no tensor'}"


def found_in(calls: list[list[Any]], limit: int = 100) -> list[Crossing | Cycle]:
    """What is wrong with the ranks' orders: crossings, then circles that are none."""
    crossed = crossings(calls, limit)
    return [*crossed, *cycles(calls, crossed, limit - len(crossed))]


def crossings(calls: list[list[Any]], limit: int = 100) -> list[Crossing]:
    """The neighbouring pairs among what two ranks both called that are in different orders."""
    places = [{call: i for i, call in enumerate(own)} for own in calls]
    found = []
    for rank, other in itertools.combinations(range(len(calls)), 2):
        common = [call for call in calls[rank] if call in places[other]]
        for first, second in _neighbours(common):
            if places[other][first] > places[other][second]:
                found.append(Crossing(rank, other, first, second))
                if len(found) == limit:
                    return found
    return found


def cycles(calls: list[list[Any]], crossed: list[Crossing], limit: int = 100) -> list[Cycle]:
    """One shortest circle in each tangle of operations in which none of ``crossed`` is."""
    after: dict[Call, dict[Call, int]] = defaultdict(dict)  # call -> next -> a rank that says so
    for rank, own in enumerate(calls):
        for first, second in _neighbours(own):
            after[first].setdefault(second, rank)
    known = {call for crossing in crossed for call in (crossing.first, crossing.second)}
    found: list[Cycle] = []
    for tangle in _tangles(after):
        if len(found) >= limit:
            break
        if known.isdisjoint(tangle):
            found.append(_shortest(after, tangle))
    return found


def _neighbours(own: list[Any]) -> Iterator[tuple[Call, Call]]:
    """Pairs of a rank's calls whose order counts, from which that of all others follows."""
    last: Call | None = None  # collective
    batch: list[Call] = []  # sends and receives since
    for call in own:
        if call[3].startswith(_BETWEEN_TWO):
            if last is not None:
                yield last, call
            batch.append(call)
            continue
        if batch:
            yield from ((earlier, call) for earlier in batch)
        elif last is not None:
            yield last, call
        last, batch = call, []


def _tangles(after: dict[Any, dict[Any, Any]]) -> Iterator[set[Any]]:
    """Sets of nodes each of which comes before, and after, every other (Tarjan's algorithm)."""
    number: dict[Any, int] = {}
    lowest: dict[Any, int] = {}
    open_: dict[Any, None] = {}
    for start in list(after):
        if start in number:
            continue
        path = [(start, iter(after.get(start, ())))]
        number[start] = lowest[start] = len(number)
        open_[start] = None
        while path:
            call, rest = path[-1]
            for following in rest:
                if following not in number:
                    number[following] = lowest[following] = len(number)
                    open_[following] = None
                    path.append((following, iter(after.get(following, ()))))
                    break
                if following in open_:
                    lowest[call] = min(lowest[call], number[following])
            else:
                path.pop()
                if path:
                    before = path[-1][0]
                    lowest[before] = min(lowest[before], lowest[call])
                if lowest[call] == number[call]:
                    tangle = set()
                    while call not in tangle:
                        tangle.add(open_.popitem()[0])
                    if len(tangle) > 1:
                        yield tangle


def _shortest(after: dict[Any, dict[Any, Any]], tangle: set[Any]) -> Cycle:
    """From one call of the tangle back to it; a rank's steps in a row are one."""
    start = min(tangle)
    came_from: dict[Any, Any] = {}
    todo = deque([start])
    while start not in came_from:
        call = todo.popleft()
        for following in after[call]:
            if following in tangle and following not in came_from:
                came_from[following] = call
                todo.append(following)
    steps: list[tuple[Any, Any, Any]] = []
    call = start
    while call != start or not steps:
        before = came_from[call]
        rank = after[before][call]
        if steps and steps[-1][0] == rank:
            steps[-1] = (rank, before, steps[-1][2])
        else:
            steps.append((rank, before, call))
        call = before
    if len(steps) > 1 and steps[0][0] == steps[-1][0]:  # around the start
        last = steps.pop()
        steps[0] = (last[0], steps[0][1], last[2])
    return Cycle(tuple(reversed(steps)))


def _print(found: Sequence[Finding]) -> None:
    for crossing in found:
        print(f"unjam: order: {crossing}", file=sys.stderr, flush=True)


def _at_exit() -> None:
    if _mode == "warn" and dist.is_initialized():
        with suppress(RuntimeError):  # a rank has ended without telling
            _print(_compare(timedelta(seconds=5)))


def _text(call: Call) -> str:
    group, key, number, what = call
    return f"{what} (use {number + 1} of key {key!r} of group {group!r})"
