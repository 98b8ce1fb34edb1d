"""DTensors and state_dicts from one mesh to another: weights from training to generation.

::

    sync = unjam.torch.Reshard.between(src=trainer.state_dict())  # on trainer ranks
    sync = unjam.torch.Reshard.between(dst=rollout.state_dict())  # on generator ranks
    work = sync(src=trainer.state_dict())  # each step; sync(dst=rollout.state_dict()) there
    ...  # nothing waits
    work.wait()

Ranks begin it in any order beside their other collectives: its bundles have keys of their own.
Tensors on GPUs travel through host memory.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from .._errors import InvalidArgument, Timeout, UnjamError
from .._types import ARRAY_DTYPES
from ..group import Group
from ..reshard import Layout, Plan, ReshardRequest, TensorSpec, Topology, placement_of
from ._context import group_of, limit_of, members_of

ProcessGroup = Any  # of torch, or a Group; None: the default one

# Types that unjam does not know travel as others of their size, and are not cast.
_RAW = {1: torch.uint8, 2: torch.bfloat16, 4: torch.int32, 8: torch.int64}


def _raw(dtype: torch.dtype) -> torch.dtype:
    if str(dtype).removeprefix("torch.") in ARRAY_DTYPES:
        return dtype
    if dtype.itemsize not in _RAW:
        raise InvalidArgument(f"{dtype} has elements of {dtype.itemsize} bytes: move its parts")
    return _RAW[dtype.itemsize]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _spec(tensor: torch.Tensor) -> dict[str, Any]:
    """What others must know of a tensor. mesh: None where it is a plain one."""
    mesh, placements = None, None
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh.mesh.tolist()
        placements = [str(placement_of(each)) for each in tensor.placements]
    return {
        "shape": list(tensor.shape),
        "dtype": _name(tensor.dtype),
        "mesh": mesh,
        "placements": placements,
    }


def _specs(state: Mapping[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
    found = {}
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            raise InvalidArgument(
                f"{name!r} is a {type(tensor).__name__}, no tensor: leave it out of the state_dict"
            )
        try:
            found[name] = _spec(tensor)
        except InvalidArgument as error:
            raise InvalidArgument(f"tensor {name!r}: {error}") from error
    return found


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, without autograd, as a type that unjam knows."""
    part = tensor.detach()
    if isinstance(part, DTensor):
        part = part.to_local()
    raw = _raw(part.dtype)
    return part if raw is part.dtype else part.view(raw)


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
        self._group = group_of(group)
        self._limit = limit_of(group)
        self._key = key
        self._rank = self._group.rank
        members = members_of(group)
        self._src, self._dst = _filled(src, "source"), _filled(dst, "destination")
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
        self._plans: list[tuple[list[str], Plan]] = []
        by_meshes: dict[str, list[str]] = {}
        for name in sorted(self._src):
            pair = json.dumps([self._src[name]["mesh"], self._dst[name]["mesh"]])
            by_meshes.setdefault(pair, []).append(name)
        for _, names in sorted(by_meshes.items()):
            self._plans.append((names, self._plan(names, members, topology, max_bytes)))

    def _plan(
        self, names: Sequence[str], members: Sequence[int], topology: Topology | None, most: int
    ) -> Plan:
        src, dst = (
            _layout(side[names[0]], members, where)
            for side, where in ((self._src, "source"), (self._dst, "destination"))
        )
        tensors = {name: _tensor(name, self._src[name], self._dst[name]) for name in names}
        return Plan(src, dst, tensors, topology, max_bytes=most)

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
        specs = _specs(state)
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
            "src": None if src is None else _specs(src),
            "dst": None if dst is None else _specs(dst),
        }
        told = _tell(group_of(group), key, mine, limit_of(group))
        members = members_of(group)
        sides = []
        for side, where in (("src", "source"), ("dst", "destination")):
            of_rank = {
                members[i]: each[side] for i, each in enumerate(told) if each[side] is not None
            }
            sides.append(_merged(of_rank, where))
        return cls(*sides, group, key=key, topology=topology, max_bytes=max_bytes)

    @property
    def plans(self) -> list[Plan]:
        """One for each pair of meshes that tensors have."""
        return [plan for _, plan in self._plans]

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
            InvalidArgument: a tensor is missing, or not as it was described; the message names it.
        """
        for given, specs, where in ((src, self._src, "source"), (dst, self._dst, "destination")):
            self._check(given, specs, where)
        requests = []
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        # All of it before something is submitted.
        calls = []
        for names, plan in self._plans:
            mine = {name: _on_host(_local(src[name])) for name in names if src and name in src}
            wanted = {}
            for name in names:
                if not dst or name not in dst:
                    continue
                target = _local(dst[name])
                wanted[name] = target if target.device.type == "cpu" else _empty_as(target)
                if wanted[name] is not target:
                    copies.append((target, wanted[name]))
            calls.append((plan, mine, wanted))
        for i, (plan, mine, wanted) in enumerate(calls):
            key = self._key if i == 0 else f"{self._key}/{i}"
            requests.append(plan.run(self._group, src=mine, dst=wanted, key=key))
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
            found = _spec(tensor)
            if found["mesh"] is None:  # its local shape is looked at by the run
                found.update(mesh=known["mesh"], placements=known["placements"])
            if found != known and not _is_one_of(found, known):
                raise InvalidArgument(
                    f"tensor {name!r} of the {where} on rank {self._rank} is {_text(found)}, and "
                    f"was described as {_text(known)}: make a new Reshard when layouts change"
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
    return _move(tensor, _spec(tensor), mesh, placements, wanted, group, key)


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
        "dtype": _name(dtype),
        "mesh": mesh.mesh.tolist(),
        "placements": [str(placement_of(each)) for each in placements],
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
    told = _tell(own, key, {"src": source, "dst": wanted}, limit)
    at = {members[i]: each for i, each in enumerate(told)}
    _same({rank: each["dst"] for rank, each in at.items()}, "the destination")
    sources = {rank: each["src"] for rank, each in at.items() if each["src"] is not None}
    if not sources:
        raise InvalidArgument("no rank has called redistribute: those of the source mesh do")
    found = _same(sources, "the source")
    _check_callers(found["mesh"], sources, "the tensor")
    plan = _one_plan(json.dumps(found), json.dumps(wanted), tuple(members))
    target = None
    if members[own.rank] in np.ravel(wanted["mesh"]).tolist():
        local = plan.rank(own.rank)["tensors"][0]["dst"]
        dtype = getattr(torch, wanted["dtype"])
        target = torch.empty(local, dtype=dtype, device=_device(mesh.device_type))
    copies = []
    out = {}
    if target is not None:
        local = _local(target)
        out["tensor"] = local if local.device.type == "cpu" else _empty_as(local)
        if out["tensor"] is not local:
            copies.append((local, out["tensor"]))
    src = {} if tensor is None else {"tensor": _on_host(_local(tensor))}
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
def _one_plan(source: str, wanted: str, members: tuple[int, ...]) -> Plan:
    src, dst = json.loads(source), json.loads(wanted)
    layouts = _layout(src, members, "source"), _layout(dst, members, "destination")
    return Plan(*layouts, {"tensor": _tensor("tensor", src, dst)})


def _device(kind: str) -> torch.device:
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _on_host(part: torch.Tensor) -> torch.Tensor:
    return part if part.device.type == "cpu" else part.cpu()


def _empty_as(part: torch.Tensor) -> torch.Tensor:
    return torch.empty(part.shape, dtype=part.dtype)


def _layout(spec: Mapping[str, Any], members: Sequence[int], where: str) -> Layout:
    """With the group's numbers for ranks."""
    place = {rank: i for i, rank in enumerate(members)}
    ranks = np.asarray(spec["mesh"])
    for rank in ranks.ravel().tolist():
        if rank not in place:
            raise InvalidArgument(
                f"the {where}'s mesh has rank {rank}, and the group has {len(members)} ranks "
                f"without it: give a group of all ranks of both meshes"
            )
    return Layout(np.vectorize(place.__getitem__)(ranks), spec["placements"])


