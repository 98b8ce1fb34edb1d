"""What ranks tell each other of tensors that are to be moved, compared and made one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from .._devices import HOST
from .._errors import InvalidArgument, Timeout, UnjamError
from .._types import ARRAY_DTYPES
from ..group import Group
from ..reshard import Layout, TensorSpec, placement_of
from ._context import device_of

# Types that unjam does not know travel as others of their size, and are not cast.
_RAW = {1: torch.uint8, 2: torch.bfloat16, 4: torch.int32, 8: torch.int64}


def raw_of(dtype: torch.dtype) -> torch.dtype:
    if str(dtype).removeprefix("torch.") in ARRAY_DTYPES:
        return dtype
    if dtype.itemsize not in _RAW:
        raise InvalidArgument(f"{dtype} has elements of {dtype.itemsize} bytes: move its parts")
    return _RAW[dtype.itemsize]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def spec_of(tensor: torch.Tensor) -> dict[str, Any]:
    """What others must know of a tensor. mesh: None where it is a plain one."""
    mesh, placements = None, None
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh.mesh.tolist()
        placements = [str(placement_of(each)) for each in tensor.placements]
    return {
        "shape": list(tensor.shape),
        "dtype": name_of(tensor.dtype),
        "mesh": mesh,
        "placements": placements,
        "device": tensor.device.type,
    }


def on_gpus(group: Group, src: Mapping[str, Any], dst: Mapping[str, Any], grouped: bool) -> bool:
    """Whether a tensor goes from GPU to GPU, or through host memory. All ranks say the same.

    Args:
        group: the one that is given, or that of the process group for CPU tensors.
        src: what is told of it on the source side.
        dst: the same of the destination.
        grouped: the group is given as such: then its context says it.
    """
    if grouped:
        return group.context._place != HOST
    return src.get("device", "cpu") == dst.get("device", "cpu") == "cuda"


def specs_of(state: Mapping[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
    found = {}
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            raise InvalidArgument(
                f"{name!r} is a {type(tensor).__name__}, no tensor: leave it out of the state_dict"
            )
        try:
            found[name] = spec_of(tensor)
        except InvalidArgument as error:
            raise InvalidArgument(f"tensor {name!r}: {error}") from error
    return found


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, without autograd, as a type that unjam knows."""
    part = tensor.detach()
    if isinstance(part, DTensor):
        part = part.to_local()
    raw = raw_of(part.dtype)
    return part if raw is part.dtype else part.view(raw)


def layout_of(spec: Mapping[str, Any], members: Sequence[int], where: str) -> Layout:
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


def tensor_of(name: str, src: Mapping[str, Any], dst: Mapping[str, Any]) -> TensorSpec:
    if src["shape"] != dst["shape"]:
        raise InvalidArgument(
            f"tensor {name!r} has shape {tuple(src['shape'])} in the source and "
            f"{tuple(dst['shape'])} in the destination: they must be equal"
        )
    before, after = getattr(torch, src["dtype"]), getattr(torch, dst["dtype"])
    wire = [name_of(raw_of(each)) for each in (before, after)]
    if before is not after and wire != [src["dtype"], dst["dtype"]]:
        raise InvalidArgument(f"tensor {name!r}: unjam does not cast {before} to {after}")
    return TensorSpec(src["shape"], wire[0], wire[1], src["placements"], dst["placements"])


def filled(given: str | Mapping[str, Any], where: str) -> dict[str, dict[str, Any]]:
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


def text_of(spec: Mapping[str, Any]) -> str:
    return (
        f"{spec['dtype']} {tuple(spec['shape'])} with {', '.join(spec['placements'])} on "
        f"{spec['mesh']}"
    )


def same_of(of_rank: Mapping[int, dict[str, Any]], what: str) -> dict[str, Any]:
    """What all say."""
    first = min(of_rank)
    for rank, spec in sorted(of_rank.items()):
        if spec != of_rank[first]:
            raise InvalidArgument(
                f"{what} is {text_of(of_rank[first])} on rank {first} and {text_of(spec)} on rank "
                f"{rank}: call with the same on all ranks"
            )
    return of_rank[first]


def check_callers(mesh: Any, callers: Mapping[int, Any], what: str) -> None:
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


def is_one_of(found: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
    """Of copies."""
    if known["placements"] != ["R", *found["placements"]] or found["mesh"] not in known["mesh"]:
        return False
    return all(found[name] == known[name] for name in ("shape", "dtype"))


def merged(
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
            merged[name] = same_of({r: {**spec, **filled} for r, spec in found.items()}, what)
        else:
            merged[name] = _copies(found) or same_of(found, what)
            check_callers(merged[name]["mesh"], found, what)
    return merged


def _gathered(group: Group, mine: np.ndarray, key: str, limit: float | None) -> np.ndarray:
    """All ranks' rows, in the group's memory and back."""
    where = device_of(group)
    rows = torch.zeros((group.size, mine.size), dtype=torch.from_numpy(mine).dtype, device=where)
    given = torch.from_numpy(mine).to(where)
    group.all_gather(given, rows, key=key).synchronize(limit)
    found: np.ndarray = rows.cpu().numpy()
    return found


def tell(group: Group, key: str, mine: Any, limit: float | None) -> list[Any]:
    """What each rank of the group says, by rank."""
    text = np.frombuffer(json.dumps(mine).encode(), np.uint8)
    try:
        sizes = _gathered(group, np.array([len(text)], np.int64), f"{key} sizes", limit).ravel()
        most = int(sizes.max())
        padded = np.zeros(most, np.uint8)
        padded[: len(text)] = text
        all_texts = _gathered(group, padded, f"{key} specs", limit)
    except Timeout:
        raise
    except UnjamError as error:
        raise dist.DistBackendError(f"unjam: {error}") from error
    return [json.loads(row[:size].tobytes()) for row, size in zip(all_texts, sizes, strict=True)]
