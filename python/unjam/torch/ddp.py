"""For DistributedDataParallel: gradients under keys, so that buckets may be ready in any order."""

# No `from __future__ import annotations`: register_comm_hook compares the hook's annotations, which
# would be texts, with the types.

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .keys import key


def comm_hook(
    group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket's gradients under a key of its own.

    ``model.register_comm_hook(group, unjam.torch.ddp.comm_hook)`` with the model's process group,
    or None for the default one. The results are those of DDP without a hook. Two models whose
    backward passes run in different orders: :func:`keyed`, with a prefix each.
    """
    return _average("ddp", group, bucket)


def keyed(model: DistributedDataParallel, prefix: str = "ddp") -> DistributedDataParallel:
    """Gives every bucket of gradients of ``model`` a key of its own; returns ``model``.

    Args:
        model: before its first backward pass.
        prefix: what keys begin with, to tell two models apart; the same on all ranks.
    """

    def hook(
        group: dist.ProcessGroup | None, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        return _average(prefix, group, bucket)

    model.register_comm_hook(model.process_group, hook)
    return model


def _average(
    prefix: str, group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    tensor = bucket.buffer()
    tensor.div_(dist.get_world_size(group))
    with key(f"{prefix} bucket {bucket.index()}"):
        work = dist.all_reduce(tensor, group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])
