"""unjam and NCCL on one GPU of a job, each called straight through its C API.

Neither has a Python layer around it here: what is timed is the library, and ctypes for both.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import unjam

from .. import _abi
from .._devices import call_options
from .._lib import check, library
from ..cuda.nccl import Nccl, hand_over
from .cases import ROOT, Case
from .cuda_data import Buffers
from .libraries import register_for_all
from .rows import PlanUsed

Issue = Callable[[], int]


class Calls(NamedTuple):
    """What runs a case.

    Attributes:
        issue: one call on the first buffers, as a kernel in the stream; gives the result code.
        burst: a call on each of the buffers, all outstanding at once; then the stream waits for
            them.
        check: raises unless a result code is success.
    """

    issue: Issue
    burst: Callable[[], None]
    check: Callable[[int], None]


class CudaLibrary(Protocol):
    """A collective communication library, as one rank of a job with a GPU sees it."""

    def prepare(self, case: Case, buffers: Sequence[Buffers], key: str | None = None) -> Calls:
        """What runs the case; under this key, where a library has keys."""

    def close(self) -> None:
        """Ends the rank."""


class CudaUnjam:
    """unjam, through registered collectives: plan and key are looked up once."""

    def __init__(
        self, rank: int, ranks: int, unique_id: bytes, stream: Any, heap_bytes: int | None = None
    ) -> None:
        """Joins the job; returns when all ranks have.

        Args:
            rank: this one.
            ranks: how many.
            unique_id: of the job.
            stream: a torch.cuda.Stream of the rank's device.
            heap_bytes: of the heap, if the buffers are to be there.
        """
        index = stream.device.index
        self._context = unjam.init(
            ranks, rank, unique_id, device="cuda", device_index=index, heap_bytes=heap_bytes
        )
        self._group = self._context.group(name="bench")
        self._stream = stream.cuda_stream
        self._registered: dict[str, unjam.Collective] = {}  # by key
        self._before = _Moved()  # as the case was prepared

    def alloc(self, nbytes: int) -> unjam.Memory:
        """Memory of the heap."""
        return self._context.alloc(nbytes)

    def register(self, block: Any) -> None:
        """Lets the others store there, from when they have it mapped: that is waited for."""
        register_for_all(self._context, block)

    def prepare(self, case: Case, buffers: Sequence[Buffers], key: str | None = None) -> Calls:
        """See :class:`CudaLibrary`. The i-th buffers of a burst have a key of their own."""
        run, key = library().unjamRunWithOptions, key or case.collective
        self._before = _moved(self._context.info())
        in_stream, beside = (
            call_options(0, None, 0, self._stream, order)
            for order in (_abi.STREAM_SYNC, _abi.STREAM_ASYNC)
        )
        issue = self._call(run, case, key, buffers[0], in_stream, None)
        requests = (ctypes.c_void_p * len(buffers))()
        burst = [
            self._call(run, case, f"{key} {i}", pair, beside, _at(requests, i))
            for i, pair in enumerate(buffers)
        ]
        wait, free, stream = library().unjamStreamWait, library().unjamRequestFree, self._stream

        def run_burst() -> None:
            code = 0
            for call in burst:
                code = code or call()
            check(code)
            for request in requests:
                code = code or wait(request, stream)
            check(code)
            for request in requests:
                free(request)

        return Calls(issue, run_burst, check)

    def plan(self, case: Case) -> PlanUsed:
        """By what the case's in-stream calls were run; the protocol is "" if not told.

        What is said of slices is said of this rank's, since the case was prepared.
        """
        info = self._context.info()
        algorithm, protocol, lanes = plan_of(info, case.collective)
        now, before = _moved(info), self._before
        if now.straight > before.straight:
            protocol += ", direct"
        if now.dma_bytes > before.dma_bytes:
            protocol += ", dma"
        sent = now.sent_bytes - before.sent_bytes
        share = round((now.dma_bytes - before.dma_bytes) / sent, 3) if sent else 0.0
        return PlanUsed(algorithm, protocol, lanes, share)

    def close(self) -> None:
        """See :class:`CudaLibrary`."""
        self._context.device_synchronize(30.0)
        self._context.close()

    def abort(self) -> None:
        """Lets the other ranks know that this one will not come."""
        self._context.abort()

    def _call(
        self,
        run: Any,
        case: Case,
        key: str,
        buffers: Buffers,
        options: _abi.CallOptions,
        request: Any,
    ) -> Issue:
        if key not in self._registered:
            self._registered[key] = self._group.register(
                case.collective, key, case.element_type, root=ROOT
            )
        collective = self._registered[key]
        send, recv = _addresses(buffers)
        return partial(
            run, collective._handle, send, recv, case.count, ctypes.byref(options), request
        )


def plan_of(info: Mapping[str, Any], key: str) -> tuple[str, str, int | None]:
    """Algorithm, protocol and lanes of a key of the group "bench", from a context's info.

    "" or None for what is not told.
    """
    for told in info["keys"]:
        if (told["group"], told["key"]) == ("bench", key):
            return str(told["algorithm"]), str(told.get("protocol", "")), told.get("lanes")
    return "", "", None


class _Moved(NamedTuple):
    """What this rank has sent: slices straight into others' outputs, and bytes."""

    straight: int = 0
    sent_bytes: int = 0
    dma_bytes: int = 0


