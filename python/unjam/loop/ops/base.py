"""What every rule of an operator says: its tasks, what they read and write, and their result."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

from ..formats import Array, from_stored, to_stored
from ..graph import ITEM_BYTES, Graph, Operator, Value


class Rect(NamedTuple):
    """A part of a value: rows and columns from, and up to but without."""

    value: Value
    row0: int
    row1: int
    col0: int
    col1: int

    def overlaps(self, other: Rect) -> bool:
        """Of the same value."""
        return (
            self.row0 < other.row1
            and other.row0 < self.row1
            and self.col0 < other.col1
            and other.col0 < self.col1
        )


class Memory(Protocol):
    """What a task sees of its rank while the interpreter runs it."""

    rank: int

    def read(self, rect: Rect) -> Array:
        """[rows, columns] in f32; whole numbers as they are."""

    def weight(self, value: Value) -> Array:
        """In its shape, in f32."""


class Weights(NamedTuple):
    """Weights of a task as memory has them: tiles, one a task, each of equal pages.

    A page has `rows` rows of each matrix, `chunk` columns wide, one matrix after the other.
    """

    matrices: tuple[Value, ...]
    rows: int
    chunk: int
    pages: int  # of a tile
    tiles: int  # of a matrix (of each expert's)
    experts: int

    @property
    def page_bytes(self) -> int:
        """A multiple of 16."""
        item = ITEM_BYTES[self.matrices[0].dtype]
        return len(self.matrices) * self.rows * self.chunk * item

    @property
    def tile_bytes(self) -> int:
        """All pages."""
        return self.page_bytes * self.pages


class Rule(ABC):
    """An operator of a graph as tasks.

    Args:
        graph: whose it is.
        op: the operator.
        sms: for how many SMs it is cut.
    """

    kind: ClassVar[str]

    def __init__(self, graph: Graph, op: Operator, sms: int) -> None:
        self.graph, self.op, self.sms = graph, op, sms
        self.prepare()

    @property
    @abstractmethod
    def tiles(self) -> int:
        """How many tasks."""

    @abstractmethod
    def reads(self, tile: int) -> list[Rect]:
        """What a task reads beside weights; of caches, all that it may read."""

    @abstractmethod
    def writes(self, tile: int) -> list[Rect]:
        """What it writes; of caches, where."""

    @abstractmethod
    def run(self, tile: int, memory: Memory) -> list[tuple[Rect, Array]]:
        """Reads, computes, and gives what is to be written."""

    def prepare(self) -> None:  # noqa: B027 (many have nothing to choose)
        """Cuts the operator."""

    def weights(self) -> Weights | None:
        """Those that are loaded ahead, page by page."""
        return None

    def weight_bytes(self, tile: int) -> int:
        """Of weights, and of caches that are full."""
        packed = self.weights()
        return packed.tile_bytes if packed is not None else 0

    @abstractmethod
    def template(self) -> tuple[str, dict[str, Any]]:
        """The C++ function, and its template's arguments in order.

        Of these, ``dtype`` is the type of numbers if it is not the graph's, and ``eps`` becomes an
        argument of the call.
        """

    @abstractmethod
    def operands(self, tile: int) -> dict[str, Any]:
        """What an instruction says: in0, in1, in2, out, out2: values; aux, aux2: weights; a, b."""

    def staging_bytes(self) -> int:
        """Of shared memory, beside pages of weights."""
        return 0

    # ---- helpers ----

    @property
    def out(self) -> Value:
        """The only output."""
        (value,) = self.op.outputs.values()
        return value

    def whole(self, role: str) -> Rect:
        """An input's all."""
        value = self.op.inputs[role]
        return Rect(value, 0, value.rows, 0, value.cols)

    def row(self, role: str, row: int) -> Rect:
        """An input's row."""
        value = self.op.inputs[role]
        return Rect(value, row, row + 1, 0, value.cols)

    def normed(self, x: Array, memory: Memory) -> Array:
        """x, after rms_norm if the operator has one; rounded, as an operator of its own would."""
        if "norm" not in self.op.inputs:
            return x
        y = rms_norm(x, memory.weight(self.op.inputs["norm"]), self.op.settings["eps"])
        return from_stored(to_stored(y, self.graph.dtype), self.graph.dtype)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """By rows, in f32."""
    mean = (x * x).mean(axis=-1, keepdims=True, dtype=x.dtype)
    return x / (mean + x.dtype.type(eps)) ** x.dtype.type(0.5) * weight


def most_rows(batch: int, matrices: int) -> int:
    """Of a tile, so that the sums of a thread, one of a warp's rows each, stay in registers."""
    sums = 64 if batch <= 4 else 32
    return min(64, max(8, 8 * (sums // (batch * matrices))))


def tile_of(rows: int, sms: int, most: int = 64) -> int:
    """Into tiles of how many rows a matrix is cut, so that the busiest SM has the least.

    A task costs about as much as two rows beside its own.
    """
    divisors = [n for n in range(1, min(rows, most) + 1) if rows % n == 0]
    return min(divisors, key=lambda n: (math.ceil(rows / n / sms) * (n + 2), -n))


def pack(
    matrices: Sequence[Value], rows: int, page_bytes: int = 16384, experts: int = 1
) -> Weights:
    """Tiles of `rows` rows, in pages of at most `page_bytes`."""
    cols, item = matrices[0].cols, ITEM_BYTES[matrices[0].dtype]
    total = matrices[0].rows // experts
    most = max(1, page_bytes // (len(matrices) * rows * item))
    fitting = [n for n in range(1, min(cols, most) + 1) if cols % n == 0 and n * item % 16 == 0]
    chunk = max(fitting, default=16 // item)
    return Weights(tuple(matrices), rows, chunk, cols // chunk, total // rows, experts)
