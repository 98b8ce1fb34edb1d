"""The keywords that calls share, stated once: for type checkers, and for ``help()``.

A function of your own that hands keywords on can name them as unjam does::

    def sum_of(group: unjam.Group, x: Any, **options: Unpack[CollectiveOptions]) -> Request:
        return group.all_reduce(x, **options)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, TypeVar

if TYPE_CHECKING:
    from .request import Request

__all__ = ["CallOptions", "CollectiveOptions", "RunOptions", "TransferOptions"]  # for users


class RunOptions(TypedDict, total=False):
    """What every call takes.

    Attributes:
        callback: ``callback(request)`` on completion, from the context's callback thread. It may
            submit, but must not wait for pending collectives of the same context.
        stream: CUDA only: a ``torch.cuda.Stream`` or a ``cudaStream_t`` as an int; None is torch's
            current stream of the context's device (without torch: the legacy default stream). The
            collective reads its input after the work queued in the stream so far. The stream itself
            goes on beside it: ``request.wait()`` makes a stream wait for the results.
        in_stream: CUDA only: True makes the call stand in the stream as a kernel would: work queued
            in it afterwards sees the results, without a ``wait()``. Buffers are then kept alive by
            the request only, as torch's allocator expects it of a kernel: memory of another stream
            needs ``tensor.record_stream``.
    """

    callback: Callable[[Request], object] | None
    stream: Any
    in_stream: bool


class CallOptions(RunOptions, total=False):
    """What a call takes that is not registered.

    Attributes:
        key: the ordering channel. The n-th use of a key in a group is matched with the n-th use of
            it on every other rank; ranks may use different keys in different orders.
        priority: higher first, under ``order="priority"``.
    """

    key: str
    priority: int


class TransferOptions(CallOptions, total=False):
    """What a call takes that moves data.

    Attributes:
        dtype: what raw memory holds, such as "bfloat16" in a bytearray or a uint16 array. Types
            that unjam does not know (bool, int16, complex numbers, …) raise InvalidArgument, which
            says what to pass in their place.
    """

    dtype: Any


class CollectiveOptions(TransferOptions, total=False):
    """What a collective takes that moves data.

    Attributes:
        algorithm: the plan's algorithm for this call, by a name that ``UNJAM_ALGORITHM`` takes;
            None leaves it to the configuration. Ranks must agree on it.
    """

    algorithm: str | None


class Options(NamedTuple):
    """The options of one call, those that were not given as by default."""

    key: str = ""
    dtype: Any = None
    priority: int = 0
    callback: Callable[[Request], object] | None = None
    stream: Any = None
    in_stream: bool = False
    algorithm: str | None = None


_NONE = Options()
_NAMES: dict[type, frozenset[str]] = {
    kind: frozenset(kind.__annotations__)
    for kind in (RunOptions, CallOptions, TransferOptions, CollectiveOptions)
}


def read(kind: type, given: Any, function: str) -> Options:
    """The options `given`, as keywords, to a function that takes those of `kind`.

    Raises:
        TypeError: one that it does not take, in Python's words.
    """
    if not given:
        return _NONE
    if kind is CollectiveOptions or given.keys() <= _NAMES[kind]:
        try:
            return _bound(**given)
        except TypeError:  # it has no such name
            pass
    name = next(name for name in given if name not in _NAMES[kind])
    raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


def _bound(
    key: str = "",
    dtype: Any = None,
    priority: int = 0,
    callback: Callable[[Request], object] | None = None,
    stream: Any = None,
    in_stream: bool = False,
    algorithm: str | None = None,
) -> Options:
    """As the class itself, which takes longer: every call comes here."""
    values = (key, dtype, priority, callback, stream, in_stream, algorithm)
    return _new(Options, values)


_new = tuple.__new__


def _text(annotation: Any) -> str:
    """An annotation as it is written in this file."""
    return str(getattr(annotation, "__forward_arg__", annotation))


_F = TypeVar("_F", bound=Callable[..., Any])


def spelled_out(kind: type) -> Callable[[_F], _F]:
    """For a function that takes ``**options: Unpack[kind]``: ``help()`` shows each by its name."""

    def set_signature(function: _F) -> _F:
        signature = inspect.signature(function)
        words = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        words += [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=Options._field_defaults[name],
                annotation=_text(Options.__annotations__[name]),
            )
            for name in Options._fields
            if name in _NAMES[kind]
        ]
        function.__signature__ = signature.replace(parameters=words)  # type: ignore[attr-defined]
        return function

    return set_signature
