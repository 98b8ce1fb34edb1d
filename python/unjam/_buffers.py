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

# Element types that say nothing about their meaning: bytes, and 16-bit integers, which unjam does
# not reduce as such. An explicit dtype= may reinterpret them.
_RAW = frozenset({"uint8", "int8", "uint16", "int16", "bool"})

# The common case, without looking at names: native NumPy types that unjam knows.
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
    return _from_numpy(view, (obj, view), name, dtype)


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


def _from_numpy(array: np.ndarray[Any, Any], keep: Any, name: str, dtype: Any) -> Buffer:
    flags = array.flags
    if not flags.c_contiguous:
        raise InvalidArgument(
            f"{name} is not C-contiguous (shape {array.shape}, strides {array.strides}): pass "
            f"np.ascontiguousarray({name}), or a slice of whole rows"
        )
    own = array.dtype
    simple = _SIMPLE.get(own) if dtype is None else None
    if simple is not None and flags.writeable and array.size:
        address = ctypes.addressof(_first_byte(array))  # four times faster than what works for all
    else:
        address = array.__array_interface__["data"][0]
    if simple is not None and not (address % simple.itemsize):
        return Buffer(address, array.size, simple, flags.writeable, keep)
    if not own.isnative:
        raise InvalidArgument(
            f"{name} has foreign byte order ({own.str}): pass "
            f"{name}.astype({name}.dtype.newbyteorder('='))"
        )
    found = _element_type(own.name, own.kind == "V" and own.names is None, name, dtype)
    return _checked(name, address, array.nbytes, found, flags.writeable, keep)


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
    found = _element_type(own, False, name, dtype)
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
    found = _element_type(own.name, own.kind == "V" and own.names is None, name, dtype)
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


def _element_type(own: str, void: bool, name: str, dtype: Any) -> DType:
    known = ARRAY_DTYPES.get(own)
    if dtype is None:
        if known is not None:
            return known
        cure = (
            "say what its bytes are, such as dtype='bfloat16'"
            if void or own in _RAW
            else f"use one of {supported_dtypes()}"
        )
        raise InvalidArgument(f"{name} has elements of type {own}, which is not supported: {cure}")
    wanted = dtype_of(dtype)
    if known is not wanted and not void and own not in _RAW:
        raise InvalidArgument(
            f"{name} has elements of type {own}, but {wanted.label} is wanted: only raw memory "
            "(bytes, 16-bit integers) can be reinterpreted"
        )
    return wanted


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
