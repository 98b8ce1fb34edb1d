"""Futures whose callbacks may call collectives.

A callback that is added with ``then()`` runs when the operation is complete: in another thread, or
in the one that adds it if that was the case already. So which calls it comes between is not the
same on all ranks, and what it calls may not be matched by its order among them. It is matched by
what is the same everywhere: that it is what follows the n-th call of its process group and key.

Collectives in a callback are therefore made in a *context*, which is a further part of their key
(key.h). A context is named by the operation's process group and key, and by n, the number of
futures that were taken of calls of those; a second callback of one future has another context than
the first. (What is chained runs one behind the other: one context.) Names come again after
``NAMES`` futures, since what a device knows of a key is kept; should the callbacks of a name's
former bearer not have ended by then, collectives in those of the later one are refused.

Sends and receives have no contexts: their tags are told by the caller.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

import torch

T = TypeVar("T")
S = TypeVar("S")

NAMES = 512
DEEPEST = 3  # contexts in contexts, each with a name of its own


class _Operation:
    """One that a future was taken of, as contexts name it."""

    def __init__(self, own: str, prefix: str, number: int) -> None:
        self.own = own  # the key of the call, as users gave it
        self.prefix = prefix
        self.number = number
        self.callbacks: set[Context] = set()  # of those that have not ended


class Context:
    """Of the callbacks of one future, as they are added."""

    def __init__(
        self,
        c10d: ModuleType,
        operation: _Operation | None,
        fixed: str,
        path: str = "",
        depth: int = 0,
    ) -> None:
        self.c10d = c10d  # the compiled module
        self._operation = operation
        self._fixed = fixed  # a context that has no name of its own
        self._path = path
        self._depth = depth
        self._added = itertools.count()

    def wrapped(self, callback: Callable[[Any], T]) -> tuple[Callable[[Any], T], Context]:
        """The callback in its context, and the context of what is chained to it."""
        index = next(self._added)
        path = self._path if index == 0 else f"{self._path}.{self._depth}_{index}"
        operation = self._operation
        c10d = self.c10d
        within = Context(c10d, operation, self._fixed, path, self._depth + 1)
        key = within._key()
        if operation is not None:
            operation.callbacks.add(within)

        def run(future: Any) -> T:
            outer = c10d.get_key()
            c10d.set_key(*key)
            try:
                return callback(future)
            finally:
                c10d.set_key(*outer)
                if operation is not None:
                    operation.callbacks.discard(within)

        return run, within

    def _key(self) -> tuple[str, str]:
        operation = self._operation
        if operation is None:
            return "", self._fixed
        if self._fixed:
            return operation.own, self._fixed
        return operation.own, f"{operation.prefix}{operation.number}{self._path}#"


class Future(torch.futures.Future[T]):
    """torch's, with callbacks in contexts."""

    def __init__(self, of: torch._C.Future, context: Context) -> None:
        context.c10d.take_over(self, of)
        self._context = context

    def then(self, callback: Callable[[torch.futures.Future[T]], S]) -> Future[S]:
        run, within = self._context.wrapped(callback)
        return Future(super().then(run), within)

    def add_done_callback(self, callback: Callable[[torch.futures.Future[T]], None]) -> None:
        super().add_done_callback(self._context.wrapped(callback)[0])


class _Operations:
    """Of one process group and key: those that futures were taken of."""

    def __init__(self, c10d: ModuleType) -> None:
        self._c10d = c10d
        self._count = itertools.count()
        self._named: dict[int, _Operation] = {}

    def next(self, own: str, prefix: str, crowded: str) -> Context:
        number = next(self._count) % NAMES
        former = self._named.get(number)
        if former is not None and former.callbacks:
            return Context(self._c10d, _Operation(own, prefix, number), crowded)
        operation = self._named[number] = _Operation(own, prefix, number)
        return Context(self._c10d, operation, "")


def install(c10d: ModuleType) -> None:
    """Has the Works of the compiled module give out these futures."""
    plain = c10d.Work.get_future
    channels: dict[tuple[str, str, str], _Operations] = {}

    def get_future(work: Any) -> Future[Any]:
        own, context = work.key
        if not work.collective:
            return Future(plain(work), Context(c10d, None, c10d.UNORDERED))
        if context.count(_MARK) >= DEEPEST:
            return Future(plain(work), Context(c10d, _Operation(own, "", 0), context))
        channel = work.channel
        operations = channels.get((channel, own, context))
        if operations is None:
            operations = channels.setdefault((channel, own, context), _Operations(c10d))
        prefix = f"{context}{_MARK} {channel.replace('#', '##')} "
        return Future(plain(work), operations.next(own, prefix, c10d.CROWDED))

    c10d.Work.get_future = get_future


_MARK = "#then"
