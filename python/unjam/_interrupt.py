"""Blocking calls into C that let signals through."""

from __future__ import annotations

import threading
from collections.abc import Callable

# The longest time in one C call. Ctrl-C is noticed, and a closing context let go, after at most
# this.
SLICE_S = 0.05


def interruptible(work: Callable[[], None], undo: Callable[[], object]) -> None:
    """Runs `work`, which blocks in C; in the main thread so that signals get through.

    After a KeyboardInterrupt, or what another handler raises, the work goes on in its own thread,
    and is undone if it succeeds.
    """
    if threading.current_thread() is not threading.main_thread():
        work()
        return
    lock = threading.Lock()
    state = {"finished": False, "abandoned": False}
    errors: list[BaseException] = []
    done = threading.Event()

    def body() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)
        with lock:
            state["finished"] = True
            abandoned = state["abandoned"]
        if abandoned and not errors:
            undo()
        done.set()

    thread = threading.Thread(target=body, name="unjam-init", daemon=True)
    thread.start()
    try:
        # It waits in slices, for a signal may be another thread's, which does not wake this one.
        while not done.wait(SLICE_S):
            pass
    except BaseException:
        with lock:
            state["abandoned"] = True
            finished = state["finished"]
        if finished and not errors:
            undo()
        raise
    if errors:
        raise errors[0]
