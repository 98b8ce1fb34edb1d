"""For FSDP2 (``fully_shard``): parameters and gradients under keys of their module.

These collectives are then independent of all others in the group. Two things stay as they were:
each rank calls every module's collectives, as often as the others do; and FSDP2 waits for a
module's all-gather, and its reduce-scatter, before the next module's. So ranks that run their
*modules* in different orders wait in a circle, with keys too (docs/torch-recipes.md, recipe e, does
without FSDP2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from .keys import key


class _Keyed:
    """A key, and where FSDP's buffers come from: torch's allocator."""

    def __init__(self, name: str) -> None:
        self.name = name

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class KeyedAllGather(_Keyed):
    """All-gathers under a key: for ``FSDPModule.set_custom_all_gather``."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        with key(self.name):
            return dist.all_gather_into_tensor(
                output_tensor, input_tensor, group=group, async_op=async_op
            )


class KeyedReduceScatter(_Keyed):
    """Reduce-scatters under a key: for ``FSDPModule.set_custom_reduce_scatter``."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        with key(self.name):
            return dist.reduce_scatter_tensor(
                output_tensor, input_tensor, group=group, op=op, async_op=async_op
            )


def keyed(model: nn.Module, prefix: str = "fsdp") -> nn.Module:
    """Gives every module of ``model`` that FSDP2 shards a key of its own: its name in the model.

    Call it once, after the last ``fully_shard``; returns ``model``. The names must be the same on
    all ranks.

    Args:
        model: a module that ``fully_shard`` was applied to, with those below it.
        prefix: what keys begin with, to tell two models apart.

    Raises:
        ValueError: nothing in it is sharded.
    """
    from torch.distributed.fsdp import FSDPModule

    found = 0
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            label = f"{prefix} {name or '(root)'}"
            module.set_custom_all_gather(KeyedAllGather(label))
            module.set_custom_reduce_scatter(KeyedReduceScatter(label))
            found += 1
    if not found:
        raise ValueError("no module here was given to fully_shard: call keyed() after it")
    return model
