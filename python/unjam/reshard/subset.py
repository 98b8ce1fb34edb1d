"""Parts of a plan: without ranks that are gone, for some destinations only, or for some tensors.

What is left out is a whole replica: all ranks that have one place in the mesh dimensions in which
every tensor is replicated. If there are several of these, what is left of their places need be no
grid, so they become one dimension.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import numpy as np

from .._errors import InvalidArgument
from .layout import Layout, Placement, Replicate, Tensor, Topology

SIDES = ("source", "destination")


def named(tensors: Sequence[Tensor], names: Iterable[str]) -> set[str]:
    """The names, of tensors that are there.

    Raises:
        InvalidArgument: one is not.
    """
    known = [tensor.name for tensor in tensors]
    found = {names} if isinstance(names, str) else set(names)
    for name in sorted(found, key=str):
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            raise InvalidArgument(f"the plan has no tensor {name!r}{meant}")
    return found


def dropped(
    layout: Layout, side: str, tensors: Sequence[Tensor], ranks: Collection[int]
) -> tuple[Layout, list[Tensor]]:
    """The layout without the replicas that have one of these ranks, and tensors that lie on it.

    Args:
        layout: of the side.
        side: "source" or "destination".
        tensors: all that lie on it.
        ranks: which are left out; those that the mesh has not do not count.

    Raises:
        InvalidArgument: a rank has parts that no other rank has, or none would be left.
    """
    gone = sorted(set(ranks) & set(layout.ranks.ravel().tolist()))
    dims = _replicated(layout.ranks.ndim, side, tensors)
    replicas = _replicas(layout.ranks, dims)
    left = np.ones(len(replicas), bool)
    for rank in gone:
        if not dims:
            tensor, placement = _sharded(side, tensors)
            raise InvalidArgument(
                f"tensor {tensor.name!r}: rank {rank} has a part of the {side} that no other rank "
                f"has ({placement}), so it cannot be left out. Cure: have it on another rank, and "
                "make a plan of that"
            )
        left[(replicas == rank).any(axis=1)] = False
        if not left.any():
            raise InvalidArgument(
                f"rank {rank} is in the {side}'s only replica: without it nothing is left"
            )
    return _taken(layout, side, tensors, dims, left)


def kept(
    layout: Layout, tensors: Sequence[Tensor], ranks: Collection[int]
) -> tuple[Layout, list[Tensor]]:
    """The destination's layout with these ranks only, which are whole replicas; and its tensors.

    Raises:
        InvalidArgument: they are not, or the mesh has not got one.
    """
    grid, wanted = layout.ranks, set(ranks)
    for rank in sorted(wanted):
        if rank not in grid:
            raise InvalidArgument(
                f"rank {rank} is not in the destination's mesh {grid.tolist()}: give ranks of it"
            )
    if not wanted:
        raise InvalidArgument("no destination is left: give ranks of one replica at least")
    dims = _replicated(grid.ndim, "destination", tensors)
    replicas = _replicas(grid, dims)
    left = np.asarray(np.isin(replicas, sorted(wanted)).any(axis=1))
    missing = sorted(set(replicas[left].ravel().tolist()) - wanted)
    if not missing:
        return _taken(layout, "destination", tensors, dims, left)
    raise InvalidArgument(
        f"ranks {sorted(wanted)} are no whole replicas of the destination: "
        f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing))} "
        f"{'has' if len(missing) == 1 else 'have'} other parts of them: give those, too"
    )


def renumbered(layout: Layout, gone: Collection[int]) -> Layout:
    """As ``Group.shrink`` numbers ranks when some are gone: those behind them move up."""
    below = sum((layout.ranks > rank).astype(np.int64) for rank in gone)
    return _with(layout, layout.ranks - below)


def topology_without(topology: Topology | None, gone: Collection[int]) -> Topology | None:
    """The same for a topology."""
    if topology is None:
        return None
    left = [n for n in range(len(topology.hosts)) if n not in gone]
    return Topology([topology.hosts[n] for n in left], [topology.nics[n] for n in left])


def _placements(side: str, tensor: Tensor) -> tuple[Placement, ...]:
    return tensor.src if side == "source" else tensor.dst


def _replicated(ndims: int, side: str, tensors: Sequence[Tensor]) -> list[int]:
    """Mesh dimensions in which every tensor is."""
    return [
        dim
        for dim in range(ndims)
        if all(isinstance(_placements(side, tensor)[dim], Replicate) for tensor in tensors)
    ]


def _replicas(grid: np.ndarray, dims: Sequence[int]) -> np.ndarray:
    """A row for each place in these mesh dimensions: the ranks that have it."""
    front = np.moveaxis(grid, dims, range(len(dims)))
    rows = int(np.prod(front.shape[: len(dims)]))
    return front.reshape(rows, -1)


def _taken(
    layout: Layout, side: str, tensors: Sequence[Tensor], dims: Sequence[int], left: np.ndarray
) -> tuple[Layout, list[Tensor]]:
    """The layout and its tensors with some of the replicas; these dimensions become one."""
    if left.all():
        return layout, list(tensors)
    first, others = dims[0], [d for d in range(layout.ranks.ndim) if d not in dims]
    shape = [layout.ranks.shape[d] for d in others]
    grid = _replicas(layout.ranks, dims)[left].reshape(-1, *shape)
    # No shard changes its place among shards, which is what counts.
    grid = np.moveaxis(grid, 0, first)

    def merged(placements: Sequence[Placement]) -> tuple[Placement, ...]:
        return tuple(p for d, p in enumerate(placements) if d == first or d not in dims)

    return (
        Layout(grid, merged(layout.placements)),
        [
            replace(tensor, src=merged(tensor.src))
            if side == "source"
            else replace(tensor, dst=merged(tensor.dst))
            for tensor in tensors
        ],
    )


def _sharded(side: str, tensors: Sequence[Tensor]) -> tuple[Tensor, Placement]:
    return next(
        (tensor, placement)
        for tensor in tensors
        for placement in _placements(side, tensor)
        if not isinstance(placement, Replicate)
    )


def _with(layout: Layout, grid: np.ndarray) -> Layout:
    return Layout(grid, layout.placements)
