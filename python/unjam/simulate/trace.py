"""Takes a job from what torch recorded of a real run.

Reads flight-recorder dumps (pickles, loaded without running anything in them, or their JSON form)
and profiler traces (Chrome JSON, also gzipped) of all ranks: who is in which group, in which order
each rank called its collectives, how far the orders differ, how often it synchronised its GPU.
"""

from __future__ import annotations

import ast
import gzip
import io
import json
import math
import pickle
import re
import reprlib
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .engine import wilson
from .errors import InputError
from .job import Group, Job

_BIGGEST_FILE = 1 << 30
_MONOTONE = 0.1  # up to here, more disorder never makes a hang less likely
# CUDA calls that wait for the whole GPU, or may.
_SYNCHRONIZING = {
    "cudaDeviceSynchronize",
    "cudaFree",
    "cudaFreeHost",
    "cudaHostAlloc",
    "cudaHostUnregister",
    "cudaMalloc",
    "cudaMallocHost",
    "cuCtxSynchronize",
    "hipDeviceSynchronize",
    "hipFree",
    "hipMalloc",
}


@dataclass(frozen=True)
class Call:
    """A collective as one rank called it."""

    group: str
    seq: int
    op: str
    time: float


@dataclass
class RankTrace:
    """One rank's calls, in its order."""

    rank: int
    file: Path
    calls: list[Call] = field(default_factory=list)
    members: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of groups, where known
    names: dict[str, str] = field(default_factory=dict)
    syncs: int | None = None  # None: this kind of trace does not tell


@dataclass(frozen=True)
class Edge:
    """Rank `rank` called `before` before `after`."""

    rank: int
    before: tuple[int, int]
    after: tuple[int, int]


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
                yield f"  none was seen, so the risk below is an upper limit, for {high:.3g}"
            else:
                yield (
                    f"  none was seen, but in too few looks to bound the risk: below it is that of "
                    f"{high:.3g}, no limit"
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
        }


