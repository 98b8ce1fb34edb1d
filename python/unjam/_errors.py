"""Exceptions: one class per result code of the C API.

Every error that unjam raises is an :class:`UnjamError`; its message names the cause and the cure.
Where Python has a fitting built-in class, the error is one of those too, so ``except ValueError``
and ``except TimeoutError`` work as one expects.
"""

from __future__ import annotations

from . import _abi


class UnjamError(Exception):
    """Base class of every error of unjam.

    Attributes:
        code: the ``unjamResult_t`` value, 0 for errors that the Python side found by itself.
    """

    code: int = 0


class InvalidArgument(UnjamError, ValueError):
    """A value that no call could accept. Nothing was submitted."""

    code = _abi.ERROR_INVALID_ARGUMENT


class InvalidType(InvalidArgument, TypeError):
    """An object of a type that unjam cannot use, or an unknown keyword. Nothing was submitted."""


class InvalidUsage(UnjamError, RuntimeError):
    """Right values at the wrong time or on the wrong object, such as a closed context."""

    code = _abi.ERROR_INVALID_USAGE


class Mismatch(UnjamError, RuntimeError):
    """Ranks disagree on a collective (kind, count, dtype, op or root); the message says how."""

    code = _abi.ERROR_MISMATCH


class Timeout(UnjamError, TimeoutError):
    """The time given has passed. The operation goes on and can be waited for again."""

    code = _abi.ERROR_TIMEOUT


class Aborted(UnjamError, RuntimeError):
    """``Context.abort`` or the end of the context has ended the invocation."""

    code = _abi.ERROR_ABORTED


class Peer(UnjamError, RuntimeError):
    """A peer is gone: it has aborted or died. Groups without that peer go on."""

    code = _abi.ERROR_PEER


class Resources(UnjamError, RuntimeError):
    """A limit is reached; the message names it and its setting."""

    code = _abi.ERROR_RESOURCES


class System(UnjamError, RuntimeError):
    """The operating system refused something."""

    code = _abi.ERROR_SYSTEM


class Internal(UnjamError, RuntimeError):
    """A fault of unjam: please report it."""

    code = _abi.ERROR_INTERNAL


class LibraryError(UnjamError, ImportError):
    """libunjam.so was not found, could not be loaded, or has another version."""


# How the library ends what it says of ranks that disagree. In Python a key is an argument.
_KEYS_ARE_THE_CURE = " give each call a key of its own."

_BY_CODE: dict[int, type[UnjamError]] = {
    cls.code: cls
    for cls in (
        InvalidArgument,
        InvalidUsage,
        Mismatch,
        Timeout,
        Aborted,
        Peer,
        Resources,
        System,
        Internal,
    )
}


def make_error(code: int, message: str) -> UnjamError:
    """The exception for a result code.

    Args:
        code: an ``unjamResult_t`` other than success; unknown codes give :class:`Internal`.
        message: the text to show.
    """
    if code == Mismatch.code and message.endswith(_KEYS_ARE_THE_CURE):
        message = f"{message[:-1]} (key=)."
    error = _BY_CODE.get(code, Internal)(message or f"error {code}, without a message")
    error.code = code
    return error
