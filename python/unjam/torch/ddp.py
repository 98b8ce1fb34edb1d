"""For DistributedDataParallel: gradients under keys, so that buckets may be ready in any order."""

# No `from __future__ import annotations`: register_comm_hook compares the hook's annotations, which
# would be texts, with the types.

import torch
import torch.distributed as dist

from .keys import key


def comm_hook(
    group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket's gradients under a key of its own.

    ``model.register_comm_hook(group, unjam.torch.ddp.comm_hook)`` with the model's process group,
    or None for the default one. The results are those of DDP without a hook.
    """
    tensor = bucket.buffer()
    tensor.div_(dist.get_world_size(group))
    with key(f"ddp bucket {bucket.index()}"):
        work = dist.all_reduce(tensor, group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])
