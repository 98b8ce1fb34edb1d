"""Plans: made by the library, shown as numbers and tables."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .._errors import Internal, InvalidArgument
from .._interrupt import interruptible
from .._lib import check, read_json
from .._types import DType
from ..group import Group, OnComplete
from . import _abi, subset
from .layout import Layout, Placement, Tensor, TensorSpec, Topology, tensors_of
from .run import ReshardRequest, run

_BAR = 30  # characters of a full bar
_INT32 = 2**31 - 1


@dataclass(frozen=True)
class Port:
    """A NIC, and the bytes that go through it.

    Attributes:
        host: the topology's number.
        nic: the topology's number.
        out: bytes that leave.
        into: bytes that come in.
    """

    host: int
    nic: int
    out: int
    into: int


@dataclass(frozen=True)
class Comparison:
    """Times in a model with links of one rate and no latency, in bytes through one NIC.

    The paper's planners know one NIC a host: the first one that has to do with a pair of tiles.

    Attributes:
        tasks: pairs of tiles that meet, the paper's unit tasks.
        bound: nobody can be faster.
        naive: the first sender of each task, one after the other.
        size: the sender that has least to send.
        depth_first: search with pruning.
        greedy: randomised.
        paper: the better one of these two.
        copies: sends and receives, a copy for each rank.
        plan: unjam's plan, all of it under way at once.
    """

    tasks: int
    bound: int
    naive: int
    size: int
    depth_first: int
    greedy: int
    paper: int
    copies: int
    plan: int


class Plan:
    """How tensors get from one layout to another one.

    Every rank that makes it from the same arguments gets the same plan. None talks to another.

    Args:
        src: where the tensors are.
        dst: where they are wanted; may have ranks of `src`.
        tensors: of each name a :class:`TensorSpec`, or ``(shape, dtype)``.
        topology: which ranks share hosts and NICs; None: each rank is a host with one NIC, as GPUs
            are that NVLink connects.
        max_bytes: staging memory of a rank, on each side.
        window: bundles under way at once.
        stripes: parts at most in which one pair of tiles goes different ways.

    Raises:
        InvalidArgument: something does not fit; the message names the tensor.
    """

    def __init__(
        self,
        src: Layout,
        dst: Layout,
        tensors: Mapping[str, Any],
        topology: Topology | None = None,
        *,
        max_bytes: int = 256 << 20,
        window: int = 32,
        stripes: int = 8,
    ) -> None:
        for name, value, most in (
            ("max_bytes", max_bytes, 2**63 - 1),
            ("window", window, _INT32),
            ("stripes", stripes, _INT32),
        ):
            if not 1 <= value <= most:
                raise InvalidArgument(f"{name} is {value}: give 1 or more")
        checked = tensors_of(tensors, src, dst)
        self._given = _Given(src, dst, checked, topology, (max_bytes, window, stripes))
        self._types = {each.name: (each.src_dtype, each.dst_dtype) for each in checked}
        self._ranks = sorted({*src.ranks.ravel().tolist(), *dst.ranks.ravel().tolist()})
        request = _Request(src, dst, checked, topology)
        options = _abi.ReshardOptions(
            ctypes.sizeof(_abi.ReshardOptions), max_bytes, window, stripes
        )
        self._make(lambda lib, handle: request.plan(lib, options, handle))

    @classmethod
    def _of(cls, call: Any) -> Plan:
        plan = cls.__new__(cls)
        plan._types, plan._ranks, plan._given = {}, [], None
        plan._make(call)
        return plan

    def _make(self, call: Any) -> None:
        self._lib = _abi.reshard_library()
        self._handle = _abi.Handle()
        interruptible(
            lambda: check(call(self._lib, ctypes.byref(self._handle))),
            lambda: self._lib.unjamReshardDestroy(self._handle),
        )
        self._info: dict[str, Any] = self._read(0)

    def __del__(self) -> None:
        handle = getattr(self, "_handle", None)
        if handle is not None and handle.value is not None:
            self._lib.unjamReshardDestroy(handle)
            handle.value = None

    def _read(self, bundles: int) -> dict[str, Any]:
        found: dict[str, Any] = read_json(
            lambda buffer, size, needed: self._lib.unjamReshardInfo(
                self._handle, bundles, buffer, size, needed
            )
        )
        return found

    @property
    def digest(self) -> str:
        """Of ranks with equal ones the plans are equal."""
        return str(self._info["digest"])

    def bound(self) -> int:
        """The bytes that the busiest NIC must carry in one direction, whoever plans.

        Each plan with the NICs of ranks that hold or want the data, that is.
        """
        return int(self._info["bound"])

    def busiest(self) -> int:
        """The bytes that the busiest NIC does carry in one direction."""
        return int(self._info["busiest"])

    def loads(self) -> list[Port]:
        """What goes through each NIC."""
        return [
            Port(port["host"], port["nic"], port["out"], port["in"]) for port in self._info["ports"]
        ]

    def info(self, bundles: bool = False) -> dict[str, Any]:
        """All that ``unjamReshardInfo`` says; with `bundles`, also what travels together."""
        return self._read(1) if bundles else dict(self._info)

    def rank(self, rank: int) -> dict[str, Any]:
        """What one rank does, as ``unjamReshardRank`` says it: steps, boxes, local copies."""
        if not 0 <= rank <= _INT32:
            raise InvalidArgument(f"there is no rank {rank}")
        found: dict[str, Any] = read_json(
            lambda buffer, size, needed: self._lib.unjamReshardRank(
                self._handle, rank, buffer, size, needed
            )
        )
        return found

    def dtypes(self) -> dict[str, tuple[DType, DType]]:
        """Of each tensor its types on the source and on the destination mesh."""
        return dict(self._types)

    def has(self, rank: int, side: str) -> bool:
        """Whether a rank is in a mesh: "src" or "dst"."""
        given = self._subsets()
        return rank in (given.src if side == "src" else given.dst).ranks

    def ranks(self) -> list[int]:
        """Those of both meshes, ascending."""
        return list(self._ranks)

    def run(
        self,
        group: Group,
        *,
        src: Mapping[str, Any] | None = None,
        dst: Mapping[str, Any] | None = None,
        key: str = "",
        priority: int = 0,
        callback: OnComplete | None = None,
        stream: Any = None,
    ) -> ReshardRequest:
        """Moves the tensors, as far as this rank has to do with them. Returns at once.

        Every rank of the group calls it. Runs under one key come one after the other; runs under
        other keys, and other collectives, may be in another order on every rank.

        Args:
            group: the plan's ranks are numbers in it.
            src: of each name this rank's own part, as ``plan.rank(r)["tensors"]`` has its shape:
                NumPy arrays, torch tensors or what has the buffer protocol, of any strides. On a
                GPU: torch tensors of it, or what has ``__cuda_array_interface__``. Raw memory
                (16-bit integers, bool, bytes) is taken for the plan's type. None, or without
                entries, where the rank is not in the source mesh.
            dst: the same of the destination mesh; written. Its memory must not overlap that of
                `src`.
            key: the ordering channel.
            priority: higher first, under ``order="priority"``.
            callback: ``callback(request)`` on completion, from the context's callback thread.
            stream: on a GPU the run comes behind the work that the stream has, as of the group's
                calls; None: torch's current stream.

        Returns:
            A request; ``result()`` waits and gives `dst`. On a GPU its ``wait()`` lets a stream
            wait, and ``synchronize()`` the thread.

        Raises:
            InvalidArgument: a tensor is missing, or not as planned; the message names tensor, rank
                and cure. Nothing was submitted.
            InvalidUsage: the context is closed.

        What goes wrong later is raised by the request: Mismatch if ranks have different plans
        (nothing was written then), Peer if one is gone; ``incomplete()`` names this rank's tensors
        that have not come.
        """
        return run(self, group, src, dst, key, priority, callback, stream)

    def without(
        self, ranks: Collection[int] = (), *, tensors: Iterable[str] = (), renumber: bool = False
    ) -> Plan:
        """The plan of what is left without some ranks, and without some tensors. Asks nobody.

        With a rank the whole replica goes that it belongs to, of the source and of the destination:
        the ranks that have the other parts of it stay in the group, and have nothing to do.

        Args:
            ranks: such as those that are gone; those in no mesh do not count.
            tensors: names.
            renumber: whether ranks behind them move up, as ``Group.shrink`` numbers them.

        Raises:
            InvalidArgument: a rank has parts that no other rank has, or nothing would be left; the
                message names rank and tensor.
        """
        given = self._subsets()
        names = subset.named(given.tensors, tensors)
        left = [tensor for tensor in given.tensors if tensor.name not in names]
        gone = {_rank_number(rank) for rank in ranks}
        sides = []
        for layout, side in zip((given.src, given.dst), subset.SIDES, strict=True):
            part, left = subset.dropped(layout, side, left, gone)
            sides.append(part)
        topology = given.topology
        if renumber:
            sides = [subset.renumbered(layout, gone) for layout in sides]
            topology = subset.topology_without(topology, gone)
        return self._part(sides[0], sides[1], left, topology)

    def only(
        self, ranks: Collection[int] | None = None, *, tensors: Iterable[str] | None = None
    ) -> Plan:
        """The plan for some destinations only, such as a replica that came late. Asks nobody.

        All ranks of the group run it, also those that have nothing to do with it.

        Args:
            ranks: of the destination, whole replicas of it; None: all.
            tensors: names; None: all.

        Raises:
            InvalidArgument: ranks that are no whole replicas, or names that are not there.
        """
        given = self._subsets()
        left = given.tensors
        if tensors is not None:
            names = subset.named(given.tensors, tensors)
            left = [tensor for tensor in left if tensor.name in names]
        dst = given.dst
        if ranks is not None:
            dst, left = subset.kept(dst, left, [_rank_number(rank) for rank in ranks])
        return self._part(given.src, dst, left, given.topology)

    def _subsets(self) -> _Given:
        if self._given is None:
            raise InvalidArgument("one of the paper's cases has no parts: make a Plan")
        return self._given

    def _part(
        self, src: Layout, dst: Layout, left: Sequence[Tensor], topology: Topology | None
    ) -> Plan:
        if not left:
            raise InvalidArgument("no tensor is left: name those that are to be moved")
        max_bytes, window, stripes = self._subsets().limits
        specs = {
            tensor.name: TensorSpec(
                tensor.shape, tensor.src_dtype, tensor.dst_dtype, tensor.src, tensor.dst
            )
            for tensor in left
        }
        return type(self)(
            src, dst, specs, topology, max_bytes=max_bytes, window=window, stripes=stripes
        )

    def check(self) -> int:
        """Executes all ranks' plans on the numbers of elements, for small shapes.

        Returns:
            How many elements are wanted, each counted at every rank that wants it.

        Raises:
            Internal: a rank would miss an element, or get a wrong one, or one twice.
            InvalidArgument: the ranks' tensors have more than 2^24 elements together.
        """
        reports: list[dict[str, Any]] = []

        def run() -> None:
            reports.append(
                read_json(
                    lambda buffer, size, needed: self._lib.unjamReshardCheck(
                        self._handle, buffer, size, needed
                    )
                )
            )

        interruptible(run, lambda: None)
        if not reports[0]["ok"]:
            raise Internal(f"the plan is wrong: {reports[0]['error']}")
        return int(reports[0]["elements"])

    def compare(self, nodes: int = 100_000, tries: int = 100, seed: int = 1) -> Comparison:
        """The plan beside those of the paper's planners.

        Args:
            nodes: decisions of the depth-first search, 0 to 10^9.
            tries: of the randomised greedy planner for each set, 1 to 10^6.
            seed: of its choices.

        Raises:
            InvalidArgument: more than 1,024 pairs of tiles meet, too many for the paper's planners.
        """
        for name, value, least, most in (
            ("nodes", nodes, 0, 10**9),
            ("tries", tries, 1, 10**6),
            ("seed", seed, 0, 2**64 - 1),
        ):
            if not least <= value <= most:
                raise InvalidArgument(f"{name} is {value}: give {least} to {most}")
        found: list[dict[str, Any]] = []

        def run() -> None:
            found.append(
                read_json(
                    lambda buffer, size, needed: self._lib.unjamReshardCompare(
                        self._handle, nodes, tries, seed, buffer, size, needed
                    )
                )
            )

        interruptible(run, lambda: None)
        return Comparison(**found[0])

    def __str__(self) -> str:
        most = max(self.busiest(), 1)
        lines = [
            f"bound {self.bound():,} bytes, busiest NIC {self.busiest():,}",
            f"{'host':>6} {'nic':>4}  {'':3} {'bytes':>18}  of the busiest",
        ]
        for port in self.loads():
            for name, value in (("out", port.out), ("in", port.into)):
                if value:
                    bar = "#" * max(1, round(_BAR * value / most))
                    lines.append(f"{port.host:>6} {port.nic:>4}  {name:3} {value:>18,}  {bar}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<unjam.reshard.Plan {self.digest}: {self._info['bundles']} bundles>"


def _rank_number(rank: Any) -> int:
    if isinstance(rank, bool) or not hasattr(rank, "__index__") or not 0 <= rank <= _INT32:
        raise InvalidArgument(f"there is no rank {rank!r}")
    return int(rank)


@dataclass(frozen=True)
class _Given:
    """What a plan was made from."""

    src: Layout
    dst: Layout
    tensors: list[Tensor]
    topology: Topology | None
    limits: tuple[int, int, int]  # max_bytes, window, stripes


def nine(number: int) -> Plan:
    """The plan of one of the paper's nine cases, 1 to 9."""
    if not 1 <= number <= 9:
        raise InvalidArgument(f"case {number}: give 1 to 9")
    return Plan._of(lambda lib, handle: lib.unjamReshardNine(number, handle))


