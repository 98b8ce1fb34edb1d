"""Data types, reduction operators and kinds of collectives, and how user input names them."""

from __future__ import annotations

import enum
from typing import Any, TypeVar

from ._errors import InvalidArgument, InvalidType


class DType(enum.IntEnum):
    """Element types. 16- and 8-bit floats are added in float32 and rounded once a hop.

    ``FLOAT8_E4M3`` is the finite-only variant that torch and ml_dtypes call ``float8_e4m3fn``.
    """

    INT8 = 0
    UINT8 = 1
    INT32 = 2
    UINT32 = 3
    INT64 = 4
    UINT64 = 5
    FLOAT16 = 6
    BFLOAT16 = 7
    FLOAT32 = 8
    FLOAT64 = 9
    FLOAT8_E4M3 = 10
    FLOAT8_E5M2 = 11

    @property
    def label(self) -> str:
        """The name that users write, such as "bfloat16"."""
        return self.name.lower()

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZES[self]


_ITEMSIZES: dict[int, int] = {
    DType.INT8: 1,
    DType.UINT8: 1,
    DType.INT32: 4,
    DType.UINT32: 4,
    DType.INT64: 8,
    DType.UINT64: 8,
    DType.FLOAT16: 2,
    DType.BFLOAT16: 2,
    DType.FLOAT32: 4,
    DType.FLOAT64: 8,
    DType.FLOAT8_E4M3: 1,
    DType.FLOAT8_E5M2: 1,
}


class Op(enum.IntEnum):
    """Reduction operators. MIN and MAX propagate NaN; AVG of integers divides towards zero."""

    SUM = 0
    PROD = 1
    MIN = 2
    MAX = 3
    AVG = 4

    @property
    def label(self) -> str:
        """The name that users write, such as "sum"."""
        return self.name.lower()


class Kind(enum.IntEnum):
    """Kinds of collectives."""

    ALL_REDUCE = 0
    ALL_GATHER = 1
    REDUCE_SCATTER = 2
    REDUCE = 3
    BROADCAST = 4
    ALL_TO_ALL = 5
    GATHER = 6
    SCATTER = 7
    BARRIER = 8
    SEND_RECV = 9

    @property
    def label(self) -> str:
        """The name that users write, such as "all_reduce"."""
        return self.name.lower()


# Names of arrays' own dtypes (NumPy, ml_dtypes, torch) that unjam supports. Other 8-bit floats,
# such as ml_dtypes' float8_e4m3 (which has infinities), have other bit patterns and are not in
# here.
ARRAY_DTYPES: dict[str, DType] = {
    dtype.label: dtype for dtype in DType if dtype is not DType.FLOAT8_E4M3
}
ARRAY_DTYPES["float8_e4m3fn"] = DType.FLOAT8_E4M3

# All that a user may write for dtype=.
_NAMES: dict[str, DType] = {dtype.label: dtype for dtype in DType} | ARRAY_DTYPES
_OPS: dict[str, Op] = {op.label: op for op in Op}
_KINDS: dict[str, Kind] = {kind.label: kind for kind in Kind}

_E = TypeVar("_E", bound=enum.IntEnum)


def supported_dtypes() -> str:
    """The names of all data types, for messages."""
    return ", ".join(dtype.label for dtype in DType)


def dtype_of(spec: Any) -> DType:
    """The data type that `spec` names.

    Args:
        spec: a :class:`DType`, a name ("bfloat16", "float8_e4m3fn", …), or anything that NumPy or
            torch take for a dtype.

    Raises:
        InvalidArgument: not a data type that unjam supports.
    """
    if isinstance(spec, DType):
        return spec
    if isinstance(spec, str):
        found = _NAMES.get(spec.removeprefix("torch."))
    elif type(spec).__module__ == "torch":
        found = ARRAY_DTYPES.get(str(spec).removeprefix("torch."))
    else:
        try:
            import numpy as np

            found = ARRAY_DTYPES.get(np.dtype(spec).name)
        except TypeError:
            found = None
    if found is None:
        raise InvalidArgument(f"dtype {spec!r} is not supported: use one of {supported_dtypes()}")
    return found


def _parse(enumeration: type[_E], names: dict[str, _E], what: str, spec: Any) -> _E:
    if isinstance(spec, enumeration):
        return spec
    if not isinstance(spec, str):
        raise InvalidType(f"{what} must be a name, not {type(spec).__name__} {spec!r}")
    found = names.get(spec.lower().replace("-", "_"))
    if found is None:
        raise InvalidArgument(f"{what} {spec!r} is unknown: use one of {', '.join(names)}")
    return found


def op_of(spec: Any) -> Op:
    """The operator that `spec` (a name such as "sum", or an :class:`Op`) means.

    Raises:
        InvalidArgument: an unknown name.
    """
    if type(spec) is str and (found := _OPS.get(spec)) is not None:
        return found
    return _parse(Op, _OPS, "op", spec)


def kind_of(spec: Any) -> Kind:
    """The kind that `spec` ("all_reduce", "all-reduce", …, or a :class:`Kind`) means.

    Raises:
        InvalidArgument: an unknown name.
    """
    return _parse(Kind, _KINDS, "kind", spec)
