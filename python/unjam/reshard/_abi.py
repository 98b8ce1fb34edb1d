"""The C API of ``include/unjam/reshard.h`` as ctypes sees it.

``tests/python/test_reshard.py`` compares it with the header.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import (
    POINTER,
    Structure,
    c_char_p,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint64,
    c_void_p,
)
from typing import Any

from .._abi import CallOptions
from .._errors import LibraryError
from .._lib import library, library_path

REPLICATE = 0
SHARD = 1
STRIDED_SHARD = 2

Handle = c_void_p


class Mesh(Structure):
    """unjamMesh_t."""

    _fields_ = [
        ("size", c_size_t),
        ("ndims", c_int32),
        ("dims", POINTER(c_int64)),
        ("ranks", POINTER(c_int32)),
    ]


class Placement(Structure):
    """unjamPlacement_t."""

    _fields_ = [("kind", c_int32), ("dim", c_int32), ("split", c_int64)]


class ReshardTensor(Structure):
    """unjamReshardTensor_t."""

    _fields_ = [
        ("size", c_size_t),
        ("name", c_char_p),
        ("ndims", c_int32),
        ("shape", POINTER(c_int64)),
        ("src_dtype", c_int32),
        ("dst_dtype", c_int32),
        ("src", POINTER(Placement)),
        ("dst", POINTER(Placement)),
    ]


class Topology(Structure):
    """unjamTopology_t."""

    _fields_ = [
        ("size", c_size_t),
        ("nranks", c_int32),
        ("host", POINTER(c_int32)),
        ("nic", POINTER(c_int32)),
    ]


class ReshardOptions(Structure):
    """unjamReshardOptions_t."""

    _fields_ = [
        ("size", c_size_t),
        ("max_bytes", c_uint64),
        ("window", c_int32),
        ("stripes", c_int32),
    ]


class ReshardPart(Structure):
    """unjamReshardPart_t."""

    _fields_ = [
        ("size", c_size_t),
        ("name", c_char_p),
        ("data", c_void_p),
        ("dtype", c_int32),
        ("ndims", c_int32),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
    ]


_Text = [c_char_p, c_size_t, POINTER(c_size_t)]  # buffer, bytes, needed

PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {
    "unjamReshardPlan": (
        c_int,
        [
            POINTER(Mesh),
            POINTER(Mesh),
            POINTER(ReshardTensor),
            c_size_t,
            POINTER(Topology),
            POINTER(ReshardOptions),
            POINTER(Handle),
        ],
    ),
    "unjamReshardDestroy": (c_int, [Handle]),
    "unjamReshardWithout": (
        c_int,
        [
            Handle,
            POINTER(c_int32),
            c_size_t,
            POINTER(c_char_p),
            c_size_t,
            c_int,
            POINTER(Handle),
        ],
    ),
    "unjamReshardInfo": (c_int, [Handle, c_int, *_Text]),
    "unjamReshardRank": (c_int, [Handle, c_int, *_Text]),
    "unjamReshardCheck": (c_int, [Handle, *_Text]),
    "unjamReshardRun": (
        c_int,
        [
            Handle,
            c_void_p,
            c_char_p,
            POINTER(ReshardPart),
            c_size_t,
            POINTER(ReshardPart),
            c_size_t,
            POINTER(CallOptions),
            POINTER(c_void_p),
        ],
    ),
    "unjamReshardIncomplete": (c_int, [c_void_p, *_Text]),
    "unjamReshardNine": (c_int, [c_int, POINTER(Handle)]),
    "unjamReshardCompare": (c_int, [Handle, c_uint64, c_int, c_uint64, *_Text]),
}


@functools.lru_cache(maxsize=1)
def reshard_library() -> ctypes.CDLL:
    """The loaded library, with these prototypes set as well."""
    lib = library()
    try:
        for name, (result, arguments) in PROTOTYPES.items():
            function = getattr(lib, name)
            function.restype = result
            function.argtypes = arguments
    except AttributeError as error:
        raise LibraryError(
            f"{library_path()} is older than this package: {error}. Install unjam again."
        ) from error
    return lib
