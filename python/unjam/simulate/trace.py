"""Takes a job from what torch recorded of a real run.

Reads flight-recorder dumps (pickles, loaded without running anything in them, or their JSON form)
and profiler traces (Chrome JSON, also gzipped) of all ranks: who is in which group, in which order
each rank called its collectives, how far the orders differ, how often it synchronised its GPU.
"""

from __future__ import annotations

import bisect
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .engine import wilson
from .errors import InputError
from .job import Group, Job
from .trace_files import RankTrace, read_rank
from .trace_orders import Edge, count_skips, find_cycle, reference_order

_MOST_LINES = 20  # of one kind
_MONOTONE = 0.1  # up to here, more disorder never makes a hang less likely


@dataclass
class Trace:
    """What all ranks' traces say together. Groups and ranks are numbered as in :meth:`job`."""

    ranks: list[int]
    groups: list[Group]
    ops: dict[tuple[int, int], str]
    orders: list[list[tuple[int, int]]]  # each rank's collectives (group, index)
    reference: list[tuple[int, int]]
    cycle: list[Edge]
    skips: int
    looks: int
    syncs: int | None
    dropped: int
    mismatches: list[str]
    hang: list[str]  # a cycle through calls that some ranks had not made, in words
    unknown: list[str]  # why the traces do not tell of some calls whether they were made
    more_unknown: int  # lines that are not in `unknown`

    @property
    def calls(self) -> int:
        return sum(len(order) for order in self.orders)

    @property
    def disorder(self) -> tuple[float, float, float]:
        """Measured disorder probability, and its 95 % interval."""
        low, high = wilson(self.skips, self.looks)
        return (self.skips / self.looks if self.looks else 0.0), low, high

    @property
    def sync(self) -> float | None:
        """Measured synchronisation probability; None if the traces do not tell."""
        if self.syncs is None:
            return None
        return self.syncs / (self.syncs + self.calls)

    def job(self, **settings: Any) -> Job:
        """The traced stretch as a round, with the measured probabilities unless others are given.

        Where no disorder was seen, the upper end of its 95 % interval is taken.
        """
        measured, _, high = self.disorder
        settings.setdefault("disorder", measured or high)
        if settings.get("model") == "synchronization" and self.sync is not None:
            settings.setdefault("sync", min(self.sync, 0.999))
        if settings.setdefault("order", "explicit") == "explicit":
            settings["sequence"] = [group for group, _ in self.reference]
        return Job(gpus=len(self.ranks), groups=self.groups, name="trace", **settings)

    def bounds(self, job: Job) -> bool:
        """Whether the job's risk is an upper limit: no disorder was seen, in enough looks."""
        high = self.disorder[2]
        return self.skips == 0 and job.disorder == high and high <= _MONOTONE

    def name(self, collective: tuple[int, int]) -> str:
        group, index = collective
        label = self.groups[group].name or f"group {group}"
        return f"{self.ops[collective]} {index} of {label}"

    def cycle_lines(self) -> Iterator[str]:
        for edge in self.cycle:
            yield (
                f"  rank {edge.rank} called {self.name(edge.before)} before {self.name(edge.after)}"
            )

    def summary(self, job: Job) -> Iterator[str]:
        """What was measured, in words."""
        yield (
            f"{len(self.ranks)} ranks, {len(self.groups)} groups, {self.calls:,} calls"
            + (f" ({self.dropped:,} dropped: not in all ranks' traces)" if self.dropped else "")
        )
        for group in self.groups:
            ranks = ", ".join(str(self.ranks[gpu]) for gpu in group.gpus)
            yield f"  {group.name}: ranks {ranks}; {group.collectives} collectives"
        yield from (f"  disagreement: {text}" for text in self.mismatches)
        measured, low, high = self.disorder
        yield (
            f"disorder: {self.skips} of {self.looks:,} looks at a list skipped an entry: "
            f"{measured:.3g} (95 %: {low:.3g} to {high:.3g})"
        )
        if self.skips == 0 and job.disorder == high:
            if self.bounds(job):
                yield f"  none was seen, so the risk is an upper limit, for {high:.3g}"
            else:
                yield (
                    f"  none was seen, but in too few looks to bound the risk: it is given for "
                    f"{high:.3g}, which is no limit"
                )
        if self.sync is None:
            yield "synchronisations: these traces do not tell; --sync gives a probability"
        else:
            yield f"synchronisations: {self.syncs} beside {self.calls:,} calls: {self.sync:.3g}"
        if self.cycle:
            yield (
                "The traced orders themselves hold a cycle: in one queue a GPU, this very run "
                "deadlocks."
            )
            yield from self.cycle_lines()
        elif self.hang:
            yield "When the traces end, ranks stand in a cycle: in one queue a GPU, they hang."
            yield from (f"  {line}" for line in self.hang)
        else:
            yield "The traced orders hold no cycle." + (
                " Nor do the calls that were dropped." if self.dropped else ""
            )
        yield from (f"not known: {text}" for text in self.unknown)
        if self.more_unknown:
            yield f"not known: {self.more_unknown:,} more of that kind"

    def as_dict(self) -> dict[str, Any]:
        measured, low, high = self.disorder
        return {
            "ranks": self.ranks,
            "groups": [
                {
                    "name": group.name,
                    "ranks": [self.ranks[gpu] for gpu in group.gpus],
                    "collectives": group.collectives,
                }
                for group in self.groups
            ],
            "calls": self.calls,
            "dropped": self.dropped,
            "mismatches": self.mismatches,
            "disorder": {
                "skips": self.skips,
                "looks": self.looks,
                "measured": measured,
                "low": low,
                "high": high,
                "seen": self.skips > 0,
            },
            "sync": self.sync,
            "cycle": [
                {
                    "rank": edge.rank,
                    "before": self.name(edge.before),
                    "after": self.name(edge.after),
                }
                for edge in self.cycle
            ],
            "hang": self.hang,
            "unknown": self.unknown,
        }


