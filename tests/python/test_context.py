"""Contexts: beginning, end, abort, and what they tell."""

import threading
import time

import numpy as np
import pytest

import unjam
from explanations import settled, waits
from unjam import Aborted, EventType, InvalidArgument, InvalidType, InvalidUsage, Peer, Timeout


def test_init_by_threads():
    unique = unjam.unique_id()
    assert isinstance(unique, bytes) and len(unique) == 128
    assert unique != unjam.unique_id()
    results = {}

    def rank(number):
        with unjam.init(3, number, unique) as context:
            assert (context.rank, context.size) == (number, 3)
            results[number] = int(context.group().all_reduce(np.full(2, number)).result(30)[0])

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {0: 3, 1: 3, 2: 3}


def test_init_in_the_main_thread():
    unique = unjam.unique_id()
    contexts = []
    thread = threading.Thread(target=lambda: contexts.append(unjam.init(2, 1, unique)))
    thread.start()
    with unjam.init(2, 0, unique) as context:
        thread.join(30)
        assert context.rank == 0
        contexts[0].close()


def test_init_names_the_missing(monkeypatch):
    monkeypatch.setenv("UNJAM_INIT_TIMEOUT_MS", "1000")
    with pytest.raises(Timeout, match="2"):
        unjam.init(3, 0, unjam.unique_id())


@pytest.mark.parametrize(("nranks", "rank"), [(0, 0), (65536, 0), (2, 2), (2, -1)])
def test_wrong_ranks(nranks, rank):
    with pytest.raises(InvalidArgument):
        unjam.init(nranks, rank, unjam.unique_id())


def test_wrong_ids():
    with pytest.raises(InvalidArgument, match=r"unique_id\(\)"):
        unjam.init(1, 0, b"short")
    with pytest.raises(unjam.UnjamError):
        unjam.init(1, 0, bytes(range(128)))


@pytest.mark.parametrize("nranks", [0, -1, 65536, 1.5, "2", True])
def test_wrong_init_all(nranks):
    with pytest.raises(InvalidArgument):
        unjam.init_all(nranks)


def test_settings_that_must_agree():
    unique = unjam.unique_id()
    errors = {}

    def rank(number):
        try:
            unjam.init(2, number, unique, guaranteed_slots=4 + number).close()
        except unjam.UnjamError as error:
            errors[number] = str(error)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors and all("guaranteed_slots" in text.lower() for text in errors.values()), errors


# ---- the end ----


def test_close_refuses_while_pending_and_changes_nothing():
    contexts = unjam.init_all(2)
    groups = [context.group() for context in contexts]
    request = groups[0].all_reduce(np.ones(3), key="unfinished")
    with pytest.raises(InvalidUsage, match="unfinished"):
        contexts[0].close()
    assert not contexts[0].closed
    groups[1].all_reduce(np.ones(3), key="unfinished").wait(30)
    request.wait(30)
    contexts.close()
    assert contexts[0].closed
    contexts.close()


def test_a_closed_context():
    with unjam.init_all(1) as (context,):
        group = context.group()
    assert "closed" in repr(context)
    for call in (
        context.group,
        context.stats,
        context.info,
        context.explain,
        context.trace,
        context.async_error,
        context.device_synchronize,
        lambda: group.all_reduce(np.ones(3)),
        lambda: group.register_all_reduce("k", "float32"),
    ):
        with pytest.raises(InvalidUsage, match="closed"):
            call()
    context.abort()
    group.close()


def test_the_end_of_a_block_with_something_pending():
    contexts = unjam.init_all(2)
    with pytest.raises(InvalidUsage, match="forgotten"), contexts:
        request = contexts[0].group().all_reduce(np.ones(3), key="forgotten")
    assert all(context.closed for context in contexts)
    assert isinstance(request.exception(), Aborted)


def test_an_exception_in_a_block_aborts():
    contexts = unjam.init_all(2)
    with pytest.raises(KeyError), contexts[0]:
        mine = contexts[0].group().all_reduce(np.ones(3))
        theirs = contexts[1].group().all_reduce(np.ones(3), key="other")
        raise KeyError("mine")
    assert contexts[0].closed
    assert isinstance(mine.exception(), Aborted)
    assert isinstance(theirs.exception(30), Peer)
    contexts[1].close()


def test_abort_ends_waits_everywhere():
    with unjam.init_all(3) as contexts:
        pair = [context.group([0, 1]) for context in contexts[:2]]
        others = [context.group([1, 2]) for context in contexts[1:]]
        mine, theirs = pair[0].all_reduce(np.ones(3)), pair[1].all_reduce(np.ones(3), key="other")
        errors = []
        waiters = [
            threading.Thread(target=lambda r=r: errors.append(r.exception(30)))
            for r in (mine, theirs)
        ]
        for waiter in waiters:
            waiter.start()
        time.sleep(0.05)
        contexts[0].abort()
        for waiter in waiters:
            waiter.join(30)
        assert {type(error) for error in errors} == {Aborted, Peer}
        assert isinstance(contexts[0].async_error(), Aborted)
        assert isinstance(contexts[1].async_error(), Peer)
        with pytest.raises(Aborted):
            pair[0].all_reduce(np.ones(3))
        # A group without the rank that is gone goes on.
        unjam.wait_all([group.all_reduce(np.ones(3)) for group in others], 30)
        assert contexts[2].async_error() is None


