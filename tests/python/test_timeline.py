"""Traces as spans, and pictures of them."""

import json
import re

import numpy as np
import pytest

import unjam
from unjam import EventType, InvalidArgument, TraceEvent, programs
from unjam.chrome_trace import chrome_trace
from unjam.picture import draw
from unjam.timeline import Gap, RankRow, Span, Timeline, condensed, make_timeline


def event(time_ns, kind, key="", n=0, lane=0):
    return TraceEvent(time_ns, lane, kind, "", key, n)


def example():
    trace = [
        event(0, EventType.RESTART),
        event(10, EventType.START, "A"),
        event(20, EventType.PREEMPT, "A"),
        event(21, EventType.START, "B"),
        event(30, EventType.YIELD, "B"),
        event(31, EventType.START, "A"),
        event(40, EventType.FINISH, "A"),
        event(45, EventType.QUIT),
        event(60, EventType.RESTART),
        event(61, EventType.START, "B"),
        event(5, EventType.START, "A", lane=1),
    ]
    return make_timeline("example", [("A", "A: first"), ("B", "B")], [trace, []], end_ns=100)


def test_spans():
    timeline = example()
    row = timeline.rows[0]
    assert row.lanes == 2
    assert row.spans == [
        Span(0, 10, 20, "A", "preempt"),
        Span(0, 21, 30, "B", "yield"),
        Span(0, 31, 40, "A", "finish"),
        Span(0, 61, 100, "B", "open"),
        Span(1, 5, 100, "A", "open"),
    ]
    assert row.gaps == [Gap(0, 45, 60)]
    assert (timeline.start_ns, timeline.end_ns) == (5, 100)
    assert timeline.count("preempt") == 1
    assert timeline.rows[1].spans == []


def test_one_use_only():
    trace = [
        event(n * 10 + place, kind, "A", n)
        for n in range(3)
        for place, kind in enumerate((EventType.START, EventType.FINISH))
    ]
    timeline = make_timeline("", [("A", "A")], [trace], use=1)
    assert timeline.rows[0].spans == [Span(0, 10, 11, "A", "finish")]


def test_together():
    trace = [
        event(10, EventType.START, "A"),
        event(11, EventType.START, "B"),
        event(20, EventType.PREEMPT, "A"),
        event(21, EventType.FINISH, "B"),
        event(30, EventType.START, "A"),
        event(35, EventType.QUIT),
    ]
    timeline = make_timeline("", [("A", "A"), ("B", "B")], [trace], end_ns=40)
    assert timeline.rows[0].spans == [
        Span(0, 10, 20, "A", "preempt"),
        Span(0, 11, 21, "B", "finish"),
        Span(0, 30, 35, "A", "quit"),
    ]


def test_traced_iteration_covers_everything():
    traces = programs.trace_iteration(4, 0, 65536)
    keys = [(key, key) for key in programs.key_names(8)]
    timeline = make_timeline("", keys, traces, use=programs.TRACED_USE)
    for row in timeline.rows:
        finished = sorted(span.key for span in row.spans if span.end == "finish")
        assert finished == sorted(key for key, _ in keys)
    assert timeline.count("open") == 0


@pytest.mark.parametrize("ending", ["png", "svg", "html"])
def test_draw(tmp_path, ending):
    pytest.importorskip("matplotlib")
    timeline = example()
    timeline.rows[0].note = "stuck <here>"
    path = draw([timeline, example()], tmp_path / "new" / f"picture.{ending}")
    content = path.read_bytes()
    assert len(content) > 1000
    start = {"png": b"\x89PNG", "svg": b"<?xml", "html": b"<!doctype html>"}[ending]
    assert content.startswith(start)
    if ending == "html":
        assert b"stuck &lt;here&gt;" in content and b"A: first" in content


def test_without_matplotlib_it_becomes_html(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "unjam.picture.plot", None)
    assert draw([example()], tmp_path / "picture.png").name == "picture.html"


def test_wrong_ending(tmp_path):
    with pytest.raises(InvalidArgument, match=r"\.png"):
        draw([example()], tmp_path / "picture.bmp")