class _DataUnpickler(pickle.Unpickler):
    """Builds numbers, texts, lists and dicts; refuses everything that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise InputError("", f"is no flight-recorder dump: it asks for {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise InputError("", "is no flight-recorder dump: it refers to other objects")


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
            trace = _read_rank(path)
        except InputError as error:
            error.file = error.file or str(path)
            raise
        if trace.rank in ranks:
            raise InputError(
                "rank", f"{trace.rank} is also that of {ranks[trace.rank].file}", file=str(path)
            )
        ranks[trace.rank] = trace
    return _combine([ranks[rank] for rank in sorted(ranks)])


def _read_rank(path: Path) -> RankTrace:
    try:
        if path.stat().st_size > _BIGGEST_FILE:
            raise InputError("", f"is larger than {_BIGGEST_FILE >> 30} GiB")
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as stream:
                data = stream.read(_BIGGEST_FILE + 1)
            if len(data) > _BIGGEST_FILE:
                raise InputError("", f"unpacks to more than {_BIGGEST_FILE >> 30} GiB")
    except (OSError, EOFError, zlib.error) as error:
        raise InputError("", f"cannot be read: {error}") from error
    if data[:1] in (b"{", b"["):
        try:
            content = json.loads(data)
        except (ValueError, RecursionError) as error:
            line = getattr(error, "lineno", None)
            raise InputError("", f"is truncated or no JSON: {error}", line) from error
    else:
        try:
            content = _DataUnpickler(io.BytesIO(data)).load()
        except InputError:
            raise
        except Exception as error:  # a broken pickle may raise anything
            raise InputError("", f"is truncated or no pickle: {error}") from error
    if not isinstance(content, dict):
        raise InputError("", "is neither a flight-recorder dump nor a profiler trace")
    if "traceEvents" in content:
        return _read_profile(path, content)
    if "entries" in content:
        return _read_recorder(path, content)
    raise InputError("entries", "is missing: neither a flight-recorder dump nor a profiler trace")


def _rank_in_name(path: Path) -> int:
    numbers = re.findall(r"\d+", path.name.split(".")[0])
    if not numbers:
        raise InputError("rank", "the file's name must end in the rank, such as trace_rank_3")
    return int(numbers[-1])


def _get(table: Any, name: str, kind: type | tuple[type, ...], where: str) -> Any:
    if not isinstance(table, dict):
        raise InputError(where, "is no table")
    if name not in table:
        raise InputError(f"{where}.{name}", "is missing")
    if not isinstance(table[name], kind):
        raise InputError(f"{where}.{name}", f"{reprlib.repr(table[name])} is of the wrong type")
    return table[name]


def _time(table: Any, name: str, where: str) -> float:
    value = _get(table, name, (int, float), where)
    try:
        time = float(value)
    except OverflowError:
        time = math.inf
    if not math.isfinite(time):
        raise InputError(f"{where}.{name}", f"{reprlib.repr(value)} is no time")
    return time


def _rank_list(value: Any, where: str) -> tuple[int, ...]:
    """Ranks as a list, or as the text of one."""
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value) if value.strip() else []
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
            raise InputError(where, f"{reprlib.repr(value)} is no list of ranks") from error
    if not isinstance(value, list) or not all(isinstance(rank, int) for rank in value):
        raise InputError(where, f"{reprlib.repr(value)} is no list of ranks")
    return tuple(sorted(value))


def _read_recorder(path: Path, content: dict[str, Any]) -> RankTrace:
    trace = RankTrace(_rank_in_name(path), path)
    configuration = content.get("pg_config", {})
    if not isinstance(configuration, dict):
        raise InputError("pg_config", "is no table")
    for key, group in configuration.items():
        where = f"pg_config[{key}]"
        ranks = _rank_list(_get(group, "ranks", (str, list), where), f"{where}.ranks")
        if ranks:  # gloo leaves them out
            trace.members[str(group.get("name", key))] = ranks
    entries = _get(content, "entries", list, "dump")
    seen: set[tuple[str, int]] = set()
    for place, entry in enumerate(entries):
        where = f"entries[{place}]"
        if _get(entry, "is_p2p", bool, where):
            continue
        names = _get(entry, "process_group", (tuple, list), where)
        if len(names) != 2 or not all(isinstance(name, (str, int)) for name in names):
            raise InputError(
                f"{where}.process_group", f"{reprlib.repr(names)} is not (name, description)"
            )
        group = str(names[0])
        seq = _get(entry, "collective_seq_id", int, where)
        if (group, seq) in seen:  # parts of one coalesced collective
            continue
        seen.add((group, seq))
        trace.names[group] = str(names[1])
        op = _get(entry, "profiling_name", str, where).rpartition(":")[2]
        trace.calls.append(Call(group, seq, op, _time(entry, "time_created_ns", where)))
    return trace


def _read_profile(path: Path, content: dict[str, Any]) -> RankTrace:
    information = content.get("distributedInfo", {})
    if not isinstance(information, dict):
        raise InputError("distributedInfo", "is no table")
    rank = information.get("rank", None)
    trace = RankTrace(rank if isinstance(rank, int) else _rank_in_name(path), path, syncs=0)
    configuration = information.get("pg_config", [])
    if not isinstance(configuration, list):
        raise InputError("distributedInfo.pg_config", "is no list")
    for place, group in enumerate(configuration):
        where = f"distributedInfo.pg_config[{place}]"
        name = str(_get(group, "pg_name", (str, int), where))
        trace.members[name] = _rank_list(_get(group, "ranks", (str, list), where), where)
        trace.names[name] = str(group.get("pg_desc", ""))
    events = _get(content, "traceEvents", list, "trace")
    counted: dict[str, int] = {}
    calls, nameless = [], 0
    for place, event in enumerate(events):
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        where = f"traceEvents[{place}]"
        name = str(event.get("name", ""))
        if name in _SYNCHRONIZING:
            assert trace.syncs is not None
            trace.syncs += 1
        arguments = event.get("args", {})
        if name != "record_param_comms" or not isinstance(arguments, dict):
            nameless += name.startswith(("nccl:", "gloo:"))
            continue
        op = str(arguments.get("Collective name", ""))
        if not op or op in ("wait", "init") or op.startswith(("send", "recv")):
            continue
        group = str(_get(arguments, "Process Group Name", (str, int), f"{where}.args"))
        if group not in trace.members and "Process Group Ranks" in arguments:
            text = str(arguments["Process Group Ranks"])
            if "..." not in text:
                trace.members[group] = _rank_list(text, f"{where}.args.Process Group Ranks")
        trace.names.setdefault(group, str(arguments.get("Process Group Description", "")))
        calls.append((_time(event, "ts", where), group, op))
    # The n-th call in a group is its n-th on every rank: "Seq" is not in every version's traces.
    for time, group, op in sorted(calls, key=lambda call: call[0]):
        seq = counted[group] = counted.get(group, 0) + 1
        trace.calls.append(Call(group, seq, op, time * 1000))
    if not calls and nameless:
        raise InputError(
            "traceEvents",
            "has collectives without their groups (gloo's profiles do): use flight-recorder dumps",
        )
    return trace


def _combine(ranks: list[RankTrace]) -> Trace:
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
    # The ring buffers of the ranks may begin and end at different collectives.
    seqs = {
        trace.rank: {group: {c.seq for c in trace.calls if c.group == group} for group in members}
        for trace in ranks
    }
    common = {
        group: sorted(set.intersection(*(seqs[rank][group] for rank in those)))
        for group, those in members.items()
    }
    kept = [group for group in sorted(members, key=_natural) if common[group]]
    hang = find_hang(ranks, members, names, seqs)
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
            if ops.setdefault(collective, call.op) != call.op:
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
        mismatches=mismatches[:20],
        hang=hang,
    )


def _natural(text: str) -> list[Any]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in
            re.findall(r"\d+|\D+", text)]  # fmt: skip


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
    taken: set[tuple[int, int]] = set()
    result = []
    total = len({collective for order in orders for collective in order})
    while len(result) < total:
        ready: dict[tuple[int, int], int] = {}
        for rank, order in enumerate(orders):
            while position[rank] < len(order) and order[position[rank]] in taken:
                position[rank] += 1
            if position[rank] < len(order):
                head = order[position[rank]]
                ready[head] = ready.get(head, 0) + 1
        best = max(ready, key=lambda c: (ready[c] / len(groups[c[0]].gpus), -time[c], c))
        # A group's collectives are numbered in its own order, which the reference must keep.
        first = min(c for c in ((best[0], k) for k in range(best[1] + 1)) if c not in taken)
        taken.add(first)
        result.append(first)
    return result


def count_skips(
    orders: Sequence[Sequence[tuple[int, int]]], reference: Sequence[tuple[int, int]]
) -> tuple[int, int]:
    """How often ranks skipped an entry of the reference, and how often they could have."""
    rank_of = {collective: place for place, collective in enumerate(reference)}
    skips = looks = 0
    for order in orders:
        remaining = sorted(order, key=rank_of.__getitem__)
        for collective in order:
            place = remaining.index(collective)
            skips += place
            # The last entry is taken without a choice.
            looks += min(place + 1, len(remaining) - 1)
            del remaining[place]
    return skips, looks


def find_hang(
    ranks: Sequence[RankTrace],
    members: dict[str, set[int]],
    names: dict[str, str],
    seqs: dict[int, dict[str, set[int]]],
) -> list[str]:
    """A cycle through calls that some members had not made when the traces end, in words.

    Who has not called a collective calls it after all that it has called: so its last call comes
    before that collective. If that closes a cycle, every rank in it stands for good (one queue a
    GPU). What a ring buffer has lost at the beginning was called, and makes no such edge.
    """
    number: dict[tuple[str, int], tuple[int, int]] = {}
    calls: list[tuple[str, int]] = []

    def node(group: str, seq: int) -> tuple[int, int]:
        if (group, seq) not in number:
            number[group, seq] = (0, len(calls))
            calls.append((group, seq))
        return number[group, seq]

    ops = {(call.group, call.seq): call.op for trace in ranks for call in trace.calls}
    orders = [[node(call.group, call.seq) for call in trace.calls] for trace in ranks]
    missing: list[int] = []  # the ranks of the further orders
    for place, trace in enumerate(ranks):
        if not orders[place]:
            continue
        for group, seq in list(number):
            made = seqs[trace.rank].get(group, set())
            if trace.rank in members.get(group, set()) and seq > max(made, default=-1):
                orders.append([orders[place][-1], node(group, seq)])
                missing.append(place)
    if not missing:
        return []

    def name(collective: tuple[int, int]) -> str:
        group, seq = calls[collective[1]]
        return f"{ops[group, seq]} number {seq} of {names.get(group) or 'group'} {group}"

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
    return lines


def find_cycle(orders: Sequence[Sequence[tuple[int, int]]]) -> list[Edge]:
    """A shortest cycle through the first collective that is in one; [] if there is none."""
    following: dict[tuple[int, int], list[tuple[int, tuple[int, int]]]] = {}
    before: dict[tuple[int, int], int] = {}
    for rank, order in enumerate(orders):
        for place, collective in enumerate(order):
            following.setdefault(collective, [])
            before.setdefault(collective, 0)
            if place + 1 < len(order):
                following[collective].append((rank, order[place + 1]))
                before[order[place + 1]] = before.get(order[place + 1], 0) + 1
    free = [collective for collective, count in before.items() if count == 0]
    while free:
        collective = free.pop()
        del before[collective]
        for _, after in following[collective]:
            before[after] -= 1
            if before[after] == 0:
                free.append(after)
    best: list[Edge] = []
    for start in list(before)[:100]:  # what is left is in cycles or behind them
        path = _shortest_way_back(start, following, before)
        if path and (not best or len(path) < len(best)):
            best = path
    return _merge_steps(best)


def _shortest_way_back(
    start: tuple[int, int],
    following: dict[tuple[int, int], list[tuple[int, tuple[int, int]]]],
    among: dict[tuple[int, int], int],
) -> list[Edge]:
    came: dict[tuple[int, int], Edge] = {}
    queue = [start]
    for collective in queue:
        for rank, after in following[collective]:
            if after not in among or after in came:
                continue
            came[after] = Edge(rank, collective, after)
            if after == start:
                path = [came[start]]
                while path[0].before != start:
                    path.insert(0, came[path[0].before])
                return path
            queue.append(after)
    return []


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
