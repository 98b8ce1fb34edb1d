"""Traces in Chrome's trace event format, which Perfetto and chrome://tracing open.

Every rank is a process there, and every lane a thread. A bar is a stretch in which a collective ran
without interruption; how it ended is among its arguments. Files of several processes of one machine
are on one clock, so they may be opened together.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .context import Context
from .timeline import make_timeline
from .trace import TraceEvent


def write_chrome_trace(path: str | Path, *contexts: Context) -> Path:
    """Writes what the contexts' traces hold.

    Args:
        path: of the file; `.json` by convention.
        contexts: of this process, made with ``trace_events`` (``UNJAM_TRACE_EVENTS``).

    Returns:
        The file.
    """
    traces = {context.rank: context.trace() for context in contexts}
    file = Path(path)
    file.write_text(json.dumps(chrome_trace(traces)) + "\n", encoding="utf-8")
    return file


def chrome_trace(traces: Mapping[int, Iterable[TraceEvent]]) -> dict[str, Any]:
    """The format's JSON object.

    Args:
        traces: rank → its events.
    """
    events: list[dict[str, Any]] = []
    for rank, trace in sorted(traces.items()):
        mine = list(trace)
        keys = {event.key: event.key for event in mine if event.key}
        row = make_timeline("", list(keys.items()), [mine]).rows[0]
        events.append(_named("process_name", rank, 0, f"rank {rank}"))
        events += [_named("thread_name", rank, lane, f"lane {lane}") for lane in range(row.lanes)]
        events += [
            _bar(rank, s.lane, s.key, s.start_ns, s.end_ns, {"end": s.end}) for s in row.spans
        ]
        events += [_bar(rank, g.lane, "(quit)", g.start_ns, g.end_ns, {}) for g in row.gaps]
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def _named(what: str, rank: int, lane: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": lane, "args": {"name": name}}


def _bar(
    rank: int, lane: int, name: str, start_ns: int, end_ns: int, arguments: dict[str, str]
) -> dict[str, Any]:
    # The format has microseconds, with as many digits behind the point as one likes.
    return {
        "ph": "X",
        "cat": "unjam",
        "name": name,
        "pid": rank,
        "tid": lane,
        "ts": start_ns / 1000,
        "dur": (end_ns - start_ns) / 1000,
        "args": arguments,
    }
