"""Meetings of ranks in torch's store, which Ctrl-C and other signals get through."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .._interrupt import SLICE_S


def wait_for(
    store: Any, keys: list[str], timeout: timedelta, who: Callable[[], str] = lambda: ""
) -> None:
    """``store.wait(keys, timeout)``; that runs no signal handlers before its end.

    Args:
        who: says at the time limit who is missing.

    Raises:
        DistStoreError: the keys are not there in time.
    """
    end = time.monotonic() + timeout.total_seconds()
    pause = 0.001
    while not store.check(keys):
        if time.monotonic() >= end:
            missing = [key for key in keys if not store.check([key])]
            raise dist.DistStoreError(
                f"unjam: the ranks have not met within {timeout.total_seconds():g} s{who()} "
                f"(no {', '.join(missing)} in the store)"
            )
        time.sleep(pause)
        pause = min(2 * pause, SLICE_S)