def read_traces(paths: Sequence[Path]) -> Trace:
    """Reads the traces of all ranks.

    Args:
        paths: one file a rank, or folders of them.

    Raises:
        InputError: a file cannot be read, is truncated, or the ranks' files do not belong together.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files += sorted(p for p in path.iterdir() if p.is_file() and p.name[0] != ".")
        else:
            files.append(path)
    if not files:
        raise InputError("trace", "there are no files")
    ranks: dict[int, RankTrace] = {}
    for path in files:
        try:
            trace = read_rank(path)
        except InputError as error:
            error.file = error.file or str(path)
            raise
        if trace.rank in ranks:
            raise InputError(
                "rank", f"{trace.rank} is also that of {ranks[trace.rank].file}", file=str(path)
            )
        ranks[trace.rank] = trace
    return _combine([ranks[rank] for rank in sorted(ranks)])


def _members_of(ranks: list[RankTrace]) -> tuple[dict[str, set[int]], dict[str, str]]:
    """The ranks and the name of each group.

    Raises:
        InputError: there is no group, or a rank of one has no trace.
    """
    known = {trace.rank for trace in ranks}
    members: dict[str, set[int]] = {}
    names: dict[str, str] = {}
    for trace in ranks:
        for call in trace.calls:
            members.setdefault(call.group, set()).add(trace.rank)
            names[call.group] = trace.names.get(call.group, "")
    if not members:
        raise InputError("entries", "no collective is in these traces")
    for trace in ranks:
        for group, listed in trace.members.items():
            if group not in members or trace.rank not in listed:
                continue
            missing = sorted(set(listed) - known)
            if missing:
                raise InputError(
                    "trace",
                    f"group {group} has rank {missing[0]}, whose trace is missing",
                    file=str(trace.file),
                )
            members[group] |= set(listed)
    return members, names


def _combine(ranks: list[RankTrace]) -> Trace:
    members, names = _members_of(ranks)
    # The ring buffers of the ranks may begin and end at different collectives.
    seqs: dict[int, dict[str, set[int]]] = {}
    for trace in ranks:
        own: defaultdict[str, set[int]] = defaultdict(set)
        for call in trace.calls:
            own[call.group].add(call.seq)
        seqs[trace.rank] = dict(own)
    common = {
        group: sorted(set.intersection(*(seqs[rank].get(group, set()) for rank in those)))
        for group, those in members.items()
    }
    kept = [group for group in sorted(members, key=_natural) if common[group]]
    hang, unknown = find_hang(ranks, members, names, seqs)
    if not kept:
        stands = "; the ranks stand in a cycle: " + ", ".join(hang) if hang else ""
        raise InputError("entries", "no collective is in the traces of all its ranks" + stands)
    place_of = {trace.rank: place for place, trace in enumerate(ranks)}
    number = {group: place for place, group in enumerate(kept)}
    index = {
        (group, seq): (number[group], place)
        for group in kept
        for place, seq in enumerate(common[group])
    }
    orders, ops, times, mismatches = [], {}, {}, []
    dropped = 0
    for trace in ranks:
        order = []
        for call in trace.calls:
            collective = index.get((call.group, call.seq))
            if collective is None:
                dropped += 1
                continue
            order.append(collective)
            if ops.setdefault(collective, call.op) != call.op and len(mismatches) < _MOST_LINES:
                mismatches.append(
                    f"rank {trace.rank} calls {call.op} where others call {ops[collective]} "
                    f"(number {call.seq} of group {call.group})"
                )
            times.setdefault(collective, []).append(call.time)
        orders.append(order)
    groups = [
        Group(
            [place_of[rank] for rank in sorted(members[group])],
            len(common[group]),
            f"{names[group] or 'group'} {group}",
        )
        for group in kept
    ]
    mean = {collective: sum(values) / len(values) for collective, values in times.items()}
    reference = reference_order(orders, groups, mean)
    skips, looks = count_skips(orders, reference)
    told = [trace.syncs for trace in ranks if trace.syncs is not None]
    return Trace(
        ranks=[trace.rank for trace in ranks],
        groups=groups,
        ops=ops,
        orders=orders,
        reference=reference,
        cycle=find_cycle(orders),
        skips=skips,
        looks=looks,
        syncs=sum(told) if len(told) == len(ranks) else None,
        dropped=dropped,
        mismatches=mismatches,
        hang=hang,
        unknown=unknown[:_MOST_LINES],
        more_unknown=max(0, len(unknown) - _MOST_LINES),
    )


def _natural(text: str) -> list[Any]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in
            re.findall(r"\d+|\D+", text)]  # fmt: skip


def _last_call(
    trace: RankTrace, group: str, made: set[int] | None, has_transfers: bool
) -> tuple[int | None, str]:
    """The number of a rank's last call of a group, -1 for none; or why the trace does not tell."""
    last = trace.called.get(group)
    if not trace.ends:
        return last, "a profile is a window, and the rank went on"
    if made:
        return max(made), ""
    if trace.whole:
        return -1, ""
    # Where there are transfers, the number may be that of one.
    if last is not None and (last <= 0 or not has_transfers):
        return last, ""
    return last, "its ring buffer has lost its oldest calls"


