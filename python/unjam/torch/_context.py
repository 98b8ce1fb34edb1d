"""The context that process groups stand on, for what needs groups of unjam's own."""

from __future__ import annotations

import ctypes
from typing import Any

import torch.distributed as dist

from .. import context as _context
from .._config import make_config
from .._errors import InvalidArgument
from ..context import Context
from ..group import Group
from . import _internals
from .keys import unjam_backend


class WorldContext(Context):
    """A job's context for CPU tensors, which the process groups own: they end it."""

    def __init__(self, world: Any) -> None:
        self._world = world
        handle = ctypes.c_void_p(world.host_handle)
        super().__init__(handle, world.rank, world.size, make_config({"device": "host"}))
        with _context._open_lock:  # not to be closed at exit
            _context._open.pop(self, None)

    # The base class looks at it, and sets it too.
    @property
    def _closed(self) -> bool:
        return bool(self._world.host_handle != self._handle.value)

    @_closed.setter
    def _closed(self, value: bool) -> None:
        pass

    def close(self) -> None:
        """Does nothing: process groups have it."""


# Groups by the name of a process group and its context's handle: every rank makes one of each.
_groups: dict[tuple[str, int], Group] = {}


def group_of(process_group: dist.ProcessGroup | Group | None) -> Group:
    """A group of unjam's with the ranks of a process group, in their order, for CPU tensors.

    The same one each time.

    Args:
        process_group: one of unjam's; None: the default one. A Group is given back as it is.

    Raises:
        ValueError: it has another backend, or none is made yet.
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
    handle = world.host_handle
    if not handle:
        raise InvalidArgument("the process group was destroyed (destroy_process_group)")
    for known in [place for place, group in _groups.items() if group.context.closed]:
        del _groups[known]
    place = (process_group.group_name, handle)
    found = _groups.get(place)
    if found is None:
        # A group that has a job of its own has all its ranks.
        ranks = dist.get_process_group_ranks(process_group)
        members = list(range(world.size)) if world.size == len(ranks) else ranks
        found = WorldContext(world).group(members, f"reshard in {process_group.group_name}")
        _groups[place] = found
    return found


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
