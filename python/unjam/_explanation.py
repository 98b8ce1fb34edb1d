"""What ``Context.explain()`` gives, as text for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def explanation_lines(explanation: dict[str, Any]) -> Iterator[str]:
    """Lines of text: one a rank, a pending call, an absence and a cycle."""
    for rank in explanation["ranks"]:
        yield f"rank {rank['rank']}: {len(rank['pending'])} pending"
        for call in rank["pending"]:
            missing = _ranks_text(call, "not_called_by")
            calling = _ranks_text(call, "called_by")
            instead = f"; {call['instead']}" if call["instead"] else ""
            several = len(call["engines"]) > 1
            engines = ""
            for engine in call["engines"]:
                lane = f" of lane {engine['lane']}" if several else ""
                engines += f"; engine{lane} waits for {_engine_text(engine)}"
            yield (
                f"  {call['what']}, key {call['key']!r} of group {call['group']!r}, use "
                f"{call['n'] + 1}, since {call['age_ms'] / 1e3:.3f} s; called by: {calling}; "
                f"not called by: {missing}{instead}{engines}"
            )
    if "ranks_more" in explanation:
        yield f"… ({explanation['ranks_more']} more ranks)"
    for absent in explanation["absent"]:
        yield f"rank {absent['rank']}: {absent['why']}"
    if "absent_more" in explanation:
        yield f"… ({explanation['absent_more']} more that are absent)"
    for cycle in explanation["cycles"]:
        yield f"DEADLOCK: {cycle['text']}"


def _ranks_text(call: dict[str, Any], name: str) -> str:
    text = ", ".join(map(str, call[name])) or "none"
    more = call.get(f"{name}_more")
    return f"{text}, … ({more} more)" if more else text


def _engine_text(engine: dict[str, Any]) -> str:
    what = engine["waits_for"]
    if what == "turn":
        return f"its turn: use {engine['n'] + 1} of the key is not complete"
    if what not in ("data", "room"):
        return "its start" if what == "start" else str(what)
    who = "others" if engine["rank"] is None else f"rank {engine['rank']}"
    way = "from" if what == "data" else "towards"
    return f"{what} {way} {who} since {engine['since_ms'] / 1e3:.3f} s"
