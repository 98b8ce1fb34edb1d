"""The interpreter: all ranks' tasks with NumPy, in one of the legal orders, by a seed.

A task is four events: its waits pass, it reads and computes, it writes, it adds to its counter.
Events of different SMs and ranks come in any order, and packets arrive in any order. Memory has the
plan's places, so a page that is used again too early gives wrong numbers, or is told: every read
asks whether the bytes are its value's.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .._errors import Internal, InvalidArgument
from .formats import STORED, Array, from_stored, to_stored
from .graph import Value
from .ops import Rect
from .pages import PAGE_BYTES
from .plan import Plan
from .tasks import Task

ORDERS = ("random", "eager", "slow_rank", "slow_sm", "late_signals", "late_packets", "bursts")


class Fault(Internal):
    """A task read or wrote what was not its own, or nothing could go on."""


class _Packet(NamedTuple):
    """On its way to a peer."""

    rank: int
    half: int
    rect: Rect
    data: Array  # as memory has it
    sender: tuple[int, int, int]  # rank, step, task


@dataclass
class _Sm:
    rank: int
    number: int
    stream: list[int]
    at: int = 0
    step: int = 0
    phase: int = 0  # 0: waits; 1: reads next; 2: writes next; 3: adds next
    results: list[tuple[Rect, Array]] | None = None


class _Rank:
    """One rank's memory."""

    def __init__(self, plan: Plan, rank: int, weights: Mapping[str, Array]) -> None:
        self.rank, self._plan = rank, plan
        places = plan.places
        self._pages = np.zeros(places.page_count * PAGE_BYTES, np.uint8)
        self._owner = np.full(len(self._pages) // 2, -1, np.int32)  # of each 2 bytes: a value
        self._state = np.zeros(places.state_bytes, np.uint8)
        self._mail = [np.zeros(places.mail_bytes, np.uint8) for _ in range(2)]
        self.half = 0
        self.counters = np.zeros(len(plan.program.counters), np.int64)
        self.views: dict[tuple[int, int], Array] = {}
        self.owners: dict[int, Array] = {}
        self._weights: dict[int, Array] = {}
        for value in plan.graph.values:
            self._add(value, weights)
        self.poison()

    def _add(self, value: Value, weights: Mapping[str, Array]) -> None:
        places, number = self._plan.places, value.number
        if value.room == "weights":
            if value.name not in weights:
                raise InvalidArgument(f"rank {self.rank} has no weight {value.name}")
            array = weights[value.name]
            shape = (1, *array.shape) if array.ndim == 1 else array.shape
            if shape != value.shape or array.dtype != STORED[value.dtype]:
                raise InvalidArgument(
                    f"{value.name} on rank {self.rank} is {array.dtype} of shape {array.shape}: "
                    f"give {STORED[value.dtype]} of shape {value.shape}"
                )
            wide = from_stored(array, value.dtype)
            self._weights[number] = (
                wide.reshape(-1) if wide.shape[0] == 1 == wide.ndim - 1 else wide
            )
            return
        rooms: list[tuple[Array, int]]
        if value.room == "mail":
            rooms = [(mail, places.mail[number]) for mail in self._mail]
        elif value.room == "state":
            rooms = [(self._state, places.state[number])]
        else:
            rooms = [(self._pages, places.pages[number])]
            first = places.pages[number] // 2
            owner = self._owner[first : first + value.bytes // 2]
            self.owners[number] = owner.reshape(value.rows, -1)
        for half, (room, at) in enumerate(rooms):
            view = room[at : at + value.bytes].view(STORED[value.dtype])
            self.views[number, half] = view.reshape(value.rows, value.cols)
            if len(rooms) == 1:
                self.views[number, 1] = self.views[number, 0]

    def poison(self) -> None:
        """Of a step's beginning: what is in pages is no number, and nobody's."""
        self._pages[:] = 0xFF
        self._owner[:] = -1

    # ---- what a task sees ----

    def read(self, rect: Rect) -> Array:
        """As :class:`~unjam.loop.ops.Memory` says."""
        value, row0, row1, col0, col1 = rect
        if value.room == "pages":
            per = self.owners[value.number].shape[1] // value.cols
            found = self.owners[value.number][row0:row1, col0 * per : col1 * per]
            if (found != value.number).any():
                other = int(found[found != value.number][0])
                owner = "nothing" if other < 0 else self._plan.graph.values[other].name
                raise Fault(f"reads {value.name} and finds {owner}")
        return from_stored(self.views[value.number, self.half][row0:row1, col0:col1], value.dtype)

    def weight(self, value: Value) -> Array:
        """As :class:`~unjam.loop.ops.Memory` says."""
        return self._weights[value.number]

    def write(self, rect: Rect, array: Array, half: int) -> None:
        """What a task gives, rounded to the value's type."""
        value, row0, row1, col0, col1 = rect
        view = self.views[value.number, half]
        view[row0:row1, col0:col1] = to_stored(array, value.dtype)
        if value.room == "pages":
            per = self.owners[value.number].shape[1] // value.cols
            self.owners[value.number][row0:row1, col0 * per : col1 * per] = value.number


class Interpreter:
    """Runs a plan on all ranks.

    Args:
        plan: what :func:`~unjam.loop.compile_graph` made.
        weights: of each rank, as :attr:`~unjam.loop.Model.weights`.
        seed: chooses the interleaving; the same one gives the same run.
        order: who is preferred: one of :data:`ORDERS`.

    Raises:
        InvalidArgument: weights that do not fit.
    """

    def __init__(
        self,
        plan: Plan,
        weights: Sequence[Mapping[str, Array]],
        seed: int = 0,
        order: str = "random",
    ) -> None:
        if order not in ORDERS:
            raise InvalidArgument(f"order={order!r} is not known: give one of {', '.join(ORDERS)}")
        if len(weights) != plan.graph.ranks:
            raise InvalidArgument(
                f"weights of {len(weights)} ranks, and the plan is for {plan.graph.ranks}"
            )
        self.plan, self.seed, self.order = plan, seed, order
        self._random = random.Random(f"{seed} {order}")
        self._ranks = [_Rank(plan, rank, w) for rank, w in enumerate(weights)]
        self._arrived: set[tuple[int, tuple[int, int, int]]] = set()
        self._steps = 0
        self.events = 0

    def run(self, tokens: Sequence[int], positions: Sequence[int], steps: int = 1) -> Array:
        """Steps of one launch: each takes the tokens of the one before.

        Args:
            tokens: of each row, for the first step.
            positions: of each row, for the first step; the caches have what is before.
            steps: how many.

        Returns:
            The tokens of each step: [steps, batch]. All ranks have the same.

        Raises:
            InvalidArgument: a batch, token or position beyond the plan.
            Fault: a task did what no task may do; the message names seed and order.
        """
        check_inputs(self.plan, tokens, positions, steps)
        graph = self.plan.graph
        for rank in self._ranks:
            rank.views[graph.tokens.number, 0][:, 0] = tokens
            rank.views[graph.positions.number, 0][:, 0] = positions
        self._found: list[list[Array]] = [[] for _ in self._ranks]
        self._last = self._steps + steps
        sms = [
            _Sm(rank.rank, number, stream, step=self._steps)
            for rank in self._ranks
            for number, stream in enumerate(self.plan.schedule.streams)
            if stream
        ]
        self._weight = {id(sm): self._random.random() for sm in sms}
        self._slow = self._random.randrange(len(self._ranks)), self._random.choice(sms)
        packets: list[_Packet] = []
        try:
            self._loop(sms, packets)
        except Fault as fault:
            raise Fault(f"{fault} (seed {self.seed}, order {self.order})") from None
        self._steps += steps
        first = np.stack(self._found[0])
        for rank, found in enumerate(self._found):
            if not np.array_equal(first, np.stack(found)):
                raise Fault(f"rank {rank} has other tokens (seed {self.seed}, order {self.order})")
        return first

    # ---- events ----

    def _loop(self, sms: list[_Sm], packets: list[_Packet]) -> None:
        waiting = set(range(len(sms)))  # those whose task may not yet begin
        able: list[int] = []
        stale = True
        ended = 0
        while ended < len(sms):
            if stale:
                now = [place for place in waiting if self._may_begin(sms[place])]
                waiting.difference_update(now)
                able += sorted(now)
                stale = False
            choice = self._choose(sms, able, packets)
            self.events += 1
            if choice is None:
                raise Fault(self._stuck(sms, waiting))
            if choice < 0:
                self._deliver(packets.pop(-1 - choice))
                stale = True
                continue
            sm = sms[able[choice]]
            task = self.plan.program.tasks[sm.stream[sm.at]]
            if sm.phase == 0:
                sm.phase = 1
            elif sm.phase == 1:
                sm.results = self._compute(sm, task)
                sm.phase = 2
            elif sm.phase == 2:
                self._store(sm, task, packets)
                sm.phase = 3
            else:
                self._signal(sm, task)
                place = able.pop(choice)
                stale = True
                if self._goes_on(sm):
                    waiting.add(place)
                else:
                    ended += 1

    def _goes_on(self, sm: _Sm) -> bool:
        """To its next task, or step; whether there is one."""
        sm.phase, sm.results = 0, None
        sm.at += 1
        if sm.at == len(sm.stream):
            sm.at = 0
            sm.step += 1
        return sm.step < self._last

    def _may_begin(self, sm: _Sm) -> bool:
        program, rank = self.plan.program, self._ranks[sm.rank]
        task = program.tasks[sm.stream[sm.at]]
        if rank.counters[-1] < sm.step:  # the step before has not ended
            return False
        for counter, threshold in task.waits:
            if rank.counters[counter] < sm.step * program.counters[counter].arrivals + threshold:
                return False
        return all(
            (sm.rank, (peer, sm.step, source)) in self._arrived
            for source in program.mail_from.get(task.number, ())
            for peer in range(len(self._ranks))
            if peer != sm.rank
        )

    def _choose(self, sms: list[_Sm], able: list[int], packets: list[_Packet]) -> int | None:
        """A place in `able`, or -1 - a packet's place; None: nothing can go on."""
        pick = self._random
        if not able and not packets:
            return None
        if self.order == "late_packets":
            deliver = not able
        elif self.order == "eager":
            deliver = bool(packets)
        else:
            deliver = bool(packets) and (not able or pick.random() < 0.3)
        if deliver:
            return -1 - pick.randrange(len(packets))
        if self.order == "eager":
            return max(range(len(able)), key=lambda i: (sms[able[i]].phase, -able[i]))
        if self.order == "slow_rank" or self.order == "slow_sm":
            fast = [i for i, place in enumerate(able) if not self._is_slow(sms[place])]
            return pick.choice(fast) if fast else pick.randrange(len(able))
        if self.order == "late_signals":  # everything begins and reads before anything is told
            return min(range(len(able)), key=lambda i: (sms[able[i]].phase, pick.random()))
        if self.order == "bursts":  # one goes as far as it can before the next
            if pick.random() < 0.02:
                self._weight = {id(sm): pick.random() for sm in sms}
            return max(range(len(able)), key=lambda i: self._weight[id(sms[able[i]])])
        return pick.randrange(len(able))

    def _is_slow(self, sm: _Sm) -> bool:
        rank, slow = self._slow
        return sm.rank == rank if self.order == "slow_rank" else sm is slow

    def _compute(self, sm: _Sm, task: Task) -> list[tuple[Rect, Array]]:
        if task.op < 0:
            return []
        rank = self._ranks[sm.rank]
        rank.half = sm.step % 2
        try:
            return self.plan.program.rules[task.op].run(task.tile, rank)
        except Fault as fault:
            name = self.plan.program.name(task)
            raise Fault(f"rank {sm.rank}, SM {sm.number}: {name} {fault}") from None

    def _store(self, sm: _Sm, task: Task, packets: list[_Packet]) -> None:
        for rect, array in sm.results or ():
            if rect.value.room == "mail":
                data = to_stored(array, rect.value.dtype)
                packets += [
                    _Packet(peer, sm.step % 2, rect, data, (sm.rank, sm.step, task.number))
                    for peer in range(len(self._ranks))
                    if peer != sm.rank
                ]
            else:
                self._ranks[sm.rank].write(rect, array, 0)

    def _deliver(self, packet: _Packet) -> None:
        rank, half, rect, data, sender = packet
        view = self._ranks[rank].views[rect.value.number, half]
        view[rect.row0 : rect.row1, rect.col0 : rect.col1] = data
        self._arrived.add((rank, sender))

    def _signal(self, sm: _Sm, task: Task) -> None:
        rank = self._ranks[sm.rank]
        rank.counters[task.signal] += 1
        if task.op >= 0:
            return
        tokens = self.plan.graph.tokens
        self._found[sm.rank].append(rank.views[tokens.number, 0][:, 0].copy())
        rank.views[self.plan.graph.positions.number, 0][:] += 1
        rank.poison()
        self._arrived -= {
            key for key in self._arrived if key[0] == sm.rank and key[1][1] == sm.step
        }

    def _stuck(self, sms: list[_Sm], waiting: set[int]) -> str:
        sm = sms[min(waiting)]
        task = self.plan.program.tasks[sm.stream[sm.at]]
        return (
            f"nothing can go on: rank {sm.rank}, SM {sm.number} stands before "
            f"{self.plan.program.name(task)}, and {len(waiting) - 1} others wait"
        )


def check_inputs(
    plan: Plan, tokens: Sequence[int], positions: Sequence[int], steps: int = 1
) -> None:
    """Refuses what is beyond a plan, before anything runs.

    Raises:
        InvalidArgument: it names the row.
    """
    graph = plan.graph
    if type(steps) is not int or steps < 1:
        raise InvalidArgument(f"steps={steps!r}: give a whole number from 1 on")
    vocabulary = next(op for op in graph.operators if op.kind == "embedding").inputs["table"].rows
    for name, given in (("tokens", tokens), ("positions", positions)):
        if len(given) != graph.batch:
            raise InvalidArgument(
                f"{len(given)} {name}, and the plan is for a batch of {graph.batch}"
            )
        for row, number in enumerate(given):
            if int(number) != number:
                raise InvalidArgument(f"{name}[{row}] is {number!r}: give whole numbers")
    for row, (token, position) in enumerate(zip(tokens, positions, strict=True)):
        if not 0 <= token < vocabulary:
            raise InvalidArgument(f"tokens[{row}] is {token}: the model has {vocabulary} tokens")
        if not 0 <= position <= graph.context - steps:
            raise InvalidArgument(
                f"positions[{row}] is {position}: behind {steps} steps it is beyond the plan's "
                f"context of {graph.context}"
            )


def generate(
    interpreter: Interpreter, prompt: Sequence[Sequence[int]], count: int, steps: int = 1
) -> list[list[int]]:
    """Greedy tokens behind prompts of one length, which are taken token by token.

    Args:
        interpreter: fresh.
        prompt: of each row.
        count: tokens to give, of each row.
        steps: of a launch.
    """
    batch = len(prompt)
    length = len(prompt[0])
    for position in range(length):
        given = [row[position] for row in prompt]
        last: Any = interpreter.run(given, [position] * batch)[-1]
    found = [last]
    while len(found) < count:
        here = min(steps, count - len(found))
        position = length + len(found) - 1
        new = interpreter.run([int(t) for t in found[-1]], [position] * batch, here)
        found += list(new)
    return [[int(step[row]) for step in found] for row in range(batch)]
