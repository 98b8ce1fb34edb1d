"""What is said about who waits for whom: to programs, to people, by a signal, over processes."""

import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import unjam
from explanations import pending, settled, waits
from processes import SOON_S, environment, puppets, workers


@pytest.fixture
def harness():
    with workers() as harness:
        yield harness


def told_by_signal(process, *words):
    """What it writes at the signal, with these words.

    It is asked again and again: who does not answer within a second is left out.
    """
    head = f"unjam: process {process.pid}, a job of "
    before = len(process.stderr)
    end = time.monotonic() + SOON_S
    while True:
        process.signal(signal.SIGUSR2)
        again = time.monotonic() + 2
        while time.monotonic() < again:
            _, found, text = process.stderr[before:].rpartition(head)  # one answer alone
            if found and all(w in text for w in words):
                return head + text
            time.sleep(0.02)
        assert time.monotonic() < end, f"no {words} on stderr:\n{process.stderr}"


# ---- ranks as threads ----


def test_what_engines_wait_for(pair):
    contexts, (zero, one) = pair
    x, y, z = (np.zeros(2_000_000, dtype=np.float32) for _ in range(3))
    requests = [zero.all_reduce(x, key="data"), zero.all_reduce(y, key="data")]
    # A root that nobody takes from: its connector is full soon.
    requests.append(one.broadcast(z, root=1, key="room"))
    explanation = settled(
        contexts[0].explain,
        lambda e: (
            waits(e, 0, "data")[:1] == [("data", 1, None)]
            and waits(e, 1, "room") == [("room", 0, None)]
        ),
    )
    assert waits(explanation, 0, "data")[1] == ("turn", None, 0)
    (call,) = pending(explanation, 1, "room")
    assert call["what"] == "broadcast(count=2000000, float32, root=1)"
    assert (call["called_by"], call["not_called_by"]) == ([1], [0])
    (engine,) = call["engines"]
    assert engine["lane"] == 0
    assert 0 <= engine["since_ms"] <= call["age_ms"]
    # Since when: no news, and time goes on.
    time.sleep(0.1)
    explanation = settled(contexts[0].explain, lambda e: pending(e, 1, "room"))
    (later,) = pending(explanation, 1, "room")
    assert later["engines"][0]["since_ms"] >= engine["since_ms"] + 90
    words = [
        "engine waits for data from rank 1 since",
        "engine waits for its turn: use 1 of the key is not complete",
        "engine waits for room towards rank 0 since",
    ]
    settled(unjam.explain, lambda text: all(w in text for w in words))
    requests += [one.all_reduce(x.copy(), key="data"), one.all_reduce(y.copy(), key="data")]
    requests.append(zero.broadcast(z.copy(), root=1, key="room"))
    unjam.wait_all(requests, 60)
    assert all(not rank["pending"] for rank in contexts[0].explain()["ranks"])


@pytest.mark.parametrize("seed", range(8))
def test_what_an_abort_has_ended_is_not_pending(seed):
    """Although its engine, which is delayed, hears of it later, and nobody asks for the calls."""
    with unjam.init_all(3, delay_seed=seed + 1, delay_max_us=50_000) as contexts:
        x = np.zeros(100, dtype=np.float32)
        requests = [contexts[r].group().all_reduce(x.copy(), key="k") for r in (0, 1)]
        settled(
            contexts[2].explain,
            lambda e: all(waits(e, r, "k")[:1] == [("data", 2, None)] for r in (0, 1)),
        )
        for context in contexts[:2]:
            context.abort()
        settled(contexts[2].explain, lambda e: not any(r["pending"] for r in e["ranks"]))
        assert all(request.done() for request in requests)


def test_lanes():
    with unjam.init_all(2, lanes=3) as contexts:
        group = contexts[0].group()
        group.all_reduce(np.zeros(3_000_000, dtype=np.float32), key="k")
        explanation = settled(
            contexts[0].explain,
            lambda e: (
                {x["waits_for"] for c in pending(e, 0, "k") for x in c["engines"]} == {"data"}
            ),
        )
        (call,) = pending(explanation, 0, "k")
        lanes = [x["lane"] for x in call["engines"]]
        assert len(lanes) > 1 and lanes == sorted(set(lanes))
        words = f"engine of lane {lanes[-1]} waits for data from rank 1"
        settled(unjam.explain, lambda text: words in text)
        for context in contexts:
            context.abort()


def test_hold_waits_too():
    with unjam.init_all(2, policy="hold") as contexts:
        groups = [context.group() for context in contexts]
        for key in "ab":
            groups[0].all_reduce(np.zeros(10), key=key)
            groups[1].all_reduce(np.zeros(10), key=key.upper())
        explanation = settled(
            contexts[0].explain, lambda e: waits(e, 0, "a") == [("data", 1, None)]
        )
        assert waits(explanation, 0, "b") == [("start", None, None)]
        for context in contexts:
            context.abort()


