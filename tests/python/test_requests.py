"""Requests as futures: waits, time limits, callbacks, await, lifetime of buffers."""

import asyncio
import gc
import sys
import threading
import time
import weakref

import numpy as np
import pytest

import unjam
from unjam import Aborted, InvalidUsage, Timeout, _completion


def both(groups, *arrays, **options):
    return [group.all_reduce(x, **options) for group, x in zip(groups, arrays, strict=True)]


def eventually(condition, seconds=40.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.002)


def test_states(pair):
    _, groups = pair
    x, y = np.ones(5), np.ones(5)
    first = groups[0].all_reduce(x, key="k")
    assert not first.test()
    assert not first.done()
    assert repr(first) == "<unjam.Request all_reduce under key 'k' on rank 0: pending>"
    second = groups[1].all_reduce(y, key="k")
    assert first.result(30) is x
    assert second.exception(30) is None
    assert first.test() and second.done()
    assert "complete" in repr(first)
    first.wait()
    first.wait(0)
    assert x[0] == y[0] == 2.0


@pytest.mark.parametrize("timeout", [0, 0.02, 0.13])
def test_timeout(pair, timeout):
    _, groups = pair
    request = groups[0].all_reduce(np.ones(5), key="slow")
    started = time.monotonic()
    with pytest.raises(Timeout, match="key 'slow' on rank 0 is still pending"):
        request.wait(timeout)
    assert timeout <= time.monotonic() - started < timeout + 20
    with pytest.raises(TimeoutError):
        request.exception(0)
    with pytest.raises(TimeoutError):
        unjam.wait_all([request], 0.01)
    other = groups[1].all_reduce(np.ones(5), key="slow")
    unjam.wait_all([request, other], 30)


def test_many_threads_wait_for_one_request(pair):
    _, groups = pair
    x = np.ones(5)
    request = groups[0].all_reduce(x)
    seen = []
    threads = [threading.Thread(target=lambda: seen.append(request.result(30))) for _ in range(8)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    assert not seen
    groups[1].all_reduce(np.ones(5)).wait(30)
    for thread in threads:
        thread.join(30)
    assert len(seen) == 8 and all(found is x for found in seen)


def test_waiting_does_not_hold_the_interpreter(pair):
    _, groups = pair
    request = groups[0].all_reduce(np.ones(5))
    waiter = threading.Thread(target=request.wait)
    waiter.start()

    def turns():
        count, end = 0, time.monotonic() + 0.2
        while time.monotonic() < end:
            count += 1
        return count

    # Of some looks: other programs may have the cores for all of one.
    assert any(turns() > 1000 for _ in range(50))
    groups[1].all_reduce(np.ones(5)).wait(30)
    waiter.join(30)


# ---- callbacks ----


def test_callback(pair):
    _, groups = pair
    called = []
    done = threading.Event()

    def callback(request):
        called.append((request.test(), request.result(), threading.current_thread()))
        done.set()

    x = np.ones(5)
    requests = [groups[0].all_reduce(x, callback=callback), groups[1].all_reduce(np.ones(5))]
    assert done.wait(30)
    unjam.wait_all(requests, 30)
    ((complete, result, thread),) = called
    assert complete and result is x
    assert thread is not threading.current_thread()


def test_add_done_callback(pair):
    _, groups = pair
    seen = []
    x, y = np.ones(5), np.ones(5)
    request = groups[0].all_reduce(x)
    request.add_done_callback(lambda r: seen.append(("a", r)))
    request.add_done_callback(lambda r: seen.append(("b", r)))
    groups[1].all_reduce(y).wait(30)
    eventually(lambda: len(seen) == 2)
    assert seen == [("a", request), ("b", request)]
    request.add_done_callback(lambda r: seen.append(("c", r)))  # at once, or just after
    eventually(lambda: len(seen) == 3)


def test_callbacks_may_submit(launch):
    """A chain in which each completion submits the next call: no thread of the user's is in it."""
    length = 50

    def rank(context, group):
        x = np.full(100, context.rank, dtype=np.int64)
        finished = threading.Event()
        left = [length]

        def again(request):
            left[0] -= 1
            if left[0]:
                group.all_reduce(x, op="max", key="chain", callback=again)
            else:
                finished.set()

        group.all_reduce(x, op="max", key="chain", callback=again)
        assert finished.wait(60)
        return int(x[0])

    assert launch(3, rank) == [2, 2, 2]


def test_callbacks_must_not_wait_or_close(pair):
    contexts, groups = pair
    seen = []
    done = threading.Event()
    pending = groups[0].all_reduce(np.ones(3), key="pending")

    def callback(request):
        for call in (pending.wait, pending.result, contexts[0].close):
            try:
                call()
            except InvalidUsage as error:
                seen.append(str(error))
        request.wait()  # complete: fine
        done.set()

    groups[0].all_reduce(np.ones(3), key="k", callback=callback)
    others = [groups[1].all_reduce(np.ones(3), key="k")]
    assert done.wait(30)
    assert len(seen) == 3 and "callback" in seen[0]
    others.append(groups[1].all_reduce(np.ones(3), key="pending"))
    unjam.wait_all([pending, *others], 30)


def test_exceptions_in_callbacks_are_reported(pair, monkeypatch):
    _, groups = pair
    reports = []
    after = threading.Event()
    monkeypatch.setattr(sys, "unraisablehook", reports.append)

    def bad(request):
        raise ValueError("from a callback")

    request = groups[0].all_reduce(np.ones(3), callback=bad)
    request.add_done_callback(lambda r: after.set())
    groups[1].all_reduce(np.ones(3)).wait(30)
    assert after.wait(30), "the others must still run"
    eventually(lambda: reports)
    assert isinstance(reports[0].exc_value, ValueError)
    assert "bad" in f"{reports[0].object!r} {reports[0].err_msg}"  # since Python 3.13 the latter
    request.add_done_callback(bad)
    eventually(lambda: len(reports) == 2)


def test_the_default_hook_takes_the_report(python):
    code = """
import numpy as np, unjam, threading
done = threading.Event()
def bad(request):
    raise ValueError("from a callback")
with unjam.init_all(1) as (context,):
    r = context.group().all_reduce(np.ones(3), callback=bad)
    r.add_done_callback(lambda r: done.set())
    r.wait(30)
    assert done.wait(30)
"""
    finished = python("-c", code)
    assert finished.returncode == 0, finished.stderr
    assert "ValueError: from a callback" in finished.stderr
    assert "unjam callback bad" in finished.stderr


def test_callback_of_a_failed_invocation():
    with unjam.init_all(2) as contexts:
        seen = []
        request = (
            contexts[0]
            .group()
            .all_reduce(np.ones(3), callback=lambda r: seen.append((r.test(), r.exception())))
        )
        contexts[0].abort()
        with pytest.raises(Aborted):
            request.wait(30)
        eventually(lambda: seen)
        assert seen[0][0] and isinstance(seen[0][1], Aborted)


# ---- await ----


def test_await(pair):
    _, groups = pair

    async def main():
        x, y = np.ones(5), np.ones(5)
        first = groups[0].all_reduce(x)

        async def later():
            await asyncio.sleep(0.05)
            return await groups[1].all_reduce(y)

        one, two = await asyncio.wait_for(asyncio.gather(first, later()), 30)
        assert one is x and two is y
        assert await first is x  # again, when complete
        return x[0]

    assert asyncio.run(main()) == 2.0


def test_await_many_out_of_order(pair):
    """A coroutine that waits takes no thread, so no number of them can block the others."""
    _, groups = pair
    count = 100

    async def side(group, order, data):
        async def one(i):
            return await group.all_reduce(data[i], key=f"key {i}")

        await asyncio.gather(*(one(i) for i in order))

    async def main():
        data = [[np.full(10, float(i + r)) for i in range(count)] for r in range(2)]
        tasks = asyncio.gather(
            side(groups[0], range(count), data[0]), side(groups[1], reversed(range(count)), data[1])
        )
        await asyncio.wait_for(tasks, 60)
        assert all(data[r][i][0] == 2 * i + 1 for r in range(2) for i in range(count))

    asyncio.run(main())


def test_cancelled_await_leaves_the_invocation(pair):
    _, groups = pair

    async def main():
        request = groups[0].all_reduce(np.ones(5))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(wrap(request))), 0.05)
        return request

    async def wrap(request):
        return await request

    request = asyncio.run(main())
    assert not request.test()
    groups[1].all_reduce(np.ones(5)).wait(30)
    request.wait(30)


