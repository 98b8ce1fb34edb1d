"""NCCL by ctypes: what stands beside unjam, without torch.distributed's cost around it."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import time
from collections.abc import Callable
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path

ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0"}
"""What every process that uses NCCL here has in its environment: no in-switch multicast."""

_SUM = 0
_DTYPES = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "int64": 4,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
}
_ID_BYTES = 128


class NcclError(RuntimeError):
    """NCCL refused something; the message holds its own words."""


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", c_char * _ID_BYTES)]


class Nccl:
    """The loaded library. Calls give NCCL's result code: :meth:`check` raises unless success."""

    def __init__(self) -> None:
        """Loads it: from torch's wheel of it, or as the system finds it.

        Raises:
            OSError: there is none.
        """
        os.environ.update(ENVIRONMENT)
        self._dll = ctypes.CDLL(str(library_path() or "libnccl.so.2"))
        common = [c_void_p, c_void_p, c_size_t, c_int]  # send, recv, count, type
        signatures = {
            "ncclGetVersion": [POINTER(c_int)],
            "ncclGetUniqueId": [POINTER(_UniqueId)],
            "ncclCommInitRank": [POINTER(c_void_p), c_int, _UniqueId, c_int],
            "ncclCommInitAll": [POINTER(c_void_p), c_int, POINTER(c_int)],
            "ncclCommDestroy": [c_void_p],
            "ncclCommAbort": [c_void_p],
            "ncclAllReduce": [*common, c_int, c_void_p, c_void_p],
            "ncclAllGather": [*common, c_void_p, c_void_p],
            "ncclReduceScatter": [*common, c_int, c_void_p, c_void_p],
            "ncclReduce": [*common, c_int, c_int, c_void_p, c_void_p],
            "ncclBroadcast": [*common, c_int, c_void_p, c_void_p],
        }
        for name, arguments in signatures.items():
            function = getattr(self._dll, name)
            function.argtypes = arguments
            function.restype = c_int
        self._dll.ncclGetErrorString.argtypes = [c_int]
        self._dll.ncclGetErrorString.restype = c_char_p

    def check(self, code: int) -> None:
        """Raises NcclError unless `code` is success."""
        if code:
            text = self._dll.ncclGetErrorString(code) or b""
            raise NcclError(f"NCCL: {text.decode(errors='replace')} (code {code})")

    def version(self) -> str:
        """Such as "2.28.9"."""
        number = c_int()
        self.check(self._dll.ncclGetVersion(byref(number)))
        return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"

    def unique_id(self) -> bytes:
        """A new job's. The process that makes it must stay until all ranks have joined."""
        unique = _UniqueId()
        self.check(self._dll.ncclGetUniqueId(byref(unique)))
        return bytes(unique)

    def join(self, ranks: int, rank: int, unique_id: bytes) -> c_void_p:
        """A communicator on the thread's current device; returns when all ranks have joined."""
        comm = c_void_p()
        unique = _UniqueId.from_buffer_copy(unique_id)
        self.check(self._dll.ncclCommInitRank(byref(comm), ranks, unique, rank))
        return comm

    def join_all(self, ranks: int) -> list[c_void_p]:
        """Communicators on devices 0 to ranks - 1, all in this process."""
        comms = (c_void_p * ranks)()
        self.check(self._dll.ncclCommInitAll(comms, ranks, (c_int * ranks)(*range(ranks))))
        return [c_void_p(comm) for comm in comms]

    def leave(self, comm: c_void_p) -> None:
        """Destroys a communicator; all ranks do so."""
        self.check(self._dll.ncclCommDestroy(comm))

    def call(
        self,
        collective: str,
        comm: c_void_p,
        stream: int,
        dtype: str,
        count: int,
        send: int,
        recv: int,
        root: int = 0,
    ) -> tuple[Callable[..., int], tuple[object, ...]]:
        """The C function and its arguments, for a sum in `stream`; `count` as the C API counts."""
        kind = _DTYPES[dtype]
        first = (c_void_p(send), c_void_p(recv), count, kind)
        last = (comm, c_void_p(stream))
        between: dict[str, tuple[str, tuple[int, ...]]] = {
            "all_reduce": ("ncclAllReduce", (_SUM,)),
            "all_gather": ("ncclAllGather", ()),
            "reduce_scatter": ("ncclReduceScatter", (_SUM,)),
            "reduce": ("ncclReduce", (_SUM, root)),
            "broadcast": ("ncclBroadcast", (root,)),
        }
        name, middle = between[collective]
        return getattr(self._dll, name), (*first, *middle, *last)


def library_path() -> Path | None:
    """libnccl.so.2 of the wheel that torch brings along; None if there is none."""
    found = importlib.util.find_spec("nvidia")
    for folder in (found.submodule_search_locations or ()) if found else ():
        path = Path(folder) / "nccl" / "lib" / "libnccl.so.2"
        if path.is_file():
            return path
    return None


def hand_over(path: Path, rank: int, make: bytes | None, limit_s: float) -> bytes:
    """Rank 0's unique id, to all ranks, through a file that does not exist yet.

    Raises:
        TimeoutError: rank 0 did not write it.
    """
    if rank == 0 and make is not None:
        fresh = path.with_suffix(".new")
        fresh.write_bytes(make)
        fresh.rename(path)
        return make
    deadline = time.monotonic() + limit_s
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank 0 gave no NCCL id for {limit_s:g} s")
        time.sleep(0.01)
    return path.read_bytes()
