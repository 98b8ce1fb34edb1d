"""Where contexts and buffers are, which stream a call means, and what the two must have in common.

A place is the index of a CUDA device, or HOST; ANY_CUDA is memory on a device that nobody names.
torch is looked at only where the program has imported it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

from . import _abi
from ._errors import InvalidArgument, InvalidType

HOST = -1
ANY_CUDA = -2


def place_text(place: int) -> str:
    """A place as messages name it: "host memory", "cuda:0"."""
    if place == HOST:
        return "host memory"
    return "a CUDA device" if place == ANY_CUDA else f"cuda:{place}"


def current_index() -> int:
    """The calling thread's current CUDA device as torch has it; 0 without torch."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return 0
    index: int = torch.cuda.current_device()
    return index


def cuda_by_environment() -> bool:
    """Whether UNJAM_DEVICE says CUDA."""
    return os.environ.get("UNJAM_DEVICE", "") in ("cuda", str(_abi.DEVICE_CUDA))


def choose_index(settings: _abi.Config) -> None:
    """Fills in the calling thread's device where a CUDA configuration names none.

    The library would ask for it in the thread that joins, which is not the caller's.
    """
    wanted = settings.device == _abi.DEVICE_CUDA or (settings.device < 0 and cuda_by_environment())
    if wanted and settings.device_index < 0 and not os.environ.get("UNJAM_DEVICE_INDEX"):
        settings.device_index = current_index()


def check_place(what: int, context: int, rank: int) -> None:
    """Raises InvalidArgument unless buffers at `what` can be used by a context at `context`."""
    if what == context or (what == ANY_CUDA and context >= 0):
        return
    if context == HOST:
        cure = (
            "make the context with device='cuda' (unjam.init(..., device='cuda')), or pass copies "
            "in host memory, such as x.cpu()"
        )
        where = "in host memory"
    else:
        cure = f"pass tensors of that device, such as x.to('cuda:{context}')"
        where = f"on cuda:{context}"
    if what == HOST:
        cure += ", or make the context with device='host'"
    raise InvalidArgument(
        f"the buffers are in {place_text(what)}, but rank {rank} works {where}: {cure}"
    )


def stream_of(stream: Any, index: int) -> int:
    """The ``cudaStream_t`` that a user means.

    Args:
        stream: None: torch's current stream of the device if torch is loaded, otherwise the legacy
            default stream; an int: the ``cudaStream_t`` itself; otherwise an object with
            ``cuda_stream``, such as a ``torch.cuda.Stream``.
        index: the context's CUDA device.

    Raises:
        InvalidType: not a stream.
        InvalidArgument: a stream of another device.
    """
    if stream is None:
        torch = sys.modules.get("torch")
        # What torch.cuda.current_stream(index).cuda_stream gives, without making an object for it.
        current = torch and getattr(torch._C, "_cuda_getCurrentRawStream", None)
        return int(current(index)) if current else 0
    if isinstance(stream, int) and not isinstance(stream, bool):
        if not 0 <= stream < 1 << 64:
            raise InvalidArgument(f"stream {stream} is not a cudaStream_t: it is an address")
        return stream
    address = getattr(stream, "cuda_stream", None)
    if address is None:
        raise InvalidType(
            f"stream must be a torch.cuda.Stream (or another object with cuda_stream), a "
            f"cudaStream_t as an int, or None for the current stream; not "
            f"{type(stream).__name__} {stream!r}"
        )
    own = getattr(getattr(stream, "device", None), "index", None)
    if own is not None and own != index:
        raise InvalidArgument(
            f"the stream is of cuda:{own}, but the context works on cuda:{index}: pass one of "
            f"that device, such as torch.cuda.current_stream({index})"
        )
    if not 0 <= int(address) < 1 << 64:
        raise InvalidArgument(f"stream {address} is not a cudaStream_t: it is an address")
    return int(address)


def call_stream(stream: Any, in_stream: bool, place: int) -> tuple[int | None, int]:
    """Stream and order (``unjamStreamOrder_t``) of a call; (None, STREAM_NONE) on the host.

    Args:
        stream: as for :func:`stream_of`.
        in_stream: the call is to be as a kernel in the stream.
        place: the context's.

    Raises:
        InvalidArgument: a stream on the host device, or a bad one.
    """
    if place != HOST:
        return stream_of(stream, place), _abi.STREAM_SYNC if in_stream else _abi.STREAM_ASYNC
    if stream is not None or in_stream:
        raise InvalidArgument(
            "stream and in_stream are for CUDA, but this context works in host memory: leave them "
            "out, or make the context with device='cuda'"
        )
    return None, _abi.STREAM_NONE


def call_options(
    priority: int,
    callback: int | None,
    user: int,
    stream: int | None,
    order: int,
    algorithm: bytes | None = None,
) -> _abi.CallOptions:
    """The C API's options of a call, in its own terms."""
    return _abi.CallOptions(
        _OPTIONS_SIZE,
        _abi.VERSION,
        priority,
        callback,
        user,
        stream or None,
        order,
        None,
        algorithm,
    )


_OPTIONS_SIZE = ctypes.sizeof(_abi.CallOptions)