def test_several_jobs_in_one_process():
    with unjam.init_all(2) as first, unjam.init_all(3) as second:
        first[1].group().all_reduce(np.zeros(4), key="of the first")
        second[2].group().all_reduce(np.zeros(4), key="of the second")
        text = settled(
            unjam.explain, lambda t: t.count("of the first") == t.count("of the second") == 1
        )
        assert text.index("job of 2 ranks") < text.index("of the first")
        assert text.index("job of 3 ranks") < text.index("of the second")
        for context in [*first, *second]:
            context.abort()
    text = unjam.explain()
    assert "of the first" not in text and "of the second" not in text


# ---- ranks as processes ----


def test_over_processes(harness):
    ranks = puppets(harness, 3)
    ranks[0].do("call('all_reduce', 'k', count=100)")
    ranks[1].do("call('all_reduce', 'k', count=100)")
    ranks[1].do("call('broadcast', 'b', root=2)")
    explanation = settled(
        lambda: ranks[2].do("context.explain()"),
        lambda e: (
            # Each engine may still be about to start its call when all of them are known.
            all([w[0] for w in waits(e, rank, "k")] == ["data"] for rank in (0, 1))
            and waits(e, 1, "b") == [("data", 2, None)]
            and not e["absent"]
        ),
    )
    assert [rank["rank"] for rank in explanation["ranks"]] == [0, 1, 2]
    assert explanation["absent"] == explanation["cycles"] == []
    for rank in (0, 1):
        (call,) = pending(explanation, rank, "k")
        assert call["what"] == "all_reduce(count=100, float32, sum)"
        assert (call["called_by"], call["not_called_by"]) == ([0, 1], [2])
        assert call["age_ms"] > 0
    (call,) = pending(explanation, 1, "b")
    assert (call["called_by"], call["not_called_by"]) == ([1], [0, 2])
    assert explanation["ranks"][0]["waits_for"] == [2]
    assert explanation["ranks"][1]["waits_for"] == [0, 2]
    words = r"broadcast\(.*called by: 1; not called by: 0, 2; .*data from rank 2"
    settled(lambda: ranks[0].do("unjam.explain()"), lambda text: re.search(words, text))

    # Ended calls are not pending.
    for rank in ranks[:2]:
        rank.do("context.abort()")
    settled(
        lambda: ranks[2].do("context.explain()"),
        lambda e: [rank["pending"] for rank in e["ranks"]] == [[], [], []],
    )


def test_ranks_that_are_gone(harness):
    ranks = puppets(harness, 3)
    ranks[1].process.signal(signal.SIGKILL)
    ranks[2].do("context.close()")

    # A rank that is about to be known as gone "does not answer" meanwhile.
    def known(explanation):
        gone = explanation["absent"]
        return len(gone) == 2 and not any("does not answer" in rank["why"] for rank in gone)

    explanation = settled(lambda: ranks[0].do("context.explain()"), known)
    assert [rank["rank"] for rank in explanation["ranks"]] == [0]
    one, two = explanation["absent"]
    assert one["rank"] == 1
    assert re.match(rf"gone: its process \({ranks[1].process.pid}\) died", one["why"])
    assert two == {"rank": 2, "why": "has left the job"}
    assert "rank 2: has left the job" in ranks[0].do("unjam.explain()")


def test_stopped_process(harness):
    """It does not answer, which is said within about a second; then it goes on."""
    ranks = puppets(harness, 3)
    ranks[0].do("call('all_reduce', 'k')")
    ranks[1].do("call('all_reduce', 'k')")
    stopped = ranks[2].process
    stopped.stop()
    try:
        began = time.monotonic()
        ranks[0].do("context.explain()")
        assert time.monotonic() - began > 0.9
        # (One that is only slow does not answer, either.)
        silent = [{"rank": 2, "why": f"does not answer (process {stopped.pid})"}]
        explanation = settled(
            lambda: ranks[0].do("context.explain()"), lambda e: e["absent"] == silent
        )
        (call,) = pending(explanation, 1, "k")
        assert (call["called_by"], call["not_called_by"]) == ([0, 1], [])
    finally:
        stopped.signal(signal.SIGCONT)
    explanation = settled(lambda: ranks[0].do("context.explain()"), lambda e: not e["absent"])
    assert pending(explanation, 1, "k")[0]["not_called_by"] == [2]
    ranks[2].do("call('all_reduce', 'k')")
    assert [rank.do("end('k')") for rank in ranks] == [24.0] * 3


@pytest.mark.parametrize("calls_first", [True, False])
def test_deadlock_under_hold(harness, calls_first):
    """As NCCL: two processes, two keys, two orders. The circle is named, by program and signal."""
    ranks = puppets(harness, 2, {"policy": "hold"})
    ranks[0].do("call('all_reduce', 'A')")
    ranks[1].do("call('all_reduce', 'B')")
    if calls_first:  # not yet called by the other is as bad as called behind
        ranks[0].do("call('all_reduce', 'B')")
        ranks[1].do("call('all_reduce', 'A')")
    explanation = settled(lambda: ranks[0].do("context.explain()"), lambda e: e["cycles"])
    (cycle,) = explanation["cycles"]
    said = "rank 0 runs 'A' and waits for rank 1, which runs 'B' and waits for rank 0"
    assert cycle["text"] == said
    edges = [(e["rank"], e["runs"]["key"], e["waits_for"]) for e in cycle["edges"]]
    assert edges == [(0, "A", 1), (1, "B", 0)]
    settled(lambda: ranks[1].do("unjam.explain()"), lambda text: f"DEADLOCK: {said}" in text)
    told_by_signal(ranks[1].process, f"DEADLOCK: {said}")