def test_close_while_others_use_it():
    """Calls and waits in other threads end in an error, never in a crash."""
    for _ in range(20):
        contexts = unjam.init_all(2)
        group = contexts[0].group()
        stop = threading.Event()

        def use(context=contexts[0], group=group, stop=stop):
            while not stop.is_set():
                try:
                    context.stats()
                    group.all_reduce(np.ones(3)).wait()
                except (InvalidUsage, Aborted, Peer):
                    return

        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.005)
        contexts.abort()
        contexts.close()
        stop.set()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()


def test_contexts_left_open_are_closed_at_exit(python):
    code = """
import numpy as np, unjam
contexts = unjam.init_all(3)
request = contexts[0].group().all_reduce(np.ones(3), callback=lambda r: print(type(r.exception())))
print("end of program")
"""
    finished = python("-c", code)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines()[0] == "end of program"
    assert "Aborted" in finished.stdout
    told = finished.stderr.splitlines()
    assert len(told) == 1, finished.stderr
    assert "rank 0" in told[0] and "ended without close()" in told[0] and "pending" in told[0]


def test_run_ranks_raises_the_cause():
    def rank(context):
        if context.rank == 1:
            raise KeyError("the cause")
        context.group().all_reduce(np.ones(3)).wait(30)

    started = time.monotonic()
    with pytest.raises(KeyError, match="the cause"):
        unjam.launch(4, rank)
    assert time.monotonic() - started < 20


# ---- what is going on ----


def test_device_synchronize_returns_with_something_pending(pair):
    contexts, groups = pair
    request = groups[0].all_reduce(np.ones(100_000))
    started = time.monotonic()
    for _ in range(3):
        contexts[0].device_synchronize(30)
    assert time.monotonic() - started < 30
    assert not request.test()
    groups[1].all_reduce(np.ones(100_000)).wait(30)
    request.wait(30)


def test_device_synchronize_waits_under_hold():
    with unjam.init_all(2, policy="hold") as contexts:
        groups = [context.group() for context in contexts]
        request = groups[0].all_reduce(np.ones(10), key="k")
        # Until its engine has begun, the device has nothing to wait for.
        settled(contexts[0].explain, lambda e: waits(e, 0, "k") == [("data", 1, None)])
        with pytest.raises(Timeout, match="rank 0"):
            contexts[0].device_synchronize(0.2)
        groups[1].all_reduce(np.ones(10), key="k").wait(30)
        request.wait(30)
        contexts[0].device_synchronize(30)


def test_device_synchronize_in_another_thread(launch):
    def rank(context, group):
        request = group.all_reduce(np.ones(1000))
        context.device_synchronize()
        request.wait(30)

    launch(3, rank)


def test_stats(launch):
    def rank(context, group):
        before = context.stats()
        assert before.submitted == before.pending == 0
        for _ in range(10):
            group.all_reduce(np.ones(10_000)).wait(30)
        stats = context.stats()
        delta = stats - before
        assert (delta.submitted, delta.completed, delta.pending) == (10, 10, 0)
        assert delta.bytes_sent >= 10 * 80_000 and delta.slices > 0 and delta.context_loads > 0
        assert stats.lanes == delta.lanes == 2
        assert (stats + stats).submitted == 20
        assert stats.preemptions_per_block == stats.preemptions / 2

    launch(2, rank, lanes=2)


def test_info_and_explain(pair):
    contexts, groups = pair
    request = groups[0].all_reduce(np.ones(3), key="lonely")
    info = contexts[0].info()
    assert info["memory"] and info["settings"] and info["lanes"]
    time.sleep(0.05)
    explanation = contexts[1].explain()
    assert explanation["cycles"] == []
    (mine,) = [rank for rank in explanation["ranks"] if rank["rank"] == 0]
    assert mine["pending"][0]["key"] == "lonely"
    assert 1 in mine["waits_for"] or 1 in mine["pending"][0].get("not_called_by", ())
    groups[1].all_reduce(np.ones(3), key="lonely").wait(30)
    request.wait(30)


def test_trace():
    with unjam.init_all(2, trace_events=1000) as contexts:
        groups = [context.group(name="g") for context in contexts]
        before = time.monotonic_ns()
        for _ in range(2):
            unjam.wait_all([group.all_reduce(np.ones(1000), key="k") for group in groups], 30)
        run = groups[0].register_broadcast("registered", "float32")
        unjam.wait_all(
            [
                run.run(np.ones(3, np.float32)),
                groups[1].broadcast(np.ones(3, np.float32), key="registered"),
            ],
            30,
        )
        after = time.monotonic_ns()
        events = contexts[0].trace()
    shown = [event for event in events if event.key]
    assert [event.time_ns for event in events] == sorted(event.time_ns for event in events)
    assert all(before <= event.time_ns <= after for event in shown)
    finished = [(e.group, e.key, e.n) for e in shown if e.type is EventType.FINISH]
    assert finished == [("g", "k", 0), ("g", "k", 1), ("g", "registered", 0)]
    assert sum(event.type is EventType.START for event in shown) >= 3
    with unjam.init_all(1) as (context,):
        context.group().all_reduce(np.ones(3)).wait(30)
        assert context.trace() == []


