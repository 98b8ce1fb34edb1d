"""Checks of one call's buffers: sizes, types, overlap. Nothing is submitted before they pass.

They give the addresses and the count as the C API wants them.
"""

from __future__ import annotations

import math
import operator
from typing import Any, NamedTuple

from ._buffers import Buffer, buffer_of, check_writable
from ._devices import ANY_CUDA, HOST, place_text
from ._errors import InvalidArgument, InvalidType
from ._kinds import Facts, facts_of
from ._types import DType, Kind


class Arguments(NamedTuple):
    """The buffers of one call.

    Attributes:
        send: address of the input, or None where the rank has none.
        recv: address of the output, or None where the rank has none.
        elements: the count of the C API for the kind.
        dtype: of the elements.
        keep: what must stay alive until the invocation is complete.
        output: the user's object that holds the result; None where the rank gets none.
        place: where the buffers are, see ``_devices``.
    """

    send: int | None
    recv: int | None
    elements: int
    dtype: DType
    keep: tuple[Any, ...]
    output: Any
    place: int


_LONGEST = 10**18  # seconds; a float holds them, and longer still means no limit


def integer(value: Any, what: str, bits: int = 32) -> int:
    """`value` as an int of so many bits, which is what the C API takes; a larger one would wrap.

    Raises:
        InvalidArgument: not an integer, or out of its range.
    """
    value = index(value, what)
    end = 1 << (bits - 1)
    if not -end <= value < end:
        raise InvalidArgument(f"{what} {value} is out of range: {-end} to {end - 1}")
    return value


def index(value: Any, what: str) -> int:
    """`value` as an int of any size: its range is for the caller to check, before C sees it.

    Raises:
        InvalidType: not an integer.
    """
    if type(value) is int:
        return value
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise InvalidType(f"{what} must be an integer, not {type(value).__name__} {value!r}")
    return operator.index(value)


def check_callback(callback: Any, optional: bool = True) -> None:
    """Raises InvalidType unless `callback` can be called, or is None and `optional`."""
    if not callable(callback) and not (optional and callback is None):
        raise InvalidType(
            f"callback must be a function of one argument, the request; not "
            f"{type(callback).__name__} {callback!r}"
        )


def check_timeout(timeout: Any) -> None:
    """Raises InvalidArgument unless `timeout` is None or a number of seconds."""
    if timeout is None or (type(timeout) is int and -_LONGEST < timeout < _LONGEST):
        return
    try:
        nan = math.isnan(timeout)
    except OverflowError:
        raise InvalidArgument(
            f"timeout has more than {_LONGEST} seconds: give fewer, or None for no limit"
        ) from None
    except TypeError:
        raise InvalidType(
            f"timeout must be a number of seconds or None, not {type(timeout).__name__} {timeout!r}"
        ) from None
    if nan:
        raise InvalidArgument("timeout is NaN: give a number of seconds, or None for no limit")


def check_rank(rank: Any, what: str, size: int) -> int:
    """`rank`, the call's "root" or "peer", as a rank of a group of `size`.

    Raises:
        InvalidArgument: out of range.
    """
    number = index(rank, what)
    if not 0 <= number < size:
        raise InvalidArgument(
            f"{what} {number} is not a rank of the group: ranks in it go from 0 to {size - 1}"
        )
    return number


def source_only(x: Any, dtype: Any) -> Arguments:
    """An input, and no output."""
    source = buffer_of(x, "x", dtype)
    return Arguments(
        source.address, None, source.elements, source.dtype, (source.keep,), None, source.device
    )


def target_only(out: Any, name: str, dtype: Any) -> Arguments:
    """An output, and no input."""
    if out is None:
        raise InvalidType(f"{name} is missing: pass the buffer that receives the result")
    target = buffer_of(out, name, dtype)
    check_writable(target, name)
    return Arguments(
        None, target.address, target.elements, target.dtype, (target.keep,), out, target.device
    )


def nothing(place: int) -> Arguments:
    """No buffers."""
    return Arguments(None, None, 0, DType.UINT8, (), None, place)


