"""Hosts that go, fall silent or speak nonsense: who is told what, and who goes on."""

import os
import signal
import socket
import time

import numpy as np
import pytest

import hosts_tools
import unjam
from hosts_tools import puppets
from processes import workers
from rank_tools import say

CARRIERS = [
    "plugin",
    pytest.param("ucx", marks=pytest.mark.skipif(hosts_tools.ucx() is None, reason="no UCX")),
]

# The control connections of this process: those over TCP that are of unjam.
SOCKETS = """
import socket
def tcp():
    found = []
    for fd in os.listdir('/proc/self/fd'):
        try:
            copy = socket.socket(fileno=os.dup(int(fd)))
            if copy.family == socket.AF_INET and copy.type == socket.SOCK_STREAM:
                found.append(copy)
        except OSError:
            pass
    return found
"""


@pytest.fixture
def harness():
    with workers() as harness:
        yield harness


def summed(ranks, key):
    return [rank.do(f"end({key!r})") for rank in ranks]


def lost(rank, key, victim, host):
    """It hears who is gone, of which host, at which address."""
    kind, message = rank.fails(f"end({key!r})")
    assert kind == "Peer", message
    assert f"rank {victim} is gone: its process (" in message, message
    assert f" on host {host}, 127.0.0.1:" in message, message
    return message


@pytest.mark.parametrize("by", CARRIERS)
def test_killed_process(harness, by):
    """Those with it are told at once, other groups go on, and the survivors make a new group."""
    ranks = puppets(harness, (1, 1, 2), by=by)
    for rank in ranks:
        rank.do("call('all_reduce', 'first', count=1000)")
    assert summed(ranks, "first") == [10_000.0] * 4
    left = [ranks[r] for r in (0, 2, 3)]
    for rank in left:
        rank.do("rest = context.group([0, 2, 3], 'rest')")
        rank.do("call('all_reduce', 'k', count=100000)")
        rank.do("call('all_reduce', 'beside', count=100000, on=rest)")
    ranks[1].process.signal(signal.SIGKILL)
    for rank in left:
        message = lost(rank, "k", 1, "host1")
        assert message in rank.do("str(context.async_error())")
    assert summed(left, "beside") == [8e5] * 3
    for rank in left:
        kind, message = rank.fails("call('all_reduce', 'next')")
        assert kind == "Peer" and "rank 1 is gone" in message
        assert rank.do("context.absent()") == [1]
        rank.do("shrunk = group.shrink('shrunk')")
        rank.do("call('all_reduce', 'again', count=100000, on=shrunk)")
    assert summed(left, "again") == [8e5] * 3
    for rank in left:
        rank.do("context.close()")
        rank.end()


def test_killed_in_the_middle(harness):
    """With large calls on the way, and twice."""
    ranks = puppets(harness, (1, 1, 1))
    for rank in ranks:
        for key in "abc":
            rank.do(f"call('all_reduce', {key!r}, count=1000000)")
    ranks[0].process.signal(signal.SIGKILL)
    for rank in ranks[1:]:
        for key in "abc":
            kind, message = rank.outcome(f"end({key!r})")
            assert kind in (None, "Peer"), message
    for rank in ranks[1:]:
        rank.do("until(lambda: context.absent() == [0])")
        rank.do("rest = group.shrink()")
        rank.do("call('all_reduce', 'rest', count=1000, on=rest)")
    assert summed(ranks[1:], "rest") == [5000.0] * 2


@pytest.mark.parametrize("by", CARRIERS)
def test_stopped_process(harness, by):
    """For less than the time-out it goes on. For longer it is lost, and hears it as it wakes."""
    ranks = puppets(harness, (1, 1, 1), by=by, UNJAM_PEER_TIMEOUT_MS=3000)
    for rank in ranks[1:]:
        rank.do("call('all_reduce', 'short', count=50000)")
    ranks[0].process.stop()
    time.sleep(0.5)
    ranks[0].process.signal(signal.SIGCONT)
    ranks[0].do("call('all_reduce', 'short', count=50000)")
    assert summed(ranks, "short") == [3e5] * 3
    for rank in ranks[1:]:
        rank.do("rest = context.group([1, 2], 'rest')")
        rank.do("call('all_reduce', 'long', count=50000)")
    ranks[0].process.stop()
    for rank in ranks[1:]:
        message = lost(rank, "long", 0, "host0")
        assert "nothing was heard of it for 3000 ms (UNJAM_PEER_TIMEOUT_MS)" in message
        rank.do("call('all_reduce', 'beside', on=rest)")
    assert summed(ranks[1:], "beside") == [20.0] * 2
    ranks[0].process.signal(signal.SIGCONT)
    ranks[0].do("until(lambda: context.absent() == [1, 2])")
    kind, message = ranks[0].fails("call('all_reduce', 'late')")
    assert kind == "Peer" and "on host host1" in message