def _tensor(name: str, src: Mapping[str, Any], dst: Mapping[str, Any]) -> TensorSpec:
    if src["shape"] != dst["shape"]:
        raise InvalidArgument(
            f"tensor {name!r} has shape {tuple(src['shape'])} in the source and "
            f"{tuple(dst['shape'])} in the destination: they must be equal"
        )
    before, after = getattr(torch, src["dtype"]), getattr(torch, dst["dtype"])
    wire = [_name(_raw(each)) for each in (before, after)]
    if before is not after and wire != [src["dtype"], dst["dtype"]]:
        raise InvalidArgument(f"tensor {name!r}: unjam does not cast {before} to {after}")
    return TensorSpec(src["shape"], wire[0], wire[1], src["placements"], dst["placements"])


def _filled(given: str | Mapping[str, Any], where: str) -> dict[str, dict[str, Any]]:
    """Specs, in which plain tensors have a mesh: a copy on each rank."""
    specs = json.loads(given) if isinstance(given, str) else dict(given)
    ranks = sorted(
        {
            rank
            for spec in specs.values()
            if spec["mesh"] is not None
            for rank in np.ravel(spec["mesh"]).tolist()
        }
    )
    for name, spec in specs.items():
        if spec["mesh"] is not None:
            continue
        if not ranks:
            raise InvalidArgument(
                f"tensor {name!r} of the {where} is a plain one, and no DTensor says which ranks "
                "have it: describe(…, ranks=[…]), or use Reshard.between"
            )
        specs[name] = {**spec, "mesh": ranks, "placements": ["R"]}
    return specs


