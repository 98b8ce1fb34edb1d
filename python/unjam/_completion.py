"""How completions come from the library into Python.

The library calls one C function, made once and never freed, with an integer that names the request.
A table holds every pending request, and through it the request's buffers: they stay alive until the
library has let go of them, also if the user has dropped the request.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from typing import TYPE_CHECKING

from . import _abi

if TYPE_CHECKING:
    from .request import Request

_pending: dict[int, Request] = {}
_numbers = itertools.count(1)
_thread = threading.local()


def register(request: Request) -> int:
    """Keeps `request` until it completes or is forgotten; gives the number for the C call."""
    number = next(_numbers)
    _pending[number] = request
    return number


def forget(number: int) -> None:
    """Drops a request that was not submitted after all."""
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
