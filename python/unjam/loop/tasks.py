"""Operators as tasks (virtual CTAs), which wait for counters and add to one.

Tiles of an operator for which the same tasks wait share a counter, so that counters are exact and
few. A task waits until a counter has all its arrivals; so what has happened before a task follows
from counters alone, whichever SM runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from .graph import Graph
from .ops import Rect, Rule

Sync = Literal["counters", "grid"]
SYNCS: tuple[Sync, ...] = ("counters", "grid")
FINISH = "finish"  # the kind of the last task, which waits for what nobody waits for


class Wait(NamedTuple):
    """Until a counter has so many arrivals in this step."""

    counter: int
    threshold: int


@dataclass
class Task:
    """A virtual CTA.

    Attributes:
        number: the order of the host, in which all can run.
        op: number of its operator; -1: the finish.
        tile: which part of it.
        waits: all of them before it reads anything.
        signal: the counter to which it adds 1 when it has written.
        reads: without weights.
        writes: of mail, what peers get.
    """

    number: int
    op: int
    tile: int
    waits: tuple[Wait, ...]
    signal: int
    reads: tuple[Rect, ...] = ()
    writes: tuple[Rect, ...] = ()


@dataclass
class Counter:
    """Monotone: each step adds ``arrivals``, nothing resets it."""

    name: str
    arrivals: int


@dataclass
class Program:
    """The tasks of one step on one rank; the same on all ranks.

    Attributes:
        graph: what they compute.
        rules: one for each operator.
        sync: how they wait.
        tasks: in the order of the host.
        counters: those they use; the last one is of the finish.
        mail_from: of each task that reads mail, the tasks of peers whose packets it waits for.
    """

    graph: Graph
    rules: list[Rule]
    sync: Sync
    tasks: list[Task]
    counters: list[Counter]
    mail_from: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def name(self, task: Task) -> str:
        """For messages."""
        if task.op < 0:
            return FINISH
        return f"{self.graph.operators[task.op].name}[{task.tile}]"


def make_program(graph: Graph, rules: Sequence[Rule], sync: Sync) -> Program:
    """Cuts a graph into tasks with counters."""
    program = Program(graph, list(rules), sync, [], [])
    tasks, first_of = program.tasks, []
    for op, rule in zip(graph.operators, rules, strict=True):
        first_of.append(len(tasks))
        for tile in range(rule.tiles):
            reads, writes = tuple(rule.reads(tile)), tuple(rule.writes(tile))
            tasks.append(Task(len(tasks), op.number, tile, (), -1, reads, writes))
    first_of.append(len(tasks))
    ranges = [range(a, b) for a, b in zip(first_of, first_of[1:], strict=False)]
    if sync == "grid":
        _by_levels(program, ranges)
    else:
        _by_counters(program, ranges)
    _finish(program)
    _mail(program, ranges)
    return program


def _producers(graph: Graph) -> list[list[tuple[int, int]]]:
    """Of each operator: (value, operator that wrote it last before).

    Of mail that is the own send: behind it, what was sent may be overwritten.
    """
    writer: dict[int, int] = {}
    found = []
    for op in graph.operators:
        inputs = {value.number: value for value in op.inputs.values()}.values()
        found.append([(v.number, writer[v.number]) for v in inputs if v.number in writer])
        writer |= {value.number: op.number for value in op.outputs.values()}
    return found


@dataclass
class _Source:
    """What the tasks of one operator read of another's, tiles as bits."""

    writer: int
    tiles: dict[int, int]  # of each reading task
    whole: bool = False  # each task reads of every tile
    each: bool = False  # each task reads of some tile
    covers: bool = False  # every tile is read by some task


def _sources(program: Program, ranges: list[range]) -> list[list[_Source]]:
    """Of each operator, the latest first."""
    tasks, found = program.tasks, []
    for reader, pairs in enumerate(_producers(program.graph)):
        of: dict[int, _Source] = {}
        for value, writer in pairs:
            source = of.setdefault(writer, _Source(writer, {}))
            known: dict[tuple[int, ...], int] = {}
            for number in ranges[reader]:
                for rect in tasks[number].reads:
                    if rect.value.number != value:
                        continue
                    key = rect[1:]
                    if key not in known:
                        known[key] = _tiles_of(program, ranges[writer], rect)
                    source.tiles[number] = source.tiles.get(number, 0) | known[key]
        for source in of.values():
            every = (1 << len(ranges[source.writer])) - 1
            read = [source.tiles.get(number, 0) for number in ranges[reader]]
            source.whole = all(tiles == every for tiles in read)
            source.each = all(read)
            source.covers = _union(set(read)) == every
        found.append(sorted(of.values(), key=lambda source: -source.writer))
    return found


def _tiles_of(program: Program, writers: range, rect: Rect) -> int:
    bits = 0
    for tile, number in enumerate(writers):
        writes = program.tasks[number].writes
        if any(w.value is rect.value and rect.overlaps(w) for w in writes):
            bits |= 1 << tile
    return bits


def _union(sets: set[int]) -> int:
    found = 0
    for bits in sets:
        found |= bits
    return found


def _needed(program: Program, ranges: list[range]) -> list[list[_Source]]:
    """The same without what other waits already say: a residual is older than what is added to it.

    `fully[b]`: operators of which each task has ended before any task of b begins; `flows[b]`: of
    which each task ends before some task of b begins.
    """
    fully: list[set[int]] = []
    flows: list[set[int]] = []
    found = []
    for sources in _sources(program, ranges):
        known: set[int] = set()
        flow: set[int] = set()
        kept = []
        for source in sources:
            if source.writer in known:
                continue
            kept.append(source)
            if source.whole:
                known |= {source.writer} | flows[source.writer]
            if source.each:
                known |= fully[source.writer]
            flow |= fully[source.writer]
            if source.covers:
                flow |= {source.writer} | flows[source.writer]
        fully.append(known)
        flows.append(flow | known)
        found.append(kept)
    return found


