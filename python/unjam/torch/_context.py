"""The context that process groups stand on, for what needs groups of unjam's own."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import torch.distributed as dist

from .. import context as _context
from .._config import make_config
from .._devices import HOST
from .._errors import InvalidArgument
from ..context import Context
from ..group import Group
from . import _internals
from .keys import unjam_backend


class WorldContext(Context):
    """A job's context for CPU or CUDA tensors, which the process groups own: they end it."""

    def __init__(self, world: Any, cuda: bool = False) -> None:
        self._world = world
        self._cuda = cuda
        handle = ctypes.c_void_p(_handle_of(world, cuda))
        device = {"device": "cuda" if cuda else "host"}
        super().__init__(handle, world.rank, world.size, make_config(device))
        with _context._open_lock:  # not to be closed at exit
            _context._open.pop(self, None)

    # The base class looks at it, and sets it too.
    @property
    def _closed(self) -> bool:
        return bool(_handle_of(self._world, self._cuda) != self._handle.value)

    @_closed.setter
    def _closed(self, value: bool) -> None:
        pass

    def close(self) -> None:
        """Does nothing: process groups have it."""


def _handle_of(world: Any, cuda: bool) -> int:
    return int(world.cuda_handle if cuda else world.host_handle)


# Groups by the name of a process group and its context's handle: every rank makes one of each.
_groups: dict[tuple[str, int], Group] = {}


def group_of(process_group: dist.ProcessGroup | Group | None, cuda: bool = False) -> Group:
    """A group of unjam's with the ranks of a process group, in their order.

    The same one each time.

    Args:
        process_group: one of unjam's; None: the default one. A Group is given back as it is.
        cuda: for CUDA tensors; else for CPU tensors.

    Raises:
        ValueError: it has another backend, or none is made yet, or no GPU.
    """
    if isinstance(process_group, Group):
        return process_group
    if process_group is None:
        if not dist.is_initialized():
            raise InvalidArgument(
                'there is no process group: call init_process_group("unjam"), or give a group that '
                "unjam.init(...).group() has made"
            )
        process_group = dist.group.WORLD
    assert process_group is not None
    world = unjam_backend(process_group).world()
    if not world.host_handle:
        raise InvalidArgument("the process group was destroyed (destroy_process_group)")
    handle = _handle_of(world, cuda)
    if not handle:
        raise InvalidArgument(
            "the process group has no GPU: give init_process_group a device_id, or call "
            "torch.cuda.set_device first, on all ranks"
        )
    for known in [place for place, group in _groups.items() if group.context.closed]:
        del _groups[known]
    place = (process_group.group_name, handle)
    found = _groups.get(place)
    if found is None:
        # A group that has a job of its own has all its ranks.
        ranks = dist.get_process_group_ranks(process_group)
        members = list(range(world.size)) if world.size == len(ranks) else ranks
        context = WorldContext(world, cuda)
        found = context.group(members, f"reshard in {process_group.group_name}")
        _groups[place] = found
    return found


def device_of(group: Group) -> torch.device:
    """Where the group's tensors are."""
    place = group.context._place
    return torch.device("cpu") if place == HOST else torch.device("cuda", place)


def members_of(process_group: dist.ProcessGroup | Group | None) -> list[int]:
    """Its ranks, as device meshes number them, in their order."""
    if isinstance(process_group, Group):
        return list(process_group.ranks)
    if process_group is None:
        return list(range(dist.get_world_size()))
    return list(dist.get_process_group_ranks(process_group))


def limit_of(process_group: dist.ProcessGroup | Group | None) -> float | None:
    """Seconds that its operations may take; None: no limit."""
    if isinstance(process_group, Group):
        return None
    chosen = dist.group.WORLD if process_group is None else process_group
    assert chosen is not None
    return _internals.seconds_of(unjam_backend(chosen))
