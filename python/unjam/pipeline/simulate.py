"""When the actions of an order run, what waits, and what is kept meanwhile.

The model: a rank computes one action after the other. An edge carries one message after the other
in each direction, both directions at once, in the order in which they were sent; edges do not share
anything. Nothing else takes time. Sec. 4 of "On Optimizing the Communication of Model Parallelism"
has the comparisons that the modes are for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from .._errors import InvalidArgument, InvalidUsage
from . import lower
from .actions import Action, Order
from .costs import Costs, Message, Model
from .orders import one_f_one_b

MODES = {
    "serial": "a rank computes, sends or receives, one at a time",
    "fused": "sends and receives in one batch between actions, as torch's Schedule1F1B",
    "overlap": "transfers run beside the actions",
    "signal": "transfers take no time",
}


class Span(NamedTuple):
    """An action, and when it runs."""

    action: Action
    start: float
    end: float


class Hop(NamedTuple):
    """A message between two ranks, and when it is on its way."""

    message: Message
    start: float
    end: float


class Wait(NamedTuple):
    """Where a rank stands for ever.

    Attributes:
        rank: which.
        action: what it would compute next; None behind its last one.
        on: the action that it waits for.
        other: the rank that would have to go on.
        sends: ``on`` has run, and that rank does not take what it gave.
    """

    rank: int
    action: Action | None
    on: Action
    other: int
    sends: bool

    def __str__(self) -> str:
        where = f"stands before {self.action}" if self.action else "stands at its end"
        if self.sends:
            return f"rank {self.rank} {where}: rank {self.other} does not take what {self.on} gave"
        return f"rank {self.rank} {where}, which waits for {self.on} of rank {self.other}"


class Deadlock(InvalidUsage):
    """An order whose ranks wait for each other.

    Attributes:
        waits: where each rank stands that has not come to its end.
        circle: those of them that wait for each other; the message names these.
    """

    def __init__(self, mode: str, waits: Sequence[Wait]) -> None:
        self.waits = tuple(waits)
        self.circle = _circle(self.waits)
        blocked = any(wait.sends for wait in self.circle)
        cure = (
            "let transfers run beside the actions (mode overlap), or receive in the order of sends"
            if blocked
            else "put actions behind those that they wait for"
        )
        super().__init__(f"mode {mode} deadlocks: {'; '.join(map(str, self.circle))}. Cure: {cure}")


def _circle(waits: Sequence[Wait]) -> tuple[Wait, ...]:
    """The ranks that wait for each other: each waits for one that stands, so that some do."""
    of = {wait.rank: wait for wait in waits}
    seen: dict[int, int] = {}
    rank = waits[0].rank
    while rank not in seen:
        seen[rank] = len(seen)
        rank = of[rank].other
    return tuple(of[one] for one, place in seen.items() if place >= seen[rank])


@dataclass(frozen=True)
class Run:
    """An order's run.

    Attributes:
        order: whose.
        mode: how messages and actions share time.
        spans: of each rank its actions, as they run.
        hops: the messages between ranks, by their start.
        time: until all has ended, in the unit of the costs.
    """

    order: Order
    mode: str
    spans: tuple[tuple[Span, ...], ...]
    hops: tuple[Hop, ...]
    time: float

    @cached_property
    def bubbles(self) -> tuple[float, ...]:
        """Which part of the time each rank does not compute."""
        busy = [sum(span.end - span.start for span in row) for row in self.spans]
        return tuple(1 - one / self.time if self.time else 0.0 for one in busy)

    @property
    def bubble(self) -> float:
        """The mean of these."""
        return sum(self.bubbles) / len(self.bubbles)

    @cached_property
    def live(self) -> tuple[int, ...]:
        """Of how many microbatches each rank keeps activations at once, at most."""
        return live_activations(self.order)

    def as_dict(self) -> dict[str, Any]:
        """What JSON can hold: the figures, without spans."""
        return {
            "mode": self.mode,
            "time": self.time,
            "bubble": self.bubble,
            "bubbles": list(self.bubbles),
            "live": list(self.live),
        }


def live_activations(order: Order) -> tuple[int, ...]:
    """Of how many microbatches each rank keeps activations at once, at most.

    They are kept from the start of the forward to the end of the backward, or of its second part.
    Inputs that have arrived and wait are not counted. A rank with several stages counts each.
    """
    found = []
    for row in order.rows:
        now = most = 0
        for action in row:
            now += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
            most = max(most, now)
        found.append(most)
    return tuple(found)


def simulate(order: Order, costs: Costs | None = None, mode: str = "overlap") -> Run:
    """When each action of an order runs.

    Args:
        order: what each rank computes.
        costs: what everything takes; None: forwards 1, backwards 2, transfers nothing.
        mode: one of :data:`MODES`.

    Raises:
        Deadlock: the order cannot run in this mode.
        InvalidArgument: the mode is none, or the costs do not fit the order.
    """
    if mode not in MODES:
        raise InvalidArgument(f"there is no mode {mode!r}: give {', '.join(MODES)}")
    model = Model(order, Costs() if costs is None else costs)
    if mode == "fused":
        programs = lower.fused(order, model)
    elif mode == "serial":
        free = _Engine(order, model, lower.overlap(order, model), mode, instant=True).run()
        programs = lower.serial(order, model, free.free())
    else:
        programs = lower.overlap(order, model)
    return _Engine(order, model, programs, mode, instant=mode == "signal").run().result()


def signal_bound(stages: int, microbatches: int, costs: Costs | None = None) -> float:
    """The time of 1F1B, backwards in one, with transfers that take none ("Signal Send/Recv").

    An order with backwards in two parts can take less.
    """
    return simulate(one_f_one_b(stages, microbatches), costs, "signal").time


def executable(
    order: Order, edges: Iterable[tuple[int, int]], receives: int, sends: int
) -> lower.Programs:
    """What each rank does to run an order, with limits for what is under way on it.

    It comes to its end however long anything takes: no rank waits for what depends on itself.

    Args:
        order: what each rank computes.
        edges: pairs of stages (i, j), i < j; there are no others.
        receives: how many receives a rank has under way at most.
        sends: how many sends.

    Raises:
        Deadlock: the ranks would wait for each other.
        InvalidArgument: an edge that does not fit the order, or a limit below 1.
    """
    for name, limit in (("receives", receives), ("sends", sends)):
        if type(limit) is not int or limit < 1:
            raise InvalidArgument(f"{name}={limit!r} is no limit: give a number from 1 on")
    model = Model(order, Costs(edges=dict.fromkeys(edges, 0.0), neighbours=False))
    # That of the order first: it has the better words for an order that no limit could help.
    _Engine(order, model, lower.overlap(order, model), "overlap", instant=True).run().result()
    programs = lower.bounded(order, model, receives, sends)
    try:
        _Engine(order, model, programs, "overlap", instant=True).run().result()
    except Deadlock as error:
        raise InvalidArgument(
            f"with receives={receives} and sends={sends} the ranks wait for each other: "
            f"{'; '.join(map(str, error.circle))}. Give higher limits"
        ) from None
    return programs


class _Transfer:
    """A message, as far as is known."""

    __slots__ = ("end", "received", "sent")

    def __init__(self) -> None:
        self.sent: float | None = None  # when the sender has posted it
        self.received: float | None = None  # when the receiver has
        self.end: float | None = None


class _Engine:
    """Runs the ranks' programs, each as far as it gets, until none can go on.

    A rank's clock depends on messages alone, so the order in which ranks are tried does not matter.
    `instant`: transfers take no time.
    """

    def __init__(
        self, order: Order, model: Model, programs: lower.Programs, mode: str, instant: bool
    ) -> None:
        self._order, self._model, self._programs, self._mode = order, model, programs, mode
        self._instant = instant
        ranks = len(programs)
        self._at = [0] * ranks
        self._clock = [0.0] * ranks
        self._chain = [0] * ranks
        self._spans: list[list[Span]] = [[] for _ in range(ranks)]
        self._hops: list[Hop] = []
        self._transfers: dict[Message, _Transfer] = {}
        self._links: dict[tuple[int, int], deque[Message]] = {}
        self._free: dict[tuple[int, int], float] = {}
        self._waiting: dict[Message, list[int]] = {}
        self._chain_of: dict[Message, int] = {}
        self._place: dict[Action, int] = {}  # in the longest chain of actions that leads to it

    def run(self) -> _Engine:
        """Raises Deadlock if some rank does not come to its end."""
        ready = list(range(len(self._programs)))
        while ready:
            self._advance(ready.pop(), ready)
        left = [r for r, program in enumerate(self._programs) if self._at[r] < len(program)]
        if left:
            raise Deadlock(self._mode, [self._wait_of(rank) for rank in left])
        return self

    def free(self) -> lower.Free:
        """After a run whose transfers took no time."""
        spans = [span for row in self._spans for span in row]
        return lower.Free(
            {span.action: span.start for span in spans},
            {span.action: span.end for span in spans},
            self._place,
            {message: span.action for span in spans for message in self._model.gives(span.action)},
        )

    def result(self) -> Run:
        """After the run."""
        hops = sorted(self._hops, key=lambda hop: (hop.start, hop.end, hop.message))
        spans = tuple(map(tuple, self._spans))
        return Run(self._order, self._mode, spans, tuple(hops), max(self._clock))

    def _advance(self, rank: int, ready: list[int]) -> None:
        """Runs a rank until it waits; who can go on thereby is added to `ready`."""
        program = self._programs[rank]
        while self._at[rank] < len(program):
            do, what = program[self._at[rank]]
            if isinstance(what, Action):
                self._compute(rank, what)
            elif do == lower.WAIT:
                end = self._transfer(what).end
                if end is None:
                    self._waiting.setdefault(what, []).append(rank)
                    return
                self._clock[rank] = max(self._clock[rank], end)
                self._chain[rank] = max(self._chain[rank], self._chain_of[what])
            elif do == lower.SEND:
                self._transfer(what).sent = self._clock[rank]
                self._chain_of[what] = self._chain[rank]
                self._links.setdefault(what[:2], deque()).append(what)
                self._move(what[:2], ready)
            else:
                self._transfer(what).received = self._clock[rank]
                self._move(what[:2], ready)
            self._at[rank] += 1

    def _compute(self, rank: int, action: Action) -> None:
        start = self._clock[rank]
        self._clock[rank] = end = start + self._model.time(action)
        self._chain[rank] += 1
        self._place[action] = self._chain[rank]
        self._spans[rank].append(Span(action, start, end))

    def _transfer(self, message: Message) -> _Transfer:
        return self._transfers.setdefault(message, _Transfer())

    def _move(self, link: tuple[int, int], ready: list[int]) -> None:
        """Messages at the head of a link whose both ends are there."""
        queue = self._links.get(link)
        while queue:
            message = queue[0]
            transfer = self._transfer(message)
            if transfer.sent is None or transfer.received is None:
                return
            queue.popleft()
            start = max(transfer.sent, transfer.received, self._free.get(link, 0.0))
            time = 0.0 if self._instant else self._model.transfer(message)
            self._free[link] = transfer.end = start + time
            if not self._model.is_local(message):
                self._hops.append(Hop(message, start, transfer.end))
            ready += self._waiting.pop(message, ())

    def _wait_of(self, rank: int) -> Wait:
        rest = self._programs[rank][self._at[rank] :]
        message = rest[0].what
        assert isinstance(message, Message)
        action = next((step.what for step in rest if isinstance(step.what, Action)), None)
        source, target = (self._model.rank_of[stage] for stage in message[:2])
        sends = source == rank != target
        return Wait(rank, action, self._giver(message), target if sends else source, sends)

    def _giver(self, message: Message) -> Action:
        kinds = ("B", "I") if message.is_gradient else ("F",)
        row = self._order.rows[self._model.rank_of[message.source]]
        wanted = {Action(message.source, kind, message.microbatch) for kind in kinds}
        return next(action for action in row if action in wanted)
