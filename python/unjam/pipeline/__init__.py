"""Schedules of pipelines whose transfers run beside the computation.

>>> from unjam.pipeline import Costs, auto, signal_bound, simulate, write_csv
>>> costs = Costs(forward=1, backward=2, transfer=0.5)
>>> choice = auto(stages=4, microbatches=32, costs=costs)
>>> choice.name, simulate(choice.order, costs).time, signal_bound(4, 32, costs)
('1f1b', 105.0, 105.0)

docs/pipeline.md explains the words.
"""

from __future__ import annotations

from .actions import Action, Order, read_csv, write_csv
from .choose import Choice, auto
from .costs import Costs, Message
from .orders import SCHEDULES, eager_1f1b, gpipe, make_order, one_f_one_b, split_backward
from .simulate import (
    MODES,
    Deadlock,
    Hop,
    Run,
    Span,
    Wait,
    executable,
    live_activations,
    signal_bound,
    simulate,
)

__all__ = [
    "MODES",
    "SCHEDULES",
    "Action",
    "Choice",
    "Costs",
    "Deadlock",
    "Hop",
    "Message",
    "Order",
    "Run",
    "Span",
    "Wait",
    "auto",
    "eager_1f1b",
    "executable",
    "gpipe",
    "live_activations",
    "make_order",
    "one_f_one_b",
    "read_csv",
    "signal_bound",
    "simulate",
    "split_backward",
    "write_csv",
]
