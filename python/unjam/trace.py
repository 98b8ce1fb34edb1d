"""Trace events of a context: which collective ran when on which lane."""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Mapping
from typing import Any, NamedTuple

from . import _abi
from ._lib import check, library


class EventType(enum.IntEnum):
    """What happened on the lane."""

    START = _abi.TRACE_START
    PREEMPT = _abi.TRACE_PREEMPT
    YIELD = _abi.TRACE_YIELD
    FINISH = _abi.TRACE_FINISH
    QUIT = _abi.TRACE_QUIT
    RESTART = _abi.TRACE_RESTART


class TraceEvent(NamedTuple):
    """One event.

    Attributes:
        time_ns: on the clock of ``time.monotonic_ns()``.
        lane: the block.
        type: what happened. QUIT and RESTART belong to no invocation: group and key are "".
        group: the group's name.
        key: the key; "#" and the hash in hexadecimal if Python did not use the key here.
        n: which use of the key, from 0.
    """

    time_ns: int
    lane: int
    type: EventType
    group: str
    key: str
    n: int


def read_trace(handle: Any, names: Mapping[int, tuple[str, str]]) -> list[TraceEvent]:
    """All events that the library keeps for a context.

    Args:
        handle: the context's.
        names: key hash → (group, key).
    """
    capacity = 65536
    while True:
        events = (_abi.TraceEvent * capacity)()
        count = ctypes.c_size_t(0)
        check(library().unjamGetTrace(handle, events, capacity, ctypes.byref(count)))
        if count.value < capacity:
            break
        capacity *= 4
    found = []
    for event in events[: count.value]:
        kind = EventType(event.type)
        if kind in (EventType.QUIT, EventType.RESTART):
            group, key = "", ""
        else:
            group, key = names.get(event.key_hash, ("", f"#{event.key_hash:016x}"))
        found.append(TraceEvent(event.time_ns, event.lane, kind, group, key, event.n))
    return found
