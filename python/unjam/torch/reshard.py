"""DTensors and state_dicts from one mesh to another: weights from training to generation.

::

    sync = unjam.torch.Reshard.between(src=trainer.state_dict())  # on trainer ranks
    sync = unjam.torch.Reshard.between(dst=rollout.state_dict())  # on generator ranks
    work = sync(src=trainer.state_dict())  # each step; sync(dst=rollout.state_dict()) there
    ...  # nothing waits
    work.wait()

Ranks begin it in any order beside their other collectives: its bundles have keys of their own.
Tensors that are on GPUs on both sides go from GPU to GPU; what is on a CPU on one side goes through
host memory.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from .._devices import HOST
from .._errors import InvalidArgument, UnjamError
from ..group import Group
from ..reshard import Plan, ReshardRequest, Topology, placement_of
from ._context import device_of, group_of, limit_of, members_of
from ._reshard_specs import (
    check_callers,
    filled,
    is_one_of,
    layout_of,
    local_part,
    merged,
    name_of,
    on_gpus,
    same_of,
    spec_of,
    specs_of,
    tell,
    tensor_of,
    text_of,
)

_HOST_WINDOW, _DEVICE_WINDOW = 32, 4

ProcessGroup = Any  # of torch, or a Group; None: the default one


class ReshardWork:
    """A resharding under way. Made by :class:`Reshard`."""

    def __init__(
        self,
        requests: Sequence[ReshardRequest],
        copies: Sequence[tuple[torch.Tensor, torch.Tensor]],
        limit: float | None,
    ) -> None:
        self._requests = list(requests)
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = list(copies)
        self._limit = limit

    def is_completed(self) -> bool:
        """Whether it is complete, in error too. Never blocks.

        Tensors on GPUs have their values after :meth:`wait` only.
        """
        return all(request.test() for request in self._requests)

    def wait(self, timeout: float | None = None) -> None:
        """Waits, in the calling thread, until this rank's tensors are there.

        Args:
            timeout: seconds; None: the process group's limit.

        Raises:
            Timeout: the time has passed; it goes on.
            dist.DistBackendError: ranks have different plans, or one is gone;
                :meth:`incomplete` names the tensors that are not complete.
        """
        limit = self._limit if timeout is None else timeout
        error: UnjamError | None = None
        for request in self._requests:
            error = error or request.exception(limit)
        copies, self._copies = self._copies, []
        for target, source in copies:
            target.copy_(source)
        if error is not None:
            raise dist.DistBackendError(f"unjam: {error}") from error

    def incomplete(self) -> list[str]:
        """Waits, then gives the names of this rank's tensors that are not complete."""
        return [name for r in self._requests for name in r.incomplete(self._limit)]


class _Numbered(NamedTuple):
    """A plan, and which of the whole Reshard's it is: its key has that number in parts, too."""

    number: int
    names: list[str]
    plan: Plan
    group: Group  # in whose memory it runs


