"""Any memory as (address, elements, dtype), without a copy, or an error that names the cure.

Accepted in host memory: NumPy arrays (also with ml_dtypes' element types), torch CPU tensors,
objects with the buffer protocol (bytearray, memoryview, array.array, mmap, ctypes arrays; read-only
ones such as bytes as inputs only), and objects with ``__array_interface__``. On CUDA devices: torch
tensors, and objects with ``__cuda_array_interface__``. Memory must be C-contiguous and aligned to
the element's size.
"""

from __future__ import annotations

import ctypes
import math
import sys
from typing import Any, NamedTuple

import numpy as np

from ._devices import ANY_CUDA, HOST
from ._errors import InvalidArgument, InvalidType
from ._types import ARRAY_DTYPES, DType, dtype_of, supported_dtypes

# Element types that may say nothing about their meaning: bytes, and 16-bit integers, which unjam
# does not reduce as such. An explicit dtype= may reinterpret them.
_RAW = frozenset({"uint8", "int8", "uint16", "int16"})
# A bool is a byte of 0 or 1, and nothing else.
_AS_BOOL = frozenset({DType.UINT8, DType.INT8})

# The common case needs no look at names: native NumPy types that unjam knows.
_SIMPLE: dict[Any, DType] = {
    np.dtype(name): dtype
    for name, dtype in ARRAY_DTYPES.items()
    if name != "bfloat16" and not name.startswith("float8")
}


_first_byte = ctypes.c_char.from_buffer


class Buffer(NamedTuple):
    """A piece of memory.

    Attributes:
        address: of the first byte; 0 is possible if there are no elements.
        elements: how many.
        dtype: of the elements.
        writable: may be an output.
        keep: the object that keeps the memory alive (and, for the buffer protocol, unresizable).
        device: index of its CUDA device, HOST, or ANY_CUDA where the object does not say.
    """

    address: int
    elements: int
    dtype: DType
    writable: bool
    keep: Any
    device: int = HOST

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.elements * self.dtype.itemsize


def buffer_of(obj: Any, name: str, dtype: Any = None) -> Buffer:
    """Looks at `obj`, copies nothing.

    Args:
        obj: see the module's text.
        name: what messages call it ("x", "out").
        dtype: the element type of raw memory (bytes, 16-bit integers, void); otherwise it must
            agree with the object's own.

    Raises:
        InvalidType: not memory that unjam can reach.
        InvalidArgument: not contiguous, misaligned, or of an unsupported type.
    """
    if isinstance(obj, np.ndarray):
        return _from_numpy(obj, obj, name, dtype)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(obj, torch.Tensor):
        return _from_torch(torch, obj, name, dtype)
    cuda = getattr(obj, "__cuda_array_interface__", None)
    if cuda is not None:
        return _from_cuda(cuda, obj, name, dtype)
    if isinstance(obj, np.generic):
        raise InvalidType(f"{name} is a NumPy scalar, which has no memory to share: pass an array")
    interface = getattr(obj, "__array_interface__", None)
    try:
        # np.asarray takes both protocols without a copy; a list or a number would be copied, so
        # only objects that export memory get here.
        view = np.asarray(obj) if interface is not None else np.asarray(memoryview(obj))
    except (TypeError, ValueError, BufferError, NotImplementedError) as error:
        raise InvalidType(
            f"{name} is a {type(obj).__name__}, not memory that unjam can reach ({error}): pass a "
            "NumPy array, a torch tensor, or an object with the buffer protocol"
        ) from None
    return _from_numpy(view, (obj, view), name, dtype, f"np.asarray({name})")


def check_writable(buffer: Buffer, name: str) -> None:
    """Raises InvalidArgument unless `buffer` may be written."""
    if not buffer.writable:
        if getattr(buffer.keep, "requires_grad", False):
            raise InvalidArgument(
                f"{name} requires grad, and autograd would not notice that results are written "
                f"there: pass {name}.detach(), or call under torch.no_grad()"
            )
        raise InvalidArgument(
            f"{name} is read-only, but results go there: pass a writable buffer (such as a "
            f"bytearray, or a copy: {name}.copy())"
        )


