"""Registered collectives: plan and key looked up once, run many times."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from . import _arguments
from ._closing import ClosesAtEnd
from ._errors import InvalidUsage
from ._lib import check, library
from ._names import encode
from ._submit import submit
from ._types import DType, Kind, Op
from .options import RunOptions, read, spelled_out
from .request import Request

if TYPE_CHECKING:
    from typing_extensions import Unpack

    # What a user reads of its group is all of it; see test_imports.py.
    from .group import Group


class Collective(ClosesAtEnd):
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
        with group._context._call() as lib:
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
        if group._context._tracing:
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

    @spelled_out(RunOptions)
    def run(self, x: Any, out: Any = None, **options: Unpack[RunOptions]) -> Request:
        """Invokes it, as the group's call of the same kind does.

        Args:
            x: as in the call of the kind. Raw memory is taken as the registered type.
            out: as in the call of the kind; None means in place where that exists.
            options: callback, stream and in_stream, as in the call of the kind.

        Raises:
            InvalidArgument: wrong size, type or memory; nothing was submitted.
            InvalidUsage: deregistered, or the context is closed.
        """
        given = read(RunOptions, options, "run")
        group = self._group
        if self._closed or group._closed:
            what_is = "is deregistered" if self._closed else "has lost its group, which is closed"
            raise InvalidUsage(f"{self._name()} {what_is}: register it again")
        what = _arguments.for_kind(
            self._kind, x, out, group.rank, group.size, self._root, self._dtype
        )
        arguments = (self._handle, what.send, what.recv, what.elements)
        return submit(
            group._context,
            self._what,
            what,
            given,
            self._algorithm,
            "unjamRunWithOptions",
            arguments,
        )

    def close(self) -> None:
        """Deregisters it; closing its context does so too. May be repeated.

        Raises:
            InvalidUsage: runs are pending.
        """
        if self._closed:
            return
        context = self._group._context
        if context._enter():
            try:
                check(library().unjamDeregister(self._handle))
            finally:
                context._leave()
        self._closed = True

    def _end_block(self, failed: bool) -> None:
        if not failed:  # a run of a failed block may be pending
            self.close()
