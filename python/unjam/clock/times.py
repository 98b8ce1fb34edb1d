"""Times of collectives, by the library's clock."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

from .. import _abi
from .. import _limits as limits
from .._config import algorithms, present_algorithm
from .._errors import InvalidArgument
from .._interrupt import interruptible
from .._kinds import facts_of
from .._lib import library, read_json
from .._types import DType, Kind, Op, dtype_of, kind_of
from .machine import Machine, device_number

CLOCK_ONLY = ("ring_2d", "node_trees")
"""What the clock has beside the planners: a ring in each node and one across nodes, and two trees
between nodes with a chain in each. All-reduces and barriers of whole nodes."""


def algorithms_for(kind: Kind | str) -> list[str]:
    """The names that may be asked for; not all of them serve every kind."""
    names = [name for name in algorithms() if name != "auto"]
    of_nodes = kind_of(kind) in (Kind.ALL_REDUCE, Kind.BARRIER)
    return [*names, *(CLOCK_ONLY if of_nodes else ())]


def time_plan(
    kind: Kind | str,
    machine: Machine,
    ranks: int,
    nbytes: int,
    algorithm: str = "auto",
    *,
    dtype: DType | str = DType.FLOAT32,
    root: int = 0,
    lanes: int | None = None,
    path: bool = False,
    late: Mapping[int, float] | None = None,
) -> dict[str, Any]:
    """How long one collective takes.

    Args:
        kind: the collective.
        machine: where it runs.
        ranks: 1 to 1,048,576; the first ones of the machine's GPUs, node after node.
        nbytes: of the whole vector: of all ranks' blocks together, for kinds that have them.
        algorithm: a planner's name, one of :data:`CLOCK_ONLY`, or ``"auto"`` for what the selector
            takes.
        dtype: of an element; `nbytes` must be whole elements.
        root: for kinds that have one.
        lanes: blocks a rank; None: the machine's.
        path: whether the critical path is wanted.
        late: of each rank that begins late, by how many microseconds.

    Returns:
        What ``unjamPlanTime`` says: at least ``us`` and ``algorithm``.

    Raises:
        InvalidArgument: it cannot be timed; the message names the cause.
    """
    algorithm = present_algorithm(algorithm)
    if algorithm == "auto" and machine.by_algorithm:
        # Which one it is shows whose constants count.
        algorithm = _time(kind, machine, ranks, nbytes, "auto", dtype, root, lanes, False, {})[
            "algorithm"
        ]
    return _time(kind, machine, ranks, nbytes, algorithm, dtype, root, lanes, path, late or {})


def _time(
    kind: Kind | str,
    machine: Machine,
    ranks: int,
    nbytes: int,
    algorithm: str,
    dtype: DType | str,
    root: int,
    lanes: int | None,
    path: bool,
    late: Mapping[int, float],
) -> dict[str, Any]:
    number, element_type = kind_of(kind), dtype_of(dtype)
    if not 1 <= ranks <= limits.TIMED_RANKS:
        raise InvalidArgument(f"{ranks} ranks: the clock runs 1 to {limits.TIMED_RANKS:,}")
    if not 0 <= root < ranks:
        raise InvalidArgument(f"root {root} is not one of {ranks} ranks")
    for rank, us in late.items():
        if not 0 <= rank < ranks:
            raise InvalidArgument(f"late rank {rank} is not one of {ranks} ranks")
        if not 0 <= us <= 1e9:
            raise InvalidArgument(f"late rank {rank}: {us} us is no time: give 0 to 1e9")
    what = _abi.PlanTiming()
    what.size = ctypes.sizeof(what)
    what.kind, what.dtype, what.op = number, element_type, Op.SUM
    what.root, what.nranks = root, ranks
    what.count = _count(number, ranks, nbytes, element_type.itemsize)
    what.algorithm = algorithm.encode()
    values = machine.values(algorithm)
    described = _abi.Machine()
    described.size = ctypes.sizeof(described)
    for name, value in values.items():
        setattr(described, name, device_number(value) if name == "device" else value)
    if lanes is not None:
        described.lanes = lanes
    what.machine = ctypes.addressof(described)
    what.path = int(path)
    late_ranks = (ctypes.c_int32 * len(late))(*late)
    late_us = (ctypes.c_double * len(late))(*late.values())
    what.late_count = len(late)
    what.late_ranks, what.late_us = ctypes.addressof(late_ranks), ctypes.addressof(late_us)
    lib = library()
    reports: list[dict[str, Any]] = []

    def run() -> None:
        kept = (described, late_ranks, late_us)  # as long as C reads them
        reports.append(
            read_json(
                lambda buffer, size, needed: lib.unjamPlanTime(
                    ctypes.byref(what), buffer, size, needed
                )
            )
        )
        del kept

    interruptible(run, lambda: None)
    return reports[0]


def _count(kind: Kind, ranks: int, nbytes: int, element: int) -> int:
    if kind == Kind.BARRIER:
        return 1
    if nbytes < 1 or nbytes % element != 0:
        raise InvalidArgument(f"{nbytes} bytes are not whole elements of {element} bytes")
    facts = facts_of(kind)
    blocks = ranks if facts.input_blocks or facts.output_blocks else 1
    return -(-nbytes // element // blocks) or 1