def find_hang(
    ranks: Sequence[RankTrace],
    members: dict[str, set[int]],
    names: dict[str, str],
    seqs: dict[int, dict[str, set[int]]],
) -> tuple[list[str], list[str]]:
    """A cycle through calls that some members had not made when the traces end, in words.

    Who has not called a collective calls it after all that it has called: so its last call comes
    before that collective. If that closes a cycle, every rank in it stands for good (one queue a
    GPU). What a ring buffer has lost at the beginning was called, and makes no such edge.

    Returns:
        The cycle, and of which calls the traces do not tell whether they were made: a rank that has
        lost all of a group's entries may have called everything or nothing there.
    """
    number: dict[tuple[str, int], tuple[int, int]] = {}
    calls: list[tuple[str, int]] = []
    ops: dict[tuple[str, int], str] = {}
    orders: list[list[tuple[int, int]]] = []
    for trace in ranks:
        order = []
        for call in trace.calls:
            what = (call.group, call.seq)
            if what not in number:
                number[what] = (0, len(calls))
                calls.append(what)
            ops[what] = call.op
            order.append(number[what])
        orders.append(order)
    made_by_any: defaultdict[str, list[int]] = defaultdict(list)
    for group, seq in sorted(calls):
        made_by_any[group].append(seq)
    groups_of: defaultdict[int, list[str]] = defaultdict(list)
    for group, those in members.items():
        for rank in those:
            groups_of[rank].append(group)
    transfers = set[str]().union(*(trace.transfers for trace in ranks))

    def name(collective: tuple[int, int]) -> str:
        return call_name(*calls[collective[1]])

    def call_name(group: str, seq: int) -> str:
        return f"{ops[group, seq]} number {seq} of {names.get(group) or 'group'} {group}"

    missing: list[int] = []  # the ranks of the further orders
    unknown: list[str] = []
    for place, trace in enumerate(ranks):
        if not orders[place]:
            continue
        for group in groups_of[trace.rank]:
            made, numbers = seqs[trace.rank].get(group), made_by_any[group]
            last, reason = _last_call(trace, group, made, group in transfers)
            if reason:
                after = bisect.bisect_right(numbers, max(made, default=-1) if made else -1)
                if after < len(numbers):
                    what = call_name(group, numbers[after])
                    unknown.append(f"whether rank {trace.rank} has called {what}: {reason}")
                continue
            assert last is not None
            for seq in numbers[bisect.bisect_right(numbers, last) :]:
                orders.append([orders[place][-1], number[group, seq]])
                missing.append(place)
    if not missing:
        return [], unknown

    lines = []
    for edge in find_cycle(orders):
        if edge.rank < len(ranks):
            called = f"called {name(edge.before)} before {name(edge.after)}"
            lines.append(f"rank {ranks[edge.rank].rank} {called}")
        else:
            rank = ranks[missing[edge.rank - len(ranks)]].rank
            lines.append(
                f"rank {rank} has not called {name(edge.after)}: it stands at {name(edge.before)}"
            )
    return lines, unknown
