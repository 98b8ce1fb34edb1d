"""Tensors into which peers may store results themselves: in unjam's heap, or registered."""

from __future__ import annotations

import atexit
import contextlib
import functools
from typing import Any

import torch
import torch.distributed as dist

from .. import _abi
from .._closing import ClosesAtEnd
from . import _internals
from ._extension import extension
from ._world import default_world

# For each device: the number of the heap that the pool is of, and the pool.
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
    index = _internals.cuda_index(device)
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
        index = _internals.cuda_index(place)
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


class Registration(ClosesAtEnd):
    """A tensor's memory that is registered. Made by :func:`register_memory`.

    It lasts until :meth:`close`, also as a context manager, which is what the tensor is kept for;
    peers store there until then, at the latest until the process group ends.
    """

    def __init__(self, world: Any, tensor: torch.Tensor) -> None:
        """For :func:`register_memory`."""
        self._world = world
        self._tensor: torch.Tensor | None = tensor
        self._cuda = tensor.is_cuda
        self._address = tensor.data_ptr()
        nbytes = tensor.numel() * tensor.element_size()
        world.register_memory(self._address, nbytes, self._cuda)
        _registered[self] = None

    @property
    def closed(self) -> bool:
        """Whether peers are no longer let store there."""
        return self._tensor is None

    def close(self) -> None:
        """Ends it; may be repeated.

        Raises:
            dist.DistBackendError: a collective that writes there is pending: nothing has changed.
                Or one has failed: it is ended, but peers that have yet to end that collective may
                still store there, so the tensor is kept to the end of the process.
        """
        if self._tensor is None:
            return
        code, why = self._world.deregister_memory(self._address, self._cuda)
        if code == _abi.ERROR_INVALID_USAGE:
            raise dist.DistBackendError(f"unjam: {why}")
        if code != _abi.SUCCESS:
            _stored_into.append(self._tensor)
        self._tensor = None
        _registered.pop(self, None)
        if code != _abi.SUCCESS:
            raise dist.DistBackendError(f"unjam: {why}")

    def _end_block(self, failed: bool) -> None:
        # What has gone wrong in the block says more than what follows from it.
        with contextlib.suppress(*([dist.DistBackendError] if failed else [])):
            self.close()


# Registrations that are open, whose tensors must not be freed; and tensors that peers may still
# store into.
_registered: dict[Registration, None] = {}
_stored_into: list[torch.Tensor] = []


def register_memory(tensor: torch.Tensor) -> Registration:
    """Lets peers store the results of collectives into a tensor's memory themselves.

    As for tensors in the heap, without one: for outputs that begin at a multiple of 16 bytes and
    lie within the tensor as a whole; a hint, which changes no result. On a GPU torch's own memory
    is good for it, but for expandable segments. Local: other ranks need not do the same.

    Args:
        tensor: contiguous; on the CPU, or on the GPU that the process group has joined with.

    Raises:
        ValueError: not such a tensor; the message says why.
        RuntimeError: there is no process group of unjam's.
        dist.DistBackendError: some of it is registered already, or as much as can be is.
    """
    if not tensor.is_contiguous():
        raise ValueError(
            f"unjam: the tensor is not contiguous (shape {tuple(tensor.shape)}): register "
            "tensor.contiguous(), or what it is a view of"
        )
    world = default_world(extension()) if dist.is_initialized() else None
    if world is None:
        raise RuntimeError('unjam: call init_process_group("unjam") first')
    return Registration(world, tensor)


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