class _Request:
    """The arguments as C reads them."""

    def __init__(
        self, src: Layout, dst: Layout, tensors: Sequence[Tensor], topology: Topology | None
    ) -> None:
        self._kept: list[Any] = []  # as long as C reads them
        self._src, self._dst = self._mesh(src), self._mesh(dst)
        self._tensors = (_abi.ReshardTensor * len(tensors))(*map(self._tensor, tensors))
        self._topology = None if topology is None else self._make_topology(topology)

    def plan(self, lib: ctypes.CDLL, options: _abi.ReshardOptions, handle: Any) -> int:
        topology = None if self._topology is None else ctypes.byref(self._topology)
        code: int = lib.unjamReshardPlan(
            ctypes.byref(self._src),
            ctypes.byref(self._dst),
            self._tensors,
            len(self._tensors),
            topology,
            ctypes.byref(options),
            handle,
        )
        return code

    def _array(self, of: Any, values: Sequence[Any]) -> Any:
        array = (of * len(values))(*values)
        self._kept.append(array)
        return array

    def _mesh(self, layout: Layout) -> _abi.Mesh:
        shape = layout.ranks.shape
        return _abi.Mesh(
            ctypes.sizeof(_abi.Mesh),
            len(shape),
            self._array(ctypes.c_int64, shape),
            self._array(ctypes.c_int32, layout.ranks.ravel().tolist()),
        )

    def _placements(self, placements: Sequence[Placement]) -> Any:
        return self._array(
            _abi.Placement,
            [
                _abi.Placement(p.kind, getattr(p, "dim", 0), getattr(p, "split_factor", 1))
                for p in placements
            ],
        )

    def _tensor(self, tensor: Tensor) -> _abi.ReshardTensor:
        return _abi.ReshardTensor(
            ctypes.sizeof(_abi.ReshardTensor),
            tensor.name.encode(),
            len(tensor.shape),
            self._array(ctypes.c_int64, tensor.shape),
            tensor.src_dtype,
            tensor.dst_dtype,
            self._placements(tensor.src),
            self._placements(tensor.dst),
        )

    def _make_topology(self, topology: Topology) -> _abi.Topology:
        if len(topology.hosts) != len(topology.nics):
            raise InvalidArgument(
                f"the topology has {len(topology.hosts)} hosts and {len(topology.nics)} NICs: give "
                "both for each rank"
            )
        for value in (*topology.hosts, *topology.nics):
            if not 0 <= value <= _INT32:
                raise InvalidArgument(f"the topology has the number {value}: give 0 to 2^31 - 1")
        return _abi.Topology(
            ctypes.sizeof(_abi.Topology),
            len(topology.hosts),
            self._array(ctypes.c_int32, topology.hosts),
            self._array(ctypes.c_int32, topology.nics),
        )
