"""What unjam touches of torch that is not torch's public interface: here, and nowhere else.

All of it was seen in torch 2.11 to 2.15, by the tests and runs of docs/compatibility.md. Each
function says why there is no other way. When a new torch moves one of them, this file changes and
nothing else in Python. (``unjam._devices`` asks ``torch._C`` for a stream's number where torch is
loaded. The adapter in C++, ``csrc``, is compiled for each torch against its headers.)
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

Maker = Callable[..., Any]


# ---- process groups ----


def is_registered(name: str) -> bool:
    """Whether torch knows a backend. ``Backend.register_backend`` refuses to be told twice, and
    ``import torch`` comes here as well as ``import unjam.torch``."""
    return name.upper() in dist.Backend._plugins


def wrap_maker_of_groups(wrap: Callable[[Maker], Maker]) -> None:
    """Puts ``wrap(make)`` in the place of the one function through which torch makes groups.

    torch has no hook there: a backend that takes another's place, or that of none, has to be put
    into the arguments.
    """
    c10d = dist.distributed_c10d
    c10d._new_process_group_helper = wrap(c10d._new_process_group_helper)


def device_of_the_group_being_made() -> torch.device | None:
    """What ``init_process_group(device_id=…)`` says.

    torch does not hand it to a backend's maker, which is called below the function that has it as a
    local variable: so it is read there.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_new_process_group_helper":
        frame = frame.f_back
    device = frame.f_locals.get("device_id") if frame is not None else None
    return device if isinstance(device, torch.device) else None


def default_group() -> dist.ProcessGroup:
    """``dist.group.WORLD`` is the same, and None where there is none; this raises torch's error."""
    return dist.distributed_c10d._get_default_group()


def default_store() -> Any:
    """Where the default group's ranks have met: a further meeting needs no address of its own."""
    return dist.distributed_c10d._get_default_store()


def backends_of(group: dist.ProcessGroup) -> list[Any]:
    """The backends of a group, one a device; torch gives out only their names."""
    return [group._get_backend(device) for device in group._device_types]


def asked_backend_of(group: dist.ProcessGroup) -> str:
    """The backend that was asked for. ``get_backend`` says it only of groups of this rank."""
    name: str = dist.distributed_c10d._world.pg_map.get(group, ("?", None))[0]
    return name


def is_known(group: dist.ProcessGroup) -> bool:
    """Whether torch has the group: not one that was destroyed."""
    return group in dist.distributed_c10d._world.pg_map


def set_asked_backend(group: dist.ProcessGroup, asked: Any, chosen: str) -> None:
    """A group that was made with `chosen` is one of `asked` for who asks torch.

    Programs that ask for a backend by name look whether they have got it.
    """
    known = dist.distributed_c10d._world.pg_map
    if group not in known:
        return
    known[group] = (asked, known[group][1])
    if ":" in chosen:  # torch looks for plug-ins by another name then, and sets none
        group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)


def group_named(name: str) -> dist.ProcessGroup | None:
    """The group that torch knows by a name; None if there is none."""
    for group, known in dist.distributed_c10d._world.pg_names.items():
        if known == name:
            return group
    return None


def name_of(group: dist.ProcessGroup) -> str:
    """The name that torch knows a group by."""
    name: str = dist.distributed_c10d._world.pg_names[group]
    return name


def add_group_like(parent: dist.ProcessGroup, name: str, more: str, backend: Any) -> Any:
    """A process group with a parent's members and this backend, known to torch as `name`.

    ``dist.new_group`` makes groups of several ranks together, with a meeting. This one is local. So
    it is entered in torch's maps as that would enter it: ``destroy_process_group``, DeviceMesh and
    compiled code look there.

    Args:
        parent: a group that torch knows.
        name: that no other group has.
        more: to be added to the parent's description.
        backend: of all devices.
    """
    c10d = dist.distributed_c10d
    world = c10d._world
    backend_name, store = world.pg_map[parent]
    made = dist.ProcessGroup(dist.PrefixStore(f"{name}/", store), parent.rank(), parent.size())
    custom = dist.ProcessGroup.BackendType.CUSTOM
    made._set_default_backend(custom)
    if parent.bound_device_id is not None:
        made.bound_device_id = parent.bound_device_id
    for device in ("cpu", "cuda"):
        made._register_backend(torch.device(device), custom, backend)
    made._set_group_name(name)
    made._set_group_desc(f"{parent.group_desc}{more}")
    world.pg_map[made] = (backend_name, store)
    world.pg_names[made] = name
    world.pg_group_ranks[made] = dict(world.pg_group_ranks[parent])
    world.pg_backend_config[made] = world.pg_backend_config[parent]
    tag = f"ptd:{name}"
    world.pg_to_tag[made] = tag
    world.tags_to_pg.setdefault(tag, []).append(made)
    c10d._register_process_group(name, made)
    return made


def seconds_of(backend: Any) -> float:
    """The time limit of a backend's operations, which its options show to C++ alone."""
    return float(backend.options._timeout.total_seconds())


# ---- others ----


def set_hook_name(model: Any, name: str) -> None:
    """What DistributedDataParallel's log calls a hook that was set in C++: there it has no name."""
    model.logger._set_comm_hook_name(name)


def cuda_index(device: Any) -> int:
    """The number of a CUDA device; of None, the current one's. torch's own functions take devices
    so, and refuse them with the same words."""
    index: int = torch.cuda._utils._get_device_index(device, optional=True)
    return index
