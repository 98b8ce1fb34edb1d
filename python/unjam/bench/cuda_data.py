"""Known inputs and checked outputs on a GPU: the same values as `data` has them on the host."""

from __future__ import annotations

from typing import Any

import torch

from .block import Block
from .cases import ROOT, Case

_BLOCK = 1 << 24  # elements at a time, so that what is computed stays small
_WRONG = 9  # into what receives: nobody contributes it

Buffers = tuple[torch.Tensor, "torch.Tensor | None"]


def allocate(case: Case, device: Any, heap: Block | None = None, rank: int = 0) -> Buffers:
    """Input and output of one rank; no output where the collective runs in place.

    Args:
        case: which.
        device: of torch.
        heap: what to cut them from; None: torch's own memory.
        rank: whose; in place an all-gather's input is that block of the output.
    """
    kind = getattr(torch, case.dtype)

    def make(elements: int) -> torch.Tensor:
        if heap is None:
            return torch.zeros(elements, dtype=kind, device=device)
        return heap.cut(elements * case.element_type.itemsize).view(kind).zero_()

    if case.in_place:
        whole = make(case.elements)
        return whole[rank * case.block : (rank + 1) * case.block], whole
    source, target = (make(elements) if elements else None for elements in case.buffers)
    assert source is not None
    return source, target


def fill(case: Case, rank: int, buffers: Buffers) -> None:
    """Writes the rank's contribution, and nonsense into what receives. In the current stream."""
    source, target = buffers
    if target is not None:  # first: the source may be a part of it
        target.fill_(_WRONG)
    if case.collective == "broadcast" and rank != ROOT:
        source.fill_(_WRONG)
    else:
        first = rank * case.block if case.collective == "all_gather" else 0
        for start in range(0, source.numel(), _BLOCK):
            stop = min(start + _BLOCK, source.numel())
            source[start:stop] = _pattern(first + start, first + stop, rank, source.device)


def wrong(case: Case, rank: int, buffers: Buffers) -> str:
    """What is wrong with the result; empty if nothing is. Waits for the current stream."""
    if case.collective == "reduce" and rank != ROOT:
        return ""
    source, target = buffers
    result = source if target is None else target
    first = rank * case.block if case.collective == "reduce_scatter" else 0
    for start in range(0, result.numel(), _BLOCK):
        stop = min(start + _BLOCK, result.numel())
        expected = _expected(case, first + start, first + stop, result.device).to(result.dtype)
        different = result[start:stop] != expected
        count = int(different.sum())
        if count:
            place = int(different.int().argmax())
            return (
                f"element {start + place} is {result[start + place].item()}, not "
                f"{expected[place].item()} ({count} wrong in elements {start} to {stop - 1})"
            )
    return ""


def _expected(case: Case, first: int, last: int, device: Any) -> torch.Tensor:
    """Elements [first, last) of the whole vector's result."""
    if case.collective == "broadcast":
        return _pattern(first, last, ROOT, device)
    if case.collective == "all_gather":
        parts = []
        while first < last:
            rank = first // case.block
            stop = min(last, (rank + 1) * case.block)
            parts.append(_pattern(first, stop, rank, device))
            first = stop
        return torch.cat(parts)
    total = _pattern(first, last, 0, device)
    for rank in range(1, case.ranks):
        total += _pattern(first, last, rank, device)
    return total


def _pattern(first: int, last: int, rank: int, device: Any) -> torch.Tensor:
    """What a rank contributes to elements [first, last): int32, 0 to 3; products wrap."""
    places = torch.arange(first, last, dtype=torch.int64, device=device)
    places += (rank * 0x85EBCA6B) & 0xFFFFFFFF
    places = places.to(torch.int32)
    places *= _signed(0x9E3779B1)
    places >>= 20
    places &= 3
    return places


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word
