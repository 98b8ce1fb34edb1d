"""What is done at the end of this process, whichever way it ends that lets Python code run.

``atexit`` knows the end of the interpreter. A child of multiprocessing ends by ``os._exit``, after
multiprocessing's own finalisers; newer Pythons run ``atexit``'s as well. The system tells peers of
any other end (a signal, ``os._exit``, a crash), and they lose nothing that was complete: see
docs/guide/ends.md.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable

# The process in which each was registered: a child of fork() has its parent's, and must not run
# them.
_registered: dict[Callable[[], object], int] = {}


def at_exit(function: Callable[[], object]) -> None:
    """Has the function called at the end of this process, once or more.

    Args:
        function: does nothing where there is nothing to do.
    """
    if _registered.get(function) == os.getpid():
        return
    _registered[function] = os.getpid()
    atexit.unregister(function)
    atexit.register(function)
    multiprocessing = sys.modules.get("multiprocessing")
    if multiprocessing is None or multiprocessing.parent_process() is None:
        return
    from multiprocessing import util

    def finalize() -> None:
        # The interpreter waits for threads before it calls atexit's functions. multiprocessing does
        # so after its finalisers, which would end contexts that threads still use.
        for thread in threading.enumerate():
            if not thread.daemon and thread is not threading.current_thread():
                thread.join()
        function()

    # It runs after finalisers with a priority of their own.
    util.Finalize(None, finalize, exitpriority=-100)


def fails() -> bool:
    """Whether the process ends by an exception that nobody has caught."""
    if getattr(sys, "last_type", None) is not None:
        return True
    kind = sys.exc_info()[0]  # multiprocessing finalises while it is on its way
    return kind is not None and not issubclass(kind, SystemExit)


def patience_us() -> int:
    """What is pending at the end gets the library's time, or none if the process fails."""
    return 0 if fails() else -1
