"""From torch's process groups to unjam's jobs: who joins which, and when."""

from __future__ import annotations

import functools
import os
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .. import _ending
from .. import _torch_settings as _settings
from .._interrupt import interruptible
from . import _internals
from ._extension import extension
from ._store import wait_for

_LONGEST_MS = 1 << 30


def create(options: Any, backend_options: Any) -> Any:
    """The backend of a new process group; called by torch on the group's members.

    The default group's ranks join a job, which waits for all of them; groups made later are groups
    of that job, and need nobody. (Where the default group has another backend, every group is a job
    of its own.)
    """
    c10d = extension()
    _ending.at_exit(_shut_down)
    _warn_of_detail()
    rank, size = int(options.group_rank), int(options.group_size)
    timeout = options.timeout
    if not isinstance(timeout, timedelta):
        timeout = timedelta(seconds=float(timeout))
    ranks = [int(r) for r in options.global_ranks_in_group]
    world = default_world(c10d) if dist.is_initialized() else None
    owns = world is None
    if world is None:
        world = _join(c10d, options.store, rank, size, timeout)
        ranks = list(range(size))
    return c10d.Backend(world, ranks, rank, str(options.group_id), timeout, owns)


def default_world(c10d: Any) -> Any:
    """That of the default process group; None if it has another backend."""
    for backend in _internals.backends_of(_internals.default_group()):
        if isinstance(backend, c10d.Backend):
            return backend.world()
    wrapped = dist.get_debug_level() == dist.DebugLevel.DETAIL
    return c10d.default_world() if wrapped else None


def _join(c10d: Any, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """All ranks meet in the store first: unjam's own meeting then takes no time.

    The store may be one in which the same ranks have met before (torchrun's outlives a process
    group): each meeting has a number, which every rank counts for itself.
    """
    meeting = f"unjam/{store.add(f'unjam/meetings/{rank}', 1)}"
    device, chosen = _cuda_device()
    if rank == 0:
        store.set(f"{meeting}/ids", (c10d.new_id() + c10d.new_id()).hex())
    store.add(f"{meeting}/with_gpu", int(device >= 0))
    store.add(f"{meeting}/chosen", int(chosen))
    if store.add(f"{meeting}/arrived", 1) == size:
        store.set(f"{meeting}/all", "1")
    wait_for(
        store,
        [f"{meeting}/all", f"{meeting}/ids"],
        timeout,
        lambda: f": {store.add(f'{meeting}/arrived', 0)} of {size} have come",
    )
    ids = bytes.fromhex(store.get(f"{meeting}/ids").decode())
    with_gpu = store.add(f"{meeting}/with_gpu", 0)
    if 0 < with_gpu < size:
        raise RuntimeError(
            f"unjam: {size - with_gpu} of {size} ranks see no GPU, the others do: make them all "
            "see one (CUDA_VISIBLE_DEVICES), or set UNJAM_TORCH_CUDA=0 on all for CPU tensors only"
        )
    if store.add(f"{meeting}/chosen", 0) == 0:
        device = -1  # GPUs are there, and nobody has said anything of using them
    milliseconds = min(int(timeout.total_seconds() * 1000), _LONGEST_MS)
    half = len(ids) // 2
    worlds: list[Any] = []

    def join() -> None:
        worlds.append(c10d.World(rank, size, ids[:half], ids[half:], device, max(milliseconds, 1)))

    interruptible(join, worlds.clear)
    return worlds[0]


def _cuda_device() -> tuple[int, bool]:
    """The index of this rank's GPU, -1 for none; and whether it was chosen, not just found.

    init_process_group's device_id; else the current device, if it was set or used; else the one of
    torchrun's LOCAL_RANK.
    """
    if not _settings.CUDA.is_on() or not torch.cuda.is_available():
        return -1, False
    bound = _internals.device_of_the_group_being_made()
    if bound is not None and bound.type == "cuda" and bound.index is not None:
        return bound.index, True
    current = torch.cuda.current_device()
    local = os.environ.get("LOCAL_RANK", "")
    if current == 0 and local.isdecimal() and int(local) < torch.cuda.device_count():
        return int(local), True
    return current, current != 0 or torch.cuda.is_initialized()


def _shut_down() -> None:
    """Peers of a process that ends without destroy_process_group() learn that it has left."""
    extension().shutdown_all(_ending.patience_us())


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
