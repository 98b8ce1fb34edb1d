"""Futures whose callbacks may call collectives: what they call is matched by what it follows.

When and in which thread a callback runs is not the same on all ranks, so the collectives in it are
made in a context, which is a further part of their key. How contexts are named: csrc/context.h.
Here torch's future is given out as one of a class whose callbacks run in theirs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar, TypeVar

import torch

from .._interrupt import SLICE_S

T = TypeVar("T")
S = TypeVar("S")


class Future(torch.futures.Future[T]):
    """torch's, with callbacks in contexts. What ``then()`` returns is one, too."""

    _take_over: ClassVar[Callable[[Any, Any], None]]  # torch's future becomes this instance's

    def __init__(self, of: torch._C.Future[Any], callbacks: Any) -> None:
        """`of`: torch's future. `callbacks`: of the compiled module: where theirs are."""
        Future._take_over(self, of)
        self._callbacks = callbacks

    def wait(self) -> T:
        # torch's own wait keeps Python's signal handlers waiting, too.
        if threading.current_thread() is threading.main_thread() and not self.done():
            over = threading.Event()
            super().add_done_callback(lambda _: over.set())
            while not over.wait(SLICE_S):  # a signal may be another thread's, which wakes nobody
                pass
        return super().wait()

    def then(self, callback: Callable[[torch.futures.Future[T]], S]) -> Future[S]:
        scope = self._callbacks.add()
        then = super().then(_within(scope, callback, self._callbacks))
        return Future(then, self._callbacks.behind(scope))

    def add_done_callback(self, callback: Callable[[torch.futures.Future[T]], None]) -> None:
        super().add_done_callback(_within(self._callbacks.add(), callback, self._callbacks))


def _within(scope: Any, callback: Callable[[Any], T], callbacks: Any) -> Callable[[Any], T]:
    def run(future: Any) -> T:
        try:
            scope.enter()
            # torch hands over the instance that has added it, if that is alive, else another one.
            return callback(Future(future, callbacks))
        finally:
            scope.leave()

    return run


def install(c10d: ModuleType) -> None:
    """Has the Works of the compiled module give out these futures."""
    plain = c10d.Work.get_future
    Future._take_over = staticmethod(c10d.take_over)

    def get_future(work: Any) -> Future[Any]:
        return Future(plain(work), work.callbacks())

    c10d.Work.get_future = get_future
