"""Schedules for a PipelineStage: torch's runtime computes, sends and receives in a given order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..._errors import InvalidArgument, LibraryError
from ...pipeline import Order, eager_1f1b, split_backward

try:
    from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

    _PipelineScheduleRuntime._prepare_schedule_with_comms  # noqa: B018
except (ImportError, AttributeError) as error:
    raise LibraryError(
        f"torch {torch.__version__} lacks the pipeline runtime that unjam.torch.pipeline runs on: "
        "install torch 2.11"
    ) from error


class Ordered(_PipelineScheduleRuntime):
    """A schedule that computes in the order given; use it as torch's own schedules.

    A send begins when its action has ended, and a receive when the sender's action stands before
    it in torch's own dry run; both go on beside the actions.
    """

    def __init__(
        self,
        stages: Sequence[Any],
        order: Order,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        **options: Any,
    ) -> None:
        """Checks the order against the stages.

        Args:
            stages: this rank's, of class PipelineStage.
            order: what each rank computes; the same on all ranks.
            loss_fn: of the last stage, called with its output and the target.
            options: as of torch's schedules, such as ``scale_grads``.

        Raises:
            InvalidArgument: the order is one of other stages or ranks.
        """
        stages = list(stages)
        _check(stages, order)
        super().__init__(stages, order.microbatches, loss_fn, **options)
        self.order = order
        self.pipeline_order = {
            rank: [_Action.from_str(str(action)) for action in row]
            for rank, row in enumerate(order.rows)
        }
        # It takes actions out of the lists that it is given.
        self._prepare_schedule_with_comms(
            {rank: list(actions) for rank, actions in self.pipeline_order.items()}
        )


class Eager1F1B(Ordered):
    """Eager 1F1B with one stage a rank: transfers have the time of other microbatches.

    Stage i of n keeps activations of up to 2 (n - i) - 1 microbatches, 1F1B of n - i. The gradients
    are those of torch's Schedule1F1B.
    """

    def __init__(
        self,
        stage: Any,
        n_microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        *,
        ahead: float = 1.0,
        split: bool = False,
        delay: int | Sequence[int] = 0,
        **options: Any,
    ) -> None:
        """Makes the order and checks it.

        Args:
            stage: this rank's, of class PipelineStage.
            n_microbatches: into how many a batch is cut.
            loss_fn: of the last stage, called with its output and the target.
            ahead: which part of the additional forwards: 0 is 1F1B, 1 is all of them.
            split: whether backwards come in two parts, gradients of inputs first.
            delay: how many actions stand between the two parts; one number, or one for each stage.
            options: as of torch's schedules, such as ``scale_grads``.

        Raises:
            InvalidArgument: a number out of its range.
        """
        order = eager_1f1b(stage.num_stages, n_microbatches, ahead)
        if split:
            order = split_backward(order, delay)
        elif delay != 0:
            raise InvalidArgument("delay is of backwards in two parts: give split=True, too")
        super().__init__([stage], order, loss_fn, **options)


def _check(stages: Sequence[Any], order: Order) -> None:
    if not stages:
        raise InvalidArgument("there are no stages: give those of this rank")
    stage = stages[0]
    if order.stages != stage.num_stages or len(order.rows) != stage.group_size:
        raise InvalidArgument(
            f"the order has {order.stages} stages on {len(order.rows)} ranks, and the pipeline "
            f"{stage.num_stages} on {stage.group_size}: make an order for these"
        )
    rank = stage.group_rank
    due = {stage for stage, where in enumerate(order.rank_of) if where == rank}
    given = {stage.stage_index for stage in stages}
    if due != given:
        raise InvalidArgument(
            f"rank {rank} has stages {sorted(given)}, and in the order {sorted(due)}: give the "
            "stages that the order gives it"
        )
