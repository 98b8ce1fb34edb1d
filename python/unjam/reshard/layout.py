"""What a plan is made from: placements, layouts, tensors, hosts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._errors import InvalidArgument
from .._types import DType, dtype_of
from . import _abi


@dataclass(frozen=True)
class Placement:
    """What one mesh dimension does with a tensor."""

    @property
    def kind(self) -> int:
        """unjamPlacementKind_t."""
        return _abi.REPLICATE


@dataclass(frozen=True)
class Replicate(Placement):
    """Every place has all of it."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Shard(Placement):
    """Tensor dimension `dim` in chunks, as ``torch.chunk`` cuts: the last ones may be shorter."""

    dim: int

    @property
    def kind(self) -> int:
        """unjamPlacementKind_t."""
        return _abi.SHARD

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True)
class StridedShard(Placement):
    """`dim` in `split_factor` chunks first, and a chunk of each: torch's ``_StridedShard``.

    FSDP2 says so of a dimension that tensor parallelism has cut before.
    """

    dim: int
    split_factor: int

    @property
    def kind(self) -> int:
        """unjamPlacementKind_t."""
        return _abi.STRIDED_SHARD

    def __str__(self) -> str:
        return f"_S({self.dim}, {self.split_factor})"


_TEXT = re.compile(r"(?:(R)|(_?S)\(\s*(-?\d+)\s*(?:,\s*(\d+)\s*)?\))$")


def placement_of(spec: Any) -> Placement:
    """The placement that `spec` names.

    Args:
        spec: a :class:`Placement`, one of torch's, or a text as torch prints them: "R", "S(0)",
            "_S(0, 2)".

    Raises:
        InvalidArgument: it is none, or a partial sum.
    """
    if isinstance(spec, Placement):
        return spec
    if isinstance(spec, str):
        found = _TEXT.match(spec.strip())
        if found is None or (found[2] == "_S") is not (found[4] is not None):
            raise InvalidArgument(f'placement {spec!r}: write "R", "S(0)" or "_S(0, 2)"')
        if found[1]:
            return Replicate()
        dim = int(found[3])
        return StridedShard(dim, int(found[4])) if found[4] else Shard(dim)
    # torch's, without importing it: told by their names, for a strided shard is a shard in some
    # versions and not in others.
    name = type(spec).__name__
    if name == "_StridedShard":
        return StridedShard(spec.dim, spec.split_factor)
    if name == "Shard":
        return Shard(spec.dim)
    if name == "Replicate":
        return Replicate()
    if name in ("Partial", "_Partial", "_MaskPartial"):
        raise InvalidArgument(
            f"{spec} is a sum that is not made yet: redistribute on the source mesh first, and "
            "give the destination no partial placement"
        )
    raise InvalidArgument(f"{spec!r} is no placement: give Replicate(), Shard(0) or the like")