class Reshard:
    """Moves tensors by name from one set of ranks, or one layout, to another; planned once.

    Args:
        src: what the source ranks hold: what :meth:`describe` gave there, or a dict of the same
            contents; the same on all ranks.
        dst: the same of the destination.
        group: whose ranks call it, all of them: a process group of unjam's (None: the default
            one), or a :class:`unjam.Group` of a job beside it (``unjam.init``).
        key: the ordering channel; each Reshard of a group needs one of its own.
        topology: which ranks of the group share hosts and NICs; see :class:`unjam.reshard.Plan`.
        max_bytes: staging memory of a rank, on each side, of each pair of meshes.

    Raises:
        InvalidArgument: names that stand on one side only, partial sums, ranks that the group has
            not; the message names the tensor.
    """

    def __init__(
        self,
        src: str | Mapping[str, Any],
        dst: str | Mapping[str, Any],
        group: ProcessGroup = None,
        *,
        key: str = "reshard",
        topology: Topology | None = None,
        max_bytes: int = 256 << 20,
    ) -> None:
        self._process_group = group
        self._group = group_of(group)
        self._limit = limit_of(group)
        self._key = key
        self._rank = self._group.rank
        members = members_of(group)
        self._number = members[self._rank]  # as meshes have it
        self._src, self._dst = filled(src, "source"), filled(dst, "destination")
        for one, other, words in (
            (self._src, self._dst, "is in the source, and not in the destination"),
            (self._dst, self._src, "is in the destination, and not in the source"),
        ):
            missing = sorted(one.keys() - other.keys())
            if missing:
                raise InvalidArgument(
                    f"tensor {missing[0]!r} {words} ({len(missing)} such): leave it out of the one "
                    "state_dict, or have it in the other"
                )
        self._plans: list[_Numbered] = []
        by_meshes: dict[tuple[str, bool], list[str]] = {}
        for name in sorted(self._src):
            src, dst = self._src[name], self._dst[name]
            on_gpu = on_gpus(self._group, src, dst, isinstance(group, Group))
            pair = json.dumps([src["mesh"], dst["mesh"]])
            by_meshes.setdefault((pair, on_gpu), []).append(name)
        for number, ((_, on_gpu), names) in enumerate(sorted(by_meshes.items())):
            where = group_of(group, on_gpu)
            plan = self._plan(names, members, topology, max_bytes, _window(where))
            self._plans.append(_Numbered(number, names, plan, where))

    def _plan(
        self,
        names: Sequence[str],
        members: Sequence[int],
        topology: Topology | None,
        most: int,
        window: int,
    ) -> Plan:
        src, dst = (
            layout_of(side[names[0]], members, where)
            for side, where in ((self._src, "source"), (self._dst, "destination"))
        )
        tensors = {name: tensor_of(name, self._src[name], self._dst[name]) for name in names}
        return Plan(src, dst, tensors, topology, max_bytes=most, window=window)

    @staticmethod
    def describe(
        tensors: torch.nn.Module | Mapping[str, torch.Tensor], ranks: Sequence[int] | None = None
    ) -> str:
        """What other ranks must know of a module's state_dict, or of such a dict, as JSON.

        Args:
            tensors: DTensors, and plain tensors, of which all ranks have the same.
            ranks: who has the plain ones; None: the ranks of the DTensors' meshes.
        """
        state = tensors.state_dict() if isinstance(tensors, torch.nn.Module) else tensors
        specs = specs_of(state)
        if ranks is not None:
            for spec in specs.values():
                if spec["mesh"] is None:
                    spec.update(mesh=list(ranks), placements=["R"])
        return json.dumps(specs)

    @classmethod
    def between(
        cls,
        src: Mapping[str, torch.Tensor] | None = None,
        dst: Mapping[str, torch.Tensor] | None = None,
        group: ProcessGroup = None,
        *,
        key: str = "reshard",
        topology: Topology | None = None,
        max_bytes: int = 256 << 20,
    ) -> Reshard:
        """The same from what each rank has; ranks tell each other, and wait for that.

        Args:
            src: this rank's tensors of the source; None: it is not in it.
            dst: those of the destination.
            group: see the class; all its ranks call it, also those with neither.
            key: see the class.
            topology: see the class.
            max_bytes: see the class.

        Raises:
            InvalidArgument: on all ranks, if they do not fit together; the message names tensor
                and ranks.
        """
        mine = {
            "src": None if src is None else specs_of(src),
            "dst": None if dst is None else specs_of(dst),
        }
        told = tell(group_of(group), key, mine, limit_of(group))
        members = members_of(group)
        sides = []
        for side, where in (("src", "source"), ("dst", "destination")):
            of_rank = {
                members[i]: each[side] for i, each in enumerate(told) if each[side] is not None
            }
            sides.append(merged(of_rank, where))
        return cls(*sides, group, key=key, topology=topology, max_bytes=max_bytes)

    def without(
        self, ranks: Sequence[int] = (), tensors: Sequence[str] = (), *, key: str | None = None
    ) -> Reshard:
        """The same without some ranks' replicas, and without some tensors. Asks nobody.

        For ranks that live: all ranks of the group call what it gives, those left out, too. The
        group stays the same, so with a rank that has died each call ends with an error. Then run
        ``Plan.without(ranks, renumber=True)`` in the group that :meth:`unjam.Group.shrink` gives.

        See :meth:`unjam.reshard.Plan.without`.

        Args:
            ranks: as device meshes number them.
            tensors: names.
            key: the ordering channel; None: that of this one, whose calls it then stands between.

        Raises:
            InvalidArgument: as there.
        """
        place = {rank: i for i, rank in enumerate(members_of(self._process_group))}
        numbers = [place.get(rank, -1) for rank in ranks]
        self._named(tensors)
        return self._part(
            [name for name in self._src if name not in set(tensors)],
            lambda plan, names: plan.without(
                [n for n in numbers if n >= 0], tensors=sorted(set(plan.dtypes()) - set(names))
            ),
            key,
        )

    def only(
        self,
        ranks: Sequence[int] | None = None,
        tensors: Sequence[str] | None = None,
        *,
        key: str | None = None,
    ) -> Reshard:
        """The same for some destinations only, or some tensors; see :meth:`without`.

        Args:
            ranks: whole replicas of the destination, as device meshes number them; None: all.
            tensors: names; None: all.
            key: the ordering channel.

        Raises:
            InvalidArgument: as of :meth:`unjam.reshard.Plan.only`.
        """
        place = {rank: i for i, rank in enumerate(members_of(self._process_group))}
        for rank in ranks or ():
            if rank not in place:
                raise InvalidArgument(
                    f"rank {rank!r} is not in the group, which has {sorted(place)}: give ranks of "
                    "the destination"
                )
        numbers = None if ranks is None else [place[rank] for rank in ranks]
        self._named(() if tensors is None else tensors)
        kept = list(self._src) if tensors is None else [n for n in self._src if n in set(tensors)]
        return self._part(kept, lambda plan, names: plan.only(numbers, tensors=names), key)

    def _named(self, tensors: Sequence[str]) -> None:
        for name in tensors:
            if name not in self._src:
                raise InvalidArgument(f"no tensor {name!r} was described: give names of those")

    def _part(
        self, names: Sequence[str], make: Callable[[Plan, list[str]], Plan], key: str | None
    ) -> Reshard:
        if not names:
            raise InvalidArgument("no tensor is left: name those that are to be moved")
        part = copy.copy(self)
        part._key = self._key if key is None else key
        part._plans = []
        for each in self._plans:
            left = [name for name in each.names if name in set(names)]
            if left:
                part._plans.append(each._replace(names=left, plan=make(each.plan, left)))
        return part

    @property
    def plans(self) -> list[Plan]:
        """One for each pair of meshes that tensors have."""
        return [each.plan for each in self._plans]

    def __call__(
        self,
        src: Mapping[str, torch.Tensor] | None = None,
        dst: Mapping[str, torch.Tensor] | None = None,
    ) -> ReshardWork:
        """Begins to move them; returns at once. All ranks of the group call it.

        Args:
            src: this rank's tensors, as described; not to be changed until it is complete.
            dst: those that are written.

        Raises:
            InvalidArgument: a tensor is missing, or not as it was described, or its mesh does not
                have this rank; the message names it.
            Peer: a rank of the group is known to be gone.
        """
        for given, specs, where in ((src, self._src, "source"), (dst, self._dst, "destination")):
            self._check(given, specs, where)
        requests = []
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        # All of it before something is submitted.
        calls = []
        for each in self._plans:
            device = device_of(each.group)
            given = src if each.plan.has(self._group.rank, "src") else None
            mine = {
                name: local_part(given[name]).to(device)
                for name in each.names
                if given and name in given
            }
            wanted = {}
            for name in each.names:
                if not dst or name not in dst or not each.plan.has(self._group.rank, "dst"):
                    continue
                target = local_part(dst[name])
                wanted[name] = _there(target, device)
                if wanted[name] is not target:
                    copies.append((target, wanted[name]))
            calls.append((each, mine, wanted))
        for each, mine, wanted in calls:
            key = self._key if each.number == 0 else f"{self._key}/{each.number}"
            requests.append(each.plan.run(each.group, src=mine, dst=wanted, key=key))
        return ReshardWork(requests, copies, self._limit)

    def _check(
        self, given: Mapping[str, torch.Tensor] | None, specs: Mapping[str, Any], where: str
    ) -> None:
        for name, tensor in (given or {}).items():
            known = specs.get(name)
            if known is None:
                raise InvalidArgument(
                    f"tensor {name!r} was not described as one of the {where}: leave it out, or "
                    "make a new Reshard"
                )
            if self._number not in np.ravel(known["mesh"]):
                raise InvalidArgument(
                    f"tensor {name!r} of the {where} is given on rank {self._number}, which is not "
                    f"in its mesh {known['mesh']}: leave it out there"
                )
            found = spec_of(tensor)
            # (It may lie on another kind of device than was described, or none was.)
            found.pop("device")
            if "device" in known:
                found["device"] = known["device"]
            if found["mesh"] is None:  # its local shape is looked at by the run
                found.update(mesh=known["mesh"], placements=known["placements"])
            if found != known and not is_one_of(found, known):
                raise InvalidArgument(
                    f"tensor {name!r} of the {where} on rank {self._rank} is {text_of(found)}, and "
                    f"was described as {text_of(known)}: make a new Reshard when layouts change"
                )


