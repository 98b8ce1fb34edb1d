"""The schedules: in which order the stages of a pipeline compute.

Each function gives an :class:`~unjam.pipeline.Order` with one stage a rank. ``eager_1f1b`` and the
delay of weights' gradients are those of "On Optimizing the Communication of Model Parallelism"
(Zhuang et al., MLSys 2023), Sec. 4.
"""

from __future__ import annotations

import difflib
import math
from collections import deque
from collections.abc import Callable, Sequence

from .._errors import InvalidArgument
from .actions import Action, Order

MOST_STAGES = 1 << 12
MOST_MICROBATCHES = 1 << 16
MOST_ACTIONS = 1 << 18  # of all stages together: what is larger, nobody waits for


def gpipe(stages: int, microbatches: int) -> Order:
    """All forwards, then all backwards, each in the order of the microbatches."""
    return _rows(stages, microbatches, lambda stage: microbatches)


def one_f_one_b(stages: int, microbatches: int) -> Order:
    """1F1B: stage i of n begins with n - i forwards, then backwards and forwards alternate."""
    return _rows(stages, microbatches, lambda stage: stages - stage)


def eager_1f1b(stages: int, microbatches: int, ahead: float = 1.0) -> Order:
    """1F1B that begins with more forwards, so that transfers have time.

    Stage i of n begins with 2 (n - i) - 1 forwards in place of n - i, and so keeps up to n - i - 1
    more microbatches.

    Args:
        stages: how many.
        microbatches: how many.
        ahead: which part of these additional forwards: 0 is 1F1B, 1 is all of them.

    Raises:
        InvalidArgument: a number out of its range.
    """
    if not _is_number(ahead) or not 0 <= ahead <= 1:
        raise InvalidArgument(f"ahead={ahead!r} is no part of the forwards: give 0 to 1")

    def begins_with(stage: int) -> int:
        more = stages - stage - 1
        return stages - stage + math.floor(ahead * more + 0.5)

    return _rows(stages, microbatches, begins_with)


def split_backward(order: Order, delay: int | Sequence[int] = 0) -> Order:
    """The same order with each backward in two: gradients of inputs, and later those of weights.

    The stages before wait for the first part only.

    Args:
        order: with full backwards.
        delay: how many other actions of the rank stand between the two; one number, or one for each
            stage. At the end of a row less are left, and the weights' gradients come there.

    Raises:
        InvalidArgument: the delay is none, or the order has backwards in two parts already.
    """
    if order.is_split:
        raise InvalidArgument("the order has backwards in two parts already: give it without I, W")
    delays = [delay] * order.stages if _is_whole(delay) else delay
    if isinstance(delays, (str, bytes)) or not isinstance(delays, Sequence):
        raise InvalidArgument(f"delay={delay!r} is no number of actions: give 0, 1, 2, …")
    if len(delays) != order.stages:
        raise InvalidArgument(
            f"there are {len(delays)} delays for {order.stages} stages: give one number, or one "
            "for each stage"
        )
    for one in delays:
        if not _is_whole(one) or one < 0:
            raise InvalidArgument(f"delay={one!r} is no number of actions: give 0, 1, 2, …")
    return Order(tuple(_split_row(row, delays) for row in order.rows))


def _split_row(row: Sequence[Action], delays: Sequence[int]) -> tuple[Action, ...]:
    found: list[Action] = []
    # From which number of others on, what: gradients of weights keep the order of the microbatches.
    late: deque[tuple[int, Action]] = deque()
    others = 0
    for action in row:
        if action.kind == "B":
            action = action._replace(kind="I")
            late.append((others + 1 + delays[action.stage], action._replace(kind="W")))
        found.append(action)
        others += 1
        while late and late[0][0] <= others:
            found.append(late.popleft()[1])
    return (*found, *(action for _, action in late))


SCHEDULES: dict[str, Callable[[int, int], Order]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "eager_1f1b": eager_1f1b,
}


def make_order(name: str, stages: int, microbatches: int) -> Order:
    """The order of that name, one of :data:`SCHEDULES`.

    Raises:
        InvalidArgument: there is none of that name, or a number is out of its range.
    """
    if name not in SCHEDULES:
        near = difflib.get_close_matches(str(name), SCHEDULES, 1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise InvalidArgument(f"there is no schedule {name!r}: give {', '.join(SCHEDULES)}{meant}")
    return SCHEDULES[name](stages, microbatches)


def _rows(stages: int, microbatches: int, begins_with: Callable[[int], int]) -> Order:
    """So many forwards, then backwards and forwards in turn, then what is left of the backwards."""
    for name, number, most in (
        ("stages", stages, MOST_STAGES),
        ("microbatches", microbatches, MOST_MICROBATCHES),
    ):
        if not _is_whole(number) or not 1 <= number <= most:
            raise InvalidArgument(f"{name}={number!r} is out of range: give 1 to {most}")
    if 2 * stages * microbatches > MOST_ACTIONS:
        raise InvalidArgument(
            f"{stages} stages with {microbatches} microbatches are more than {MOST_ACTIONS} "
            "actions: give fewer"
        )
    rows = []
    for stage in range(stages):
        first = min(microbatches, begins_with(stage))
        row = [Action(stage, "F", microbatch) for microbatch in range(first)]
        for microbatch in range(microbatches):
            row.append(Action(stage, "B", microbatch))
            if first + microbatch < microbatches:
                row.append(Action(stage, "F", first + microbatch))
        rows.append(tuple(row))
    return Order(tuple(rows))


def _is_whole(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)


def _is_number(number: object) -> bool:
    return isinstance(number, (int, float)) and not isinstance(number, bool)
