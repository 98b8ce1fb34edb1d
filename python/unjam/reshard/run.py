"""Plans carried out on arrays of any strides, in host memory or on a GPU."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _arguments, _completion
from .._devices import HOST, call_options, call_stream, place_text
from .._errors import InvalidArgument, InvalidType, InvalidUsage
from .._lib import check, read_json
from .._names import encode
from .._types import ARRAY_DTYPES, DType
from ..group import Group, OnComplete
from ..request import Request
from . import _abi

if TYPE_CHECKING:
    from .plan import Plan

# What says nothing about the meaning of its elements: as many bytes as the plan's type.
_RAW = frozenset({"uint8", "int8", "uint16", "int16", "bool"})


class ReshardRequest(Request):
    """A run of a plan, as a future; see :class:`unjam.Request`.

    It fails with the first error when all that is still to be had has come.
    """

    __slots__ = ()

    def incomplete(self, timeout: float | None = None) -> list[str]:
        """Waits, then gives the names of this rank's tensors that are not complete.

        After an error all others have what they should have.

        Raises:
            Timeout: the time has passed; the run goes on.
        """
        self.exception(timeout)
        with self.context._call():
            found: list[str] = read_json(
                lambda buffer, size, needed: _abi.reshard_library().unjamReshardIncomplete(
                    self._handle, buffer, size, needed
                )
            )
        return found


@dataclass(frozen=True)
class Part:
    """A rank's own part of a tensor, as the library takes it.

    Attributes:
        address: of the first element.
        dtype: of the elements.
        shape: of the part.
        strides: bytes from one element to the next, in each dimension.
        keep: what keeps the memory alive.
    """

    address: int
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    keep: Any


def run(
    plan: Plan,
    group: Group,
    src: Mapping[str, Any] | None,
    dst: Mapping[str, Any] | None,
    key: str,
    priority: int,
    callback: OnComplete | None,
    stream: Any = None,
) -> ReshardRequest:
    """What :meth:`Plan.run` does."""
    if not isinstance(group, Group):
        raise InvalidType(f"group is a {type(group).__name__}: give what Context.group() made")
    context = group.context
    encoded = encode(key, "key")
    types = plan.dtypes()
    where = (context.rank, context._place)
    sources = _parts(src, "src", {name: pair[0] for name, pair in types.items()}, *where)
    wanted = _parts(dst, "dst", {name: pair[1] for name, pair in types.items()}, *where)
    priority = _arguments.integer(priority, "priority")
    if group._closed:
        raise InvalidUsage(f"{group!r} is closed: make it again, on all of its ranks")
    what = ("resharding", key, group.name)
    keep = (plan, *(part.keep for part in (*sources.values(), *wanted.values())))
    queue, order = call_stream(stream, False, context._place)
    request = ReshardRequest(context, what, dst, keep, callback, queue)
    number, address = 0, None
    if callback is not None:
        _arguments.check_callback(callback)
        number, address = _completion.register(request), _completion.ADDRESS
    options = call_options(priority, address, number, queue, order)
    kept: list[Any] = []
    try:
        with context._call():
            check(
                _abi.reshard_library().unjamReshardRun(
                    plan._handle,
                    group._handle,
                    encoded,
                    *_array(sources, kept),
                    *_array(wanted, kept),
                    ctypes.byref(options),
                    ctypes.byref(request._handle),
                )
            )
    except BaseException:
        if not request._handle:
            _completion.forget(number)
        raise
    return request


def _array(parts: Mapping[str, Part], kept: list[Any]) -> tuple[Any, int]:
    """As C reads them; what that points to goes into `kept`."""

    def numbers(values: Sequence[int]) -> Any:
        array = (ctypes.c_int64 * len(values))(*values)
        kept.append(array)
        return array

    array = (_abi.ReshardPart * len(parts))(
        *(
            _abi.ReshardPart(
                ctypes.sizeof(_abi.ReshardPart),
                name.encode(),
                part.address or None,
                part.dtype,
                len(part.shape),
                numbers(part.shape),
                numbers(part.strides),
            )
            for name, part in parts.items()
        )
    )
    kept.append(array)
    return array, len(parts)


def _parts(
    given: Mapping[str, Any] | None, side: str, types: Mapping[str, DType], rank: int, place: int
) -> dict[str, Part]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InvalidType(
            f"{side} is a {type(given).__name__}: give a dict of this rank's parts by name"
        )
    parts = {}
    for name, value in given.items():
        if not isinstance(name, str):
            raise InvalidType(f"{side} has the name {name!r}: tensors' names are texts")
        where = f"tensor {name!r} in {side} on rank {rank}"
        parts[name] = part_of(value, where, types.get(name), side == "dst", place)
    return parts


def part_of(value: Any, where: str, planned: DType | None, writes: bool, place: int = HOST) -> Part:
    """Looks at an array of any strides, copies nothing.

    Args:
        value: a NumPy array, a torch tensor, or what has the buffer protocol,
            ``__array_interface__`` or, on a GPU, ``__cuda_array_interface__``.
        where: what messages call it.
        planned: the plan's type, which raw memory (bytes, 16-bit integers, bool) is taken for.
        writes: it is an output.
        place: of the context, as ``_devices`` counts places.

    Raises:
        InvalidType: no memory that unjam can reach.
        InvalidArgument: read-only, elsewhere, or of a type that unjam does not know.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _of_tensor(torch, value, where, planned, writes, place)
    if place != HOST:
        return _of_cuda_array(value, where, planned, writes, place)
    if isinstance(value, np.ndarray):
        array = value
    else:
        try:
            exports = getattr(value, "__array_interface__", None) is not None
            array = np.asarray(value) if exports else np.asarray(memoryview(value))
        except (TypeError, ValueError, BufferError, NotImplementedError) as error:
            raise InvalidType(
                f"{where} is a {type(value).__name__}, not memory that unjam can reach ({error}): "
                "give a NumPy array or a torch tensor on the CPU"
            ) from None
    if writes and not array.flags.writeable:
        raise InvalidArgument(f"{where} is read-only, and is written: give a copy")
    if not array.dtype.isnative:
        raise InvalidArgument(
            f"{where} has foreign byte order: give x.astype(x.dtype.newbyteorder('='))"
        )
    dtype = _type_of(array.dtype.name, array.dtype.itemsize, where, planned)
    address = array.__array_interface__["data"][0]
    return Part(address, dtype, array.shape, array.strides, (value, array))