def _moved(info: Mapping[str, Any]) -> _Moved:
    engines = info.get("kernel", {}).get("copy_engines", {})
    return _Moved(
        sum(int(lane["into_outputs"]) for lane in info["lanes"]),
        sum(int(lane.get("bytes_sent", 0)) for lane in info["lanes"]),
        int(engines.get("dma_bytes", 0)),
    )


class CudaNccl:
    """NCCL: one communicator, calls in one stream."""

    def __init__(self, rank: int, ranks: int, store: str, stream: Any, limit_s: float) -> None:
        """Joins the job; returns when all ranks have.

        Args:
            rank: this one.
            ranks: how many.
            store: path of a file that does not exist yet, through which the ranks meet.
            stream: a torch.cuda.Stream of the rank's device, which is the current one.
            limit_s: the longest to wait for the others.
        """
        self._nccl = Nccl()
        make = self._nccl.unique_id() if rank == 0 else None
        self._comm = self._nccl.join(ranks, rank, hand_over(Path(store), rank, make, limit_s))
        self._stream = stream.cuda_stream

    def prepare(self, case: Case, buffers: Sequence[Buffers], key: str | None = None) -> Calls:
        """See :class:`CudaLibrary`. A burst is a queue in the stream: NCCL has no other way."""
        calls = [self._call(case, pair) for pair in buffers]

        def run_burst() -> None:
            code = 0
            for call in calls:
                code = code or call()
            self._nccl.check(code)

        return Calls(calls[0], run_burst, self._nccl.check)

    def all_reduce(self, data: Any, stream: Any) -> None:
        """One call in place, in a torch.cuda.Stream; `data`: a tensor."""
        address, dtype = data.data_ptr(), str(data.dtype).removeprefix("torch.")
        function, arguments = self._nccl.call(
            "all_reduce", self._comm, stream.cuda_stream, dtype, data.numel(), address, address
        )
        self._nccl.check(function(*arguments))

    def close(self) -> None:
        """See :class:`CudaLibrary`."""
        self._nccl.leave(self._comm)

    def _call(self, case: Case, buffers: Buffers) -> Issue:
        send, recv = _addresses(buffers)
        function, arguments = self._nccl.call(
            case.collective, self._comm, self._stream, case.dtype, case.count, send, recv, ROOT
        )
        return partial(function, *arguments)


def _addresses(buffers: Buffers) -> tuple[int, int]:
    source, target = buffers
    return source.data_ptr(), (source if target is None else target).data_ptr()


def _at(array: Any, place: int) -> Any:
    """The address of an array's element, as a ctypes pointer."""
    return ctypes.cast(
        ctypes.byref(array, place * ctypes.sizeof(ctypes.c_void_p)), ctypes.POINTER(_abi.Handle)
    )
