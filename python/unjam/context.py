"""Contexts: one rank of a job each."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from . import _abi, _arguments, _completion, _ending
from . import _limits as limits
from ._closing import ClosesAtEnd
from ._config import make_config
from ._context_handle import ContextHandle
from ._devices import HOST, choose_index
from ._errors import InvalidArgument, InvalidType, InvalidUsage, Timeout, UnjamError, make_error
from ._explanation import explanation_lines
from ._interrupt import SLICE_S, interruptible
from ._lib import check, last_error, library, read_json
from ._log import logger
from .group import Group
from .memory import Memory
from .registration import Registration
from .request import forked as forked_requests
from .stats import Stats
from .trace import TraceEvent, read_trace

# The references are strong: a context lives until it is closed, at the latest at exit. A dict keeps
# their order.
_open: dict[Context, None] = {}
_open_lock = threading.Lock()
_LONGEST_STEP_S = 1e9  # of a wait in C, whose microseconds are an int64
_explained_too: list[Callable[[], list[tuple[int, dict[str, Any]]]]] = []


def unique_id() -> bytes:
    """A secret name for a new job, 128 bytes, to be handed to every rank's :func:`init`.

    Ranks are threads of this process, or other processes of this machine and user: hand it to them
    by a pipe, a file, a key-value store, or as ``UNJAM_ID`` in hexadecimal digits
    (``unique_id().hex()``, or ``unjam id`` on the command line) in their environment.
    """
    unique = _abi.UniqueId()
    check(library().unjamGetUniqueId(ctypes.byref(unique)))
    return bytes(unique)


def init(nranks: int, rank: int, unique_id: bytes, **config: Any) -> Context:
    """Joins a job as one of its ranks; returns when all ranks have joined.

    Args:
        nranks: ranks of the job, 1 to 65,535 (on CUDA devices 1 to 64).
        rank: this one, 0 to nranks - 1.
        unique_id: from :func:`unique_id`, the same on all ranks.
        config: fields of ``unjamConfig_t``: policy ("adaptive", "fixed", "hold"), order ("fifo",
            "priority"), algorithm (a name that
            UNJAM_ALGORITHM takes), device ("host", "cuda"),
            device_index (CUDA; None: the calling thread's current device as torch has it, or 0),
            lanes, trace_events, stall_ms, …; what is not given comes from the environment (``unjam
            env``), then from the defaults.

    Raises:
        InvalidArgument: a bad rank, id or setting; unknown settings raise InvalidType.
        Timeout: ranks are missing after UNJAM_INIT_TIMEOUT_MS (30 s by default); the message names
            them.
        UnjamError: ranks that differ in a setting that must be equal, and the system's refusals.
    """
    nranks = _check_ranks(nranks)
    rank = _arguments.index(rank, "rank")
    if not 0 <= rank < nranks:
        raise InvalidArgument(
            f"rank {rank} of a job of {nranks} ranks: they go from 0 to {nranks - 1}"
        )
    if not isinstance(unique_id, (bytes, bytearray, memoryview)):
        raise InvalidType(
            f"unique_id must be bytes, not {type(unique_id).__name__}: pass what "
            "unjam.unique_id() gave"
        )
    if len(unique_id) != _abi.UNIQUE_ID_BYTES:
        raise InvalidArgument(
            f"unique_id has {len(unique_id)} bytes, not {_abi.UNIQUE_ID_BYTES}: pass what "
            "unjam.unique_id() gave"
        )
    settings = make_config(config)
    choose_index(settings)
    unique = _abi.UniqueId.from_buffer_copy(unique_id)
    lib = library()
    handle = ctypes.c_void_p()

    def join() -> None:
        check(lib.unjamInit(ctypes.byref(handle), nranks, unique, rank, ctypes.byref(settings)))

    interruptible(join, lambda: lib.unjamDestroy(handle))
    return Context(handle, rank, nranks, settings, unique_id=bytes(unique_id))


def init_from_environment(**config: Any) -> Context:
    """Joins a job as the rank that the environment names.

    ``UNJAM_RANK``, ``UNJAM_RANKS`` and ``UNJAM_ID``, or what torchrun, mpirun or srun set.

    Args:
        config: as for :func:`init`.

    Raises:
        InvalidUsage: the environment names no rank or no job; the message says what to set.
        UnjamError: as :func:`init`.
    """
    settings = make_config(config)
    choose_index(settings)
    lib = library()
    handle = ctypes.c_void_p()

    def join() -> None:
        check(lib.unjamInitFromEnvironment(ctypes.byref(handle), ctypes.byref(settings)))

    interruptible(join, lambda: lib.unjamDestroy(handle))
    rank, size = ctypes.c_int(), ctypes.c_int()
    check(lib.unjamContextRank(handle, ctypes.byref(rank)))
    check(lib.unjamContextSize(handle, ctypes.byref(size)))
    return Context(handle, rank.value, size.value, settings)


def init_all(nranks: int, **config: Any) -> Contexts:
    """All contexts of a job at once, by one thread.

    Args:
        nranks: ranks of the job, 1 to 65,535 (on CUDA devices 1 to 64).
        config: as for :func:`init`; the same for all ranks. Without a device_index, rank r of a
            CUDA job uses device r, of d devices r modulo d; ranks that share one have fewer lanes.

    Returns:
        A list of contexts, by rank, that is also a context manager: ``with unjam.init_all(4) as
        contexts`` closes all at the end, and aborts all first if the block raises.
    """
    settings = make_config(config)
    nranks = _check_ranks(nranks)
    handles = (ctypes.c_void_p * nranks)()
    check(library().unjamInitAll(handles, nranks, ctypes.byref(settings)))
    unique = os.urandom(16)  # of this job among those of this process
    return Contexts(
        Context(ctypes.c_void_p(handle), rank, nranks, settings, unique_id=unique)
        for rank, handle in enumerate(handles)
    )


def _find_place(handle: Any, settings: _abi.Config) -> int:
    """As ``_devices`` counts places; the library is asked, which deals out the GPUs."""
    if settings.device == 0 or (settings.device < 0 and "UNJAM_DEVICE" not in os.environ):
        return HOST
    info: dict[str, Any] = read_json(
        lambda buffer, size, needed: library().unjamInfo(handle, buffer, size, needed)
    )
    return HOST if info["device"] == "host" else int(info["kernel"]["device"])


def _check_ranks(nranks: Any) -> int:
    number = _arguments.index(nranks, "nranks")
    if not 1 <= number <= limits.RANKS:
        raise InvalidArgument(f"nranks is {number}: a job has 1 to {limits.RANKS} ranks")
    return number


class Context(ContextHandle, ClosesAtEnd):
    """One rank of a job. Made by :func:`init` or :func:`init_all`; close it when done.

    As a context manager it closes itself at the end of the block; if the block raises, it aborts
    first, so that no peer waits for a rank that is gone. All methods may be called from any thread.
    """

    def __init__(
        self, handle: Any, rank: int, size: int, settings: _abi.Config, unique_id: bytes = b""
    ) -> None:
        """Made by :func:`init` and :func:`init_all`, not by users."""
        tracing = bool(settings.trace_events or os.environ.get("UNJAM_TRACE_EVENTS"))
        super().__init__(handle, rank, size, _find_place(handle, settings), tracing)
        self._job: object = unique_id or object()  # equal for ranks of one job
        self._residency_s = settings.residency_us * 1e-6
        self._aborted = False
        with _open_lock:
            _open[self] = None
        _ending.at_exit(_end_all)

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"<unjam.Context rank {self._rank} of {self._size}{state}>"

    # ---- groups ----

    def group(self, ranks: Sequence[int] | None = None, name: str = "") -> Group:
        """A group of ranks. Local: does not communicate, and waits for nobody.

        Every member makes it with the same ranks in the same order. Groups with equal members are
        told apart by name, and those with equal names by the number of earlier ones on the rank.

        Args:
            ranks: distinct ranks of the job, this one among them; None: all.
            name: shown in messages and traces.

        Raises:
            InvalidArgument: a rank twice, out of range, or this rank is not among them.
        """
        members = None
        if ranks is not None:
            try:
                members = list(ranks)
            except TypeError:
                raise InvalidType(
                    f"ranks must be a list of ranks, not {type(ranks).__name__} {ranks!r}"
                ) from None
            members = [_arguments.integer(rank, "rank") for rank in members]
        return Group(self, members, name)

    # ---- memory ----

    def alloc(self, nbytes: int) -> Memory:
        """Memory for buffers, from the heap that ``heap_bytes`` (``UNJAM_HEAP``) sets aside.

        Peers may store results into outputs there themselves. Local, and waits for nobody.

        Args:
            nbytes: how many bytes; their contents are undefined.

        Raises:
            InvalidArgument: fewer than none.
            Resources: there is no heap, or no room in it; the message says what there is.
        """
        nbytes = _arguments.integer(nbytes, "nbytes", bits=64)
        if nbytes < 0:
            raise InvalidArgument(f"nbytes is {nbytes}: give the number of bytes, from 0")
        return Memory._allocate(self, nbytes, self._place)

    def register_memory(self, memory: Any) -> Registration:
        """Lets peers store results into outputs in this memory themselves, as in the heap.

        A hint: results are the same without it, and no other rank need do so. Local, waits for no
        peer. For outputs that begin at a multiple of 16 bytes and lie in one registration as a
        whole. It lasts until ``close()`` of what is returned (also a context manager), at the
        latest until this context is closed; the memory is kept until then, and must not be freed
        or resized.

        Args:
            memory: an array or a tensor whose memory results may go to; or (address, bytes). On a
                GPU memory of ``cudaMalloc``: torch's, unless its segments are expandable.

        Raises:
            InvalidArgument: no such memory; the message says what is wrong with it.
            InvalidUsage: some of it is registered already.
            Resources: there are 64 registrations, as many as a rank can have.
        """
        return Registration(self, memory)

    # ---- the end ----

    def abort(self) -> None:
        """Ends every pending invocation of this rank with Aborted, and refuses further ones.

        Returns always, from any thread. Peers' pending invocations that share a group with this
        rank end with :class:`~unjam.Peer`. Does nothing on a closed context.
        """
        if self._enter():
            self._aborted = True
            try:
                check(library().unjamAbort(self._handle))
            finally:
                self._leave()

    def close(self) -> None:
        """Ends the context and frees its groups, collectives and requests. Local; may be repeated.

        Raises:
            InvalidUsage: invocations are pending; the message names them and nothing has changed:
                wait for them, or :meth:`abort` first. Also if called from one of its own callbacks.
        """
        if _completion.callback_context() is self:
            raise InvalidUsage(
                "a callback must not close its own context: close it in another thread"
            )
        stored_into = self._may_be_stored_into()
        if not self._destroy():
            return
        for registration in list(self._registrations):
            if stored_into:
                registration._keep()
            registration._end()
        _completion.drop_context(self)
        with _open_lock:
            _open.pop(self, None)

    def _may_be_stored_into(self) -> bool:
        """Whether peers may store into what is registered when the context has ended."""
        if not self._registrations or self.closed:
            return False
        return self._aborted or self.info()["windows"]["retired"] != 0

    def _end_block(self, failed: bool) -> None:
        if self.inherited:  # it is for the parent to end it
            return
        if not failed:
            try:
                self.close()
            except InvalidUsage:
                self._abort_and_close()
                raise
        else:
            self._abort_and_close()

    def _abort_and_close(self) -> None:
        self.abort()
        self.close()

    # ---- what is going on ----

    def device_synchronize(self, timeout: float | None = None) -> None:
        """Waits until no engine of this rank is running, as cudaDeviceSynchronize would on a GPU.

        Pending collectives do not delay it, except under policy "hold", where it can wait for ever.

        Args:
            timeout: seconds; None waits without limit.

        Raises:
            Timeout: the time has passed.
            Aborted: the context was aborted meanwhile.
        """
        _arguments.check_timeout(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        # Every C call begins to look anew, so a slice shorter than an engine's longest stay would
        # never see its end. Only the main thread needs slices, because only it gets Ctrl-C.
        sliced = threading.current_thread() is threading.main_thread()
        longest = max(0.5, 8 * self._residency_s)
        slice_s = SLICE_S
        while True:
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            step = remaining
            if sliced and (step is None or step > slice_s):
                step = slice_s
            # Where C has no number for it, the next step takes the rest.
            microseconds = -1 if step is None else int(min(step, _LONGEST_STEP_S) * 1e6)
            with self._call() as lib:
                code = lib.unjamDeviceSynchronize(self._handle, microseconds)
                if code != _abi.ERROR_TIMEOUT:
                    check(code)
                    return
            if step == remaining and step is not None and step <= _LONGEST_STEP_S:
                raise Timeout(
                    f"an engine of rank {self._rank} is still running after {timeout:g} s "
                    "(Context.explain() tells what it runs)"
                )
            slice_s = min(2 * slice_s, longest)

    def stats(self) -> Stats:
        """A snapshot of the counters since the context began."""
        struct = _abi.Stats(size=ctypes.sizeof(_abi.Stats))
        with self._call() as lib:
            check(lib.unjamGetStats(self._handle, ctypes.byref(struct)))
        return Stats.from_struct(struct)

    def info(self) -> dict[str, Any]:
        """Settings, memory by key and peer, heap, windows, what keys hold; figures by key, lane."""
        with self._call() as lib:
            info: dict[str, Any] = read_json(
                lambda buffer, size, needed: lib.unjamInfo(self._handle, buffer, size, needed)
            )
        return info

    def explain(self) -> dict[str, Any]:
        """Who waits for whom, over all ranks of the job.

        Waits for the answers of other processes, a second at most. The signal SIGUSR2
        (``UNJAM_EXPLAIN_SIGNAL``) prints the same.

        Returns:
            ``{"ranks": [{"rank", "running", "waits_for", "pending": [{"group", "key", "n", "what",
            "age_ms", "called_by", "not_called_by", "instead", "engines": [{"lane", "waits_for", …},
            …]}, …]}, …], "cycles": [{"text", "edges": [{"rank", "runs": {"group", "key", "n"},
            "waits_for"}, …]}, …], "absent": [{"rank", "why"}, …]}``.

            At most 64 ranks are in a list, those that others wait for first. "ranks_more",
            "called_by_more" and so on say how many others there are, if any.

            ``instead`` says what those that have not called it have called of the same group that
            this rank has not, as a send under another key; "" if nothing. ``engines`` has an entry
            for each lane that works on the call: it waits for "data" (from "rank", since
            "since_ms"), for "room" (towards "rank", since "since_ms"), for its "turn" (use "n" of
            the key is not complete), for its "start" (it has not been begun), or for "nothing" (it
            moves, or its part is done). A cycle is there only if it is certain: no
            rank in it can go on.
        """
        with self._call() as lib:
            explanation: dict[str, Any] = read_json(
                lambda buffer, size, needed: lib.unjamExplain(self._handle, buffer, size, needed)
            )
        return explanation

    def trace(self) -> list[TraceEvent]:
        """The newest events, oldest first, lane after lane; empty unless ``trace_events`` is "
        "set."""
        with self._call():
            return read_trace(self._handle, self._names)

    def async_error(self) -> UnjamError | None:
        """The context's first asynchronous error (abort, mismatch, peer), or None. Not raised."""
        code = ctypes.c_int(0)
        text = ctypes.create_string_buffer(4096)
        with self._call() as lib:
            check(
                lib.unjamGetAsyncError(self._handle, ctypes.byref(code), text, ctypes.sizeof(text))
            )
        return make_error(code.value, text.value.decode("utf-8", "replace")) if code.value else None


class Contexts(list[Context], ClosesAtEnd):
    """All contexts of a job made by :func:`init_all`, by rank; a context manager over them."""

    def _end_block(self, failed: bool) -> None:
        if failed:
            for context in self:
                if not context.inherited:
                    context.abort()
        first: UnjamError | None = None
        for context in self:
            try:
                context._end_block(failed)
            except UnjamError as failure:
                first = first or failure
        if first is not None and not failed:
            raise first

    def abort(self) -> None:
        """Aborts every context."""
        for context in self:
            context.abort()

    def close(self) -> None:
        """Closes every context; raises what :meth:`Context.close` raises, at the first that "
        "refuses."""
        for context in self:
            context.close()


def open_contexts() -> list[Context]:
    """Those of this process, in the order of their making."""
    with _open_lock:
        return list(_open)


def explained_too(jobs: Callable[[], list[tuple[int, dict[str, Any]]]]) -> None:
    """:func:`explain` tells of these jobs as well: each is (ranks, what ``explain()`` gives)."""
    _explained_too.append(jobs)


def explain() -> str:
    """What every rank of every open job waits for, as text: one line a pending collective.

    The ranks of other processes are asked; a second at most is waited for each job's. For
    machines: :meth:`Context.explain`.
    """
    told: dict[object, list[str]] = {}
    for context in open_contexts():
        if context._job in told:
            continue  # another rank of the job has told it all
        with suppress(UnjamError):
            told[context._job] = [
                f"job of {context.size} ranks",
                *explanation_lines(context.explain()),
            ]
    for jobs in _explained_too:
        for size, explanation in jobs():
            told[object()] = [f"job of {size} ranks", *explanation_lines(explanation)]
    return "\n".join(line for lines in told.values() for line in lines)


def _forked() -> None:
    """In a child of fork(): contexts stay with the parent, of whose threads none is here.

    Locks may be held by them, so there are new ones; what calls the library is refused there. Exit
    handlers find nothing to close.
    """
    global _open_lock
    _open_lock = threading.Lock()
    for context in list(_open):
        context._disown()
    _open.clear()
    _completion.forked()
    forked_requests()


os.register_at_fork(after_in_child=_forked)


def _end_all() -> None:
    """At the end of the process, see ``unjamFinalize`` in unjam.h: ends what was left open.

    What is pending is waited for a while, unless the process fails. No callback may reach an
    interpreter that is gone.
    """
    with _open_lock:
        contexts = list(_open)
    if not contexts:
        return
    lib = library()
    if code := lib.unjamFinalize(_ending.patience_us()):
        logger.warning("%s", last_error(code))
    for context in contexts:
        context._aborted = True  # what peers may store into is kept
        with suppress(UnjamError):
            context.close()
