"""Keys: ordering channels inside a process group (design: any order, matched by group, key, n)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ._extension import extension


@contextmanager
def key(name: str) -> Iterator[None]:
    """Operations that this thread calls inside the block are made under this key.

    Of each process group, calls under one key are matched in their order, and are independent of
    calls under other keys: ranks may make those in any order. Nests: ``key("a")`` inside
    ``key("b")`` is the key "b/a". Holds for whatever is called inside on unjam groups, by libraries
    too; not inside of ``torch.compile`` (traced code keeps a group's name only: use
    :func:`keyed_group` there).

    Args:
        name: any text but the empty one; the same on all ranks.
    """
    _check_name(name)
    c10d = extension()
    outer = c10d.push_key(name)
    try:
        yield
    finally:
        c10d.set_key(outer)


def current_key() -> str:
    """The key that this thread's calls are made under; "" outside of every :func:`key` block."""
    return str(extension().get_key().own).replace("##", "#")


def keyed_group(group: dist.ProcessGroup | None, name: str) -> dist.ProcessGroup:
    """A process group with the same members whose calls are made under a key of their own.

    Local: nothing is sent, no rank is waited for, and it needs no memory of its own. It is a real
    process group, which can be handed to any library, to a DeviceMesh or to compiled code; it is
    known to torch as "<name of group>#<name>". The same call again returns the same group. It ends
    with the group that it is of.

    Args:
        group: a process group of unjam's; None: the default one.
        name: the key; the same on all ranks.

    Raises:
        ValueError: the group has another backend, or this rank is not in it.
    """
    _check_name(name)
    c10d = dist.distributed_c10d
    parent = c10d._get_default_group() if group is None else group
    if parent is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this rank is not in the group: only members make a keyed group of it")
    world = c10d._world
    if parent not in world.pg_map:
        raise ValueError("the group was destroyed, or is not a process group of torch's")
    full_name = f"{world.pg_names[parent]}#{_escaped(name)}"
    for known, known_name in world.pg_names.items():
        if known_name == full_name:
            return known
    backend = unjam_backend(parent)
    backend_name, store = world.pg_map[parent]
    made = dist.ProcessGroup(dist.PrefixStore(f"{full_name}/", store), parent.rank(), parent.size())
    made._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    if parent.bound_device_id is not None:
        made.bound_device_id = parent.bound_device_id
    keyed = backend.keyed(name)
    for device in ("cpu", "cuda"):
        made._register_backend(torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, keyed)
    made._set_group_name(full_name)
    made._set_group_desc(f"{parent.group_desc}#{name}")
    world.pg_map[made] = (backend_name, store)
    world.pg_names[made] = full_name
    world.pg_group_ranks[made] = dict(world.pg_group_ranks[parent])
    world.pg_backend_config[made] = world.pg_backend_config[parent]
    tag = f"ptd:{full_name}"
    world.pg_to_tag[made] = tag
    world.tags_to_pg.setdefault(tag, []).append(made)
    c10d._register_process_group(full_name, made)
    return made


def unjam_backend(group: dist.ProcessGroup) -> Any:
    """The group's backend, as the compiled module has it.

    Raises:
        ValueError: it has another one.
    """
    for device in group._device_types:
        backend = group._get_backend(device)
        if isinstance(backend, extension().Backend):
            return backend
    if dist.get_debug_level() == dist.DebugLevel.DETAIL:
        raise ValueError(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL puts a wrapper around the group's backend, under which "
            "unjam, if it is there, cannot be reached, and which compares calls in the program's "
            "order, so that keys are of no use: unset it"
        )
    name = dist.distributed_c10d._world.pg_map.get(group, ("?", None))[0]
    raise ValueError(f"the group's backend is {name!r}, not unjam")


def _escaped(name: str) -> str:
    """A single "#" begins what is no user's: or "a#b" were the name of b in a."""
    return name.replace("#", "##")


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise TypeError(f"a key is a str, not {type(name).__name__}")
    if not name or "\0" in name:
        raise ValueError("a key is a text that is not empty and has no NUL in it")
