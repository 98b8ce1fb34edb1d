"""The two parts of a backward: gradients of inputs, and later those of weights.

The idea is that of torch.distributed.pipelining's stage_backward_input and stage_backward_weight:
keep the gradients at the nodes of the graph where weights come in, and go on from there. Theirs
lose gradients of weights that are used twice, and of outputs that depend on no input; here such
weights get theirs in the first part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Grads = tuple[torch.Tensor | None, ...]
Rest = Callable[[], None]  # computes gradients of weights, and adds them


def full(roots: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> None:
    """Adds to ``.grad`` of all leaves.

    Args:
        roots: outputs that have a gradient.
        grads: these.
    """
    if roots:
        torch.autograd.backward(tuple(roots), tuple(grads))


def of_inputs(
    roots: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], inputs: Iterable[torch.Tensor]
) -> Rest:
    """Adds to ``.grad`` of the inputs; what it returns, called once, adds to that of weights.

    The inputs are leaves. Hooks of tensors inside, where a weight is used, run in both parts.
    """
    leaves = [x for x in inputs if x.requires_grad]
    if not roots or not leaves:  # nobody waits for the first part
        return lambda: full(roots, grads)
    cuts, at_once = _cut(roots, leaves)
    kept: dict[Node, Grads] = {}

    def keeper(node: Node) -> Callable[[Grads], None]:
        def keep(outputs: Grads) -> None:
            kept[node] = outputs

        return keep

    hooks = [node.register_prehook(keeper(node)) for node in cuts]
    try:
        torch.autograd.backward(
            tuple(roots), tuple(grads), retain_graph=True, inputs=[*leaves, *at_once]
        )
    finally:
        for hook in hooks:
            hook.remove()

    def rest() -> None:
        for node, weights in cuts.items():
            # One after the other: a node may lead to the next one, whose gradients have that part.
            given = [(n, g) for n, g in enumerate(kept.pop(node, ())) if g is not None]
            if given:
                edges = [GradientEdge(node, n) for n, _ in given]
                torch.autograd.backward(edges, [g for _, g in given], inputs=weights)

    return rest


def _cut(
    roots: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]
) -> tuple[dict[Node, list[torch.Tensor]], list[torch.Tensor]]:
    """Where weights come in: nodes that lead to inputs, and the weights that only they lead to.

    Beside them the weights that cannot wait, since several such nodes, or none, lead to them.
    """
    starts = [get_gradient_edge(root).node for root in roots]
    ends = {get_gradient_edge(leaf).node for leaf in leaves}
    nexts: dict[Node, list[Node]] = {}
    before: dict[Node, list[Node]] = {}
    todo = list(starts)
    while todo:
        node = todo.pop()
        if node in nexts:
            continue
        nexts[node] = [after for after, _ in node.next_functions if after is not None]
        for after in nexts[node]:
            before.setdefault(after, []).append(node)
        todo += nexts[node]
    on_path = _reached([end for end in ends if end in nexts], before)
    of: dict[Node, set[Node]] = {}
    for node in on_path:
        aside = [after for after in nexts[node] if after not in on_path]
        if found := {end for end in _reached(aside, nexts) if _is_weight(end)}:
            of[node] = found
    apart = {
        end
        for end in _reached([node for node in starts if node not in on_path], nexts)
        if _is_weight(end)
    }
    uses: dict[Node, int] = dict.fromkeys(apart, 2)
    for found in of.values():
        for end in found:
            uses[end] = uses.get(end, 0) + 1
    cuts = {node: [_weight(end) for end in found if uses[end] == 1] for node, found in of.items()}
    at_once = [_weight(end) for end, count in uses.items() if count > 1]
    return {node: weights for node, weights in cuts.items() if weights}, at_once


def _reached(starts: Iterable[Node], nexts: dict[Node, list[Node]]) -> set[Node]:
    found: set[Node] = set()
    todo = list(starts)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += nexts.get(node, ())
    return found


def _is_weight(node: Node) -> bool:
    return node.name().endswith("AccumulateGrad")


def _weight(node: Any) -> torch.Tensor:
    weight = node.variable
    assert isinstance(weight, torch.Tensor)
    return weight
