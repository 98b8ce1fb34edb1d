"""Who ran what when: traces of all ranks as spans, for a picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

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
    """What one rank did.

    Attributes:
        rank: which.
        lanes: blocks.
        spans: what ran when.
        gaps: when its engine had quit.
        note: what is to be said of it.
        done: (time, key) of each collective's end; only where spans do not tell.
    """

    rank: int
    lanes: int = 1
    spans: list[Span] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    note: str = ""
    done: list[tuple[int, str]] = field(default_factory=list)


@dataclass
class Timeline:
    """Rows of all ranks over one stretch of time.

    Attributes:
        title: one line.
        keys: (key, label) in the order of the legend.
        start_ns: the left edge.
        end_ns: the right edge.
        rows: by rank.
        caption: what is to be seen, in a sentence or two.
        waits: (rank, the rank that it waits for) of a deadlock's circle.
    """

    title: str
    keys: list[tuple[str, str]]
    start_ns: int
    end_ns: int
    rows: list[RankRow]
    caption: str = ""
    waits: list[tuple[int, int]] = field(default_factory=list)

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


def condensed(timeline: Timeline, columns: int = 80) -> Timeline:
    """The same in so few columns that a picture shows who had what in hand, and not every poll.

    A column of a lane has the key that ran longest in it, and columns that have the same are one
    span. Ends of collectives are in `done` of the rows.
    """
    width = (timeline.end_ns - timeline.start_ns) / columns
    edges = [timeline.start_ns + round(width * column) for column in range(columns + 1)]
    rows = []
    for row in timeline.rows:
        spans = []
        for lane in range(row.lanes):
            held: list[dict[str, int]] = [{} for _ in range(columns)]
            for span in row.spans:
                if span.lane == lane:
                    _spread(span, held, timeline.start_ns, width)
            longest = [max(keys, key=keys.__getitem__) if keys else "" for keys in held]
            start = 0
            for place in range(1, columns + 1):
                if place == columns or longest[place] != longest[start]:
                    if longest[start]:
                        spans.append(
                            Span(lane, edges[start], edges[place], longest[start], "yield")
                        )
                    start = place
        done = {span.key: span.end_ns for span in row.spans if span.end == "finish"}
        ends = sorted((end_ns, key) for key, end_ns in done.items())
        rows.append(RankRow(row.rank, row.lanes, spans, [], row.note, ends))
    return replace(timeline, rows=rows)


def _spread(span: Span, held: list[dict[str, int]], start_ns: int, width: float) -> None:
    """Adds a span's time to the columns that it lies in."""
    first = max(0, int((span.start_ns - start_ns) / width))
    last = min(len(held) - 1, int((span.end_ns - start_ns) / width))
    for column in range(first, last + 1):
        left, right = start_ns + width * column, start_ns + width * (column + 1)
        time = min(span.end_ns, right) - max(span.start_ns, left)
        if time > 0:
            held[column][span.key] = held[column].get(span.key, 0) + round(time)


def _wanted(event: TraceEvent, shown: dict[str, str], use: int | None) -> bool:
    return event.key in shown and (use is None or event.n == use)


def _row(rank: int, events: list[TraceEvent], end_ns: int | None) -> RankRow:
    row = RankRow(rank, lanes=1 + max((event.lane for event in events), default=0))
    for lane in range(row.lanes):
        # There are several at once where a lane sends all that it has, then receives.
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
