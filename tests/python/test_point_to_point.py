"""All-to-all, gather, scatter, barriers, sends, receives and probes through Python."""

import random
import threading
import time

import numpy as np
import pytest

import unjam
from unjam import InvalidArgument, InvalidType, InvalidUsage, Mismatch, Peer

COUNTS = [0, 1, 7, 64, 1000, 100_003]


def block(source, destination, count):
    return np.arange(count) + 1_000_000 * source + 10_000_000 * destination


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("count", COUNTS)
def test_blocks(launch, ranks, count):
    root = ranks - 1

    def rank(context, group):
        me = context.rank
        x = np.stack([block(me, r, count) for r in range(ranks)])
        out = np.full((ranks, count), -1)
        assert group.all_to_all(x, out).result(30) is out
        np.testing.assert_array_equal(out, [block(r, me, count) for r in range(ranks)])

        everybody = [block(r, 0, count) for r in range(ranks)]
        out = np.full((ranks, count), -1)
        result = group.gather(block(me, 0, count), out if me == root else None, root=root)
        assert (result.result(30) is out) == (me == root)
        np.testing.assert_array_equal(out, everybody if me == root else np.full_like(out, -1))
        out[root] = block(root, 0, count)  # in place
        group.gather(
            out[root] if me == root else block(me, 0, count), out if me == root else None, root=root
        ).wait(30)
        if me == root:
            np.testing.assert_array_equal(out, everybody)

        out = np.full(count, -1)
        group.scatter(x if me == root else None, out, root=root).wait(30)
        np.testing.assert_array_equal(out, block(root, me, count))
        x = np.stack([block(me, r, count) for r in range(ranks)])
        out = x[me] if me == root else np.full(count, -1)
        group.scatter(x if me == root else None, out, root=root).wait(30)
        np.testing.assert_array_equal(out, block(root, me, count))
        group.barrier().wait(30)
        return True

    assert launch(ranks, rank) == [True] * ranks


@pytest.mark.parametrize("kind", ["all_to_all", "gather", "scatter"])
def test_registered(launch, kind):
    def rank(context, group):
        with group.register(kind, "key", np.int64, root=1) as run:
            seen = []
            for use in range(3):
                x = np.arange(4) + 10 * context.rank + 100 * use
                out = {
                    "all_to_all": np.zeros(4, np.int64),
                    "gather": np.zeros(8, np.int64) if context.rank == 1 else None,
                    "scatter": np.zeros(2, np.int64),
                }[kind]
                run.run(x, out).wait(30)
                seen.append(None if out is None else (out - 100 * use).tolist())
        assert seen[0] == seen[1] or kind == "gather"
        return seen[0]

    assert (
        launch(2, rank)
        == {
            "all_to_all": [[0, 1, 10, 11], [2, 3, 12, 13]],
            "gather": [None, [0, 1, 2, 3, 10, 11, 12, 13]],
            "scatter": [[10, 11], [12, 13]],
        }[kind]
    )


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
def test_ring_of_messages(launch, count, dtype):
    def rank(context, group):
        to, source = (context.rank + 1) % 3, (context.rank - 1) % 3
        x = (np.arange(count) % 100 + context.rank).astype(dtype)
        out = np.zeros(count, dtype)
        sent = group.send(x, to, key="ring")
        assert group.recv(out, source, key="ring").result(30) is out
        sent.wait(30)
        np.testing.assert_array_equal(out, (np.arange(count) % 100 + source).astype(dtype))
        return True

    assert launch(3, rank) == [True] * 3


def test_any_order_among_collectives(launch):
    ranks, tags, uses = 3, 12, 2

    def value(source, to, tag, use):
        return float(source + 10 * to + 100 * tag + 10_000 * use)

    def rank(context, group):
        me = context.rank
        channels = [
            (peer, tag, sends)
            for peer in range(ranks)
            if peer != me
            for tag in range(tags)
            for sends in (True, False)
        ]
        todo = [channel for channel in channels for _ in range(uses)] + [None] * tags
        random.Random(me).shuffle(todo)
        done, collectives, requests, received = {}, list(range(tags)), [], []
        random.Random(me + 77).shuffle(collectives)
        for channel in todo:
            if channel is None:
                tag = collectives.pop()
                requests.append(group.all_reduce(np.ones(tag + 1), key=f"k{tag}"))
                continue
            peer, tag, sends = channel
            use = done[channel] = done.get(channel, -1) + 1
            size = 20_000 if tag % 4 == 0 else 3
            if sends:
                x = np.full(size, value(me, peer, tag, use))
                requests.append(group.send(x, peer, key=f"k{tag}"))
            else:
                out = np.zeros(size)
                requests.append(group.recv(out, peer, key=f"k{tag}"))
                received.append((out, value(peer, me, tag, use)))
        unjam.wait_all(requests, 60)
        for out, want in received:
            assert (out == want).all()
        return len(received)

    assert launch(ranks, rank) == [(ranks - 1) * tags * uses] * ranks


