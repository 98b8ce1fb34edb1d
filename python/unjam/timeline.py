"""Who ran what when: traces of all ranks as spans, for a picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .trace import EventType, TraceEvent

_ENDS = {
    EventType.PREEMPT: "preempt",
    EventType.YIELD: "yield",
    EventType.FINISH: "finish",
    EventType.QUIT: "quit",
}


@dataclass(frozen=True)
class Span:
    """A collective running on a lane without interruption, alone or with others.

    Attributes:
        lane: the block.
        start_ns: on the traces' clock.
        end_ns: on the traces' clock.
        key: of the collective.
        end: "finish", "preempt", "yield", "quit", or "open" if the trace ends first.
    """

    lane: int
    start_ns: int
    end_ns: int
    key: str
    end: str


@dataclass(frozen=True)
class Gap:
    """An engine that has quit, until it was started again or the trace ends."""

    lane: int
    start_ns: int
    end_ns: int


@dataclass
class RankRow:
    """What one rank did."""

    rank: int
    lanes: int = 1
    spans: list[Span] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    note: str = ""


@dataclass
class Timeline:
    """Rows of all ranks over one stretch of time.

    Attributes:
        title: one line.
        keys: (key, label) in the order of the legend.
        start_ns: the left edge.
        end_ns: the right edge.
        rows: by rank.
    """

    title: str
    keys: list[tuple[str, str]]
    start_ns: int
    end_ns: int
    rows: list[RankRow]

    @property
    def milliseconds(self) -> float:
        """Length of the stretch."""
        return (self.end_ns - self.start_ns) * 1e-6

    def count(self, end: str) -> int:
        """How many spans ended in that way."""
        return sum(span.end == end for row in self.rows for span in row.spans)


def make_timeline(
    title: str,
    keys: Sequence[tuple[str, str]],
    traces: Sequence[Iterable[TraceEvent]],
    use: int | None = None,
    start_ns: int | None = None,
    end_ns: int | None = None,
) -> Timeline:
    """The timeline of all ranks' traces.

    Args:
        title: one line.
        keys: (key, label) of the collectives to show; others are left out.
        traces: each rank's events.
        use: show only this use of each key (the iteration); None: all.
        start_ns: the left edge; None: the first event shown.
        end_ns: the right edge, where open spans end; None: the last event shown.
    """
    shown = dict(keys)
    rows = []
    for rank, trace in enumerate(traces):
        rows.append(_row(rank, [e for e in trace if not e.key or _wanted(e, shown, use)], end_ns))
    spans = [span for row in rows for span in row.spans]
    if start_ns is None:
        start_ns = min((span.start_ns for span in spans), default=0)
    if end_ns is None:
        end_ns = max((span.end_ns for span in spans), default=start_ns + 1)
    end_ns = max(end_ns, start_ns + 1)
    for row in rows:
        row.gaps = [
            Gap(gap.lane, max(gap.start_ns, start_ns), min(gap.end_ns, end_ns))
            for gap in row.gaps
            if gap.end_ns > start_ns and gap.start_ns < end_ns
        ]
    return Timeline(title, list(keys), start_ns, end_ns, rows)


def _wanted(event: TraceEvent, shown: dict[str, str], use: int | None) -> bool:
    return event.key in shown and (use is None or event.n == use)


def _row(rank: int, events: list[TraceEvent], end_ns: int | None) -> RankRow:
    row = RankRow(rank, lanes=1 + max((event.lane for event in events), default=0))
    for lane in range(row.lanes):
        # Several at once where a lane sends of all that it has, then receives.
        running: dict[tuple[str, str, int], TraceEvent] = {}
        quit_ns: int | None = None
        mine = sorted((e for e in events if e.lane == lane), key=lambda event: event.time_ns)
        for event in mine:
            if event.type is EventType.RESTART:
                if quit_ns is not None:
                    row.gaps.append(Gap(lane, quit_ns, event.time_ns))
                quit_ns = None
                continue
            what = (event.group, event.key, event.n)
            if event.type is EventType.QUIT:
                quit_ns = event.time_ns
                ended = list(running.values())
                running.clear()
            else:
                ended = [running.pop(what)] if what in running else []
            end = _ENDS.get(event.type, "yield")
            row.spans += [Span(lane, e.time_ns, event.time_ns, e.key, end) for e in ended]
            if event.type is EventType.START:
                running[what] = event
        last = end_ns if end_ns is not None else (mine[-1].time_ns if mine else 0)
        row.spans += [Span(lane, e.time_ns, last, e.key, "open") for e in running.values()]
        if quit_ns is not None:
            row.gaps.append(Gap(lane, quit_ns, max(last, quit_ns)))
    return row