def test_broken_connection(harness):
    """Between two of three processes: one of them is lost to all, and the others go on."""
    ranks = puppets(harness, (1, 1, 1))
    for rank in ranks:
        rank.do(SOCKETS)
        rank.do("call('all_reduce', 'k', count=1000)" if rank is not ranks[2] else "None")
    ends = ranks[1].do("[s.getsockname()[1] for s in tcp()]")
    ranks[0].do(f"[s.shutdown(socket.SHUT_RDWR) for s in tcp() if s.getpeername()[1] in {ends}]")
    for rank in ranks[:2]:
        kind, message = rank.fails("end('k')")
        assert kind == "Peer" and " is gone: its process (" in message, message
    ranks[2].do("until(lambda: context.absent())")
    (lost_one,) = ranks[2].do("context.absent()")
    assert lost_one in (0, 1)
    ranks[lost_one].do("until(lambda: len(context.absent()) == 2)")
    left = [ranks[1 - lost_one], ranks[2]]
    for rank in left:
        assert rank.do("context.absent()") == [lost_one]
        rank.do("rest = group.shrink()")
        rank.do("call('all_reduce', 'rest', value=1, on=rest)")
    assert summed(left, "rest") == [8.0] * 2


def test_bytes_of_a_stranger_in_a_connection(harness):
    """They have no tag."""
    ranks = puppets(harness, (1, 1))
    ranks[0].do(SOCKETS)
    ranks[1].do("call('all_reduce', 'k')")
    # In front of what is said next, so that a frame begins with it.
    ranks[0].do("[s.send(b'\\0' * 64) for s in tcp()]")
    message = lost(ranks[1], "k", 0, "host0")
    assert "tag" in message or "carrier" in message or "frame" in message, message


def test_carrier_that_fails(harness):
    """What it says is in the error."""
    ranks = puppets(harness, (1, 1))
    for rank in ranks:
        rank.do("call('all_reduce', 'first')")
    assert summed(ranks, "first") == [12.0] * 2
    ranks[0].do("import ctypes")
    # NetFaults of tests/net/faults.h: `fails`, which is kSend.
    ranks[0].do(
        "ctypes.c_int.in_dll(ctypes.CDLL(os.environ['UNJAM_NET_PLUGIN']), 'unjam_net_faults')"
        ".value = 8"
    )
    messages = []
    for rank in ranks:
        kind, message = rank.outcome("call('all_reduce', 'k', count=1000)")
        if kind is None:
            kind, message = rank.fails("end('k')")
        assert kind == "Peer"
        messages.append(message)
    # (Either may hear first that the other one has hung up.)
    assert any("by its carrier" in m and "unjam-test" in m for m in messages), messages


def test_abort_and_shrink(harness):
    ranks = puppets(harness, (2, 1))
    for rank in ranks[:2]:
        rank.do("call('all_reduce', 'k')")
    ranks[2].do("context.abort()")
    for rank in ranks[:2]:
        kind, message = rank.fails("end('k')")
        assert kind == "Peer" and "rank 2 is gone: the context was aborted" in message
        rank.do("rest = group.shrink()")
        rank.do("call('all_reduce', 'rest', on=rest)")
    assert summed(ranks[:2], "rest") == [12.0] * 2


