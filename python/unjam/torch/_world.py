"""From torch's process groups to unjam's jobs: who joins which, and when."""

from __future__ import annotations

import atexit
import functools
import os
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .. import _torch_settings as _settings
from ._extension import extension

_LONGEST_MS = 1 << 30


def create(options: Any, backend_options: Any) -> Any:
    """The backend of a new process group; called by torch on the group's members.

    The default group's ranks join a job, which waits for all of them; groups made later are groups
    of that job, and need nobody. (Where the default group has another backend, every group is a job
    of its own.)
    """
    c10d = extension()
    _shut_down_at_exit()
    _warn_of_detail()
    rank, size = int(options.group_rank), int(options.group_size)
    timeout = options.timeout
    if not isinstance(timeout, timedelta):
        timeout = timedelta(seconds=float(timeout))
    ranks = [int(r) for r in options.global_ranks_in_group]
    default = not dist.is_initialized()
    world = None if default else c10d.default_world()
    if world is None:
        world = _join(c10d, options.store, rank, size, timeout)
        ranks = list(range(size))
    return c10d.Backend(world, ranks, rank, str(options.group_id), timeout, default)


def _join(c10d: Any, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """All ranks meet in the store first: unjam's own meeting then takes no time."""
    cuda = _cuda_device()
    if rank == 0:
        store.set("unjam/ids", (c10d.new_id() + c10d.new_id()).hex())
    ids = bytes.fromhex(store.get("unjam/ids").decode())
    if store.add("unjam/with_gpu" if cuda >= 0 else "unjam/without_gpu", 1) and (
        store.add("unjam/arrived", 1) == size
    ):
        store.set("unjam/all", "1")
    store.wait(["unjam/all"], timeout)
    without = store.add("unjam/without_gpu", 0)
    if 0 < without < size:
        raise RuntimeError(
            f"unjam: {without} of {size} ranks see no GPU, the others do: make them all see one "
            "(CUDA_VISIBLE_DEVICES), or set UNJAM_TORCH_CUDA=0 on all for CPU tensors only"
        )
    milliseconds = min(int(timeout.total_seconds() * 1000), _LONGEST_MS)
    half = len(ids) // 2
    return c10d.World(rank, size, ids[:half], ids[half:], cuda, max(milliseconds, 1))


def _cuda_device() -> int:
    """The index of this rank's GPU, or -1 for none.

    The current device, and where that was not chosen yet, the one of torchrun's LOCAL_RANK.
    """
    if not _settings.CUDA.is_on() or not torch.cuda.is_available():
        return -1
    current = torch.cuda.current_device()
    local = os.environ.get("LOCAL_RANK", "")
    if current == 0 and local.isdecimal() and int(local) < torch.cuda.device_count():
        return int(local)
    return current


@functools.lru_cache(maxsize=1)
def _shut_down_at_exit() -> None:
    """Peers of a process that ends without destroy_process_group() learn that it has left."""
    atexit.register(extension().shutdown_all)


@functools.lru_cache(maxsize=1)
def _warn_of_detail() -> None:
    if dist.get_debug_level() == dist.DebugLevel.DETAIL:
        warnings.warn(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL makes torch compare every call over all ranks before "
            "it reaches unjam, in the program's order: calls in different orders are then errors, "
            "or hang. unjam compares calls itself, whatever their order; to see where orders "
            "differ, use unjam.check_order()",
            stacklevel=2,
        )
