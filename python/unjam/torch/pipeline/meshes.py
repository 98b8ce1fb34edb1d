"""Stages that several ranks compute together, and the reshardings between them.

Such a stage has a mesh of ranks, as tensor parallelism makes one. What an edge between two meshes
carries goes by a plan of unjam.reshard, and its gradients by the plan of the way back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..._errors import InvalidArgument, UnjamError
from ...group import Group
from ...reshard import Layout, Plan, Replicate, ReshardRequest, TensorSpec
from .._context import group_of, limit_of
from .._reshard_specs import local_part, name_of, raw_of
from .stages import Edge, Spec

Mesh = np.ndarray[Any, np.dtype[np.int64]]  # of the group's ranks

_WINDOW = 4  # bundles of one message under way
KEYS = 1 + _WINDOW  # of a rank, that a message between meshes takes at most
_MOST_BYTES = 64 << 20  # of staging, of each message


def meshes_of(given: Sequence[Any] | None, group: dist.ProcessGroup) -> list[Mesh]:
    """The ranks of each of an order's rows, as numbers in the group.

    Args:
        given: of each row a DeviceMesh, or a (nested) list of the group's ranks; None: one rank a
            row.
        group: whose ranks have the rows.

    Raises:
        InvalidArgument: a rank is in no mesh, in two, or not in the group.
    """
    size = dist.get_world_size(group)
    if given is None:
        return [np.array([rank]) for rank in range(size)]
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence):
        raise InvalidArgument(f"meshes={given!r}: give a list with a mesh for each of its rows")
    place = {rank: n for n, rank in enumerate(dist.get_process_group_ranks(group))}
    found: list[Mesh] = []
    owner: dict[int, int] = {}
    for row, mesh in enumerate(given):
        try:
            ranks = Layout(mesh, [Replicate()] * np.ndim(getattr(mesh, "mesh", mesh))).ranks
        except (ValueError, InvalidArgument) as error:
            raise InvalidArgument(f"meshes[{row}]: {error}") from error
        if hasattr(mesh, "mesh"):  # a DeviceMesh has the job's ranks
            missing = sorted(set(ranks.ravel().tolist()) - place.keys())
            if missing:
                raise InvalidArgument(
                    f"meshes[{row}] has rank {missing[0]}, which the pipeline's group has not: "
                    "give a group of all meshes' ranks"
                )
            ranks = np.vectorize(place.__getitem__)(ranks)
        for rank in ranks.ravel().tolist():
            if not 0 <= rank < size:
                raise InvalidArgument(
                    f"meshes[{row}] has rank {rank}, and the group has ranks 0 to {size - 1}"
                )
            other = owner.setdefault(rank, row)
            if other != row or (ranks == rank).sum() > 1:
                raise InvalidArgument(
                    f"rank {rank} is in meshes[{other}] and again in meshes[{row}]: give each "
                    "rank one place"
                )
        found.append(ranks)
    for rank in range(size):
        if rank not in owner:
            raise InvalidArgument(
                f"rank {rank} of the group is in no mesh: give it one, or a group without it"
            )
    return found


def row_of(meshes: Sequence[Mesh], rank: int) -> int:
    """In which of them the rank is."""
    return next(row for row, mesh in enumerate(meshes) if rank in mesh)


def check_layouts(
    edges: Sequence[Edge], meshes: Sequence[Mesh], rank_of: Sequence[int], kind: str
) -> None:
    """Whether the edges' layouts fit the meshes of their stages.

    Args:
        edges: all.
        meshes: of the order's rows.
        rank_of: each stage's row.
        kind: of device, where tensors are.

    Raises:
        InvalidArgument: they do not; the message names edge and tensor.
    """
    for edge in edges:
        rows = rank_of[edge.source], rank_of[edge.target]
        if all(meshes[row].size == 1 for row in rows):
            continue
        for name, _ in edge.pairs:
            layouts = [_layout(edge, name, side, meshes[row]) for side, row in enumerate(rows)]
            if rows[0] == rows[1] and layouts[0].placements != layouts[1].placements:
                raise InvalidArgument(
                    f"edge {edge}: {name!r} would change its layout on one mesh: give both sides "
                    "the same, and redistribute it in a stage"
                )
            shards = any(not isinstance(p, Replicate) for p in layouts[0].placements)
            if shards and edge.specs is None:
                raise InvalidArgument(
                    f"edge {edge}: {name!r} leaves stage {edge.source} in parts: give the edge "
                    "specs, with the shapes of whole tensors"
                )
        if rows[0] != rows[1] and kind != "cpu":
            raise InvalidArgument(
                f"edge {edge} reshards, which is for tensors on the CPU so far, and these are on "
                f"{kind}: give each stage one rank"
            )


def _layout(edge: Edge, name: str, side: int, mesh: Mesh) -> Layout:
    given = (edge.layouts or {}).get(name)
    placements = [Replicate()] * mesh.ndim if given is None else given[side]
    try:
        return Layout(mesh, placements)
    except InvalidArgument as error:
        stage = (edge.source, edge.target)[side]
        raise InvalidArgument(f"edge {edge}: {name!r} at stage {stage}: {error}") from error


class Route:
    """An edge between two meshes: its plans, there and back, the same on all ranks."""

    def __init__(self, edge: Edge, specs: Mapping[str, Spec], meshes: tuple[Mesh, Mesh]) -> None:
        """Plans; sends nothing.

        Args:
            edge: between the meshes.
            specs: of each output of the edge, as a whole.
            meshes: of its source and its target.

        Raises:
            InvalidArgument: a layout that does not fit a shape; the message names edge and tensor.
        """
        self.ranks = sorted({rank for mesh in meshes for rank in mesh.ravel().tolist()})
        self._edge = edge
        self._specs = [(name, specs[name]) for name, _ in edge.pairs]
        place = {rank: n for n, rank in enumerate(self.ranks)}
        self._meshes = [np.vectorize(place.__getitem__)(mesh) for mesh in meshes]
        graded = [pair for pair in self._specs if pair[1].grad]
        self._plans = [self._plan(self._specs, 0), self._plan(graded, 1)]

    def plan(self, is_gradient: bool) -> Plan | None:
        """That of activations or of gradients; None: nothing travels."""
        return self._plans[is_gradient]

    def byte(self, is_gradient: bool, name: str) -> Plan:
        """A byte in place of a message. Ranks that give it another name all get an error."""
        return self._planned({name: TensorSpec((1,), "uint8")}, int(is_gradient))

    def parts(self, rank: int, side: str) -> dict[str, Spec]:
        """What a rank of the group has of each output: "src" or "dst" of the edge."""
        plan = self._plans[0]
        assert plan is not None
        told = plan.rank(self.ranks.index(rank))["tensors"]
        shapes = {each["name"]: each[side] for each in told}
        return {
            name: Spec(tuple(shapes[name]), spec.dtype, spec.grad) for name, spec in self._specs
        }

    def _plan(self, specs: Sequence[tuple[str, Spec]], back: int) -> Plan | None:
        tensors = {}
        for name, spec in specs:
            ends = [_layout(self._edge, name, n, self._meshes[n]).placements for n in (0, 1)]
            try:
                dtype = name_of(raw_of(spec.dtype))
            except InvalidArgument as error:
                raise InvalidArgument(f"edge {self._edge}: {name!r}: {error}") from error
            tensors[name] = TensorSpec(spec.shape, dtype, None, ends[back], ends[1 - back])
        try:
            return self._planned(tensors, back) if tensors else None
        except InvalidArgument as error:
            raise InvalidArgument(f"edge {self._edge}: {error}") from error

    def _planned(self, tensors: Mapping[str, TensorSpec], back: int) -> Plan:
        ends = [Layout(mesh, [Replicate()] * mesh.ndim) for mesh in self._meshes]
        return Plan(ends[back], ends[1 - back], tensors, max_bytes=_MOST_BYTES, window=_WINDOW)


class Routes:
    """The messages between meshes of one pipeline, on one rank."""

    def __init__(self, name: str, group: dist.ProcessGroup) -> None:
        """Sends nothing.

        Args:
            name: of the pipeline.
            group: a process group of unjam's.
        """
        self._name = name
        self._group = group
        self._rank = dist.get_rank(group)
        self._routes: dict[Edge, Route] = {}
        self._groups: dict[tuple[int, ...], Group] = {}

    def add(self, edge: Edge, specs: Mapping[str, Spec], meshes: tuple[Mesh, Mesh]) -> None:
        """Plans an edge, on all ranks of the pipeline; see :class:`Route`."""
        route = self._routes[edge] = Route(edge, specs, meshes)
        ranks = tuple(route.ranks)
        if self._rank in ranks and ranks not in self._groups and meshes[0] is not meshes[1]:
            whole = group_of(self._group)
            members = [whole.ranks[rank] for rank in ranks]
            self._groups[ranks] = whole.context.group(members, f"{self._name} {edge}")

    def has(self, edge: Edge) -> bool:
        """Whether one of its stages has several ranks."""
        return edge in self._routes

    def parts(self, edge: Edge, side: str) -> dict[str, Spec]:
        """What this rank has of an edge's outputs."""
        return self._routes[edge].parts(self._rank, side)

    def post(
        self,
        edge: Edge,
        key: str,
        is_gradient: bool,
        sends: bool,
        tensors: Sequence[torch.Tensor],
        byte: str = "",
    ) -> list[Any]:
        """Begins a message: the works to wait for.

        Args:
            edge: one that has a route.
            key: the message's.
            is_gradient: whether it goes back.
            sends: whether this rank does; otherwise it receives.
            tensors: what is sent, or written; kept untouched until the end.
            byte: not empty: they are one byte of this name.
        """
        route = self._routes[edge]
        plan = route.byte(is_gradient, byte) if byte else route.plan(is_gradient)
        if plan is None:
            return []
        parts = dict(zip(plan.dtypes(), map(local_part, tensors), strict=True))
        group = self._groups[tuple(route.ranks)]
        src, dst = (parts, None) if sends else (None, parts)
        return [_Work(plan.run(group, src=src, dst=dst, key=key), limit_of(self._group))]


class _Work:
    """A resharding under way, as messages of torch's are."""

    def __init__(self, request: ReshardRequest, limit: float | None) -> None:
        self._request = request
        self._limit = limit

    def wait(self, timeout: timedelta | None = None) -> None:
        """Raises what they raise."""
        limit = self._limit if timeout is None else timeout.total_seconds()
        try:
            self._request.synchronize(limit)
        except UnjamError as error:
            raise dist.DistBackendError(f"unjam: {error}") from error