def redistribute(
    tensor: DTensor,
    mesh: Any,
    placements: Sequence[Any],
    *,
    dtype: torch.dtype | None = None,
    group: ProcessGroup = None,
    key: str = "redistribute",
) -> DTensor | None:
    """A DTensor on another mesh: ``tensor.redistribute`` across meshes. Waits for the others.

    Ranks of the source mesh call it, all others of the group call :func:`receive`. It has no part
    in autograd.

    Args:
        tensor: of the source mesh.
        mesh: the destination, a DeviceMesh; it may have ranks of the source mesh.
        placements: one for each of its dimensions; no partial sums.
        dtype: of the result; None: the tensor's.
        group: as of :class:`Reshard`.
        key: the ordering channel.

    Returns:
        The DTensor, on ranks of `mesh`; None on others.

    Raises:
        InvalidArgument: on all ranks, if they do not fit together; the message says what differs.
        dist.DistBackendError: a rank is gone.
    """
    if not isinstance(tensor, DTensor):
        raise InvalidArgument(f"redistribute takes a DTensor, not a {type(tensor).__name__}")
    wanted = _destination(mesh, placements, tensor.shape, tensor.dtype if dtype is None else dtype)
    return _move(tensor, spec_of(tensor), mesh, placements, wanted, group, key)


