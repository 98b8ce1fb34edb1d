"""A plan as a program: C++ from templates, and the tables that its kernel reads.

The kernels have never run on a GPU; docs/loop-kernel.md says what has been tried of them.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .._errors import InvalidArgument
from .formats import STORED, Array
from .graph import Value
from .ops import Weights
from .plan import Plan
from .tasks import Task

KERNELS = Path(__file__).parent / "kernels"
ENTRY = "unjam_loop_step"
UNIT = 16  # bytes, which offsets count
PAGE_BYTES = 16384  # of a slot of the ring
FEWEST_SLOTS, MOST_SLOTS = 3, 12
# Bytes of shared memory that a block may have.
SHARED_BYTES = {"sm_80": 166912, "sm_90a": 232448}

INSTRUCTION = np.dtype(
    [
        ("task", "<u4"),
        ("variant", "<u2"),
        ("experts", "<u2"),
        ("first_wait", "<u4"),
        ("num_waits", "<u4"),
        ("signal", "<u4"),
        ("a", "<u4"),
        ("b", "<u4"),
        ("in0", "<u4"),
        ("in1", "<u4"),
        ("in2", "<u4"),
        ("out", "<u4"),
        ("out2", "<u4"),
        ("pages", "<u2"),
        ("page_units", "<u2"),
        ("aux", "<u4"),
        ("aux2", "<u4"),
        ("weight", "<u4"),
    ]
)
# A report's fields (kernels/program.cuh).
REPORT = struct.Struct("<10I3Q")
_COUNTER, _PACKETS, _STEP = 1, 2, 4  # its kinds; what is left is a page


@dataclass
class Code:
    """What a launch takes.

    Attributes:
        plan: what it computes.
        arch: for which GPUs: a key of :data:`SHARED_BYTES`.
        source: C++ of the program, which includes the kernels' headers.
        instructions: of all blocks, one block's behind the other's.
        streams: of each block its first instruction, and the end.
        waits: [counter, threshold].
        weight_places: of values and of packed weights (by the operator's number), in bytes.
        weight_bytes: of one rank.
        shared_bytes: of a block.
        variants: calls of operators in the source.
    """

    plan: Plan
    arch: str
    source: str
    instructions: Array
    streams: Array
    waits: Array
    weight_places: dict[tuple[str, int], int]
    weight_bytes: int
    shared_bytes: int
    variants: list[str]


def generate(plan: Plan, arch: str = "sm_90a", slots: int | None = None) -> Code:
    """Makes a program of a plan.

    Args:
        plan: what to run.
        arch: sm_80 or sm_90a.
        slots: of the ring of pages, at least 3; None: as many as fit, at most 12.

    Raises:
        InvalidArgument: an unknown kind of GPU, or what does not fit a block's shared memory.
    """
    if arch not in SHARED_BYTES:
        raise InvalidArgument(f"arch={arch!r} is not supported: give {' or '.join(SHARED_BYTES)}")
    staging = max(rule.staging_bytes() for rule in plan.program.rules)
    slots = _slots(plan, arch, staging, slots)
    places, weight_bytes = _weight_places(plan)
    variants: dict[str, int] = {}
    rows, waits, first_waits = [], [], {}
    streams = [0]
    for stream in plan.schedule.streams:
        for number in stream:
            task = plan.program.tasks[number]
            if task.waits not in first_waits:
                first_waits[task.waits] = len(waits)
                waits += task.waits
            variant = variants.setdefault(_call(plan, task), len(variants))
            rows.append(_instruction(plan, task, variant, first_waits[task.waits], places))
        streams.append(len(rows))
    calls = list(variants)
    return Code(
        plan,
        arch,
        _source(plan, calls, slots, staging),
        np.array(rows, INSTRUCTION),
        np.array(streams, np.uint32),
        np.array(waits, np.uint32).reshape(-1, 2),
        places,
        weight_bytes,
        _shared_bytes(slots, staging),
        calls,
    )


def pack_weights(code: Code, weights: Mapping[str, Array]) -> Array:
    """One rank's weights as the kernel reads them: bytes.

    Args:
        code: what :func:`generate` gave.
        weights: one of :attr:`~unjam.loop.Model.weights`.
    """
    blob = np.zeros(code.weight_bytes, np.uint8)
    rules, values = code.plan.program.rules, code.plan.graph.values
    for (what, number), at in code.weight_places.items():
        if what == "value":
            flat = _stored(weights, values[number])
        else:
            packed = rules[number].weights()
            assert packed is not None
            flat = _packed([_stored(weights, v) for v in packed.matrices], packed)
        raw = np.ascontiguousarray(flat).reshape(-1).view(np.uint8)
        blob[at : at + len(raw)] = raw
    return blob


def read_report(code: Code, raw: bytes) -> str:
    """What a launch says that has ended early; "" if it has not.

    Args:
        code: what ran.
        raw: the report's memory.
    """
    _, written, kind, rank, block, number, what, have, want, step, program, other, ns = (
        REPORT.unpack_from(raw)
    )
    if not written:
        return ""
    tasks, counters = code.plan.program.tasks, code.plan.program.counters
    task = f"task {number} ({code.plan.program.name(tasks[number])})" if number < len(tasks) else ""
    where = f"rank {rank}, SM {block}: {task} of program {program:016x}, step {step},"
    waited = f"has waited {ns / 1e6:.0f} ms for"
    if kind == _PACKETS:
        if other == 0:
            return f"{where} {waited} packets of rank {what}, which has not begun"
        if other != program:
            return f"{where} {waited} packets of rank {what}, which runs program {other:016x}"
        return f"{where} {waited} packets of rank {what}"
    if kind in (_COUNTER, _STEP):
        name = f"counter {what} ({counters[what].name})"
        return f"{where} {waited} {name}: {have} of {want} arrivals"
    return f"{where} {waited} a page of weights"


# ---- inner ----


def _slots(plan: Plan, arch: str, staging: int, wanted: int | None) -> int:
    if wanted is not None and not FEWEST_SLOTS <= wanted <= MOST_SLOTS:
        raise InvalidArgument(f"slots={wanted!r}: give {FEWEST_SLOTS} to {MOST_SLOTS}")
    for slots in range(wanted or MOST_SLOTS, FEWEST_SLOTS - 1, -1):
        if _shared_bytes(slots, staging) <= SHARED_BYTES[arch]:
            return slots
    raise InvalidArgument(
        f"a batch of {plan.graph.batch} takes {staging} bytes of shared memory for activations, "
        f"and {arch} has {SHARED_BYTES[arch]} in all: give a smaller batch, or split the model "
        "over more ranks"
    )


def _shared_bytes(slots: int, staging: int) -> int:
    """As Layout of kernels/pages.cuh."""
    scratch = _up(16 * slots + 16, 128)
    return _up(scratch + 1024 + staging, 128) + slots * PAGE_BYTES


def _up(x: int, to: int) -> int:
    return -(-x // to) * to


def _weight_places(plan: Plan) -> tuple[dict[tuple[str, int], int], int]:
    """Packed tiles first, then what tasks read in place."""
    found: dict[tuple[str, int], int] = {}
    at = 0
    taken: set[int] = set()
    for number, rule in enumerate(plan.program.rules):
        packed = rule.weights()
        if packed is None:
            continue
        found["packed", number] = at
        at += _up(packed.tile_bytes * packed.tiles * packed.experts, 128)
        taken |= {value.number for value in packed.matrices}
    for op in plan.graph.operators:
        for value in op.inputs.values():
            if value.room == "weights" and value.number not in taken:
                taken.add(value.number)
                found["value", value.number] = at
                at += _up(value.bytes, 128)
    if at > UNIT << 32:
        raise InvalidArgument(f"a rank's weights take {at} bytes: split the model over more ranks")
    return found, at


def _call(plan: Plan, task: Task) -> str:
    """A case of the program's switch."""
    if task.op < 0:
        return f"finish<Layout, {plan.graph.batch}>(t)"
    name, given = plan.program.rules[task.op].template()
    numbers = {"bf16": "Bf16", "f32": "F32"}[given.get("dtype", plan.graph.dtype)]
    words = ["Layout", numbers]
    for key, value in given.items():
        if key not in ("dtype", "eps"):
            words.append(str(value).lower() if isinstance(value, bool) else str(value))
    eps = f", {float(given['eps'])!r}f" if "eps" in given else ""
    return f"{name}<{', '.join(words)}>(t{eps})"


def _instruction(
    plan: Plan,
    task: Task,
    variant: int,
    first_wait: int,
    places: dict[tuple[str, int], int],
) -> tuple[int, ...]:
    fields = dict.fromkeys(INSTRUCTION.names or (), 0)
    fields |= {
        "task": task.number,
        "variant": variant,
        "first_wait": first_wait,
        "num_waits": len(task.waits),
        "signal": task.signal,
    }
    if task.op < 0:
        fields["in0"] = _units(plan, plan.graph.tokens, places)
        return tuple(fields.values())
    rule = plan.program.rules[task.op]
    operands = rule.operands(task.tile)
    for key, what in operands.items():
        fields[key] = _units(plan, what, places) if isinstance(what, Value) else what
    packed = rule.weights()
    if packed is not None:
        at = places["packed", task.op] + operands["a"] * packed.tile_bytes
        fields["weight"] = at // UNIT
        fields["pages"], fields["page_units"] = packed.pages, packed.page_bytes // UNIT
        if packed.experts > 1 or "route" in rule.op.inputs:
            fields["experts"] = rule.op.settings["k"] if rule.kind == "expert_down" else 1
            fields["aux2"] = packed.tiles * packed.tile_bytes // UNIT
    return tuple(fields.values())


def _units(plan: Plan, value: Value, places: dict[tuple[str, int], int]) -> int:
    rooms = {"pages": plan.places.pages, "state": plan.places.state, "mail": plan.places.mail}
    at = (
        places["value", value.number]
        if value.room == "weights"
        else rooms[value.room][value.number]
    )
    return at // UNIT


def _stored(weights: Mapping[str, Array], value: Value) -> Array:
    array = weights[value.name]
    if array.dtype != STORED[value.dtype] or array.size != value.rows * value.cols:
        raise InvalidArgument(f"{value.name} is {array.dtype} of {array.size} numbers: rebuild it")
    return array


def _packed(arrays: list[Array], packed: Weights) -> Array:
    """[experts, tiles, pages, matrices, rows, chunk]."""
    shape = (packed.experts, packed.tiles, packed.rows, packed.pages, packed.chunk)
    return np.stack([array.reshape(shape) for array in arrays]).transpose(1, 2, 4, 0, 3, 5)


def _source(plan: Plan, calls: list[str], slots: int, staging: int) -> str:
    cases = "\n".join(
        f"      case {n}:\n        {call};\n        break;" for n, call in enumerate(calls)
    )
    ahead = "true" if plan.program.sync == "counters" else "false"
    return f"""// Program {plan.number:016x}: {plan.graph.name}, made by unjam.loop.
#include "frame.cuh"

namespace {{
using namespace unjam_loop;

struct Program {{
  using Layout = unjam_loop::Layout<{slots}, {PAGE_BYTES}, {staging}>;
  static constexpr bool kAhead = {ahead};
  LOOP_DEVICE static void run(const Task& t) {{
    switch (t.i.variant) {{
{cases}
    }}
  }}
}};
static_assert(Program::Layout::kBytes == {_shared_bytes(slots, staging)});

}}  // namespace

LOOP_KERNEL void LOOP_BOUNDS(unjam_loop::kThreads) {ENTRY}(LOOP_PARAMETERS(p)) {{
  unjam_loop::run_program<Program>(p);
}}
"""
