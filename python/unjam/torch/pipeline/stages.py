"""What a pipeline consists of: stages with named tensors, and edges between them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..._errors import InvalidArgument
from ...reshard import placement_of


@dataclass(frozen=True)
class Spec:
    """A tensor as one microbatch has it.

    Attributes:
        shape: its sizes.
        dtype: its type.
        grad: whether a gradient of it comes back.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    grad: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        if not all(type(n) is int and n >= 0 for n in self.shape):
            raise InvalidArgument(f"{self.shape} is no shape: give whole numbers from 0 on")
        if not isinstance(self.dtype, torch.dtype):
            raise InvalidArgument(f"{self.dtype!r} is no type: give one of torch's, as float32")
        if self.grad and not (self.dtype.is_floating_point or self.dtype.is_complex):
            raise InvalidArgument(f"{self.dtype} has no gradients: give grad=False")

    @classmethod
    def of(cls, x: torch.Tensor) -> Spec:
        """That of a tensor."""
        return cls(tuple(x.shape), x.dtype, x.requires_grad)

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{name}{list(self.shape)}" + ("" if self.grad else " without gradient")


@dataclass(frozen=True)
class Stage:
    """A part of a model.

    Attributes:
        module: called with the inputs in their order; gives a tensor, or a tuple of them.
        inputs: names of what it takes. What no edge brings is of the batch.
        outputs: names of what it gives.
    """

    module: nn.Module
    inputs: Sequence[str] = ("x",)
    outputs: Sequence[str] = ("x",)

    def __post_init__(self) -> None:
        if not isinstance(self.module, nn.Module):
            raise InvalidArgument(f"a stage's module is a torch.nn.Module, not {self.module!r}")
        for what in ("inputs", "outputs"):
            object.__setattr__(self, what, _names(f"a stage's {what}", getattr(self, what)))


@dataclass(frozen=True, eq=False)
class Edge:
    """Tensors that stage ``source`` gives to stage ``target``, and whose gradients come back.

    Attributes:
        source: number of the stage that gives them.
        target: of the one that takes them; any one behind.
        tensors: names of the source's outputs, which are those of the target's inputs, or a mapping
            from the ones to the others.
        specs: of each output; None: found out before the first step.
        layouts: of outputs whose stages have several ranks, their placements on the source's mesh
            and on the target's, one for each mesh dimension, as ``{"x": (["R"], ["S(1)"])}``. What
            is not here has a whole copy on each rank.
    """

    source: int
    target: int
    tensors: Sequence[str] | Mapping[str, str] = ("x",)
    specs: Mapping[str, Spec] | None = None
    layouts: Mapping[str, tuple[Sequence[Any], Sequence[Any]]] | None = None
    pairs: tuple[tuple[str, str], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        i, j = self.source, self.target
        if not (type(i) is int and type(j) is int):
            raise InvalidArgument(f"edge {i!r} -> {j!r}: give the numbers of two stages")
        if i >= j:
            cure = f"give Edge({j}, {i})" if i > j else "leave it out"
            raise InvalidArgument(f"edge {self} does not lead forward: {cure}")
        tensors = self.tensors
        if isinstance(tensors, Mapping):
            outputs = _names(f"edge {self}", list(tensors))
            inputs = _names(f"edge {self}", list(tensors.values()))
        else:
            outputs = inputs = _names(f"edge {self}", tensors)
        if not outputs:
            raise InvalidArgument(f"edge {self} has no tensors: name some, or leave it out")
        object.__setattr__(self, "pairs", tuple(zip(outputs, inputs, strict=True)))
        if self.specs is not None and (
            set(self.specs) != set(outputs)
            or not all(isinstance(spec, Spec) for spec in self.specs.values())
        ):
            raise InvalidArgument(
                f"edge {self}: specs are of {sorted(self.specs)}, and its tensors {outputs}: give "
                "a Spec for each of these"
            )
        object.__setattr__(self, "layouts", self._checked_layouts(outputs))

    def _checked_layouts(self, outputs: Sequence[str]) -> dict[str, tuple[Any, Any]]:
        found = {}
        for name, pair in (self.layouts or {}).items():
            if name not in outputs:
                raise InvalidArgument(
                    f"edge {self}: layouts have {name!r}, and its tensors are {outputs}"
                )
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise InvalidArgument(
                    f"edge {self}: the layouts of {name!r} are {pair!r}: give placements on the "
                    "source's mesh, and on the target's"
                )
            try:
                before, after = (tuple(placement_of(each) for each in side) for side in pair)
            except InvalidArgument as error:
                raise InvalidArgument(f"edge {self}: {name!r}: {error}") from error
            found[name] = (before, after)
        return found

    def __str__(self) -> str:
        return f"{self.source}-{self.target}"


def check(stages: Mapping[int, Stage], edges: Sequence[Edge], count: int) -> None:
    """Whether this rank's stages and all edges fit together, in a pipeline of `count` stages.

    Raises:
        InvalidArgument: they do not; the message names stage, edge and tensor.
    """
    seen: set[tuple[int, int]] = set()
    brought: dict[tuple[int, str], Edge] = {}
    for edge in edges:
        if not isinstance(edge, Edge):
            raise InvalidArgument(f"{edge!r} is no edge: give Edge(source, target, tensors)")
        i, j = edge.source, edge.target
        if i < 0 or j >= count:
            raise InvalidArgument(f"edge {edge}: there are stages 0 to {count - 1}")
        if (i, j) in seen:
            raise InvalidArgument(f"edge {edge} is there twice: give one with all tensors")
        seen.add((i, j))
        for output, taken in edge.pairs:
            other = brought.setdefault((j, taken), edge)
            if other is not edge:
                raise InvalidArgument(
                    f"edges {other} and {edge} both bring {taken!r}: give stage {j} two inputs"
                )
            for stage, name, what in ((i, output, "outputs"), (j, taken, "inputs")):
                if stage in stages:
                    _has(stages[stage], stage, name, what, edge)


def _has(stage: Stage, number: int, name: str, what: str, edge: Edge) -> None:
    known = getattr(stage, what)
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        raise InvalidArgument(
            f"edge {edge}: stage {number} has no {name!r} among its {what}, which are "
            f"{', '.join(known) or 'none'}{meant}"
        )


def _names(where: str, names: Any) -> tuple[str, ...]:
    if isinstance(names, str):
        raise InvalidArgument(f"{where}: give a sequence of names, such as ({names!r},)")
    found = tuple(names)
    if not all(isinstance(name, str) and name for name in found):
        raise InvalidArgument(f"{where}: {found} are no names: give texts")
    if len(set(found)) != len(found):
        raise InvalidArgument(f"{where}: {found} has a name twice: give each one once")
    return found
