"""What the library's table of kinds says: who has data before and after, and in which shape."""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

from . import _abi
from ._lib import check, library
from ._types import Kind


class Facts(NamedTuple):
    """One row of the table.

    Attributes:
        name: as messages call it, with its article: "an all-reduce".
        function: of the C API; "" of a send/recv, which has two.
        reduces: whether it has an operator.
        has_root: whether it names a rank.
        input_blocks: whether an input holds the blocks of all ranks; else one block, or no blocks.
        output_blocks: the same of an output.
        root_reads: whether only the root has an input.
        root_writes: whether only the root has an output.
        in_place: whether input and output may be the same memory.
    """

    name: str
    function: str
    reduces: bool
    has_root: bool
    input_blocks: bool
    output_blocks: bool
    root_reads: bool
    root_writes: bool
    in_place: bool


@functools.cache
def facts_of(kind: Kind) -> Facts:
    """The row of `kind`."""
    row = _abi.KindInfo(size=ctypes.sizeof(_abi.KindInfo))
    check(library().unjamGetKindInfo(kind, ctypes.byref(row)))
    label = row.name.decode()
    article = "an" if label[0] in "aeiou" else "a"
    blocks = bool(row.blocks)
    return Facts(
        name=f"{article} {label.replace('_', '-')}",
        function="" if kind is Kind.SEND_RECV else "unjam" + label.title().replace("_", ""),
        reduces=bool(row.reduces),
        has_root=bool(row.has_root),
        input_blocks=blocks and row.reads != _abi.HOLDERS_OWNER,
        output_blocks=blocks and row.writes != _abi.HOLDERS_OWNER,
        root_reads=row.reads == _abi.HOLDERS_ROOT,
        root_writes=row.writes == _abi.HOLDERS_ROOT,
        in_place=bool(row.in_place),
    )
