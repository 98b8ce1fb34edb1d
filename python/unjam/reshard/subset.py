"""Parts of a plan: without ranks that are gone, for some destinations only, or for some tensors.

A mesh is a grid, so what is left out is a whole replica: all places of one number in a mesh
dimension in which every tensor is replicated.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence

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


def dropped(layout: Layout, side: str, tensors: Sequence[Tensor], ranks: Collection[int]) -> Layout:
    """The layout without the replicas that have one of these ranks.

    Args:
        layout: of the side.
        side: "source" or "destination".
        tensors: all that lie on it.
        ranks: which are left out; those that the mesh has not do not count.

    Raises:
        InvalidArgument: a rank has parts that no other rank has, or none would be left.
    """
    grid = layout.ranks
    for rank in sorted(ranks):
        places = np.argwhere(grid == rank)
        if not len(places):
            continue
        dims = _replicated(grid.ndim, side, tensors)
        if not dims:
            tensor, placement = _sharded(side, tensors)
            raise InvalidArgument(
                f"tensor {tensor.name!r}: rank {rank} has a part of the {side} that no other rank "
                f"has ({placement}), so it cannot be left out. Cure: have it on another rank, and "
                "make a plan of that"
            )
        # That which takes the fewest ranks along.
        dim = max(dims, key=lambda d: grid.shape[d])
        if grid.shape[dim] == 1:
            raise InvalidArgument(
                f"rank {rank} is in the {side}'s only replica: without it nothing is left"
            )
        grid = np.delete(grid, int(places[0][dim]), axis=dim)
    return _with(layout, grid)


def kept(layout: Layout, tensors: Sequence[Tensor], ranks: Collection[int]) -> Layout:
    """The destination's layout with these ranks only, which are whole replicas.

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
    whole: set[int] = set(grid.ravel().tolist())
    for dim in _replicated(grid.ndim, "destination", tensors):
        numbers = sorted({int(p[dim]) for rank in wanted for p in np.argwhere(grid == rank)})
        some = np.take(grid, numbers, axis=dim)
        found = set(some.ravel().tolist())
        if found == wanted:
            return _with(layout, some)
        whole = min(whole, found, key=len)
    if whole == wanted:
        return layout
    missing = sorted(whole - wanted)
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


def _sharded(side: str, tensors: Sequence[Tensor]) -> tuple[Tensor, Placement]:
    return next(
        (tensor, placement)
        for tensor in tensors
        for placement in _placements(side, tensor)
        if not isinstance(placement, Replicate)
    )


def _with(layout: Layout, grid: np.ndarray) -> Layout:
    return Layout(grid, layout.placements)
