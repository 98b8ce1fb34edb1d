"""How completions come from the library into Python.

A thread that waits for a request, or tests it, takes its completion itself. The library is asked
for a call, for which it wakes a thread, only where nobody may look: for a request with callbacks,
and for one that the user has dropped while it was pending, whose buffers must stay alive. The
library then calls one C function, which is made once and never freed. It gets a number, by which a
table here knows what is meant and keeps it alive.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from typing import Any, Protocol

from . import _abi


class Completed(Protocol):
    """What the library is to tell of a completion: a request, or its remains."""

    @property
    def context(self) -> object: ...

    def _finish(self, code: int, destroyed: bool = False) -> None: ...


class Remains:
    """What is left of a pending request that the user has dropped: its buffers."""

    def __init__(self, context: object, keep: tuple[Any, ...]) -> None:
        """Keeps `keep` alive while it is in the table."""
        self.context = context
        self._keep = keep

    def _finish(self, code: int, destroyed: bool = False) -> None:
        """The library has let go of the buffers, and so does this, by leaving the table."""


_pending: dict[int, Completed] = {}
_numbers = itertools.count(1)
_thread = threading.local()


def register(request: Completed) -> int:
    """Keeps `request` until the library calls or it is forgotten; gives the number for the call."""
    number = next(_numbers)
    _pending[number] = request
    return number


def forget(number: int) -> None:
    """Drops what the library will not call for after all; for 0, nothing."""
    _pending.pop(number, None)


def drop_context(context: object) -> None:
    """Ends what a destroyed context has left behind, so that nobody waits for it for ever."""
    for number, request in list(_pending.items()):
        if request.context is context:
            _pending.pop(number, None)
            request._finish(_abi.ERROR_ABORTED, destroyed=True)


def forked() -> None:
    """In a child of fork(): what is pending is the parent's, and so is the callback thread."""
    global _thread
    _pending.clear()
    _thread = threading.local()


def callback_context() -> object | None:
    """The context whose callback the calling thread is running now, or None."""
    return getattr(_thread, "context", None)


def report(error: BaseException, where: object) -> None:
    """Hands an exception that has no caller to sys.unraisablehook.

    Python has no function for that, but ctypes does it for what its callbacks raise; the callback
    made here has the name of `where`, because that is what the report shows.
    """

    def unjam_callback() -> None:
        raise error

    unjam_callback.__qualname__ = f"unjam callback {getattr(where, '__qualname__', repr(where))}"
    _NoArguments(unjam_callback)()


_NoArguments = ctypes.CFUNCTYPE(None)


def _completed(result: int, user: int | None) -> None:
    request = _pending.pop(user or 0, None)
    if request is None:
        return
    _thread.context = request.context
    try:
        request._finish(result)
    except BaseException as error:  # nothing may escape into the library's thread
        report(error, request)
    finally:
        _thread.context = None


_trampoline = _abi.Callback(_completed)
ADDRESS: int = ctypes.cast(_trampoline, ctypes.c_void_p).value or 0
"""Address of the C function to pass as ``unjamCallback_t``; the number goes into ``user``."""