def test_torch_and_raw_memory(pair):
    torch = pytest.importorskip("torch")
    _, (first, second) = pair
    x = torch.arange(5, dtype=torch.bfloat16)
    sent = first.send(x, 1)
    out = torch.zeros(5, dtype=torch.bfloat16)
    assert second.recv(out, 0).result(30) is out
    sent.wait(30)
    assert torch.equal(x, out)
    sent = first.send(b"hello", 1, key="text")
    text = bytearray(5)
    second.recv(text, 0, key="text").wait(30)
    sent.wait(30)
    assert text == b"hello"


def test_barrier_waits_for_all(launch):
    called = [0] * 20

    def rank(context, group):
        for i in range(len(called)):
            time.sleep(0.001 * random.random())
            called[i] += 1 if context.rank == 0 else 1000
            group.barrier(key="b").wait(30)
            assert called[i] == 1001
        return True

    # One at a time adds up: the interpreter's lock.
    assert launch(2, rank) == [True] * 2


def test_probe(pair):
    contexts, (first, second) = pair
    assert not second.probe(0, key="k")
    sent = [first.send(np.arange(n), 1, key="k") for n in (3, 0)]
    for n in (3, 0):
        assert second.probe(0, key="k")
        assert not second.probe(0)
        second.recv(np.zeros(n, np.int64), 0, key="k").wait(30)
    assert not second.probe(0, key="k")
    unjam.wait_all(sent, 30)
    contexts[0].abort()
    with pytest.raises(Peer, match="rank 0 is gone"):
        second.probe(0, key="k")


def test_mismatch_names_both_ends(pair):
    _, (first, second) = pair
    requests = [
        second.recv(np.zeros(4, np.float32), 0, key="k"),
        first.send(np.zeros(4, np.float64), 1, key="k"),
    ]
    for request in requests:
        with pytest.raises(
            Mismatch,
            match=r"the send from rank 0 to rank 1 under key 'k'.*"
            r"rank \d called send_recv\(count=4, float.., source=0, destination=1\); rank",
        ):
            request.wait(30)
    requests = [
        first.recv(np.zeros(4), 1, key="k"),
        second.send(np.arange(4.0), 0, key="k"),
    ]
    unjam.wait_all(requests, 30)


def test_what_is_refused(pair):
    contexts, (group, _) = pair
    before = contexts[0].stats().submitted
    x, y = np.zeros(8, np.float32), np.zeros(8, np.float32)
    read_only = np.zeros(8, np.float32)
    read_only.flags.writeable = False
    wrong = [
        (lambda: group.send(x, 2), InvalidArgument, "from 0 to 1"),
        (lambda: group.recv(x, -1), InvalidArgument, "from 0 to 1"),
        (lambda: group.probe(2), InvalidArgument, "from 0 to 1"),
        (lambda: group.send(x, "1"), InvalidType, "must be an integer"),
        (lambda: group.recv(None, 1), InvalidType, "out is missing"),
        (lambda: group.recv(read_only, 1), InvalidArgument, "read-only"),
        (lambda: group.probe(1, key=3), InvalidType, "key must be a str"),
        (lambda: group.all_to_all(x, x), InvalidArgument, "overlap: use separate buffers$"),
        (lambda: group.all_to_all(x, y[:6]), InvalidArgument, "same size"),
        (lambda: group.all_to_all(x[:7], y[:7]), InvalidArgument, "a multiple of 2"),
        (lambda: group.gather(x, y), InvalidArgument, "a gather of 8 elements from each of 2"),
        (lambda: group.gather(x), InvalidType, "out is missing"),
        (lambda: group.scatter(x, y), InvalidArgument, "a scatter into 8 elements on each of 2"),
        (lambda: group.scatter(x, None), InvalidType, "out is missing"),
        (lambda: group.scatter(None, None, root=1), InvalidType, "out is missing"),
        (lambda: group.gather(x, y, root=2), InvalidArgument, "root 2 is not a rank"),
    ]
    for call, error, text in wrong:
        with pytest.raises(error, match=text):
            call()
    assert contexts[0].stats().submitted == before
    group.close()
    for call in (lambda: group.send(x, 1), lambda: group.probe(1), lambda: group.barrier()):
        with pytest.raises(InvalidUsage, match="closed"):
            call()


