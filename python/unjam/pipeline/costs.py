"""What the actions and transfers of a pipeline take."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .._errors import InvalidArgument
from .actions import Action, Order

Times = float | Sequence[float]  # of all stages, or of each
Both = float | tuple[float, float]  # of an edge: both directions, or forward and backward


class Message(NamedTuple):
    """What goes over an edge for one microbatch: an activation, or its gradient backwards."""

    source: int
    target: int
    microbatch: int

    @property
    def is_gradient(self) -> bool:
        """Whether it goes backwards."""
        return self.source > self.target


@dataclass(frozen=True)
class Costs:
    """How long everything takes, in any unit of time.

    Attributes:
        forward: a microbatch's forward, of all stages or of each.
        backward: its backward in one.
        inputs: the part of the backward that gives gradients of inputs; None: half of it.
        weights: the other part; None: half of it.
        transfer: from each stage to the next: both directions, or (forward, backward).
        edges: the same of single edges (i, j), i < j. An edge that skips stages exists only here.
        neighbours: whether each stage has an edge to the next; False: only those of ``edges``.
    """

    forward: Times = 1.0
    backward: Times = 2.0
    inputs: Times | None = None
    weights: Times | None = None
    transfer: Both = 0.0
    edges: Mapping[tuple[int, int], Both] = field(default_factory=dict)
    neighbours: bool = True


class Model:
    """The costs of one order's actions and messages, checked.

    Raises:
        InvalidArgument: a time is none, or does not fit the order's stages.
    """

    def __init__(self, order: Order, costs: Costs) -> None:
        stages = order.stages
        if (costs.inputs is None) != (costs.weights is None):
            raise InvalidArgument("inputs and weights belong together: give both times, or none")
        backward = _of_stages("backward", costs.backward, stages)
        half = [time / 2 for time in backward]
        self._times = {
            "F": _of_stages("forward", costs.forward, stages),
            "B": backward,
            "I": half if costs.inputs is None else _of_stages("inputs", costs.inputs, stages),
            "W": half if costs.weights is None else _of_stages("weights", costs.weights, stages),
        }
        transfer = _both("transfer", costs.transfer)
        chain = range(stages - 1) if costs.neighbours else ()
        self.edges = {(stage, stage + 1): transfer for stage in chain}
        for edge, times in costs.edges.items():
            self.edges[_checked(edge, stages)] = _both(f"the transfer {edge}", times)
        self._into: list[list[int]] = [[] for _ in range(stages)]
        self._from: list[list[int]] = [[] for _ in range(stages)]
        for i, j in sorted(self.edges):
            self._into[j].append(i)
            self._from[i].append(j)
        self.rank_of = order.rank_of

    def time(self, action: Action) -> float:
        """How long it takes."""
        return self._times[action.kind][action.stage]

    def transfer(self, message: Message) -> float:
        """How long it takes; nothing within a rank."""
        if self.is_local(message):
            return 0.0
        forward, backward = self.edges[min(message[:2]), max(message[:2])]
        return backward if message.is_gradient else forward

    def is_local(self, message: Message) -> bool:
        """Whether it stays within a rank."""
        return self.rank_of[message.source] == self.rank_of[message.target]

    def needs(self, action: Action) -> list[Message]:
        """What must have arrived before it can begin."""
        stage, _, microbatch = action
        if action.is_forward:
            return [Message(other, stage, microbatch) for other in self._into[stage]]
        if action.gives_gradients:
            return [Message(other, stage, microbatch) for other in self._from[stage]]
        return []

    def gives(self, action: Action) -> list[Message]:
        """What can be sent when it has ended."""
        stage, _, microbatch = action
        if action.is_forward:
            return [Message(stage, other, microbatch) for other in self._from[stage]]
        if action.gives_gradients:
            return [Message(stage, other, microbatch) for other in self._into[stage]]
        return []


def _of_stages(name: str, times: Times, stages: int) -> list[float]:
    if isinstance(times, (int, float)):
        times = [times] * stages
    if isinstance(times, (str, bytes)) or not isinstance(times, Sequence):
        raise InvalidArgument(f"{name}={times!r} is no time: give a number, or one for each stage")
    if len(times) != stages:
        raise InvalidArgument(
            f"{name} has {len(times)} times for {stages} stages: give one number, or one for each"
        )
    return [_time(name, time) for time in times]


def _both(name: str, times: Both) -> tuple[float, float]:
    if isinstance(times, (int, float)):
        times = (times, times)
    if not isinstance(times, (tuple, list)) or len(times) != 2:
        raise InvalidArgument(
            f"{name}: {times!r} is no time: give a number, or two for forward and backward"
        )
    return _time(name, times[0]), _time(name, times[1])


def _time(name: str, time: object) -> float:
    if isinstance(time, bool) or not isinstance(time, (int, float)) or not 0 <= time < math.inf:
        raise InvalidArgument(f"{name}: {time!r} is no time: give a number from 0 on")
    return float(time)


def _checked(edge: object, stages: int) -> tuple[int, int]:
    if not isinstance(edge, tuple) or len(edge) != 2 or not all(type(i) is int for i in edge):
        raise InvalidArgument(f"{edge!r} is no edge: give the numbers of two stages")
    i, j = edge
    if not (0 <= i < stages and 0 <= j < stages):
        raise InvalidArgument(f"edge {edge} leads beyond the stages: there are 0 to {stages - 1}")
    if i >= j:
        cure = f"give ({j}, {i})" if i > j else "leave it out"
        raise InvalidArgument(f"edge {edge} does not lead forward: {cure}")
    return i, j
