"""A model's step as virtual CTAs of one kernel: graph, schedule, checker, interpreter, code.

>>> from unjam.loop import SHAPES, compile_graph, llama
>>> plan = compile_graph(llama(SHAPES["tiny"], ranks=2, context=128).graph)
>>> plan.verdict.is_right
True

docs/loop-kernel.md says what is there and what is not: nothing launches on a GPU yet.
"""

from __future__ import annotations

from .check import Fault, Verdict, check
from .graph import Graph, Operator, Value
from .models import SHAPES, DecoderConfig, Model, llama, moe, random_state_dict
from .plan import Plan, compile_graph
from .schedule import Machine, Schedule, Span
from .tasks import Program, Task, Wait

__all__ = [
    "SHAPES",
    "DecoderConfig",
    "Fault",
    "Graph",
    "Machine",
    "Model",
    "Operator",
    "Plan",
    "Program",
    "Schedule",
    "Span",
    "Task",
    "Value",
    "Verdict",
    "Wait",
    "check",
    "compile_graph",
    "llama",
    "moe",
    "random_state_dict",
]
