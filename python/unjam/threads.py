"""Ranks as threads of one process: run a function once per rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ._errors import Aborted, Peer
from .context import Context, init_all

T = TypeVar("T")


def run_ranks(contexts: Sequence[Context], function: Callable[[Context], T]) -> list[T]:
    """Calls ``function(context)`` for every context, each in its own thread, and waits for all.

    If one raises, all contexts are aborted, so that the others come back from their waits. The same
    happens if the calling thread is interrupted (Ctrl-C).

    Args:
        contexts: one per rank.
        function: what a rank does.

    Returns:
        The results, in the order of `contexts`.

    Raises:
        BaseException: the first that a rank raised; errors that only tell of the abort come last.
    """
    results: list[Any] = [None] * len(contexts)
    errors: list[BaseException] = []

    def body(place: int, context: Context) -> None:
        try:
            results[place] = function(context)
        except BaseException as error:
            errors.append(error)
            _abort(contexts)

    threads = [
        threading.Thread(target=body, args=(place, context), name=f"unjam-rank-{context.rank}")
        for place, context in enumerate(contexts)
    ]
    started: list[threading.Thread] = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
        _join(started)
    except BaseException:
        _abort(contexts)
        _join(started)
        raise
    if errors:
        causes = [error for error in errors if not isinstance(error, (Aborted, Peer))]
        raise (causes or errors)[0]
    return results


def launch(nranks: int, function: Callable[[Context], T], **config: Any) -> list[T]:
    """Makes a job of `nranks` contexts, runs ``function(context)`` in a thread each, closes all.

    Args:
        nranks: 1 to 65,535 (on CUDA devices 1 to 64).
        function: what a rank does; it waits for what it submits.
        config: as for :func:`unjam.init`.

    Returns:
        The results, by rank.
    """
    with init_all(nranks, **config) as contexts:
        return run_ranks(contexts, function)


def _abort(contexts: Sequence[Context]) -> None:
    for context in contexts:
        context.abort()


def _join(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        while thread.is_alive():
            thread.join(0.1)  # in slices, so that Ctrl-C gets through