class Layout:
    """A mesh of ranks, and how tensors lie on it.

    Args:
        mesh: ranks as a nested list or an array, of as many dimensions as the mesh has.
        placements: one for each mesh dimension, applied from the first on; of tensors that have
            none of their own.
    """

    def __init__(self, mesh: Any, placements: Sequence[Any]) -> None:
        mesh = getattr(mesh, "mesh", mesh)  # a DeviceMesh has them as a tensor
        try:
            ranks = np.asarray(mesh)
        except ValueError as error:
            raise InvalidArgument(f"the mesh is no grid: {error}") from error
        if not np.issubdtype(ranks.dtype, np.integer) or ranks.ndim < 1 or ranks.size == 0:
            raise InvalidArgument("the mesh is no grid of ranks: give a (nested) list of integers")
        if ranks.min() < 0 or ranks.max() >= 2**31:
            raise InvalidArgument(f"the mesh has ranks from {ranks.min()} to {ranks.max()}")
        self.ranks = ranks.astype(np.int64)
        self.placements = tuple(placement_of(placement) for placement in placements)
        self._check(self.placements)

    def _check(self, placements: Sequence[Placement]) -> None:
        if len(placements) != self.ranks.ndim:
            raise InvalidArgument(
                f"{len(placements)} placements on a mesh of {self.ranks.ndim} dimensions: give one "
                "for each"
            )

    def __str__(self) -> str:
        shape = "x".join(map(str, self.ranks.shape))
        return f"{shape} ranks, {', '.join(map(str, self.placements))}"

    def __repr__(self) -> str:
        return f"Layout({self.ranks.tolist()}, {list(self.placements)})"


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to be moved.

    Attributes:
        shape: global.
        dtype: a data type or its name; on the source mesh.
        dst_dtype: on the destination mesh; None: the same.
        src: placements on the source mesh; None: the layout's.
        dst: placements on the destination mesh; None: the layout's.
    """

    shape: Sequence[int]
    dtype: Any
    dst_dtype: Any = None
    src: Sequence[Any] | None = None
    dst: Sequence[Any] | None = None


@dataclass(frozen=True)
class Tensor:
    """A checked :class:`TensorSpec`."""

    name: str
    shape: tuple[int, ...]
    src_dtype: DType
    dst_dtype: DType
    src: tuple[Placement, ...]
    dst: tuple[Placement, ...]


def tensor_of(name: str, spec: Any, src: Layout, dst: Layout) -> Tensor:
    """The tensor that `spec` names: a TensorSpec, or a tuple of its first fields."""
    if not isinstance(spec, TensorSpec):
        if not isinstance(spec, (tuple, list)) or not 2 <= len(spec) <= 5:
            raise InvalidArgument(f"tensor {name}: give (shape, dtype) or a TensorSpec")
        spec = TensorSpec(*spec)
    shape = []
    for size in spec.shape:
        if isinstance(size, bool) or not hasattr(size, "__index__") or not 0 <= size < 2**60:
            raise InvalidArgument(f"tensor {name}: a dimension of {size!r}")
        shape.append(int(size))
    sides = []
    for layout, given in ((src, spec.src), (dst, spec.dst)):
        placements = (
            layout.placements if given is None else tuple(placement_of(each) for each in given)
        )
        try:
            layout._check(placements)
        except InvalidArgument as error:
            raise InvalidArgument(f"tensor {name}: {error}") from error
        # As torch counts from the end.
        sides.append(tuple(_positive(placement, len(shape)) for placement in placements))
    src_dtype = dtype_of(spec.dtype)
    dst_dtype = src_dtype if spec.dst_dtype is None else dtype_of(spec.dst_dtype)
    return Tensor(name, tuple(shape), src_dtype, dst_dtype, *sides)


def _positive(placement: Placement, ndims: int) -> Placement:
    if isinstance(placement, Shard) and -ndims <= placement.dim < 0:
        return Shard(placement.dim + ndims)
    if isinstance(placement, StridedShard) and -ndims <= placement.dim < 0:
        return StridedShard(placement.dim + ndims, placement.split_factor)
    return placement


@dataclass(frozen=True)
class Topology:
    """Of each rank from 0 on its host and its NIC there.

    Attributes:
        hosts: numbers of hosts.
        nics: numbers of NICs, inside their host.
    """

    hosts: Sequence[int]
    nics: Sequence[int]

    @classmethod
    def equal(cls, ranks: int, ranks_per_host: int, nics_per_host: int = 1) -> Topology:
        """Consecutive ranks a host; its NICs are given to them in order, as evenly as it goes."""
        for name, value in (
            ("ranks", ranks),
            ("ranks_per_host", ranks_per_host),
            ("nics_per_host", nics_per_host),
        ):
            if not 1 <= value <= 1 << 24:
                raise InvalidArgument(f"{name} is {value}: give 1 to {1 << 24:,}")
        return cls(
            [rank // ranks_per_host for rank in range(ranks)],
            [rank % ranks_per_host * nics_per_host // ranks_per_host for rank in range(ranks)],
        )


def tensors_of(tensors: Mapping[str, Any], src: Layout, dst: Layout) -> list[Tensor]:
    """All of them, by name."""
    return [tensor_of(name, spec, src, dst) for name, spec in tensors.items()]
