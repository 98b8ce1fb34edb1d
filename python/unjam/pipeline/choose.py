"""Which schedule a pipeline needs, given what its transfers take."""

from __future__ import annotations

from dataclasses import dataclass

from .actions import Order
from .costs import Costs
from .orders import eager_1f1b, one_f_one_b, split_backward
from .simulate import signal_bound, simulate

_STEADY = 4  # microbatches a stage: more only make the middle longer
_DELAYS = range(0, 16, 2)  # of the last stage; with an odd one a weight's gradient parts a pair
_CLOSE = 1 + 1e-9  # sums of times are rounded


@dataclass(frozen=True)
class Choice:
    """What :func:`auto` has chosen, and why.

    Attributes:
        name: ``1f1b`` or ``eager_1f1b``, with backwards in two parts.
        order: its actions.
        delays: of each stage, how many actions later weights' gradients come.
        why: a sentence.
    """

    name: str
    order: Order
    delays: tuple[int, ...]
    why: str


def auto(stages: int, microbatches: int, costs: Costs | None = None) -> Choice:
    """The schedule that hides transfers and keeps the fewest activations thereby.

    Backwards come in two parts. If 1F1B then takes no longer than with transfers that take no time,
    it is chosen: it keeps no more activations. With stages alike that is so while a transfer there
    and one back take no longer than the gradients of weights. Where these take as long as a
    forward, a transfer may take half a forward.

    Otherwise it is eager 1F1B, if that is faster. The last stage, which keeps the fewest
    activations, may compute gradients of weights later: by the fewest actions that give the
    shortest time, while it keeps no more than the first stage.

    Args:
        stages: how many.
        microbatches: how many.
        costs: what everything takes; above all the transfers.

    Raises:
        InvalidArgument: a number out of its range, or costs that do not fit.
    """
    few = min(microbatches, _STEADY * stages)
    plain = simulate(split_backward(one_f_one_b(stages, few)), costs).time
    if plain <= _CLOSE * signal_bound(stages, few, costs):
        return _plain(
            stages,
            microbatches,
            "1F1B hides these transfers, if backwards come in two parts; no activation is added",
        )
    eager = eager_1f1b(stages, few)
    best, least = 0, simulate(split_backward(eager), costs).time
    most = stages + stages - 1  # what the first stage keeps
    for delay in _DELAYS[1:]:
        if delay // 2 + 1 > most:
            break
        time = simulate(split_backward(eager, _on_last(delay, stages)), costs).time
        if time * _CLOSE < least:
            best, least = delay, time
    if least * _CLOSE >= plain:
        return _plain(stages, microbatches, "no order hides these transfers better than 1F1B")
    delays = _on_last(best, stages)
    why = "1F1B does not hide these transfers: more forwards go ahead, and keep activations"
    if best:
        why += f"; the last stage's weights come {best} actions later"
    return Choice(
        "eager_1f1b", split_backward(eager_1f1b(stages, microbatches), delays), delays, why
    )


def _plain(stages: int, microbatches: int, why: str) -> Choice:
    order = split_backward(one_f_one_b(stages, microbatches))
    return Choice("1f1b", order, (0,) * stages, why)


def _on_last(delay: int, stages: int) -> tuple[int, ...]:
    return (0,) * (stages - 1) + (delay,)