# ---- lifetime ----


class Array(np.ndarray):
    """An array that can be referred to weakly."""


def test_buffers_live_until_completion_without_the_request(pair):
    _, groups = pair
    x = np.ones(1000).view(Array)
    alive = weakref.ref(x)
    groups[0].all_reduce(x)
    del x
    gc.collect()
    assert alive() is not None
    groups[1].all_reduce(np.ones(1000)).wait(30)
    eventually(lambda: gc.collect() is not None and alive() is None)


def test_buffers_are_let_go_while_the_request_is_kept(pair):
    _, groups = pair
    out, x = np.ones(1000), np.ones(1000).view(Array)
    alive = weakref.ref(x)
    request = groups[0].all_reduce(x, out)
    del x
    groups[1].all_reduce(np.ones(1000)).wait(30)
    request.wait(30)
    eventually(lambda: gc.collect() is not None and alive() is None)
    assert request.result() is out


def test_a_bytearray_in_use_cannot_be_resized(pair):
    _, groups = pair
    x = bytearray(8)
    request = groups[0].all_reduce(x)
    with pytest.raises(BufferError):
        x.extend(b"more")
    groups[1].all_reduce(bytearray(8)).wait(30)
    request.wait(30)

    def resizable():
        try:
            x.extend(b"more")
        except BufferError:
            return False
        return True

    eventually(resizable)


def test_nothing_is_left_behind(launch):
    def count():
        gc.collect()
        return sum(type(o) is unjam.Request for o in gc.get_objects())

    before, objects = len(_completion._pending), count()

    def rank(context, group):
        for i in range(300):
            group.all_reduce(np.ones(4), key=str(i % 7))
        group.all_reduce(np.ones(4), key="last").wait(30)
        while context.stats().pending:
            time.sleep(0.001)

    launch(2, rank)
    eventually(lambda: len(_completion._pending) == before)
    eventually(lambda: count() <= objects)


def test_requests_outlive_their_context():
    with unjam.init_all(1) as (context,):
        request = context.group().all_reduce(np.ones(3))
        request.wait(30)
    assert request.test()
    request.wait()
    del request
    gc.collect()
