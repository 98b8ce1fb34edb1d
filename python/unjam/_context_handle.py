"""A context as the objects that it makes see it: its handle, and the guards around C calls.

Groups, requests, memory and registrations stand on this file, and ``context`` stands on them. So no
module needs one that needs it.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from . import _abi, _completion
from ._devices import HOST
from ._errors import InvalidUsage, make_error
from ._lib import check, last_error, library


class Registered(Protocol):
    """Memory that a context holds a registration of."""

    def _keep(self) -> None: ...

    def _end(self) -> None: ...


class ContextHandle:
    """The handle of a context, who may use it now, and what it was opened with.

    C calls under way hold the handle, and closing waits for them: a handle that is used after it
    was destroyed would be memory that is another's.
    """

    def __init__(self, handle: Any, rank: int, size: int, place: int, tracing: bool) -> None:
        """`place`: as ``_devices`` counts them; `tracing`: whether events are kept."""
        self._handle = handle
        self._rank = rank
        self._size = size
        self._place = place
        self._tracing = tracing
        self._names: dict[int, tuple[str, str]] = {}  # key hash -> (group, key), while tracing
        # It is re-entrant, for a request's finaliser may run at any place of the thread that holds
        # it.
        self._guard = threading.RLock()
        self._idle = threading.Condition(self._guard)
        self._users = 0
        self._closing = False
        self._closed = False
        self._registrations: dict[Registered, None] = {}  # in the order of their making
        # True in a child of fork() that has not made this context: the library refuses its calls.
        self.inherited = False

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        return self._rank

    @property
    def size(self) -> int:
        """Ranks of the job."""
        return self._size

    @property
    def device(self) -> str:
        """Where its engine runs and its buffers are: "host", or "cuda:" and the index."""
        return "host" if self._place == HOST else f"cuda:{self._place}"

    @property
    def closed(self) -> bool:
        """Whether ``close()`` has succeeded."""
        return self._closed

    def absent(self) -> list[int]:
        """Ranks that are no longer there: their process died, or they were aborted or closed.

        After a :class:`~unjam.Peer` error the survivors go on with ``Group.shrink``.
        """
        ranks = (ctypes.c_int * self._size)()
        count = ctypes.c_int()
        with self._call() as lib:
            check(lib.unjamContextAbsent(self._handle, ranks, self._size, ctypes.byref(count)))
        return list(ranks[: count.value])

    # ---- guards around C calls ----

    def _enter(self) -> bool:
        """Holds the handles for a C call; False if the context is closed. Pair with _leave()."""
        with self._guard:
            while self._closing:
                if _completion.callback_context() is self:
                    return False  # close() is waiting for this callback
                self._idle.wait()
            if self._closed:
                return False
            self._users += 1
            return True

    def _leave(self) -> None:
        with self._guard:
            self._users -= 1
            if self._closing and not self._users:
                self._idle.notify_all()

    @contextmanager
    def _call(self) -> Iterator[Any]:
        if not self._enter():
            raise self._closed_error()
        try:
            yield library()
        finally:
            self._leave()

    def _closed_error(self) -> InvalidUsage:
        return InvalidUsage(
            f"the context of rank {self._rank} is closed: call before the end of its `with` block "
            "or its close(), or join a new job"
        )

    # ---- the end ----

    def _destroy(self) -> bool:
        """Waits for C calls under way, then destroys the handle; False if that was done before.

        Raises:
            UnjamError: the library refuses, and the context stays open.
        """
        with self._idle:
            while self._closing:
                self._idle.wait()
            if self._closed:
                return False
            self._closing = True
            try:
                while self._users:
                    self._idle.wait()
            except BaseException:
                self._closing = False
                self._idle.notify_all()
                raise
        code = _abi.ERROR_INTERNAL
        message = ""
        try:
            code = library().unjamDestroy(self._handle)
            if code:
                message = last_error(code)
        finally:
            with self._idle:
                self._closing = False
                self._closed = code == _abi.SUCCESS
                self._idle.notify_all()
        if code:
            raise make_error(code, message)
        return True

    def _disown(self) -> None:
        """In a child of fork()."""
        self.inherited = True
        self._guard = threading.RLock()
        self._idle = threading.Condition(self._guard)
        self._users = 0
        self._closing = False

    def _free_request(self, handle: Any, keep: tuple[Any, ...] | None) -> None:
        """From a request's finaliser: must not wait.

        Args:
            handle: of the request.
            keep: what must stay alive until it is complete; None if it is known to be.
        """
        if self.inherited:
            return
        with self._idle:
            if self._closing:
                if keep is not None:  # for as long as it takes
                    _completion.register(_completion.Remains(self, keep))
                return
            closed = self._closed
            self._users += 1
        try:
            lib = library()
            done = ctypes.c_int(closed or keep is None)
            if not done.value:
                lib.unjamTest(handle, ctypes.byref(done))
            if keep is not None and not done.value:
                number = _completion.register(_completion.Remains(self, keep))
                # Where that fails, the buffers stay until the context is closed.
                lib.unjamOnComplete(handle, _completion.ADDRESS, number)
            lib.unjamRequestFree(handle)
        finally:
            self._leave()
