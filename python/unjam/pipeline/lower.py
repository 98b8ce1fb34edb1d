"""From an order to what each rank does about computing, sending and receiving.

A *step* computes an action, or posts a send or a receive, which then run beside the rank, or waits
until such a transfer has ended. The modes differ in where these steps stand, and in nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from .actions import Action, Order
from .costs import Message, Model

COMPUTE, SEND, RECEIVE, WAIT = "compute", "send", "receive", "wait"


class Step(NamedTuple):
    """What a rank does: one of the four words above, and with what."""

    do: str
    what: Action | Message


Programs = list[list[Step]]  # of each rank


class Free(NamedTuple):
    """The run of an order whose transfers take no time.

    Attributes:
        start: when each action starts.
        end: when it ends.
        place: how many actions the longest chain has that leads to it.
        giver: the action that gives each message.
    """

    start: dict[Action, float]
    end: dict[Action, float]
    place: dict[Action, int]
    giver: dict[Message, Action]


def overlap(order: Order, model: Model) -> Programs:
    """Receives are posted at the start, sends when there is something; only receivers wait."""
    programs: Programs = []
    for row in order.rows:
        program = _received_early(row, model, lambda message: True)
        for action in row:
            program += (Step(WAIT, message) for message in model.needs(action))
            program.append(Step(COMPUTE, action))
            program += (Step(SEND, message) for message in model.gives(action))
        programs.append(program)
    return programs


def bounded(order: Order, model: Model, receives: int, sends: int) -> Programs:
    """As overlap, with limits for what is under way on a rank: what an executor runs.

    At the start, receives are posted for what is used first, and another one whenever one has
    ended. A send beyond its limit waits for the oldest one, and the end of a program for all.

    Args:
        order: the actions.
        model: their edges.
        receives: at most so many from other ranks, 1 or more.
        sends: at most so many to other ranks, 1 or more.
    """
    programs: Programs = []
    for row in order.rows:
        due = deque(message for action in row for message in _remote(model.needs(action), model))
        program = _received_early(row, model, model.is_local)
        program += (Step(RECEIVE, due.popleft()) for _ in range(min(receives, len(due))))
        sent: deque[Message] = deque()
        for action in row:
            for message in model.needs(action):
                program.append(Step(WAIT, message))
                if due and not model.is_local(message):
                    program.append(Step(RECEIVE, due.popleft()))
            program.append(Step(COMPUTE, action))
            for message in model.gives(action):
                if not model.is_local(message):
                    if len(sent) == sends:
                        program.append(Step(WAIT, sent.popleft()))
                    sent.append(message)
                program.append(Step(SEND, message))
        program += (Step(WAIT, message) for message in sent)
        programs.append(program)
    return programs


def fused(order: Order, model: Model) -> Programs:
    """As torch's Schedule1F1B does it, for any order.

    Between two actions stands one batch: what the last one sends and what the next one receives; it
    ends as a whole. If both are forwards, or both parts of backwards, what is sent goes on behind
    the next action, and is waited for when there is more to send in this way, or another batch.
    """
    programs: Programs = []
    for row in order.rows:
        program = _received_early(row, model, model.is_local)
        last: Action | None = None
        pending: list[Message] = []
        for action in row:
            sends = _remote(model.gives(last), model) if last else []
            receives = _remote(model.needs(action), model)
            goes_on = last is not None and last.is_forward == action.is_forward
            if sends or not goes_on:
                program += (Step(WAIT, message) for message in pending)
                pending = sends if goes_on else []
            program += (Step(SEND, message) for message in sends)
            program += (Step(RECEIVE, message) for message in receives)
            batch = receives if goes_on else sends + receives
            program += (Step(WAIT, message) for message in batch)
            program += _computed(action, model)
            last = action
        assert last is not None
        sends = _remote(model.gives(last), model)
        program += (Step(WAIT, message) for message in pending)
        program += (Step(SEND, message) for message in sends)
        program += (Step(WAIT, message) for message in sends)
        programs.append(program)
    return programs


def serial(order: Order, model: Model, free: Free) -> Programs:
    """A rank does one thing at a time: it computes, or it sends, or it receives.

    All ranks have one order of transfers, so that no two wait for each other: that in which the
    data would be there if transfers took no time; of those at once, the one needed first.

    Args:
        order: the actions.
        model: their edges.
        free: when they run if transfers take no time.
    """
    due: dict[Message, tuple[float, float, int]] = {}
    at: list[list[Message]] = [[] for _ in order.rows]
    for row in order.rows:
        for action in row:
            for message in _remote(model.needs(action), model):
                giver = free.giver[message]
                due[message] = (free.end[giver], free.start[action], free.place[giver])
                for stage in message[:2]:
                    at[model.rank_of[stage]].append(message)
    programs: Programs = []
    for rank, row in enumerate(order.rows):
        program = _received_early(row, model, model.is_local)
        left = deque(sorted(at[rank], key=lambda message: (*due[message], message)))
        for action in row:
            while left and _is_before(due[left[0]], free, action):
                program += _exchanged(left.popleft(), rank, model)
            program += _computed(action, model)
        for message in left:
            program += _exchanged(message, rank, model)
        programs.append(program)
    return programs


def _is_before(due: tuple[float, float, int], free: Free, action: Action) -> bool:
    """Whether a message is there before the action starts, in the run without transfer times.

    Places in chains tell where actions take no time.
    """
    ready, _, place = due
    return (ready, place) < (free.start[action], free.place[action])


def _received_early(
    row: Sequence[Action], model: Model, which: Callable[[Message], bool]
) -> list[Step]:
    return [
        Step(RECEIVE, message)
        for action in row
        for message in model.needs(action)
        if which(message)
    ]


def _remote(messages: Sequence[Message], model: Model) -> list[Message]:
    return [message for message in messages if not model.is_local(message)]


def _computed(action: Action, model: Model) -> Iterator[Step]:
    """An action, with what it takes from its own rank and leaves there."""
    yield from (Step(WAIT, m) for m in model.needs(action) if model.is_local(m))
    yield Step(COMPUTE, action)
    yield from (Step(SEND, m) for m in model.gives(action) if model.is_local(m))


def _exchanged(message: Message, rank: int, model: Model) -> tuple[Step, Step]:
    sends = model.rank_of[message.source] == rank
    return Step(SEND if sends else RECEIVE, message), Step(WAIT, message)
