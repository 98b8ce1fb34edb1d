"""Who runs which task: a static list for each SM, by longest path on a modelled machine.

The machine is a model, not measured: it decides which task goes first, and draws the picture.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import NamedTuple

from .._errors import InvalidArgument
from .tasks import Program, Task

MOST_SMS = 1024


@dataclass(frozen=True)
class Machine:
    """A GPU, as the scheduler sees it. Times are in microseconds.

    Attributes:
        sms: that run tasks; one more is left for the daemon.
        bandwidth: bytes a microsecond of all SMs together, of weights.
        ring_bytes: of weights that an SM can have ahead of the task that it runs.
        task: what a task takes beside its weights.
        wait: from a counter's last arrival until a task has seen it.
        hop: from a send to what receives it on a peer.
    """

    sms: int = 131
    bandwidth: float = 3.0e6
    ring_bytes: int = 192 << 10
    task: float = 0.4
    wait: float = 0.8
    hop: float = 1.5

    def __post_init__(self) -> None:
        """Refuses what is no machine."""
        if type(self.sms) is not int or not 1 <= self.sms <= MOST_SMS:
            raise InvalidArgument(f"sms={self.sms!r} is out of range: give 1 to {MOST_SMS}")
        for name in ("bandwidth", "ring_bytes"):
            if not 0 < getattr(self, name) < math.inf:
                raise InvalidArgument(f"{name} must be above 0: it is {getattr(self, name)!r}")
        for name in ("task", "wait", "hop"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InvalidArgument(f"{name} is no time: it is {getattr(self, name)!r}")


class Span(NamedTuple):
    """When a task runs on the modelled machine, in microseconds."""

    task: int
    start: float
    end: float


@dataclass
class Schedule:
    """Tasks of each SM, in order."""

    streams: list[list[int]]


def make_schedule(program: Program, machine: Machine) -> Schedule:
    """Gives each SM that is free the task with the longest way behind it among those that can run.

    Tasks of an SM follow each other in an order in which all can run, so SMs cannot wait for each
    other in a circle, nor can ranks: what receives comes behind what sends.
    """
    costs = [_cost(program, machine, task) for task in program.tasks]
    longest = _longest(program, machine, costs)
    missing = [c.arrivals for c in program.counters]
    opens = [len(task.waits) + (task.number in program.mail_from) for task in program.tasks]
    waiting: list[list[int]] = [[] for _ in program.counters]
    mail_left = {number: len(sources) for number, sources in program.mail_from.items()}
    mailed: dict[int, list[int]] = {}
    for number, sources in program.mail_from.items():
        for source in sources:
            mailed.setdefault(source, []).append(number)
    for task in program.tasks:
        for wait in task.waits:
            waiting[wait.counter].append(task.number)
    able_at = [0.0] * len(program.tasks)
    coming = [(0.0, n) for n, count in enumerate(opens) if count == 0]
    heapq.heapify(coming)
    able: list[tuple[float, int]] = []
    free = [(0.0, sm) for sm in range(machine.sms)]
    streams: list[list[int]] = [[] for _ in range(machine.sms)]
    running: list[tuple[float, int]] = []
    latest = [0.0] * len(program.counters)

    def open_one(number: int, time: float) -> None:
        opens[number] -= 1
        able_at[number] = max(able_at[number], time)
        if opens[number] == 0:
            heapq.heappush(coming, (able_at[number], number))

    def end(time: float, number: int) -> None:
        task = program.tasks[number]
        latest[task.signal] = max(latest[task.signal], time)
        missing[task.signal] -= 1
        if missing[task.signal] == 0:
            for other in waiting[task.signal]:
                open_one(other, latest[task.signal] + machine.wait)
        for other in mailed.get(number, ()):
            mail_left[other] -= 1
            if mail_left[other] == 0:
                open_one(other, time + machine.hop)

    left = len(program.tasks)
    while left:
        time, sm = free[0]
        while running and running[0][0] <= time:
            end(*heapq.heappop(running))
        while coming and coming[0][0] <= time:
            number = heapq.heappop(coming)[1]
            heapq.heappush(able, (-longest[number], number))
        if able:
            number = heapq.heappop(able)[1]
            streams[sm].append(number)
            heapq.heapreplace(free, (time + costs[number], sm))
            heapq.heappush(running, (time + costs[number], number))
            left -= 1
            continue
        times = [heap[0][0] for heap in (running, coming) if heap]
        if not times:
            raise AssertionError("tasks wait for each other")  # they come in an order that runs
        heapq.heapreplace(free, (max(time, min(times)), sm))
    return Schedule(streams)


def timeline(program: Program, schedule: Schedule, machine: Machine) -> list[list[Span]]:
    """When each task runs on the modelled machine, by SMs; weights are loaded ahead.

    Loads of an SM go on, in order, while its tasks wait, as far as its ring has room. With grid
    barriers they wait, too.
    """
    ahead = program.sync == "counters"
    rate = machine.bandwidth / machine.sms
    done_at: dict[int, float] = {}
    full_at = [0.0] * len(program.counters)
    missing = [c.arrivals for c in program.counters]
    spans: list[list[Span]] = [[] for _ in schedule.streams]
    sms = [_Sm(machine, rate) for _ in schedule.streams]
    blocked: dict[tuple[str, int], list[int]] = {}
    place = [0] * len(schedule.streams)
    todo = list(range(len(schedule.streams)))
    while todo:
        sm = todo.pop()
        stream = schedule.streams[sm]
        while place[sm] < len(stream):
            task = program.tasks[stream[place[sm]]]
            lacking = _lacking(program, task, missing, done_at)
            if lacking is not None:
                blocked.setdefault(lacking, []).append(sm)
                break
            ready = max((full_at[w.counter] + machine.wait for w in task.waits), default=0.0)
            for source in program.mail_from.get(task.number, ()):
                ready = max(ready, done_at[source] + machine.hop)
            start, end = sms[sm].run(ready, *_bytes(program, task), ahead)
            spans[sm].append(Span(task.number, start, end))
            place[sm] += 1
            done_at[task.number] = end
            full_at[task.signal] = max(full_at[task.signal], end)
            missing[task.signal] -= 1
            if missing[task.signal] == 0:
                todo += blocked.pop(("counter", task.signal), [])
            todo += blocked.pop(("task", task.number), [])
    return spans


def _lacking(
    program: Program, task: Task, missing: list[int], done_at: dict[int, float]
) -> tuple[str, int] | None:
    """The first thing that a task still waits for."""
    for wait in task.waits:
        if missing[wait.counter]:
            return "counter", wait.counter
    for source in program.mail_from.get(task.number, ()):
        if source not in done_at:
            return "task", source
    return None


class _Sm:
    """A loader that runs ahead through a ring, and who takes what it has loaded."""

    def __init__(self, machine: Machine, rate: float) -> None:
        self._machine, self._rate = machine, rate
        self._free, self._loaded = 0.0, 0.0
        self._ring: list[tuple[float, int]] = []  # ends and bytes of tasks in front
        self._held = 0

    def run(self, ready: float, ahead: int, late: int, is_ahead: bool) -> tuple[float, float]:
        """Start and end of the next task, with the bytes that can be loaded ahead, or cannot."""
        begin = self._loaded if is_ahead else max(self._loaded, ready)
        share = min(ahead, self._machine.ring_bytes)  # more is loaded while the task runs
        self._held += share
        while self._held > self._machine.ring_bytes and self._ring:
            end, count = self._ring.pop(0)
            self._held -= count
            begin = max(begin, end)
        self._loaded = begin + ahead / self._rate
        start = max(ready, self._free)
        end = max(start + self._machine.task, self._loaded) + late / self._rate
        self._free = end
        self._ring.append((end, share))
        return start, end


def _bytes(program: Program, task: Task) -> tuple[int, int]:
    """Of a task's weights: those that can be loaded ahead, and the others."""
    if task.op < 0:
        return 0, 0
    rule = program.rules[task.op]
    packed, count = rule.weights(), rule.weight_bytes(task.tile)
    return (count, 0) if packed is not None and packed.experts == 1 else (0, count)


def _cost(program: Program, machine: Machine, task: Task) -> float:
    """Without what is loaded ahead."""
    return machine.task + sum(_bytes(program, task)) / (machine.bandwidth / machine.sms)


def _longest(program: Program, machine: Machine, costs: list[float]) -> list[float]:
    """Of each task, the time from its start to the end of the longest way behind it."""
    behind = [0.0] * len(program.counters)
    mail = [0.0] * len(program.tasks)
    found = [0.0] * len(program.tasks)
    for task in reversed(program.tasks):
        found[task.number] = costs[task.number] + max(behind[task.signal], mail[task.number])
        for wait in task.waits:
            way = found[task.number] + machine.wait
            behind[wait.counter] = max(behind[wait.counter], way)
        for source in program.mail_from.get(task.number, ()):
            mail[source] = max(mail[source], found[task.number] + machine.hop)
    return found
