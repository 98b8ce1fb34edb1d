"""A batch in microbatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..._errors import InvalidArgument, InvalidType
from .stages import Spec

Batch = Mapping[str, torch.Tensor | Sequence[torch.Tensor]]


def cut(
    batch: Batch | None, due: Mapping[str, int], rank: int, count: int
) -> dict[str, list[torch.Tensor]]:
    """The microbatches by name.

    Args:
        batch: what a user gave; None: nothing.
        due: of what stages take from it, the stage.
        rank: whose stages these are.
        count: of microbatches.

    Raises:
        InvalidArgument: the batch is not that.
    """
    batch = {} if batch is None else batch
    if not isinstance(batch, Mapping):
        raise InvalidType(f"a batch is a mapping from names, not {type(batch).__name__}")
    for name, stage in due.items():
        if name not in batch:
            raise InvalidArgument(
                f"stage {stage} takes {name!r}, which no edge brings: give it in the batch"
            )
    for name in batch:
        if name not in due:
            raise InvalidArgument(
                f"the batch has {name!r}, which no stage of rank {rank} takes from it: give "
                f"{', '.join(due) or 'nothing'}"
            )
    return {
        name: microbatches_of(f"stage {due[name]}, {name!r}", batch[name], count) for name in due
    }


def microbatches_of(where: str, x: Any, count: int) -> list[torch.Tensor]:
    """A tensor cut along its first dimension, or a sequence of one for each, checked."""
    if isinstance(x, torch.Tensor):
        if x.dim() == 0 or x.shape[0] == 0 or x.shape[0] % count:
            size = x.shape[0] if x.dim() else "no"
            raise InvalidArgument(
                f"{where} has {size} rows, which are not {count} microbatches of one size: give "
                f"a multiple of {count}"
            )
        return list(x.chunk(count))
    parts = list(x) if isinstance(x, Sequence) else []
    if len(parts) != count or not all(isinstance(part, torch.Tensor) for part in parts):
        raise InvalidArgument(f"{where}: give a tensor, or a sequence of {count} tensors")
    for number, part in enumerate(parts):
        if (part.shape, part.dtype) != (parts[0].shape, parts[0].dtype):
            raise InvalidArgument(
                f"{where}: microbatch {number} is {Spec.of(part)}, and microbatch 0 "
                f"{Spec.of(parts[0])}: give all one shape and type"
            )
    return parts
