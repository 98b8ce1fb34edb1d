"""Signals get through every wait of a process group: Python's handlers run while it waits."""

import pytest

from processes import workers

pytest.importorskip("torch")

from torch_tools import START_S, make_store  # noqa: E402

LONG_S = 200  # to catch hangs
pytestmark = [pytest.mark.timeout(900, func_only=True), pytest.mark.usefixtures("adapter")]


def ranks(rank, port, part):
    import os
    import signal
    import threading
    import time
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    import unjam.torch
    from rank_tools import say
    from torch_tools import join_store, meet

    limit_s = 60  # of every wait; a signal's handler has a second
    torch.set_num_threads(1)
    store = join_store(port, 2)

    def join(name):
        dist.init_process_group(
            "unjam",
            store=dist.PrefixStore(name, store),
            rank=rank,
            world_size=2,
            timeout=timedelta(seconds=limit_s),
        )

    def soon(number):
        """Sends it to this process a little later, when the main thread waits, most likely."""
        sent = []

        def send():
            sent.append(time.monotonic())
            os.kill(os.getpid(), number)

        timer = threading.Timer(0.3, send)
        timer.start()
        return sent, timer

    def interrupted(call):
        """Ctrl-C ends the call; how long that takes."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sent, timer = soon(signal.SIGINT)
        try:
            call()
        except KeyboardInterrupt:
            return time.monotonic() - sent[0]
        finally:
            timer.join()
        raise AssertionError("not interrupted")

    def goes_on(call):
        """A handler runs in the middle of the call, which then comes to its end."""
        handled = []

        def handle(number, frame):
            handled.append(number)
            store.set(f"go {len(done)}", "")

        signal.signal(signal.SIGTERM, handle)
        _, timer = soon(signal.SIGTERM)
        value = call()
        timer.join()
        assert handled == [signal.SIGTERM]
        return value

    x, one = torch.ones(4), torch.ones(1)
    done = []
    if part == "meeting":
        if rank == 0:
            took = interrupted(lambda: join("nobody else comes"))
            say(took)
        meet(store, "the end", 2, 300)
        os._exit(0)
    join("a group")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    full = torch.zeros(1)

    def waits_for_room():
        """More keys than there may be under way."""
        for i in range(20):
            unjam.torch.all_reduce(full.clone(), async_op=True, key=f"room {i}")

    waits = {
        "all_reduce": lambda: dist.all_reduce(x),
        "all_gather": lambda: dist.all_gather([torch.ones(4), torch.ones(4)], x),
        "barrier": dist.barrier,
        "object": lambda: dist.all_gather_object([None, None], "x"),
        "work": lambda: dist.all_reduce(x, async_op=True).wait(),
        "work with a limit": lambda: dist.all_reduce(x, async_op=True).wait(
            timedelta(seconds=limit_s)
        ),
        "recv": lambda: dist.recv(x, 1),
        "recv from any": lambda: dist.recv(x),
        "irecv": lambda: dist.irecv(x, 1, tag=3).wait(),
        "a large send": lambda: dist.send(torch.ones(1 << 22), 1),
        "batch": lambda: [
            w.wait() for w in dist.batch_isend_irecv([dist.P2POp(dist.irecv, x, 1, tag=4)])
        ],
        "to itself": lambda: dist.isend(x, 0).wait(),
        "future": lambda: dist.all_reduce(x, async_op=True).get_future().wait(),
        "then": lambda: (
            dist.all_reduce(x, async_op=True).get_future().then(lambda f: f.value()).wait()
        ),
        "backward": lambda: model(torch.ones(1, 2)).sum().backward(),
        "no room": waits_for_room,
    }
    if part == "interrupted":
        if rank == 0:
            for name, wait in waits.items():
                with unjam.torch.key(name):
                    say([name, interrupted(wait)])
        meet(store, "the end", 2, 900)
        os._exit(0)  # with all that is pending
    calls = {  # what rank 0 does, and, when the signal has come, rank 1
        "all_reduce": (lambda: dist.all_reduce(one), lambda: dist.all_reduce(one)),
        "recv": (lambda: dist.recv(one, 1), lambda: dist.send(one, 0)),
        "barrier": (dist.barrier, dist.barrier),
        "future": (
            lambda: dist.all_reduce(one, async_op=True).get_future().wait(),
            lambda: dist.all_reduce(one),
        ),
    }
    for name, (here, there) in calls.items():
        with unjam.torch.key(name):
            if rank == 0:
                goes_on(here)
            else:
                store.wait([f"go {len(done)}"], timedelta(seconds=300))
                there()
        done.append(name)
    say(float(one))
    dist.destroy_process_group()


def test_ctrl_c_ends_every_wait():
    store = make_store()
    with workers() as harness:
        # (Few keys at a time, for the one that waits for room; the others have one each.)
        both = [
            harness.start_with_torch(ranks, r, store.port, "interrupted", UNJAM_MAX_ACTIVE_KEYS=30)
            for r in range(2)
        ]
        for _ in range(16):
            name, seconds = both[0].said(START_S)
            assert seconds < 30, (name, seconds)  # of one that is allowed; the waits have 60
        for process in both:
            process.ends(LONG_S)


def test_ctrl_c_ends_the_meeting():
    store = make_store()
    with workers() as harness:
        both = [harness.start_with_torch(ranks, r, store.port, "meeting") for r in range(2)]
        assert both[0].said(START_S) < 30
        for process in both:
            process.ends(LONG_S)


def test_a_handler_runs_and_the_wait_goes_on():
    store = make_store()
    with workers() as harness:
        both = [harness.start_with_torch(ranks, r, store.port, "goes on") for r in range(2)]
        for process in both:
            assert process.said(START_S) == 4.0
        for process in both:
            process.ends(LONG_S)