def for_kind(
    kind: Kind, x: Any, out: Any, rank: int, size: int, root: int, dtype: Any
) -> Arguments:
    """The buffers of a call of `kind`; `rank`, `size` and `root` are the group's.

    What a rank's part of the call does not use is not looked at. Where input and output have the
    same shape, `out` None means in place.
    """
    facts = facts_of(kind)
    if facts.root_writes and rank != root:
        return source_only(x, dtype)
    same_shape = facts.input_blocks == facts.output_blocks
    may_be_one = same_shape and facts.in_place
    if facts.root_reads and rank != root:
        if out is None and may_be_one:
            return target_only(x, "x", dtype)
        return target_only(out, "out", dtype)
    source = buffer_of(x, "x", dtype)
    if may_be_one and (out is None or out is x):
        if not facts.root_reads:  # a root that alone has the input already has its output
            check_writable(source, "x")
        return _in_place(source, x)
    target = _output(out, source, dtype)
    if same_shape:
        return _of_one_shape(facts, source, target, size, out)
    if facts.output_blocks:
        _check_parts(facts, target, "out", source, "from each of", size)
        place = f"part {rank} of out, of {source.elements} elements"
        _no_overlap(target, source, rank * source.nbytes, place)
        return _two(source, target, source.elements, out)
    _check_parts(facts, source, "x", target, "on each of", size)
    place = f"part {rank} of x, of {target.elements} elements"
    _no_overlap(source, target, rank * target.nbytes, place)
    return _two(source, target, target.elements, out)


def _of_one_shape(
    facts: Facts, source: Buffer, target: Buffer, size: int, output: Any
) -> Arguments:
    """Both hold one vector, or both the blocks of all ranks."""
    _same_size(source, target)
    blocks = size if facts.input_blocks else 1
    if source.elements % blocks:
        raise InvalidArgument(
            f"x has {source.elements} elements; {facts.name} between {size} ranks needs a "
            f"multiple of {size}, the same number for each"
        )
    if facts.in_place:
        _no_overlap(source, target, 0, "the same buffer (out=None)")
    else:
        _no_overlap(source, target, None, "")
    return _two(source, target, source.elements // blocks, output)


def _check_parts(
    facts: Facts, whole: Buffer, name: str, part: Buffer, ranks: str, size: int
) -> None:
    """`whole` has as many elements as `size` times `part`."""
    if whole.elements == size * part.elements:
        return
    way = "into" if name == "x" else "of"
    raise InvalidArgument(
        f"{name} has {whole.elements} elements; {facts.name} {way} {part.elements} elements "
        f"{ranks} {size} ranks needs {size * part.elements}"
    )


def _in_place(buffer: Buffer, output: Any) -> Arguments:
    address, keep = buffer.address, (buffer.keep,)
    return Arguments(address, address, buffer.elements, buffer.dtype, keep, output, buffer.device)


def _two(source: Buffer, target: Buffer, elements: int, output: Any) -> Arguments:
    keep = (source.keep, target.keep)
    place = target.device if source.device == ANY_CUDA else source.device
    return Arguments(source.address, target.address, elements, source.dtype, keep, output, place)


def _output(out: Any, source: Buffer, dtype: Any) -> Buffer:
    if out is None:
        raise InvalidType("out is missing: pass the buffer that receives the result")
    target = buffer_of(out, "out", dtype)
    check_writable(target, "out")
    if target.dtype is not source.dtype:
        raise InvalidArgument(
            f"x has {source.dtype.label} elements, but out has {target.dtype.label}: pass an out "
            "of the same type"
        )
    if target.device != source.device and not (
        ANY_CUDA in (source.device, target.device) and HOST not in (source.device, target.device)
    ):
        raise InvalidArgument(
            f"x is in {place_text(source.device)}, but out is in {place_text(target.device)}: pass "
            "an out beside x"
        )
    return target


def _same_size(source: Buffer, target: Buffer) -> None:
    if source.elements != target.elements:
        raise InvalidArgument(
            f"x has {source.elements} elements, but out has {target.elements}: pass an out of the "
            "same size"
        )


def _no_overlap(whole: Buffer, part: Buffer, offset: int | None, place: str) -> None:
    """`part` may lie at `offset` of `whole` (in place; None: nowhere) or outside of it."""
    if not part.elements or not whole.elements:
        return
    if offset is not None and part.address == whole.address + offset:
        return
    if part.address < whole.address + whole.nbytes and whole.address < part.address + part.nbytes:
        or_place = f", or, for a call in place, {place}" if place else ""
        raise InvalidArgument(f"x and out overlap: use separate buffers{or_place}")