def test_version_and_environment():
    assert unjam.library_version().split(".")[:2] == unjam.__version__.split(".")[:2]
    names = [variable["name"] for variable in unjam.environment()]
    assert "UNJAM_POLICY" in names and all(name.startswith("UNJAM_") for name in names)


def test_the_end_of_a_process_leaves_closed_contexts_alone(python):
    """Kept requests keep their contexts, whose engines may still speak of closed groups."""
    result = python(
        "-c",
        """
import ctypes
import numpy as np
import unjam

finalize = ctypes.CDLL(str(unjam.library_path())).unjamFinalize
kept = []
for _ in range(30):
    contexts = unjam.init_all(2)
    groups = [[c.group(name=str(k)) for k in range(8)] for c in contexts]
    requests = [
        group.all_reduce(np.ones(4, np.float32), key="k")
        for pair in zip(*groups, strict=True)
        for group in pair
    ]
    unjam.wait_all(requests)
    kept.append(requests)
    for group in sum(groups, []):
        group.close()
    for context in contexts:
        context.close()
    assert finalize(ctypes.c_int64(0)) == 0
""",
    )
    assert result.returncode == 0, (result.returncode, result.stderr)


def test_algorithm_of_one_call(pair):
    contexts, groups = pair
    registered = [g.register("broadcast", "r", "float32", algorithm="chain") for g in groups]

    def used(context, key):
        (found,) = [k["algorithm"] for k in context.info()["keys"] if k["key"] == key]
        return found

    for name in ("ring", "one_shot", "two_shot"):
        x = [np.ones(8, np.float32) for _ in groups]
        calls = zip(groups, x, strict=True)
        for request in [g.all_reduce(a, key="k", algorithm=name) for g, a in calls]:
            request.wait()
        assert all((a == 2).all() for a in x)
        assert {used(context, "k") for context in contexts} == {name}
    x = [np.full(8, r, np.float32) for r in range(2)]
    for request in [c.run(a) for c, a in zip(registered, x, strict=True)]:
        request.wait()
    assert (x[1] == 0).all() and {used(context, "r") for context in contexts} == {"chain"}


def test_double_binary_trees():
    def rank(context):
        group, me, n = context.group(), context.rank, context.size
        total = n * (n + 1) // 2
        for count in (1, 50_001):
            x = np.full(count, me + 1.0, np.float32)
            options = {"key": "k", "algorithm": "double_binary_tree"}
            assert (group.all_reduce(x, **options).result(60) == total).all()
            for root in range(n):
                x = np.full(count, me + 1, np.int64)
                group.reduce(x, op="avg", root=root, **options).result(60)
                assert me != root or (x == total // n).all()
                x = np.full(count, me, np.int32)
                assert (group.broadcast(x, root=root, **options).result(60) == root).all()
        words = "double_binary_tree does not serve all_gather: use one of ring.one_shot.rsag.pat$"
        with pytest.raises(InvalidArgument, match=words):
            group.all_gather(x, np.empty(n * x.size, x.dtype), **options)
        return {key["algorithm"] for key in context.info()["keys"]}

    def barrier(context):
        context.group().barrier(key="b").wait(60)
        return {key["algorithm"] for key in context.info()["keys"]}

    for ranks in (2, 5):
        used = [{"double_binary_tree"}] * ranks
        for lanes in (1, 3):
            assert unjam.launch(ranks, rank, lanes=lanes) == used
        assert unjam.launch(ranks, barrier, algorithm="double_binary_tree") == used


def test_algorithms_that_are_not_there(pair):
    _, groups = pair
    x = np.ones(8, np.float32)
    with pytest.raises(InvalidArgument, match="unknown algorithm 'rings': use one of auto"):
        groups[0].all_reduce(x, algorithm="rings")
    with pytest.raises(InvalidArgument, match="unknown algorithm ''"):
        groups[0].all_reduce(x, algorithm="")
    with pytest.raises(InvalidArgument, match="pairwise does not serve all_reduce: use one of"):
        groups[0].all_reduce(x, algorithm="pairwise")
    called = []
    for wrong in (1, "ring\0"):
        with pytest.raises(InvalidArgument, match="algorithm"):
            groups[0].all_reduce(x, algorithm=wrong, callback=called.append)
    with pytest.raises(InvalidType, match="algorithm must be a name, not int 1"):
        groups[0].all_reduce(x, algorithm=1)
    for context in groups[0].context, groups[1].context:
        context.close()
    assert called == []