def receive(
    mesh: Any,
    placements: Sequence[Any],
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    group: ProcessGroup = None,
    key: str = "redistribute",
) -> DTensor | None:
    """What :func:`redistribute` gives, on ranks that are not in the source mesh.

    Args:
        mesh: as there.
        placements: as there.
        shape: of the whole tensor.
        dtype: of the result.
        group: as there.
        key: as there.

    Returns:
        The DTensor, on ranks of `mesh`; None on those that are in neither.

    Raises:
        InvalidArgument: as there.
        dist.DistBackendError: as there.
    """
    wanted = _destination(mesh, placements, shape, dtype)
    return _move(None, None, mesh, placements, wanted, group, key)


def _destination(
    mesh: Any, placements: Sequence[Any], shape: Sequence[int], dtype: torch.dtype
) -> dict[str, Any]:
    return {
        "shape": list(shape),
        "dtype": name_of(dtype),
        "mesh": mesh.mesh.tolist(),
        "placements": [str(placement_of(each)) for each in placements],
        "device": mesh.device_type,
    }


def _move(
    tensor: DTensor | None,
    source: dict[str, Any] | None,
    mesh: Any,
    placements: Sequence[Any],
    wanted: dict[str, Any],
    group: ProcessGroup,
    key: str,
) -> DTensor | None:
    own, limit, members = group_of(group), limit_of(group), members_of(group)
    told = tell(own, key, {"src": source, "dst": wanted}, limit)
    at = {members[i]: each for i, each in enumerate(told)}
    same_of({rank: each["dst"] for rank, each in at.items()}, "the destination")
    sources = {rank: each["src"] for rank, each in at.items() if each["src"] is not None}
    if not sources:
        raise InvalidArgument("no rank has called redistribute: those of the source mesh do")
    found = same_of(sources, "the source")
    check_callers(found["mesh"], sources, "the tensor")
    own = group_of(group, on_gpus(own, found, wanted, isinstance(group, Group)))
    where = device_of(own)
    plan = _one_plan(json.dumps(found), json.dumps(wanted), tuple(members), _window(own))
    target = None
    if members[own.rank] in np.ravel(wanted["mesh"]).tolist():
        local = plan.rank(own.rank)["tensors"][0]["dst"]
        dtype = getattr(torch, wanted["dtype"])
        target = torch.empty(local, dtype=dtype, device=_device(mesh.device_type))
    copies = []
    out = {}
    if target is not None:
        local = local_part(target)
        out["tensor"] = _there(local, where)
        if out["tensor"] is not local:
            copies.append((local, out["tensor"]))
    src = {} if tensor is None else {"tensor": local_part(tensor).to(where)}
    request = plan.run(own, src=src, dst=out, key=key)
    ReshardWork([request], copies, limit).wait()
    if target is None:
        return None
    shape = torch.Size(wanted["shape"])
    strides = torch.empty(shape, device="meta").stride()
    made: DTensor = DTensor.from_local(
        target, mesh, list(placements), run_check=False, shape=shape, stride=strides
    )
    return made


@functools.lru_cache(maxsize=256)
def _one_plan(source: str, wanted: str, members: tuple[int, ...], window: int) -> Plan:
    src, dst = json.loads(source), json.loads(wanted)
    layouts = layout_of(src, members, "source"), layout_of(dst, members, "destination")
    return Plan(*layouts, {"tensor": tensor_of("tensor", src, dst)}, window=window)


def _window(group: Group) -> int:
    """Bundles under way at once: on GPUs a few large ones are faster, with as much staging."""
    return _DEVICE_WINDOW if group.context._place != HOST else _HOST_WINDOW


def _device(kind: str) -> torch.device:
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _there(part: torch.Tensor, where: torch.device) -> torch.Tensor:
    """The part, or, if it is elsewhere, memory for what comes."""
    return part if part.device == where else torch.empty(part.shape, dtype=part.dtype, device=where)
