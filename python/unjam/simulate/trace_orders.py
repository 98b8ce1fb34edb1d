"""Orders in which ranks call collectives: one for all, how far each departs from it, cycles.

Every step costs about as much for the last call of a trace as for the first: traces of a whole run
have hundreds of thousands.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from .job import Group


@dataclass(frozen=True)
class Edge:
    """Rank `rank` called `before` before `after`."""

    rank: int
    before: tuple[int, int]
    after: tuple[int, int]


def reference_order(
    orders: Sequence[Sequence[tuple[int, int]]],
    groups: Sequence[Group],
    time: dict[tuple[int, int], float],
) -> list[tuple[int, int]]:
    """One order for all that departs from the ranks' orders as little as it can be seen to.

    Takes what all members have next; the earliest, if there are several. Where nothing is next for
    all (a cycle), what most are ready for.
    """
    position = [0] * len(orders)
    taken = [0] * len(groups)  # of each group, whose collectives are taken by number
    waiting: dict[tuple[int, int], list[int]] = defaultdict(list)  # ranks that have it next
    # What is next for anybody, best first. An entry is out of date once its collective is taken, or
    # more ranks have it next: each pays for its own entry, and the order costs no more than that.
    heap: list[tuple[float, float, tuple[int, int], int]] = []
    result: list[tuple[int, int]] = []

    def advance(rank: int) -> None:
        order = orders[rank]
        while position[rank] < len(order):
            head = order[position[rank]]
            if head[1] >= taken[head[0]]:
                ready = waiting[head]
                ready.append(rank)
                share = len(ready) / len(groups[head[0]].gpus)
                heapq.heappush(heap, (-share, time[head], (-head[0], -head[1]), len(ready)))
                return
            position[rank] += 1

    for rank in range(len(orders)):
        advance(rank)
    while heap:
        _, _, (group, number), count = heap[0]
        best = (-group, -number)
        if best[1] < taken[best[0]] or count != len(waiting[best]):
            heapq.heappop(heap)
            continue
        # A group's collectives are numbered in its own order, which the reference must keep.
        first = (best[0], taken[best[0]])
        taken[first[0]] += 1
        result.append(first)
        for rank in waiting.pop(first, ()):
            advance(rank)
    return result


def count_skips(
    orders: Sequence[Sequence[tuple[int, int]]], reference: Sequence[tuple[int, int]]
) -> tuple[int, int]:
    """How often ranks skipped an entry of the reference, and how often they could have."""
    rank_of = {collective: place for place, collective in enumerate(reference)}
    skips = looks = 0
    for order in orders:
        places = _as_permutation([rank_of[collective] for collective in order])
        early = _Ones(len(places))  # taken before something that stands in front of it
        front, gone = 0, bytearray(len(places))
        for done, place in enumerate(places):
            gone[place] = 1
            # Those in front of it that are still there.
            skipped = place - front - early.before(place) if place != front else 0
            if place != front:
                early.set(place)
            while front < len(places) and gone[front]:
                if front != place:
                    early.clear(front)
                front += 1
            skips += skipped
            # The last entry is taken without a choice.
            looks += min(skipped + 1, len(places) - done - 1)
    return skips, looks


def _as_permutation(values: Sequence[int]) -> list[int]:
    """The place of each of them among them all in their order."""
    rank_of = {value: place for place, value in enumerate(sorted(values))}
    return [rank_of[value] for value in values]


class _Ones:
    """A set of places; counts those in front of one in the logarithm of their number."""

    def __init__(self, places: int) -> None:
        self._sums = [0] * (places + 1)

    def _add(self, place: int, step: int) -> None:
        place += 1
        while place < len(self._sums):
            self._sums[place] += step
            place += place & -place

    def set(self, place: int) -> None:
        self._add(place, 1)

    def clear(self, place: int) -> None:
        self._add(place, -1)

    def before(self, place: int) -> int:
        found = 0
        while place:
            found += self._sums[place]
            place -= place & -place
        return found


def find_cycle(orders: Sequence[Sequence[tuple[int, int]]]) -> list[Edge]:
    """A cycle, [] if there is none: the shortest through the collectives that are looked at.

    As many of those in cycles are looked at as cost no more than some passes over all.
    """
    following: dict[tuple[int, int], list[tuple[int, tuple[int, int]]]] = {}
    leading: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for rank, order in enumerate(orders):
        for place, collective in enumerate(order):
            following.setdefault(collective, [])
            leading.setdefault(collective, [])
            if place + 1 < len(order):
                following[collective].append((rank, order[place + 1]))
                leading.setdefault(order[place + 1], []).append(collective)
    # What nothing in a cycle leads to, and what leads to nothing in a cycle.
    left = dict.fromkeys(following)
    _peel(left, {c: len(those) for c, those in leading.items()},
          {c: [after for _, after in those] for c, those in following.items()})  # fmt: skip
    _peel(left, {c: sum(after in left for _, after in following[c]) for c in left}, leading)
    if not left:
        return []
    best: list[Edge] = []
    budget = 4 * len(following) + 100_000
    for start in (_in_a_cycle(following, left), *left):
        path, seen = _shortest_way_back(start, following, left, len(best))
        best = path or best
        budget -= seen
        if budget < 0:
            break
    return _merge_steps(best)


def _in_a_cycle(
    following: dict[tuple[int, int], list[tuple[int, tuple[int, int]]]],
    left: dict[tuple[int, int], None],
) -> tuple[int, int]:
    """One that is: from each of `left` a step leads to another, so that a walk comes back."""
    at = next(iter(left))
    passed = set()
    while at not in passed:
        passed.add(at)
        at = next(after for _, after in following[at] if after in left)
    return at


def _peel(
    left: dict[tuple[int, int], None],
    degree: dict[tuple[int, int], int],
    onward: dict[tuple[int, int], list[tuple[int, int]]],
) -> None:
    """Takes out of `left` whose degree is 0, and so on; each lowers those that come after it."""
    free = [collective for collective in left if degree[collective] == 0]
    while free:
        collective = free.pop()
        del left[collective]
        for after in onward[collective]:
            if after in left:
                degree[after] -= 1
                if degree[after] == 0:
                    free.append(after)


def _shortest_way_back(
    start: tuple[int, int],
    following: dict[tuple[int, int], list[tuple[int, tuple[int, int]]]],
    among: dict[tuple[int, int], None],
    limit: int,
) -> tuple[list[Edge], int]:
    """The steps from `start` to itself, if fewer than `limit` (0: any), and how many were seen."""
    came: dict[tuple[int, int], Edge] = {}
    ring, length = [start], 0
    while ring and not 0 < limit <= length + 1:
        length += 1
        outside = []
        for collective in ring:
            for rank, after in following[collective]:
                if after not in among or after in came:
                    continue
                came[after] = Edge(rank, collective, after)
                if after == start:
                    path = [came[start]]
                    while path[-1].before != start:
                        path.append(came[path[-1].before])
                    return path[::-1], len(came)
                outside.append(after)
        ring = outside
    return [], len(came)


def _merge_steps(path: list[Edge]) -> list[Edge]:
    """One edge for consecutive ones of a rank."""
    merged: list[Edge] = []
    for edge in path:
        if merged and merged[-1].rank == edge.rank:
            merged[-1] = Edge(edge.rank, merged[-1].before, edge.after)
        else:
            merged.append(edge)
    if len(merged) > 1 and merged[0].rank == merged[-1].rank:
        last = merged.pop()
        merged[0] = Edge(last.rank, last.before, merged[0].after)
    return merged