def _from_numpy(
    array: np.ndarray[Any, Any], keep: Any, name: str, dtype: Any, expression: str = ""
) -> Buffer:
    """`expression`: the array in the user's terms, where that is not `name`."""
    flags = array.flags
    if not flags.c_contiguous:
        raise InvalidArgument(
            f"{name} is not C-contiguous (shape {array.shape}, strides {array.strides}): pass "
            f"np.ascontiguousarray({name}), or a slice of whole rows"
        )
    own = array.dtype
    simple = _SIMPLE.get(own) if dtype is None else None
    if simple is not None and flags.writeable and array.size:
        address = ctypes.addressof(_first_byte(array))  # faster than what works for all
    else:
        address = array.__array_interface__["data"][0]
    if simple is not None and not (address % simple.itemsize):
        return Buffer(address, array.size, simple, flags.writeable, keep)
    if not own.isnative:
        raise InvalidArgument(
            f"{name} has foreign byte order ({own.str}): pass "
            f"{name}.astype({name}.dtype.newbyteorder('='))"
        )
    source = _numpy_like(expression or name)
    found = _element_type(own.name, _void_bytes(own), name, dtype, source)
    return _checked(name, address, array.nbytes, found, flags.writeable, keep)


def _void_bytes(own: np.dtype[Any]) -> int:
    """Bytes of an element of raw memory; 0: it is none. (ml_dtypes' types are of kind "V", too.)"""
    return own.itemsize if own.type is np.void and own.names is None else 0


def _from_torch(torch: Any, tensor: Any, name: str, dtype: Any) -> Buffer:
    device = HOST
    if tensor.is_cuda:
        device = tensor.get_device()
    elif tensor.device.type != "cpu":
        raise InvalidType(
            f"{name} is a tensor on {tensor.device}, and unjam works in host memory and on CUDA "
            f"devices: pass {name}.cpu()"
        )
    if tensor.layout is not torch.strided:
        raise InvalidType(f"{name} is a {tensor.layout} tensor: pass {name}.to_dense()")
    if not tensor.is_contiguous():
        raise InvalidArgument(
            f"{name} is not contiguous (shape {tuple(tensor.shape)}, strides {tensor.stride()}): "
            f"pass {name}.contiguous()"
        )
    if tensor.is_neg() or tensor.is_conj():
        raise InvalidArgument(
            f"{name} is a lazy negation or conjugation: pass {name}.resolve_neg().resolve_conj()"
        )
    own = str(tensor.dtype).removeprefix("torch.")
    source = _Source(
        f"{name}.view(torch.{{}})", f"{name}.to(torch.{{}})", f"torch.view_as_real({name})"
    )
    found = _element_type(own, 0, name, dtype, source)
    nbytes = tensor.numel() * tensor.element_size()
    writable = not (tensor.requires_grad and torch.is_grad_enabled())
    return _checked(name, tensor.data_ptr(), nbytes, found, writable, tensor, device)


def _from_cuda(interface: Any, obj: Any, name: str, dtype: Any) -> Buffer:
    """Memory of CuPy, Numba, JAX and others. Its "stream" is not looked at: the call's is."""
    shape = tuple(interface["shape"])
    own = np.dtype(interface["typestr"])
    address, read_only = interface["data"]
    nbytes = math.prod(shape) * own.itemsize
    strides = interface.get("strides")
    if strides is not None and nbytes and tuple(strides) != _row_major(shape, own.itemsize):
        raise InvalidArgument(
            f"{name} is not C-contiguous (shape {shape}, strides {tuple(strides)}): pass a "
            "contiguous copy, or a slice of whole rows"
        )
    source = _numpy_like(name, prefix="xp.")
    found = _element_type(own.name, _void_bytes(own), name, dtype, source)
    return _checked(name, address or 0, nbytes, found, not read_only, obj, _index_of(obj))