def test_chrome_trace():
    trace = [
        event(1000, EventType.START, "A"),
        event(3500, EventType.PREEMPT, "A"),
        event(4000, EventType.QUIT),
        event(6000, EventType.RESTART),
        event(500, EventType.START, "B", lane=1),
        event(7000, EventType.FINISH, "B", lane=1),
    ]
    found = chrome_trace({3: trace, 0: []})["traceEvents"]
    bars = {(e["pid"], e["tid"], e["name"]): e for e in found if e["ph"] == "X"}
    assert set(bars) == {(3, 0, "A"), (3, 1, "B"), (3, 0, "(quit)")}
    assert (bars[3, 0, "A"]["ts"], bars[3, 0, "A"]["dur"]) == (1.0, 2.5)
    assert bars[3, 0, "A"]["args"] == {"end": "preempt"}
    assert bars[3, 1, "B"]["args"] == {"end": "finish"}
    assert (bars[3, 0, "(quit)"]["ts"], bars[3, 0, "(quit)"]["dur"]) == (4.0, 2.0)
    names = {(e["pid"], e["tid"], e["args"]["name"]) for e in found if e["ph"] == "M"}
    assert {(0, 0, "rank 0"), (3, 0, "rank 3"), (3, 1, "lane 1")} <= names


def test_chrome_trace_of_a_job(tmp_path):
    with unjam.init_all(2, trace_events=1000) as contexts:
        key = 'layer "1" [weights]'
        data = [np.ones(5000, np.float32) for _ in contexts]
        unjam.wait_all(
            [c.group().all_reduce(x, key=key) for c, x in zip(contexts, data, strict=True)]
        )
        file = unjam.write_chrome_trace(tmp_path / "trace.json", *contexts)
    events = json.loads(file.read_text())["traceEvents"]
    for rank in (0, 1):
        bars = [e for e in events if e["ph"] == "X" and e["pid"] == rank and e["name"] == key]
        assert bars and bars[-1]["args"]["end"] == "finish"
        assert all(bar["dur"] >= 0 for bar in bars)


def test_condensed_shows_what_ran_longest():
    """Columns of 10 ns: polls are gone, ends are kept, and what stands side by side is one span."""
    spans = [
        Span(0, 0, 14, "A", "preempt"),
        Span(0, 14, 15, "B", "preempt"),
        Span(0, 15, 20, "A", "preempt"),
        Span(0, 20, 24, "B", "preempt"),
        Span(0, 24, 30, "C", "finish"),
        Span(0, 50, 58, "A", "finish"),
        Span(0, 58, 60, "B", "finish"),
    ]
    rows = [RankRow(3, 1, spans, [Gap(0, 30, 50)], "a note")]
    timeline = Timeline("t", [(k, k) for k in "ABC"], 0, 60, rows, "a caption", [(3, 4)])
    (row,) = condensed(timeline, 6).rows
    assert [(s.start_ns, s.end_ns, s.key) for s in row.spans] == [
        (0, 20, "A"), (20, 30, "C"), (50, 60, "A"),
    ]  # fmt: skip
    assert row.done == [(30, "C"), (58, "A"), (60, "B")]
    assert (row.rank, row.note, row.gaps) == (3, "a note", [])
    assert len(timeline.rows[0].spans) == 7  # as it was
    short = condensed(timeline, 6)
    assert (short.title, short.caption, short.waits) == ("t", "a caption", [(3, 4)])


@pytest.mark.parametrize("ending", ["svg", "html"])
def test_captions_circles_and_ends_are_drawn(tmp_path, ending):
    if ending == "svg":
        pytest.importorskip("matplotlib")
    stuck = [
        RankRow(rank, spans=[Span(0, 0, 1000, "A", "open")], note="holds A") for rank in (0, 1)
    ]
    above = Timeline("deadlock", [("A", "A: 1 KiB")], 0, 1000, stuck, "for ever", [(0, 1), (1, 0)])
    done = [RankRow(rank, spans=[Span(0, 0, 900, "A", "finish")]) for rank in (0, 1)]
    below = condensed(Timeline("unjam", [("A", "A: 1 KiB")], 0, 1000, done, "all done"))
    text = draw([above, below], tmp_path / f"t.{ending}").read_text(encoding="utf-8")
    assert "for ever" in text and "all done" in text
    if ending == "html":
        assert text.count("<polygon") == 2 and "A: 1 KiB: done" in text
    else:
        drawn = re.findall(r"<!-- (.*?) -->", text, re.S)
        assert {"done", "stuck", "waits for"} <= set(drawn)
        assert "preempted" not in drawn and "engine has quit" not in drawn  # there are none
