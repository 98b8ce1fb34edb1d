"""Registered collectives: plan and key looked up once, run many times."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from . import _arguments, _completion
from ._errors import InvalidUsage
from ._lib import check, library
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
    ) -> None:
        """Made by ``Group.register…``, not by users."""
        from .group import describe_key, encode

        self._group = group
        self._kind = kind
        self._key = key
        self._dtype = dtype
        self._op = op
        self._root = root
        self._what = f"{kind.label} {describe_key(group, key)}"
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
            group._note_key(lib, key, encoded)

    def __repr__(self) -> str:
        return f"<unjam.Collective {self._what}, {self._dtype.label}>"

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
    ) -> Request:
        """Invokes it, as the group's call of the same kind does.

        Args:
            x: as in the call of the kind. Raw memory is taken as the registered type.
            out: as in the call of the kind; None means in place where that exists.
            callback: ``callback(request)`` on completion, from the context's callback thread.

        Raises:
            InvalidArgument: wrong size, type or memory; nothing was submitted.
            InvalidUsage: deregistered, or the context is closed.
        """
        group = self._group
        what = _arguments.for_kind(
            self._kind, x, out, group.rank, group.size, self._root, self._dtype
        )
        if self._closed or group._closed:
            raise InvalidUsage(f"{self._what} is deregistered")
        request = Request(group.context, self._what, what.output, what.keep, callback)
        number = _completion.register(request)
        try:
            with group.context._call() as lib:
                check(
                    lib.unjamRun(
                        self._handle,
                        what.send,
                        what.recv,
                        what.elements,
                        _completion.ADDRESS,
                        number,
                        ctypes.byref(request._handle),
                    )
                )
        except BaseException:
            if not request._handle:
                _completion.forget(number)
            raise
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
