"""One invocation: wait for it, test it, await it, or be called back."""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from . import _abi, _arguments, _completion
from ._context_handle import ContextHandle
from ._devices import stream_of
from ._errors import Aborted, InvalidArgument, InvalidUsage, Timeout, UnjamError, make_error
from ._interrupt import SLICE_S
from ._lib import check, last_error, library

if TYPE_CHECKING:
    # What a user reads of a request's context is all of it; see test_imports.py.
    from .context import Context

# Guards every request's list of callbacks. It is re-entrant, for the garbage collector may run a
# user's finaliser at any place of the thread that holds it.
_lock = threading.RLock()


class Request:
    """An invocation under way, as a future.

    Returned by every collective call. Dropping it is fine: the invocation goes on and its buffers
    stay alive until it is complete. Safe to use from any thread.

    Ordering: when :meth:`wait`, :meth:`result`, :meth:`exception` or :meth:`test` has told of
    completion, or a callback runs, the output is complete and visible to the calling thread. Until
    then the input must not change and the output must not be read.

    On a CUDA device, :meth:`wait` without a time limit lets a stream wait instead of the thread, as
    in PyTorch; :meth:`synchronize`, :meth:`result`, :meth:`exception` and :func:`unjam.wait_all`
    block the thread everywhere.
    """

    __slots__ = (
        "__weakref__",
        "_callbacks",
        "_code",
        "_handle",
        "_keep",
        "_message",
        "_ordered",
        "_output",
        "_stream",
        "_watched",
        "_what",
        "context",
    )

    def __init__(
        self,
        context: ContextHandle,
        what: tuple[str, str, str],
        output: Any,
        keep: tuple[Any, ...],
        callback: Callable[[Request], object] | None,
        stream: int | None = None,
        in_stream: bool = False,
    ) -> None:
        """Made by groups and collectives, not by users; `stream` None: on the host device."""
        self.context: Context = context  # type: ignore[assignment]  # there is no other handle
        self._what = what
        self._output = output
        self._keep: tuple[Any, ...] | None = keep
        self._stream = stream
        # The call's own stream comes after it, so freed memory is safe as that of a kernel is.
        self._ordered = in_stream
        self._handle = ctypes.c_void_p()
        self._code: int | None = None  # result once known to be complete
        self._message = ""
        # True: the library will call _finish(). Else its work is done by the thread that finds the
        # request complete.
        self._watched = callback is not None
        # None once they have run.
        self._callbacks: list[Callable[[Request], object]] | None = (
            [] if callback is None else [callback]
        )

    def __repr__(self) -> str:
        state = "failed" if self._code else "complete"
        if self._code is None:
            state = "pending"
        return f"<unjam.Request {self._name()}: {state}>"

    def _name(self) -> str:
        kind, key, group = self._what
        where = f" of group {group!r}" if group else ""
        return f"{kind} under key {key!r}{where} on rank {self.context.rank}"

    def __del__(self) -> None:
        # This runs only when no thread is inside a wait.
        handle = getattr(self, "_handle", None)
        if handle:
            known = self._code is not None or self._ordered
            self.context._free_request(handle, None if known else self._keep)

    # ---- completion ----

    def test(self) -> bool:
        """Whether the invocation is complete, in error too. Never blocks, never raises its "
        "error.

        Raises:
            InvalidUsage: called in a child of fork(); the request stays with the parent.
        """
        if self._code is not None:
            return True
        if not self.context._enter():
            return self._after_close()
        try:
            if not self._handle:
                return self._code is not None
            done = ctypes.c_int(0)
            code = library().unjamTest(self._handle, ctypes.byref(done))
            if done.value:
                self._complete(code)
            elif code:  # not the invocation's: such as in a forked child
                raise make_error(code, last_error(code))
        finally:
            self.context._leave()
        return self._code is not None

    done = test

    def wait(self, timeout: float | None = None, *, stream: Any = None) -> None:
        """Makes what follows come after the invocation: the calling thread, or a CUDA stream.

        On the host device, or with a time limit, as :meth:`synchronize`. On a CUDA device without a
        time limit it returns at once, and work queued in the stream from now on runs after the
        invocation and sees its results. An invocation that fails ends that wait, too: the error is
        raised by :meth:`synchronize` and told by ``Context.async_error``.

        Args:
            timeout: seconds, in which the calling thread waits; 0 only looks.
            stream: CUDA: as for the group's calls; None: torch's current stream.

        Raises:
            InvalidArgument: a stream where none can be waited with, or a bad one.
            UnjamError: as :meth:`synchronize`; without blocking, what is known already.
        """
        if self._stream is not None and timeout is None:
            self._stream_wait(stream)
            return
        if stream is not None:
            raise InvalidArgument(
                "stream cannot be combined with timeout: a stream waits without limit"
                if self._stream is not None
                else "stream is for CUDA, but this request is of the host device: leave it out"
            )
        self.synchronize(timeout)

    def synchronize(self, timeout: float | None = None) -> None:
        """Waits, in the calling thread, until the invocation is complete.

        Obeys Ctrl-C: KeyboardInterrupt is raised within about 50 ms and leaves the invocation
        pending.

        Args:
            timeout: seconds; None waits without limit, 0 only looks.

        Raises:
            Timeout: the time has passed; the invocation goes on.
            InvalidUsage: called from a callback while pending: the callback thread is what would
                complete it. Or in a child of fork(): the request stays with the parent.
            UnjamError: the invocation failed (Mismatch, Peer, Aborted, …).
        """
        if self._code is None:
            self._wait(timeout)
        if self._code:
            raise self._error()

    def result(self, timeout: float | None = None) -> Any:
        """Waits as :meth:`synchronize`, then gives the output: the object passed as out (or, in
        place, as x).

        None on ranks that receive nothing (a reduce, away from its root).
        """
        self.synchronize(timeout)
        return self._output

    def exception(self, timeout: float | None = None) -> UnjamError | None:
        """Waits, then gives the invocation's error, or None if it succeeded.

        Raises:
            Timeout: the time has passed; the invocation goes on.
        """
        if self._code is None:
            self._wait(timeout)
        return self._error() if self._code else None

    def add_done_callback(self, callback: Callable[[Request], object]) -> None:
        """Calls ``callback(request)`` on completion, from the context's callback thread.

        If the invocation's completion has been told already, calls it at once in this thread. The
        callback may submit further collectives, but must not wait for pending ones. An exception in
        it goes to ``sys.unraisablehook``; the other callbacks still run.
        """
        _arguments.check_callback(callback, optional=False)
        if self.context.inherited:
            self.test()
        if not self._watched:
            self.test()
        with _lock:
            watched, pending = self._watched, self._callbacks is not None
            if self._callbacks is not None:
                self._callbacks.append(callback)
                self._watched = True
        if not pending:
            self._call(callback)
        elif not watched:
            self._watch()

    def __await__(self) -> Generator[Any, None, Any]:
        """``await request`` gives what :meth:`result` gives, without blocking the event loop."""
        if self._code is None:
            loop = asyncio.get_running_loop()
            future: asyncio.Future[None] = loop.create_future()

            def resolve() -> None:
                if not future.done():
                    future.set_result(None)

            def completed(_: Request) -> None:
                with suppress(RuntimeError):  # the loop may be closed: nobody waits any more
                    loop.call_soon_threadsafe(resolve)

            self.add_done_callback(completed)
            yield from future
        return self.result()

    # ---- inside ----

    def _stream_wait(self, stream: Any) -> None:
        if self._code:
            raise self._error()
        queue = stream_of(stream, self.context._place)
        if self._code is not None or (self._ordered and queue == self._stream):
            return
        if not self.context._enter():
            if not self._after_close():
                raise self.context._closed_error()
            return
        try:
            check(library().unjamStreamWait(self._handle, queue or None))
        finally:
            self.context._leave()
        self._ordered = self._ordered or queue == self._stream

    def _wait(self, timeout: float | None) -> None:
        context = self.context
        _arguments.check_timeout(timeout)
        if context.inherited:
            self.test()  # raises
        if _completion.callback_context() is not None and not self.test():
            raise InvalidUsage(
                f"{self._name()} is pending, and a callback must not wait for collectives: use "
                "add_done_callback, or wait in another thread"
            )
        deadline = None if timeout is None else time.monotonic() + timeout
        lib = library()
        while self._code is None:
            remaining = SLICE_S if deadline is None else deadline - time.monotonic()
            if not context._enter():
                if not self._after_close():
                    raise InvalidUsage(
                        f"{self._name()} has lost its context, which is closed: wait for requests "
                        "before the context ends"
                    )
                return
            try:
                code = lib.unjamWait(self._handle, max(0, int(min(remaining, SLICE_S) * 1e6)))
                if code != _abi.ERROR_TIMEOUT:
                    self._complete(code)
                    return
                if self._ended_by_timeout():
                    return
            finally:
                context._leave()
            if deadline is not None and remaining <= SLICE_S and time.monotonic() >= deadline:
                raise Timeout(
                    f"{self._name()} is still pending after {timeout:g} s (it goes on; "
                    "Context.explain() tells who waits for whom)"
                )

    def _ended_by_timeout(self) -> bool:
        """After unjamWait gave ERROR_TIMEOUT: whether that is the invocation's own result."""
        done = ctypes.c_int(0)
        code = library().unjamTest(self._handle, ctypes.byref(done))
        if done.value:
            self._complete(code)
        return bool(done.value)

    def _complete(self, code: int) -> None:
        """Notes the result; the C call that gave it was made by this thread."""
        if code and not self._message:
            text = library().unjamRequestError(self._handle) or b""
            self._message = text.decode("utf-8", "replace") or last_error(code)
        self._code = code
        with _lock:
            if not self._watched:
                self._keep = self._callbacks = None

    def _after_close(self) -> bool:
        """As test(), where the context is closed: then all is complete, and handles stay valid."""
        if self._code is None and self._handle and self.context.closed:
            done = ctypes.c_int(0)
            code = library().unjamTest(self._handle, ctypes.byref(done))
            if done.value:
                self._complete(code)
        return self._code is not None

    def _watch(self) -> None:
        """Asks the library to call _finish(); not more than once."""
        if not self.context._enter():
            if self._after_close():
                self._finish(self._code or 0)
            return
        number = _completion.register(self)
        try:
            code = library().unjamOnComplete(self._handle, _completion.ADDRESS, number)
            if code:
                check(code)
        except BaseException:
            _completion.forget(number)
            raise
        finally:
            self.context._leave()

    def _finish(self, code: int, destroyed: bool = False) -> None:
        """The library has let go of the buffers: called once, mostly from the callback thread.

        The handle is valid there without a guard, because destroying a context first ends its
        callback thread; `destroyed` tells of the one call that comes after that.
        """
        if code and self._code is None and self._handle and not destroyed:
            text = library().unjamRequestError(self._handle) or b""
            self._message = text.decode("utf-8", "replace")
        if self._code is None:
            self._code = code
        self._keep = None
        with _lock:
            callbacks, self._callbacks = self._callbacks, None
        for callback in callbacks or ():
            self._call(callback)

    def _call(self, callback: Callable[[Request], object]) -> None:
        try:
            callback(self)
        except BaseException as error:
            _completion.report(error, callback)

    def _error(self) -> UnjamError:
        code = self._code or 0
        if not self._message and self._handle and self.context._enter():
            # It was complete before the submitting call had returned the handle.
            try:
                text = library().unjamRequestError(self._handle) or b""
                self._message = text.decode("utf-8", "replace")
            finally:
                self.context._leave()
        if code == _abi.ERROR_ABORTED and not self._message:
            return Aborted(f"{self._name()} was ended: its context was aborted or destroyed")
        return make_error(code, self._message or f"{self._name()} failed with code {code}")


def forked() -> None:
    """In a child of fork(): a thread that is not there may have held the lock."""
    global _lock
    _lock = threading.RLock()


def wait_all(requests: Iterable[Request], timeout: float | None = None) -> None:
    """Waits in the calling thread for all requests, with one time limit for all of them.

    Args:
        timeout: seconds; None waits without limit.

    Raises:
        Timeout: the time has passed; what is pending goes on.
        UnjamError: the first request, in the order given, that failed. The others were waited for
            too.
    """
    _arguments.check_timeout(timeout)
    deadline = None if timeout is None else time.monotonic() + timeout
    first: UnjamError | None = None
    for request in requests:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        error = request.exception(left)
        first = first or error
    if first is not None:
        raise first