def _row_major(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides = []
    for extent in reversed(shape):
        strides.append(itemsize)
        itemsize *= extent
    return tuple(reversed(strides))


def _index_of(obj: Any) -> int:
    """The CUDA device of an object that may say so through DLPack."""
    says = getattr(obj, "__dlpack_device__", None)
    return ANY_CUDA if says is None else int(says()[1])


class _Source(NamedTuple):
    """What holds the elements, as far as advice depends on it: how it is viewed and converted."""

    view: str
    convert: str
    reals: str  # of complex numbers: their two parts


def _numpy_like(name: str, prefix: str = "np.") -> _Source:
    view, convert = f"{name}.view({prefix}{{}})", f"{name}.astype({prefix}{{}})"
    return _Source(view, convert, view)


def _element_type(own: str, void: int, name: str, dtype: Any, source: _Source) -> DType:
    """The data type of elements.

    Args:
        own: the name that the object has for it.
        void: bytes of an element that says nothing about its meaning; 0: it says something.
        name: what messages call the object.
        dtype: what the user says.
        source: of the elements.

    Raises:
        InvalidArgument: it is none that unjam knows, or not the one that the user says.
    """
    known = ARRAY_DTYPES.get(own)
    if dtype is None:
        if known is not None:
            return known
        raise InvalidArgument(
            f"{name} has elements of type {own}, which is not supported: {_cure(own, void, source)}"
        )
    wanted = dtype_of(dtype)
    if known is wanted or void or own in _RAW or (own == "bool" and wanted in _AS_BOOL):
        return wanted
    cure = "only raw memory (bytes, 16-bit integers) can be reinterpreted"
    if known is None:
        cure += f"; {_cure(own, void, source)}"
    raise InvalidArgument(
        f"{name} has elements of type {own}, but {wanted.label} is wanted: {cure}"
    )


# For a type of number that unjam does not know: the known one that holds its values.
_WIDER = {
    "int16": "int32",
    "uint16": "int32",
    "float96": "float64",
    "float128": "float64",
    "complex192": "complex128",
    "complex256": "complex128",
}


def _cure(own: str, void: int, source: _Source) -> str:
    """What to do about elements that unjam does not know, so that the results are right."""
    if own == "bool":
        return (
            f"pass {source.view.format('uint8')}, with op='max' for \"or\" and op='min' for \"and\""
        )
    if own.startswith("void") and not void:
        return f"pass its fields one by one, or, to move them only, {source.view.format('uint8')}"
    if void:
        fitting = [d.label for d in DType if d.itemsize == void]
        if not fitting:
            return f"to move them only, pass {source.view.format('uint8')}"
        # People keep in raw words what NumPy has no type for.
        usual = {1: "uint8", 2: "bfloat16", 4: "float32", 8: "float64"}[void]
        others = ", ".join(repr(label) for label in fitting if label != usual)
        return f"say what its bytes are, such as dtype={usual!r} (or {others})"
    if own in _WIDER:
        cure = f"convert it, such as {source.convert.format(_WIDER[own])}"
        if own.startswith("complex"):
            cure += " and pass its real and imaginary parts"
        elif own == "uint16":
            cure += "; or, if its words are raw, say what they are, such as dtype='bfloat16'"
        return cure
    if own in _PARTS:
        parts = source.reals.format(_PARTS[own])
        return f"pass its real and imaginary parts, {parts}, which is right for op='sum' and 'avg'"
    if own.startswith(("datetime64", "timedelta64")):
        return (
            f"pass {source.view.format('int64')}, with op='min' or 'max' (NaT is the smallest "
            "number there)"
        )
    if own == "object" or own.startswith(("str", "bytes")):
        return "its elements are no numbers; encode them to a buffer of bytes (uint8)"
    if own.startswith(("int", "uint")):  # of few bits
        return f"convert it, such as {source.convert.format('int8')}"
    if own.startswith(("float", "bfloat")):
        return f"convert it, such as {source.convert.format('float32')}"
    return f"use one of {supported_dtypes()}"


# For complex numbers: the type of their two parts.
_PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


def _checked(
    name: str,
    address: int,
    nbytes: int,
    dtype: DType,
    writable: bool,
    keep: Any,
    device: int = HOST,
) -> Buffer:
    size = dtype.itemsize
    if not (0 <= address and 0 <= nbytes and address + nbytes <= 1 << 64):
        raise InvalidArgument(
            f"{name} says that it has {nbytes} bytes at {address:#x}: no memory is there"
        )
    count, rest = divmod(nbytes, size)
    if rest:
        raise InvalidArgument(
            f"{name} has {nbytes} bytes, which is not a whole number of {dtype.label} "
            f"({size} bytes each)"
        )
    if address % size and count:
        raise InvalidArgument(
            f"{name} starts at address {address:#x}, which is not aligned to {dtype.label} "
            f"({size} bytes): copy it to fresh memory"
        )
    return Buffer(address, count, dtype, writable, keep, device)