@pytest.mark.parametrize("ranks", [1, 3])
def test_messages_to_oneself(launch, ranks):
    def rank(context, group):
        me = context.rank
        out = [np.zeros(5, np.int32) for _ in range(4)]
        requests = [
            group.send(np.full(5, 1, np.int32), me, key="a"),
            group.recv(out[1], me, key="b"),
            group.send(np.full(5, 2, np.int32), me, key="a"),
        ]
        assert group.probe(me, key="a")
        assert not group.probe(me, key="b")
        requests += [
            group.recv(out[0], me, key="a"),
            group.recv(out[2], me, key="a"),
            group.send(np.full(5, 3, np.int32), me, key="b"),
        ]
        unjam.wait_all(requests, 30)
        assert not group.probe(me, key="a")
        return [int(x[0]) for x in out[:3]]

    assert launch(ranks, rank) == [[1, 3, 2]] * ranks


def test_a_message_to_oneself_that_differs_ends_both_calls(pair):
    _, (group, _) = pair
    requests = [group.send(np.ones(3), 0, key="k"), group.recv(np.ones(4), 0, key="k")]
    errors = [str(request.exception(30)) for request in requests]
    assert errors[0] == errors[1]
    assert "the send from rank 0 to itself under key 'k'" in errors[0]
    with pytest.raises(Mismatch, match="out of use"):
        group.send(np.ones(3), 0, key="k")


def test_a_message_to_oneself_needs_both_calls(pair):
    contexts, (group, _) = pair
    request = group.send(np.ones(3), 0, key="k")
    with pytest.raises(unjam.Timeout):
        request.wait(0.05)
    what = contexts[0].explain()["ranks"][0]["pending"][0]["what"]
    assert what == "send_recv(count=3, float64, source=0, destination=0) without its receive"
    group.recv(np.ones(3), 0, key="k").wait(30)
    request.wait(30)


def test_requests_say_what_they_are(pair):
    _, (first, second) = pair
    request = second.recv(np.zeros(2), 0, key="k")
    assert "recv from rank 0 under key 'k'" in repr(request)
    pending = second.context.explain()["ranks"][1]["pending"][0]
    assert pending["what"] == "send_recv(count=2, float64, source=0, destination=1)"
    assert pending["not_called_by"] == [0]
    sent = first.send(np.ones(2), 1, key="k", callback=lambda r: None)
    assert "send to rank 1" in repr(sent)
    unjam.wait_all([request, sent], 30)
    waits = first.barrier(key="b")
    assert "barrier under key 'b'" in repr(waits)
    second.barrier(key="b").wait(30)
    waits.wait(30)


def test_threads_send_and_receive_at_once(launch):

    def rank(context, group):
        results = []

        def work(tag):
            for i in range(20):
                out = np.zeros(100)
                sent = group.send(np.full(100, float(tag + i)), 1 - context.rank, key=f"t{tag}")
                group.recv(out, 1 - context.rank, key=f"t{tag}").wait(60)
                sent.wait(60)
                results.append((out == tag + i).all())

        threads = [threading.Thread(target=work, args=(t,)) for t in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return len(results), all(results)

    assert launch(2, rank) == [(160, True)] * 2


def test_a_killed_sender_is_named(python):
    code = """
import os, signal, sys, numpy as np, unjam
def body(rank, identity):
    context = unjam.init(2, rank, identity)
    group = context.group()
    if rank == 1:
        group.send(np.ones(1), 0, key="up").wait(30)
        signal.pause()
    out = np.zeros(1)
    group.recv(out, 1, key="up").wait(30)  # what it sent is lost if it dies before
    os.kill(child, signal.SIGKILL)
    try:
        group.recv(out, 1, key="never").wait(30)
    except unjam.Peer as error:
        print("error:", error)
    context.abort()
identity = unjam.unique_id()
child = os.fork()
body(1 if child == 0 else 0, identity)
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert "error:" in done.stdout and "rank 1 is gone" in done.stdout