def _by_counters(program: Program, ranges: list[range]) -> None:
    """Exact waits. Tiles that the same sets of tasks wait for share a counter."""
    tasks, needed = program.tasks, _needed(program, ranges)
    marks: list[int] = [0] * len(tasks)  # of each tile: the sets of tiles in which it is read
    set_of: list[dict[tuple[int, int], int]] = []  # of each operator: (writer, tiles) to its bit
    bits = 0
    for sources in needed:
        of_set: dict[tuple[int, int], int] = {}
        for source in sources:
            for tiles in dict.fromkeys(source.tiles.values()):
                of_set[source.writer, tiles] = 1 << bits
                bits += 1
                for tile, number in enumerate(ranges[source.writer]):
                    if tiles >> tile & 1:
                        marks[number] |= of_set[source.writer, tiles]
        set_of.append(of_set)
    counters: list[dict[int, int]] = []  # of each operator: mark to counter
    for op, numbers in zip(program.graph.operators, ranges, strict=True):
        of_mark: dict[int, int] = {}
        for number in numbers:
            mark = marks[number]
            if mark not in of_mark:
                of_mark[mark] = len(program.counters)
                program.counters.append(Counter(f"{op.name}.{len(of_mark) - 1}", 0))
            program.counters[of_mark[mark]].arrivals += 1
            tasks[number].signal = of_mark[mark]
        counters.append(of_mark)
    for reader, sources in enumerate(needed):
        waits_of: dict[tuple[tuple[int, int], ...], tuple[Wait, ...]] = {}
        for number in ranges[reader]:
            key = tuple((s.writer, s.tiles[number]) for s in sources if number in s.tiles)
            if key not in waits_of:
                found = sorted(
                    counter
                    for pair in key
                    for mark, counter in counters[pair[0]].items()
                    if mark & set_of[reader][pair]
                )
                waits_of[key] = tuple(Wait(c, program.counters[c].arrivals) for c in found)
            tasks[number].waits = waits_of[key]
    _shorten(program)


def _shorten(program: Program) -> None:
    """Takes away waits for what another of a task's waits already says."""
    full = [0] * len(program.counters)  # what was full before all arrivals of a counter
    kept: dict[tuple[Wait, ...], tuple[tuple[Wait, ...], int]] = {}
    for task in program.tasks:
        if task.waits not in kept:
            inner = 0
            for wait in task.waits:
                inner |= full[wait.counter]
            rest = tuple(wait for wait in task.waits if not inner >> wait.counter & 1)
            before = inner
            for wait in rest:
                before |= 1 << wait.counter
            kept[task.waits] = rest, before
        task.waits, before = kept[task.waits]
        full[task.signal] |= before


def _by_levels(program: Program, ranges: list[range]) -> None:
    """ARK's barriers: no task of a level begins before all of the level in front have ended."""
    levels: list[int] = []
    for sources in _producers(program.graph):
        levels.append(1 + max((levels[writer] for _, writer in sources), default=-1))
    # Levels in the order of the host: an operator behind another one has no lower level.
    for place in range(1, len(levels)):
        levels[place] = max(levels[place], levels[place - 1])
    program.counters += [Counter(f"level {n}", 0) for n in range(levels[-1] + 1)]
    for level, numbers in zip(levels, ranges, strict=True):
        program.counters[level].arrivals += len(numbers)
    for level, numbers in zip(levels, ranges, strict=True):
        waits = () if level == 0 else (Wait(level - 1, program.counters[level - 1].arrivals),)
        for number in numbers:
            program.tasks[number].waits = waits
            program.tasks[number].signal = level


def _finish(program: Program) -> None:
    """The last task: behind it nothing of the step is under way, and the next one may begin."""
    waited = {wait.counter for task in program.tasks for wait in task.waits}
    rest = [c for c in range(len(program.counters)) if c not in waited]
    waits = tuple(Wait(c, program.counters[c].arrivals) for c in rest)
    program.tasks.append(Task(len(program.tasks), -1, 0, waits, len(program.counters)))
    program.counters.append(Counter(FINISH, 1))


def _mail(program: Program, ranges: list[range]) -> None:
    sender: dict[int, range] = {}
    for op, numbers in zip(program.graph.operators, ranges, strict=True):
        for value in op.inputs.values():
            if value.room != "mail":
                continue
            for number in numbers:
                rects = [r for r in program.tasks[number].reads if r.value is value]
                program.mail_from[number] = tuple(
                    source
                    for source in sender[value.number]
                    if any(r.overlaps(w) for r in rects for w in program.tasks[source].writes)
                )
        sender |= {v.number: numbers for v in op.outputs.values() if v.room == "mail"}


def counters_before(program: Program, order: Sequence[Task]) -> list[int]:
    """Of each task, as bits, the counters that are full before it begins.

    Args:
        program: the tasks.
        order: one in which they can run.
    """
    full = [0] * len(program.counters)  # what was full before all arrivals of a counter
    of_waits: dict[tuple[Wait, ...], int] = {}
    found = [0] * len(program.tasks)
    for task in order:
        before = of_waits.get(task.waits)
        if before is None:
            before = 0
            for counter, threshold in task.waits:
                if threshold >= program.counters[counter].arrivals:
                    before |= full[counter] | 1 << counter
            of_waits[task.waits] = before
        found[task.number] = before
        full[task.signal] |= before
    return found
