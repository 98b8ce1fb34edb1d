"""From what a user says of a schedule to the order of a pipeline's actions."""

from __future__ import annotations

from collections.abc import Sequence

from ..._errors import InvalidArgument
from ...pipeline import Costs, Order, auto, make_order, split_backward

AUTO = "auto"


def order_of(
    schedule: Order | str,
    rows: int,
    microbatches: int | None,
    split: bool,
    delay: int | Sequence[int],
    costs: Costs | None,
) -> Order:
    """The order; its arguments are Pipeline's.

    Raises:
        InvalidArgument: they do not fit together; the message says what to give.
    """
    if costs is not None and schedule != AUTO:
        raise InvalidArgument('costs are what schedule="auto" looks at: leave them out')
    if isinstance(schedule, str):
        return _named(schedule, rows, microbatches, split, delay, costs)
    if not isinstance(schedule, Order):
        raise InvalidArgument(f"schedule={schedule!r} is no order: give an Order or a name of one")
    if microbatches not in (None, schedule.microbatches) or split or delay != 0:
        raise InvalidArgument(
            "microbatches, split and delay are of schedules by name: an Order has its own"
        )
    if len(schedule.rows) != rows:
        raise InvalidArgument(
            f"the order is of {len(schedule.rows)} ranks, and the group has {rows}: make an order "
            "for these"
        )
    return schedule


def _named(
    name: str,
    stages: int,
    microbatches: int | None,
    split: bool,
    delay: int | Sequence[int],
    costs: Costs | None,
) -> Order:
    if microbatches is None:
        raise InvalidArgument(f"schedule={name!r} needs microbatches: give their number")
    if name == AUTO:
        if split or delay != 0:
            raise InvalidArgument(
                'split and delay are what schedule="auto" chooses: leave them out'
            )
        if costs is None:
            raise InvalidArgument(
                'schedule="auto" needs costs, above all what a transfer takes beside a forward: '
                "give Costs(transfer=0.5) or the like"
            )
        return auto(stages, microbatches, costs).order
    order = make_order(name, stages, microbatches)
    if split:
        return split_backward(order, delay)
    if delay != 0:
        raise InvalidArgument("delay is of backwards in two parts: give split=True, too")
    return order
