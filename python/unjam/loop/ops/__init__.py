"""Rules of operators: how each is cut into tasks, what they read and write, what they give."""

from __future__ import annotations

from ..graph import Graph
from .attention import Attention, Merge, Rope
from .base import Memory, Rect, Rule, Weights
from .dense import Best, Embedding, Gated, Head, Linear, Norm, Pick
from .exchange import Gather, Send, Sum
from .experts import ExpertDown, ExpertUp, Route

RULES: dict[str, type[Rule]] = {
    rule.kind: rule
    for rule in (
        Embedding,
        Norm,
        Linear,
        Gated,
        Rope,
        Attention,
        Merge,
        Send,
        Sum,
        Gather,
        Head,
        Best,
        Pick,
        Route,
        ExpertUp,
        ExpertDown,
    )
}


def rules_of(graph: Graph, sms: int) -> list[Rule]:
    """A rule for each operator, in order."""
    return [RULES[op.kind](graph, op, sms) for op in graph.operators]


__all__ = ["RULES", "Memory", "Rect", "Rule", "Weights", "rules_of"]
