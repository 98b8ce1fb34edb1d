"""Registered collectives: plan and key looked up once, run many times."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from . import _arguments, _completion
from ._devices import call_options, call_stream, check_place
from ._errors import InvalidUsage
from ._lib import check, library
from ._names import encode
from ._types import DType, Kind, Op
from .request import Request

if TYPE_CHECKING:
    from .group import Group


class Collective:
    """A collective of fixed kind, key, type, operator and root. Made by ``Group.register…``.

    Runs share the key's order with each other and with plain calls under the same key.
    """

    def __init__(
        self,
        group: Group,
        kind: Kind,
        key: str,
        dtype: DType,
        op: Op,
        root: int,
        priority: int,
        algorithm: bytes | None,
    ) -> None:
        """Made by ``Group.register…``, not by users."""
        self._group = group
        self._kind = kind
        self._key = key
        self._dtype = dtype
        self._op = op
        self._root = root
        self._algorithm = algorithm
        self._what = (kind.label, key, group.name)
        self._handle = ctypes.c_void_p()
        self._closed = False
        encoded = encode(key, "key")
        with group.context._call() as lib:
            check(
                lib.unjamRegister(
                    group._handle,
                    encoded,
                    kind,
                    dtype,
                    op,
                    root,
                    priority,
                    ctypes.byref(self._handle),
                )
            )
            if group.context._tracing:
                group._note_key(key, encoded)

    def __repr__(self) -> str:
        return f"<unjam.Collective {self._name()}, {self._dtype.label}>"

    def _name(self) -> str:
        return f"{self._kind.label} under key {self._key!r} on rank {self._group.context.rank}"

    @property
    def group(self) -> Group:
        """The group it runs on."""
        return self._group

    @property
    def kind(self) -> Kind:
        """Which kind of collective."""
        return self._kind

    @property
    def key(self) -> str:
        """The ordering channel."""
        return self._key

    @property
    def dtype(self) -> DType:
        """Element type of its buffers."""
        return self._dtype

    def run(
        self,
        x: Any,
        out: Any = None,
        *,
        callback: Callable[[Request], object] | None = None,
        stream: Any = None,
        in_stream: bool = False,
    ) -> Request:
        """Invokes it, as the group's call of the same kind does.

        Args:
            x: as in the call of the kind. Raw memory is taken as the registered type.
            out: as in the call of the kind; None means in place where that exists.
            callback: ``callback(request)`` on completion, from the context's callback thread.
            stream: as in the call of the kind.
            in_stream: as in the call of the kind.

        Raises:
            InvalidArgument: wrong size, type or memory; nothing was submitted.
            InvalidUsage: deregistered, or the context is closed.
        """
        group = self._group
        if self._closed or group._closed:
            what_is = "is deregistered" if self._closed else "has lost its group, which is closed"
            raise InvalidUsage(f"{self._name()} {what_is}: register it again")
        if callback is not None:
            _arguments.check_callback(callback)
        what = _arguments.for_kind(
            self._kind, x, out, group.rank, group.size, self._root, self._dtype
        )
        context = group.context
        check_place(what.place, context._place, context.rank)
        queue, order = call_stream(stream, in_stream, context._place)
        request = Request(context, self._what, what.output, what.keep, callback, queue, in_stream)
        number, address, options = 0, None, None
        if callback is not None:
            number, address = _completion.register(request), _completion.ADDRESS
        if number or order or self._algorithm is not None:
            options = ctypes.byref(call_options(0, address, number, queue, order, self._algorithm))
        if not context._enter():
            _completion.forget(number)
            raise context._closed_error()
        try:
            code = library().unjamRunWithOptions(
                self._handle,
                what.send,
                what.recv,
                what.elements,
                options,
                ctypes.byref(request._handle),
            )
            if code:
                check(code)
        except BaseException:
            if not request._handle:
                _completion.forget(number)
            raise
        finally:
            context._leave()
        return request

    def close(self) -> None:
        """Deregisters it; closing its context does so too. May be repeated.

        Raises:
            InvalidUsage: runs are pending.
        """
        if self._closed:
            return
        context = self._group.context
        if context._enter():
            try:
                check(library().unjamDeregister(self._handle))
            finally:
                context._leave()
        self._closed = True

    def __enter__(self) -> Collective:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
