"""Keys: ordering channels inside a process group (design: any order, matched by group, key, n)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from . import _internals
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
    parent = _internals.default_group() if group is None else group
    if parent is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this rank is not in the group: only members make a keyed group of it")
    if not _internals.is_known(parent):
        raise ValueError("the group was destroyed, or is not a process group of torch's")
    full_name = f"{_internals.name_of(parent)}#{_escaped(name)}"
    known = _internals.group_named(full_name)
    if known is not None:
        return known
    keyed = unjam_backend(parent).keyed(name)
    made: dist.ProcessGroup = _internals.add_group_like(parent, full_name, f"#{name}", keyed)
    return made


def unjam_backend(group: dist.ProcessGroup) -> Any:
    """The group's backend, as the compiled module has it.

    Raises:
        ValueError: it has another one.
    """
    for backend in _internals.backends_of(group):
        if isinstance(backend, extension().Backend):
            return backend
    if dist.get_debug_level() == dist.DebugLevel.DETAIL:
        raise ValueError(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL puts a wrapper around the group's backend, under which "
            "unjam, if it is there, cannot be reached, and which compares calls in the program's "
            "order, so that keys are of no use: unset it"
        )
    name = _internals.asked_backend_of(group)
    raise ValueError(f"the group's backend is {name!r}, not unjam")


def _escaped(name: str) -> str:
    """A single "#" begins what is no user's: or "a#b" were the name of b in a."""
    return name.replace("#", "##")


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise TypeError(f"a key is a str, not {type(name).__name__}")
    if not name or "\0" in name:
        raise ValueError("a key is a text that is not empty and has no NUL in it")