def _of_cuda_array(value: Any, where: str, planned: DType | None, writes: bool, place: int) -> Part:
    told = getattr(value, "__cuda_array_interface__", None)
    if told is None:
        raise InvalidArgument(
            f"{where} is a {type(value).__name__}, and the rank works on {place_text(place)}: give "
            "a tensor of that device"
        )
    if writes and told["data"][1]:
        raise InvalidArgument(f"{where} is read-only, and is written: give a copy")
    dtype = np.dtype(told["typestr"])
    shape = tuple(told["shape"])
    strides = told.get("strides")
    if strides is None:  # row-major
        strides = [dtype.itemsize * math.prod(shape[d + 1 :]) for d in range(len(shape))]
    return Part(
        told["data"][0],
        _type_of(dtype.name, dtype.itemsize, where, planned),
        shape,
        tuple(strides),
        value,
    )


def _of_tensor(
    torch: Any, tensor: Any, where: str, planned: DType | None, writes: bool, place: int
) -> Part:
    if (tensor.device.index if tensor.device.type == "cuda" else HOST) != place or (
        tensor.device.type not in ("cpu", "cuda")
    ):
        cure = "x.cpu()" if place == HOST else f"x.to('{place_text(place)}')"
        raise InvalidArgument(
            f"{where} is on {tensor.device}, and the rank works in {place_text(place)}: give "
            f"{cure}, or a group of a context there"
        )
    if tensor.layout is not torch.strided:
        raise InvalidType(f"{where} is a {tensor.layout} tensor: give {tensor.layout}.to_dense()")
    if hasattr(tensor, "placements"):
        raise InvalidType(f"{where} is a DTensor: give x.to_local(), or use unjam.torch.Reshard")
    if tensor.is_neg() or tensor.is_conj():
        raise InvalidArgument(
            f"{where} is a lazy negation or conjugation: give x.resolve_neg().resolve_conj()"
        )
    if writes and tensor.requires_grad and torch.is_grad_enabled():
        raise InvalidArgument(
            f"{where} requires grad, and autograd would not notice that it is written: give "
            "x.detach(), or call under torch.no_grad()"
        )
    size = tensor.element_size()
    name = str(tensor.dtype).removeprefix("torch.")
    return Part(
        tensor.data_ptr(),
        _type_of(name, size, where, planned),
        tuple(tensor.shape),
        tuple(stride * size for stride in tensor.stride()),
        tensor,
    )


def _type_of(name: str, size: int, where: str, planned: DType | None) -> DType:
    known = ARRAY_DTYPES.get(name)
    raw = name in _RAW or name.startswith("void")
    if planned is not None and known is not planned and raw and size == planned.itemsize:
        return planned
    if known is None:
        hint = "" if planned is None else f": the plan says {planned.label}"
        raise InvalidArgument(
            f"{where} has elements of type {name}, which unjam does not know{hint}"
        )
    return known
