"""Known inputs and checked outputs: small integers, so that every sum is exact in every type."""

from __future__ import annotations

from typing import Any

import numpy as np

from .block import Block
from .cases import ROOT, Case

Array = np.ndarray[Any, Any]

_BLOCK = 1 << 18  # elements at a time, so that what is computed stays in the cache
_VALUES = 4  # contributions are 0 to 3: 64 ranks sum up to 192, which bfloat16 holds


def allocate(case: Case, heap: Block | None = None) -> tuple[Array, Array | None]:
    """Input and output of one rank; no output where the collective runs in place.

    Args:
        case: which.
        heap: what to cut them from; None: NumPy's own memory.
    """
    kind = _storage(case)

    def make(elements: int) -> Array:
        if heap is None:
            return np.zeros(elements, kind)
        array: Array = heap.cut(elements * np.dtype(kind).itemsize).view(kind)
        array.fill(0)
        return array

    source, target = (make(elements) if elements else None for elements in case.buffers)
    assert source is not None
    return source, target


def fill(case: Case, rank: int, source: Array, target: Array | None) -> None:
    """Writes the rank's contribution, and nonsense into what receives."""
    first = rank * case.block if case.collective == "all_gather" else 0
    receives_only = case.collective == "broadcast" and rank != ROOT
    for start in range(0, source.size, _BLOCK):
        stop = min(start + _BLOCK, source.size)
        if receives_only:
            source[start:stop] = 9
        else:
            source[start:stop] = _encode(case, _pattern(first + start, first + stop, rank))
    if target is not None:
        target.fill(9)


def wrong(case: Case, rank: int, source: Array, target: Array | None) -> str:
    """What is wrong with the result; empty if nothing is."""
    if case.collective == "reduce" and rank != ROOT:
        return ""
    result = source if target is None else target
    first = rank * case.block if case.collective == "reduce_scatter" else 0
    for start in range(0, result.size, _BLOCK):
        stop = min(start + _BLOCK, result.size)
        expected = _encode(case, _expected(case, first + start, first + stop))
        different = result[start:stop] != expected
        if different.any():
            place = int(np.argmax(different))
            count = int(np.count_nonzero(different))
            return (
                f"element {start + place} is {result[start + place]}, not {expected[place]} "
                f"({count} wrong in elements {start} to {stop - 1})"
            )
    return ""


def _expected(case: Case, first: int, last: int) -> Array:
    """Elements [first, last) of the whole vector's result."""
    if case.collective == "broadcast":
        return _pattern(first, last, ROOT)
    if case.collective == "all_gather":
        places = np.arange(first, last) // case.block
        values = np.empty(last - first, np.uint32)
        for rank in range(int(places[0]), int(places[-1]) + 1):
            mine = places == rank
            values[mine] = _pattern(first, last, rank)[mine]
        return values
    total = _pattern(first, last, 0)
    for rank in range(1, case.ranks):
        total += _pattern(first, last, rank)
    return total


def _pattern(first: int, last: int, rank: int) -> Array:
    """What a rank contributes to elements [first, last): a multiplicative hash's high bits."""
    places = np.arange(first, last, dtype=np.uint32)
    places += np.uint32((rank * 0x85EBCA6B) & 0xFFFFFFFF)
    places *= np.uint32(0x9E3779B1)
    places >>= np.uint32(20)
    places &= np.uint32(_VALUES - 1)
    return places


def _storage(case: Case) -> Any:
    return np.int16 if case.dtype == "bfloat16" else np.dtype(case.dtype)


def _encode(case: Case, values: Array) -> Array:
    if case.dtype == "bfloat16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.int16)
    if case.dtype == "int8":
        return values.astype(np.uint8).view(np.int8)
    return values.astype(_storage(case))