def test_no_deadlock_without_hold(harness):
    ranks = puppets(harness, 2)
    ranks[0].do("call('all_reduce', 'A')")
    ranks[1].do("call('all_reduce', 'B')")
    for _ in range(5):
        assert ranks[0].do("context.explain()")["cycles"] == []
    ranks[0].do("call('all_reduce', 'B'), end('B')")
    ranks[1].do("call('all_reduce', 'A'), end('A')")


# ---- by a signal ----


def test_signal(harness):
    """To one process: the state of all ranks, on its stderr alone."""
    ranks = puppets(harness, 3)
    for rank in ranks[:2]:
        rank.do("call('all_reduce', 'k', count=5)")
    settled(
        lambda: ranks[2].do("context.explain()"),
        lambda e: all([w[0] for w in waits(e, rank, "k")] == ["data"] for rank in (0, 1)),
    )
    text = told_by_signal(
        ranks[2].process,
        "unjam: rank 0: 1 pending\n",
        "unjam: rank 1: 1 pending\n",
        "unjam: rank 2: 0 pending\n",
    )
    assert f"unjam: process {ranks[2].process.pid}, a job of 3 ranks" in text
    calls = [line for line in text.splitlines() if "'k'" in line]
    assert len(calls) == 2
    for line in calls:
        assert re.search(
            r"all_reduce\(count=5, float32, sum\), 'k', since \d+\.\d{3} s; called by: 0, 1; "
            r"not called by: 2; engine waits for data from rank \d since \d+\.\d{3} s",
            line,
        ), line
    assert ranks[0].process.stderr == ranks[1].process.stderr == ""
    # Again, and it has disturbed nobody.
    ranks[2].do("call('all_reduce', 'k', count=5)")
    assert [rank.do("end('k')") for rank in ranks] == [30.0] * 3
    told_by_signal(ranks[0].process, "rank 2: 0 pending", "rank 0: 0 pending")


def test_signal_with_a_stopped_process(harness):
    ranks = puppets(harness, 2)
    ranks[1].process.stop()
    try:
        ranks[0].process.signal(signal.SIGUSR2)
        ranks[0].process.wait_for_stderr(
            f"rank 1: does not answer (process {ranks[1].process.pid})"
        )
    finally:
        ranks[1].process.signal(signal.SIGCONT)


def test_other_signal(harness):
    (rank,) = puppets(harness, 1, UNJAM_EXPLAIN_SIGNAL=int(signal.SIGUSR1))
    rank.process.signal(signal.SIGUSR1)
    rank.process.wait_for_stderr("rank 0: 0 pending")


OWN_HANDLER = """
import os, signal, time, unjam
got = []
if {before}:
    signal.signal(signal.SIGUSR2, lambda *_: got.append(1))
with unjam.init_all(1) as contexts:
    if not {before}:
        signal.signal(signal.SIGUSR2, lambda *_: got.append(1))
    os.kill(os.getpid(), signal.SIGUSR2)
    time.sleep(0.7)
print(got)
"""


@pytest.mark.parametrize("before", [True, False])
def test_handler_of_the_program_stays(python, before):
    result = python("-c", OWN_HANDLER.format(before=before))
    assert (result.returncode, result.stdout.strip(), result.stderr) == (0, "[1]", "")


def test_ignored_signal_stays_ignored(python):
    result = python(
        "-c",
        "import os, signal, time, unjam\n"
        "signal.signal(signal.SIGUSR2, signal.SIG_IGN)\n"
        "with unjam.init_all(1):\n"
        "    os.kill(os.getpid(), signal.SIGUSR2); time.sleep(0.5)\n",
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_no_signal_if_none_is_wanted():
    """Then it ends the process, as it does by default."""
    code = (
        "import os, signal, time, unjam\n"
        "with unjam.init_all(1):\n"
        "    os.kill(os.getpid(), signal.SIGUSR2); time.sleep(5)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(UNJAM_EXPLAIN_SIGNAL=0),
        capture_output=True,
        timeout=60,
    )
    assert (result.returncode, result.stderr) == (-signal.SIGUSR2, b"")


def test_signal_among_many(harness):
    """A hundred of them in a row do no harm."""
    ranks = puppets(harness, 2)
    for rank in ranks:
        rank.do("call('all_reduce', 'k')")
    for _ in range(100):
        ranks[0].process.signal(signal.SIGUSR2)
    assert [rank.do("end('k')") for rank in ranks] == [12.0] * 2
    ranks[0].process.wait_for_stderr("rank 1: ")
