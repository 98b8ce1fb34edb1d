"""For DistributedDataParallel: gradients under keys, so that buckets may be ready in any order."""

# No `from __future__ import annotations`: register_comm_hook compares the hook's annotations, which
# would be texts, with the types.

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from . import _internals
from ._extension import extension
from .keys import key, unjam_backend


def comm_hook(
    group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket's gradients under a key of its own.

    ``model.register_comm_hook(group, unjam.torch.ddp.comm_hook)`` with the model's process group,
    or None for the default one. The results are those of DDP without a hook. Two models whose
    backward passes run in different orders: :func:`keyed`, with a prefix each. On CUDA the backward
    pass makes the host wait for the future of a hook in Python; without a hook, and with
    :func:`keyed`, a stream waits.
    """
    return _average("ddp", group, bucket)


def keyed(model: DistributedDataParallel, prefix: str = "ddp") -> DistributedDataParallel:
    """Gives every bucket of gradients of ``model`` a key of its own; returns ``model``.

    On CUDA the end of the backward pass orders the current stream after the averages, as with
    NCCL, and the host goes on; also where buckets are ready inside of an inner pass (reentrant
    checkpoints), for which DDP without it makes the host wait, as with hooks in Python.

    In ``model.join()`` ranks without data take part in the averages. As with all hooks, these are
    sums divided by the group's size: ``divide_by_initial_world_size=False`` changes nothing.

    Args:
        model: before its first backward pass, and without a hook.
        prefix: what keys begin with, to tell two models apart; the same on all ranks.
    """
    try:
        backend = unjam_backend(model.process_group)
    except ValueError:  # another backend, or a wrapped one, which the calls themselves get through

        def hook(
            group: dist.ProcessGroup | None, bucket: dist.GradBucket
        ) -> torch.futures.Future[torch.Tensor]:
            return _average(prefix, group, bucket)

        model.register_comm_hook(model.process_group, hook)
        return model
    extension().average_by_keys(model.reducer, backend, prefix)
    _internals.set_hook_name(model, "unjam.torch.ddp.keyed")
    return model


def _average(
    prefix: str, group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    tensor = bucket.buffer()
    tensor.div_(dist.get_world_size(group))
    with key(f"{prefix} bucket {bucket.index()}"):
        work = dist.all_reduce(tensor, group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])
