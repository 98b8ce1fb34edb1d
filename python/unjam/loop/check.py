"""The checker: proves of a plan that no order of its tasks reads or overwrites too early.

It looks at tasks, places and streams alone, and shares no code with what made the waits. Memory is
proved by counters, so it holds for each schedule; deadlock is looked for in the streams.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Sequence
from dataclasses import dataclass, field

from .._errors import InvalidArgument
from .graph import ITEM_BYTES, Value
from .ops import Rect
from .pages import PAGE_BYTES, Places
from .schedule import Schedule
from .tasks import Program, Task, Wait

MOST_FAULTS = 20


@dataclass(frozen=True)
class Fault:
    """What is wrong.

    Attributes:
        kind: counter, schedule, deadlock, read, reuse, write, missing, or mail.
        text: names task, counter and value.
    """

    kind: str
    text: str


@dataclass
class Verdict:
    """What the checker found.

    Attributes:
        faults: the first ones; none if the plan is right.
        tasks: how many were looked at.
        seconds: that it took.
    """

    faults: list[Fault] = field(default_factory=list)
    tasks: int = 0
    seconds: float = 0.0

    @property
    def is_right(self) -> bool:
        """Whether nothing was found."""
        return not self.faults

    def require(self) -> None:
        """Raises what was found.

        Raises:
            InvalidArgument: with the first faults.
        """
        if self.faults:
            raise InvalidArgument(
                "the plan is wrong: " + "; ".join(fault.text for fault in self.faults[:3])
            )


class _Full(Exception):
    """Enough was found."""


def check(
    program: Program, places: Places, schedule: Schedule, others: Sequence[Schedule] = ()
) -> Verdict:
    """Checks one step of a plan.

    Args:
        program: tasks with their counters.
        places: where values lie.
        schedule: streams of SMs.
        others: of peers, if they differ; each has the same program.
    """
    begin = time.perf_counter()
    verdict = Verdict(tasks=len(program.tasks))
    checker = _Checker(program, places, verdict)
    try:
        checker.counters()
        checker.streams([schedule, *others])
        if verdict.is_right:
            order = checker.run([schedule, *others])
            if verdict.is_right:
                checker.memory(order)
    except _Full:
        pass
    verdict.seconds = time.perf_counter() - begin
    return verdict


@dataclass
class _Segment:
    """Bytes between two borders of any access."""

    owner: int = -1  # value
    writers: int = 0  # counters, as bits
    readers: int = 0  # of state; of pages they are kept by values
    written: bool = False


class _Room:
    """A piece of memory, cut where any access begins or ends."""

    def __init__(self, offsets: dict[int, int]) -> None:
        self.offsets = offsets
        self._borders: set[int] = set()
        self.sorted: list[int] = []
        self.segments: list[_Segment] = []
        self._known: dict[tuple[int, int, int, int, int], list[tuple[int, int]]] = {}

    def spans(self, rect: Rect) -> list[tuple[int, int]]:
        """Bytes of a rectangle, from and up to."""
        value = rect.value
        item, cols = ITEM_BYTES[value.dtype], value.cols
        base = self.offsets[value.number]
        if rect.col0 == 0 and rect.col1 == cols:
            return [(base + rect.row0 * cols * item, base + rect.row1 * cols * item)]
        return [
            (base + (row * cols + rect.col0) * item, base + (row * cols + rect.col1) * item)
            for row in range(rect.row0, rect.row1)
        ]

    def add(self, rect: Rect) -> None:
        key = (rect.value.number, *rect[1:])
        if key not in self._known:
            self._known[key] = []
            for span in self.spans(rect):
                self._borders.update(span)

    def cut(self) -> None:
        self.sorted = sorted(self._borders)
        self.segments = [_Segment() for _ in self.sorted]

    def of(self, rect: Rect) -> list[tuple[int, int]]:
        """Ranges of segments."""
        key = (rect.value.number, *rect[1:])
        if not self._known[key]:
            self._known[key] = [
                (bisect_left(self.sorted, a), bisect_left(self.sorted, b))
                for a, b in self.spans(rect)
            ]
        return self._known[key]


class _Checker:
    def __init__(self, program: Program, places: Places, verdict: Verdict) -> None:
        self.program, self.places, self.verdict = program, places, verdict

    def fault(self, kind: str, text: str) -> None:
        self.verdict.faults.append(Fault(kind, text))
        if len(self.verdict.faults) >= MOST_FAULTS:
            raise _Full

    # ---- counters ----

    def counters(self) -> None:
        """Arrivals are what waits want; a step adds the same to each, and nothing is left over."""
        program = self.program
        counted = Tally(task.signal for task in program.tasks)
        last = len(program.counters) - 1
        for number in sorted(set(counted) - set(range(last + 1))):
            self.fault("counter", f"a task adds to counter {number}, which is not there")
        for number, counter in enumerate(program.counters):
            if counted[number] != counter.arrivals:
                self.fault(
                    "counter",
                    f"counter {number} ({counter.name}) gets {counted[number]} arrivals a step, "
                    f"and its sum is {counter.arrivals}",
                )
        waited: set[int] = set()
        seen: set[tuple[Wait, ...]] = set()
        for task in program.tasks:
            if task.waits in seen:
                continue
            seen.add(task.waits)
            for counter, threshold in task.waits:
                waited.add(counter)
                if not 0 <= counter <= last:
                    self.fault(
                        "counter",
                        f"{self.name(task)} waits for counter {counter}, which is not there",
                    )
                elif threshold != program.counters[counter].arrivals:
                    self.fault(
                        "counter",
                        f"{self.name(task)} waits for {threshold} arrivals of counter {counter} "
                        f"({program.counters[counter].name}), which gets "
                        f"{program.counters[counter].arrivals}",
                    )
        for number in range(last):
            if number not in waited:
                self.fault(
                    "counter",
                    f"nobody waits for counter {number} ({program.counters[number].name}): its "
                    "tasks may run into the next step",
                )

    def name(self, task: Task) -> str:
        return f"task {task.number} ({self.program.name(task)})"

    # ---- streams ----

    def streams(self, schedules: Sequence[Schedule]) -> None:
        """Each task is once in the streams of each rank."""
        numbers = range(len(self.program.tasks))
        for rank, schedule in enumerate(schedules):
            counted = Tally(task for stream in schedule.streams for task in stream)
            where = f" on rank {rank}" if len(schedules) > 1 else ""
            for number in sorted(set(counted) | set(numbers)):
                if number not in numbers:
                    self.fault("schedule", f"task {number}{where} is not there")
                elif counted[number] != 1:
                    self.fault(
                        "schedule",
                        f"{self.name(self.program.tasks[number])} stands {counted[number]} times "
                        f"in the streams{where}",
                    )

    def run(self, schedules: Sequence[Schedule]) -> list[Task]:
        """Runs what can run until nothing can; the first rank's order.

        Waits are monotone, so if this comes to an end, each order does. A rank alone stands for
        peers with the same schedule.
        """
        program, ranks = self.program, len(schedules)
        count = [[0] * len(program.counters) for _ in schedules]
        done = [bytearray(len(program.tasks)) for _ in schedules]
        at = [[0] * len(s.streams) for s in schedules]
        blocked: dict[tuple[int, str, int], list[tuple[int, int]]] = {}
        todo = [(rank, sm) for rank, s in enumerate(schedules) for sm in range(len(s.streams))]
        order: list[Task] = []

        def lacking(rank: int, task: Task) -> tuple[int, str, int] | None:
            for counter, threshold in task.waits:
                if count[rank][counter] < threshold:
                    return rank, "counter", counter
            for source in program.mail_from.get(task.number, ()):
                for peer in range(ranks):
                    if not done[peer][source]:
                        return peer, "task", source
            return None

        while todo:
            rank, sm = todo.pop()
            stream = schedules[rank].streams[sm]
            while at[rank][sm] < len(stream):
                task = program.tasks[stream[at[rank][sm]]]
                lacks = lacking(rank, task)
                if lacks is not None:
                    blocked.setdefault(lacks, []).append((rank, sm))
                    break
                at[rank][sm] += 1
                done[rank][task.number] = 1
                count[rank][task.signal] += 1
                if rank == 0:
                    order.append(task)
                todo += blocked.pop((rank, "counter", task.signal), [])
                todo += blocked.pop((rank, "task", task.number), [])
        for (peer, what, number), waiting in blocked.items():
            for rank, sm in waiting:
                task = program.tasks[schedules[rank].streams[sm][at[rank][sm]]]
                where = f"rank {rank}, " if ranks > 1 else ""
                if what == "counter":
                    wants = next(w.threshold for w in task.waits if w.counter == number)
                    thing = (
                        f"counter {number} ({program.counters[number].name}): "
                        f"{count[peer][number]} of {wants}"
                    )
                else:
                    thing = f"packets of {self.name(program.tasks[number])} from peers"
                self.fault(
                    "deadlock", f"{where}SM {sm} stands before {self.name(task)}: waits for {thing}"
                )
        return order

    # ---- memory ----

    def memory(self, order: Sequence[Task]) -> None:
        """Each read has its writers before it, each write all who used the place before."""
        rooms = {
            "pages": _Room(self.places.pages),
            "state": _Room(self.places.state),
            "mail": _Room(self.places.mail),
        }
        self._borders(rooms)
        before = self._before(order)
        readers: dict[int, int] = {}  # of each value's content: counters
        looked: set[tuple[tuple[int, ...], tuple[Wait, ...]]] = set()
        written: Tally[int] = Tally()
        for task in order:
            known = before[task.number]
            for rect in task.reads:
                number = rect.value.number
                key = ((number, *rect[1:]), task.waits)
                if key not in looked:
                    looked.add(key)
                    self._read(task, rect, rooms[rect.value.room], known)
                readers[number] = readers.get(number, 0) | 1 << task.signal
                if rect.value.room == "state":
                    for first, last in rooms["state"].of(rect):
                        for segment in rooms["state"].segments[first:last]:
                            segment.readers |= 1 << task.signal
            for rect in task.writes:
                written[rect.value.number] += self._write(
                    task, rect, rooms[rect.value.room], known, readers
                )
        for op in self.program.graph.operators:
            for value in op.outputs.values():
                if written[value.number] < value.bytes:
                    self.fault(
                        "missing",
                        f"of {value.name} only {written[value.number]} bytes of {value.bytes} are "
                        "written",
                    )
        self._mail()

    def _borders(self, rooms: dict[str, _Room]) -> None:
        for task in self.program.tasks:
            for rect in task.reads + task.writes:
                rooms[rect.value.room].add(rect)
        for room in rooms.values():
            room.cut()
        for value in self.program.graph.values:
            if value.room == "pages" and (
                self.places.pages[value.number] + value.bytes > self.places.page_count * PAGE_BYTES
            ):
                self.fault("reuse", f"{value.name} goes beyond the pages")
        for name, offsets in (("state", self.places.state), ("mail", self.places.mail)):
            self._apart(name, offsets)

    def _apart(self, room: str, offsets: dict[int, int]) -> None:
        """State and mail share nothing."""
        values = self.program.graph.values
        end, last = 0, ""
        for number, at in sorted(offsets.items(), key=lambda item: item[1]):
            if at < end:
                self.fault("reuse", f"{values[number].name} and {last} overlap in {room}")
            end, last = at + values[number].bytes, values[number].name

    def _before(self, order: Sequence[Task]) -> list[int]:
        """Of each task, as bits, the counters that are full before it begins."""
        arrivals = [counter.arrivals for counter in self.program.counters]
        common = [0] * len(arrivals)
        found = [0] * len(self.program.tasks)
        cache: dict[tuple[Wait, ...], int] = {}
        for task in order:
            if task.waits not in cache:
                bits = 0
                for counter, threshold in task.waits:
                    if threshold == arrivals[counter]:
                        bits |= common[counter] | 1 << counter
                cache[task.waits] = bits
            found[task.number] = cache[task.waits]
            common[task.signal] |= cache[task.waits]
        return found

    def _read(self, task: Task, rect: Rect, room: _Room, known: int) -> None:
        value = rect.value
        if value.room == "mail":
            return  # packets say themselves whether they are there: _mail()
        for first, last in room.of(rect):
            for segment in room.segments[first:last]:
                if value.room == "state" and segment.owner < 0:
                    continue  # kept from the step before
                if segment.owner != value.number:
                    what = self._what(segment.owner)
                    self.fault("read", f"{self.name(task)} reads {value.name}, where {what}")
                    return
                if segment.writers & ~known:
                    self.fault(
                        "read",
                        f"{self.name(task)} may read {value.name} before it is written: it does "
                        f"not wait for {self._counter(segment.writers & ~known)}",
                    )
                    return

    def _write(
        self, task: Task, rect: Rect, room: _Room, known: int, readers: dict[int, int]
    ) -> int:
        """How many bytes it writes."""
        value, count = rect.value, 0
        for first, last in room.of(rect):
            for place in range(first, last):
                segment = room.segments[place]
                if segment.owner == value.number and segment.written:
                    self.fault("write", f"{self.name(task)} writes {value.name} a second time")
                    return count
                if value.room != "mail":
                    users = segment.writers | segment.readers
                    if value.room == "pages" and segment.owner >= 0:
                        users |= readers.get(segment.owner, 0)
                    if users & ~known:
                        former = segment.owner if segment.owner >= 0 else value.number
                        self.fault(
                            "reuse",
                            f"{self.name(task)} writes {value.name}, where {self._what(former)} "
                            f"may be in use: it does not wait for {self._counter(users & ~known)}",
                        )
                        return count
                segment.owner, segment.writers, segment.written = (
                    value.number,
                    1 << task.signal,
                    True,
                )
                count += room.sorted[place + 1] - room.sorted[place]
        return count

    def _what(self, owner: int) -> str:
        return "nothing is written" if owner < 0 else self.program.graph.values[owner].name

    def _counter(self, bits: int) -> str:
        number = (bits & -bits).bit_length() - 1
        return f"counter {number} ({self.program.counters[number].name})"

    def _mail(self) -> None:
        """What reads mail waits for all packets that it reads."""
        senders: dict[int, list[Task]] = {}
        for task in self.program.tasks:
            for rect in task.writes:
                if rect.value.room == "mail":
                    senders.setdefault(rect.value.number, []).append(task)
        for task in self.program.tasks:
            known = set(self.program.mail_from.get(task.number, ()))
            for rect in task.reads:
                if rect.value.room != "mail":
                    continue
                for sender in senders.get(rect.value.number, []):
                    needed = any(_meets(rect, w, rect.value) for w in sender.writes)
                    if needed and sender.number not in known:
                        self.fault(
                            "mail",
                            f"{self.name(task)} reads mail of {self.name(sender)}, and does not "
                            "wait for it",
                        )


def _meets(rect: Rect, other: Rect, value: Value) -> bool:
    return other.value is value and rect.overlaps(other)
