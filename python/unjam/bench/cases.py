"""What is measured: collectives, sizes, and what a size means."""

from __future__ import annotations

from dataclasses import dataclass

from .._types import DType, dtype_of

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")

DTYPES = ("int8", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64")

ROOT = 0  # of broadcast and reduce

HEAP_PIECE = 512  # what sizes in the heap are rounded up to

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class Case:
    """One collective at one size.

    Attributes:
        collective: one of COLLECTIVES.
        dtype: one of DTYPES.
        ranks: how many.
        elements: of the whole vector: what every rank ends or begins with in an all-gather or a
            reduce-scatter, and what every rank has otherwise.
        in_place: of an all-gather: its input lies in the output, as the rank's own block.
    """

    collective: str
    dtype: str
    ranks: int
    elements: int
    in_place: bool = False

    @classmethod
    def of_size(
        cls, collective: str, dtype: str, ranks: int, size: int, in_place: bool = False
    ) -> Case:
        """The largest case of at most `size` bytes (at least one element a rank)."""
        elements = max(1, size // dtype_of(dtype).itemsize)
        if collective in ("all_gather", "reduce_scatter"):
            elements = max(1, elements // ranks) * ranks
        return cls(collective, dtype, ranks, elements, in_place and collective == "all_gather")

    @property
    def element_type(self) -> DType:
        """The data type."""
        return dtype_of(self.dtype)

    @property
    def nbytes(self) -> int:
        """The size, as nccl-tests counts it: bytes of the whole vector."""
        return self.elements * self.element_type.itemsize

    @property
    def block(self) -> int:
        """Elements of one rank's share of the whole vector."""
        return self.elements // self.ranks

    @property
    def buffers(self) -> tuple[int, int]:
        """Elements of a rank's input and output; no output where the collective runs in place."""
        if self.collective == "all_gather":
            return self.block, self.elements
        if self.collective == "reduce_scatter":
            return self.elements, self.block
        return self.elements, 0

    @property
    def heap_bytes(self) -> int:
        """What a rank's buffers take of unjam's heap."""
        pieces = (elements * self.element_type.itemsize for elements in self.buffers)
        return sum(in_heap(size) for size in pieces)

    @property
    def count(self) -> int:
        """Elements as the C API counts them."""
        blocked = self.collective in ("all_gather", "reduce_scatter")
        return self.block if blocked else self.elements

    @property
    def bus_factor(self) -> float:
        """Bus bandwidth over algorithm bandwidth (bytes over time), as in nccl-tests."""
        if self.collective == "all_reduce":
            return 2 * (self.ranks - 1) / self.ranks
        if self.collective in ("all_gather", "reduce_scatter"):
            return (self.ranks - 1) / self.ranks
        return 1.0


def in_heap(nbytes: int) -> int:
    """What so many bytes take of unjam's heap."""
    return -(-nbytes // HEAP_PIECE) * HEAP_PIECE


def parse_sizes(text: str, step: int = 2) -> list[int]:
    """Sizes in bytes from "1K:64M" (multiplying by `step`) or "1K,96K,1M".

    Raises:
        ValueError: not of that form; the message says what is.
    """
    if ":" not in text:
        return sorted({parse_size(part) for part in text.split(",")})
    first, _, last = text.partition(":")
    low, high = parse_size(first), parse_size(last)
    if low > high:
        raise ValueError(f"{text!r}: the first size is larger than the last")
    sizes = []
    while low <= high:
        sizes.append(low)
        low *= step
    return sizes


def parse_size(text: str) -> int:
    """Bytes from "1024", "1K", "64M" or "1G".

    Raises:
        ValueError: not of that form, or 0.
    """
    trimmed = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = trimmed[-1:] if trimmed[-1:] in ("K", "M", "G") else ""
    digits = trimmed.removesuffix(unit)
    if not digits.isdecimal() or int(digits) == 0:
        raise ValueError(f"{text!r} is not a size: write 1024, 1K, 64M or 1G")
    return int(digits) * _UNITS[unit]


def size_text(nbytes: int) -> str:
    """A size as people read it: "1 KiB", "64 MiB", "1,000 B"."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes:,} B"