def _text(spec: Mapping[str, Any]) -> str:
    return (
        f"{spec['dtype']} {tuple(spec['shape'])} with {', '.join(spec['placements'])} on "
        f"{spec['mesh']}"
    )


def _same(of_rank: Mapping[int, dict[str, Any]], what: str) -> dict[str, Any]:
    """What all say."""
    first = min(of_rank)
    for rank, spec in sorted(of_rank.items()):
        if spec != of_rank[first]:
            raise InvalidArgument(
                f"{what} is {_text(of_rank[first])} on rank {first} and {_text(spec)} on rank "
                f"{rank}: call with the same on all ranks"
            )
    return of_rank[first]


def _check_callers(mesh: Any, callers: Mapping[int, Any], what: str) -> None:
    ranks = set(np.ravel(mesh).tolist())
    for rank in sorted(ranks ^ set(callers)):
        words = "has not given it" if rank in ranks else "has given it, and is not in its mesh"
        raise InvalidArgument(f"rank {rank} {words}: {what} is on the mesh {mesh}")


def _copies(of_rank: Mapping[int, dict[str, Any]]) -> dict[str, Any] | None:
    """Of a tensor that lies on several meshes in the same way, as FSDP beside tensor parallelism
    has it: on a mesh of those. None: it does not."""
    meshes = []
    for _, spec in sorted(of_rank.items()):
        if spec["mesh"] not in meshes:
            meshes.append(spec["mesh"])
    first = of_rank[min(of_rank)]
    ranks = [rank for mesh in meshes for rank in np.ravel(mesh).tolist()]
    alike = all({**spec, "mesh": None} == {**first, "mesh": None} for spec in of_rank.values())
    shapes = {np.shape(mesh) for mesh in meshes}
    if len(meshes) == 1 or not alike or len(shapes) > 1 or len(set(ranks)) < len(ranks):
        return None
    return {**first, "mesh": meshes, "placements": ["R", *first["placements"]]}


def _is_one_of(found: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
    """Of copies."""
    if known["placements"] != ["R", *found["placements"]] or found["mesh"] not in known["mesh"]:
        return False
    return all(found[name] == known[name] for name in ("shape", "dtype"))


def _merged(
    of_rank: Mapping[int, Mapping[str, dict[str, Any]]], where: str
) -> dict[str, dict[str, Any]]:
    """One spec for each name; a plain tensor is on the ranks that have it."""
    by_name: dict[str, dict[int, dict[str, Any]]] = {}
    for rank, specs in sorted(of_rank.items()):
        for name, spec in specs.items():
            by_name.setdefault(name, {})[rank] = spec
    merged = {}
    for name, found in by_name.items():
        what = f"tensor {name!r} of the {where}"
        plain = {rank for rank, spec in found.items() if spec["mesh"] is None}
        if plain and len(plain) != len(found):
            raise InvalidArgument(
                f"{what} is a DTensor on some ranks, and a plain tensor on {sorted(plain)}"
            )
        if plain:
            filled = {"mesh": sorted(found), "placements": ["R"]}
            merged[name] = _same({r: {**spec, **filled} for r, spec in found.items()}, what)
        else:
            merged[name] = _copies(found) or _same(found, what)
            _check_callers(merged[name]["mesh"], found, what)
    return merged


def _tell(group: Group, key: str, mine: Any, limit: float | None) -> list[Any]:
    """What each rank of the group says, by rank."""
    text = np.frombuffer(json.dumps(mine).encode(), np.uint8)
    sizes = np.zeros(group.size, np.int64)
    try:
        group.all_gather(np.array([len(text)], np.int64), sizes, key=f"{key} sizes").synchronize(
            limit
        )
        most = int(sizes.max())
        padded = np.zeros(most, np.uint8)
        padded[: len(text)] = text
        all_texts = np.zeros((group.size, most), np.uint8)
        group.all_gather(padded, all_texts, key=f"{key} specs").synchronize(limit)
    except Timeout:
        raise
    except UnjamError as error:
        raise dist.DistBackendError(f"unjam: {error}") from error
    return [json.loads(row[:size].tobytes()) for row, size in zip(all_texts, sizes, strict=True)]