def test_ranks_that_disagree(harness):
    """Each end hears what differs."""
    ranks = puppets(harness, (1, 1), UNJAM_STALL_MS=200)
    for n, rank in enumerate(ranks):
        kind, message = rank.outcome(f"call('all_reduce', 'k', count={4 + n})")
        assert kind in (None, "Mismatch"), message
    for rank in ranks:
        kind, message = rank.fails("end('k')")
        assert kind == "Mismatch"
        assert "count=4" in message and "count=5" in message, message
        rank.do("call('all_reduce', 'other')")
    assert summed(ranks, "other") == [12.0] * 2


# ---- the meeting ----


def joins():
    try:
        unjam.init_from_environment().close()
        say("joined")
    except unjam.UnjamError as error:
        say([type(error).__name__, str(error)])


def start(harness, hosts, worker, changes, by="plugin"):
    ranks = hosts_tools.places(hosts)
    for rank, more in zip(ranks, changes, strict=True):
        rank.update(hosts_tools.carrier(by), UNJAM_INIT_TIMEOUT_MS=30_000)
        rank.update(more)
        for name in [name for name, value in rank.items() if value is None]:
            del rank[name]
    return [harness.start(worker, name=f"rank {r}", **env) for r, env in enumerate(ranks)]


@pytest.mark.parametrize(
    "second, says",
    [
        ({"UNJAM_LANES": 2}, "UNJAM_LANES=2"),
        ({"UNJAM_NET_PLUGIN": "/nowhere/net.so"}, "carrier=none"),
        ({"UNJAM_RANKS": 3}, "3"),
    ],
)
def test_ranks_that_do_not_fit_together(harness, second, says):
    """All of them hear why."""
    ranks = start(harness, (1, 1), joins, ({}, second))
    for rank in ranks:
        kind, message = rank.said()
        assert says in message, message
    for rank in ranks:
        rank.ends()


def test_wrong_id(harness):
    other = hosts_tools.places((1,))[0]["UNJAM_ID"]
    changes = ({"UNJAM_INIT_TIMEOUT_MS": 3000}, {"UNJAM_ID": other})
    first, second = start(harness, (1, 1), joins, changes)
    assert "secret" in second.said()[1]
    assert "had not joined: rank 1" in first.said()[1]


def test_a_rank_that_does_not_come(harness):
    first, second = start(harness, (1, 1, 1), joins, [{"UNJAM_INIT_TIMEOUT_MS": 2000}] * 3)[:2]
    harness.all[2].kill()
    for rank in (first, second):
        assert "rank 2" in rank.said()[1]


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"UNJAM_ROOT": "127.0.0.1"}, "HOST:PORT"),
        ({"UNJAM_ROOT": "0.0.0.0:5000"}, "that all hosts can reach"),
        ({"UNJAM_ID": None}, "UNJAM_ID"),
        ({"UNJAM_FIRST_CONNECTORS": 8}, "UNJAM_FIRST_CONNECTORS must be 0"),
    ],
)
def test_environment_that_does_not_do(harness, changes, says):
    for rank in start(harness, (1, 1), joins, (changes, changes)):
        assert says in rank.said()[1]


def test_strangers_at_the_root(harness):
    """Who connects to the port and talks nonsense, or says nothing, disturbs nobody."""
    port = hosts_tools.free_port()
    ranks = hosts_tools.places((1, 1), port)
    carrier = hosts_tools.carrier("plugin")
    first = harness.start(joins, **ranks[0], **carrier)
    strangers = []
    end = time.monotonic() + 20
    while len(strangers) < 20 and time.monotonic() < end:
        try:
            strangers.append(socket.create_connection(("127.0.0.1", port), 1))
        except OSError:
            time.sleep(0.05)
    for stranger in strangers[::2]:
        stranger.send(os.urandom(100))
    second = harness.start(joins, **ranks[1], **carrier)
    assert [first.said(), second.said()] == ["joined"] * 2
    for stranger in strangers:
        stranger.close()
    # Nobody listens any more.
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), 1)


def test_job_after_job(harness):
    """Descriptors and mappings are given back."""
    for rank in start(harness, (1, 1), again, ({}, {})):
        rank.said()
        rank.ends()


def again():
    def held():
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    seen = []
    for _ in range(6):
        with unjam.init_from_environment() as context:
            x = np.full(1000, 1.0)
            context.group().all_reduce(x).wait(40)
            assert (x == 2).all()
        seen.append(held())
    assert seen[1] == seen[-1], seen
    say("done")
