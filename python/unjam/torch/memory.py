"""Tensors in unjam's heap (``UNJAM_HEAP``), into which peers may store results themselves."""

from __future__ import annotations

import atexit
import functools
from typing import Any

import torch
import torch.distributed as dist

from ._extension import extension
from ._world import default_world

# By device: the number of the heap that it is of, and the pool.
_pools: dict[int, tuple[int, torch.cuda.MemPool]] = {}


def memory_pool(device: Any = None) -> torch.cuda.MemPool:
    """A pool for tensors on a GPU whose memory is in unjam's heap there.

        with torch.cuda.use_mem_pool(unjam.torch.memory_pool()):
            x = torch.empty(1 << 20, device="cuda")

    The same one each time, as long as the process group lasts. torch takes the heap in pieces of 2
    MiB for tensors of up to 1 MiB, of 20 MiB for those of up to 10 MiB, and of as much as larger
    ones have, rounded up to 2 MiB; and keeps them for further tensors of the pool. What does not
    fit raises ``torch.OutOfMemoryError``, however much memory the GPU has beside. Tensors outlive
    the process group.

    Args:
        device: a CUDA device; None: the current one.

    Raises:
        RuntimeError: no process group of unjam's uses that GPU, or there is no heap.
    """
    index = torch.cuda._utils._get_device_index(device, optional=True)
    number = int(extension().heap_on(index))
    if not number:
        raise RuntimeError(
            f"unjam: no process group has a heap on cuda:{index}: set UNJAM_HEAP (such as 1G) on "
            'all ranks, and call init_process_group("unjam") with that GPU before (docs/torch.md, '
            '"How a GPU is chosen")'
        )
    found = _pools.get(index)
    if found is None or found[0] != number:
        with torch.cuda.device(index):
            _forget_pools_at_exit()
            found = _pools[index] = (number, torch.cuda.MemPool(_allocator().allocator()))
    return found[1]


def empty(*size: Any, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
    """As ``torch.empty``, with the tensor in the heap.

    Args:
        size: integers, or one sequence of them.
        dtype: None: torch's default.
        device: "cpu", or the GPU that the process group has joined with; None: torch's default.

    Raises:
        RuntimeError: there is no process group of unjam's.
        dist.DistBackendError: CPU: there is no heap, or no room in it; the message says what there
            is. On a GPU that is ``torch.OutOfMemoryError``.
    """
    place = torch.get_default_device() if device is None else torch.device(device)
    if place.type == "cuda":
        index = torch.cuda._utils._get_device_index(place, optional=True)
        with torch.cuda.use_mem_pool(memory_pool(index), index):
            return torch.empty(*size, dtype=dtype, device=torch.device("cuda", index))
    if place.type != "cpu":
        raise ValueError(f"unjam: tensors are on the CPU or on CUDA devices, not on {place}")
    world = default_world(extension()) if dist.is_initialized() else None
    if world is None:
        raise RuntimeError('unjam: call init_process_group("unjam") first: the heap is that job\'s')
    sizes = list(size[0]) if len(size) == 1 and not isinstance(size[0], int) else list(size)
    tensor: torch.Tensor = world.empty(sizes, torch.get_default_dtype() if dtype is None else dtype)
    return tensor


@functools.lru_cache(maxsize=1)
def _allocator() -> Any:
    """For good: torch keeps pointers to its functions."""
    return torch.cuda.memory.CUDAPluggableAllocator(
        extension().__file__, "unjam_torch_alloc", "unjam_torch_free"
    )


@functools.lru_cache(maxsize=1)
def _forget_pools_at_exit() -> None:
    """While CUDA is still there: what ends after it cannot give its memory back."""
    atexit.register(_pools.clear)
