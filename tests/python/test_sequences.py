"""Sequences of calls that once went wrong, each reduced to its least form."""

import numpy as np
import pytest

import unjam


def test_undelivered_broadcasts_meet_a_limit_not_a_hang():
    """A root is done before its peers have called: what they have yet to take is limited."""
    with unjam.init_all(2, max_active_keys=8) as contexts:
        root, other = (context.group() for context in contexts)
        x, y = np.ones(4), np.zeros(4)
        sent = 0
        with pytest.raises(unjam.Resources, match="yet to take"):
            for sent in range(100):
                root.broadcast(x, key=f"k{sent}").wait(30)
        assert sent == 16
        for i in range(sent):
            other.broadcast(y, key=f"k{i}").wait(30)
        requests = [group.broadcast(z, key="new") for group, z in ((root, x), (other, y))]
        unjam.wait_all(requests, 30)


def test_a_failing_use_leaves_earlier_uses_alone():
    with unjam.init_all(2, stall_ms=50) as contexts:
        a, b = (context.group() for context in contexts)
        first = [a.all_reduce(np.ones(4), key="k") for _ in range(6)]
        second = [b.all_reduce(np.ones(4), key="k") for _ in range(5)]
        wrong = b.all_reduce(np.ones(5), key="k")
        assert all(r.exception(30) is None for r in first[:5] + second)
        assert isinstance(first[5].exception(30), unjam.Mismatch)
        assert isinstance(wrong.exception(30), unjam.Mismatch)


def test_a_failing_use_behind_a_long_queue():
    """More uses than the engine takes: the rest waits on the host, and must not fail early."""
    with unjam.init_all(2, stall_ms=50, max_active_keys=1) as contexts:
        a, b = (context.group() for context in contexts)
        first = [a.all_reduce(np.ones(4), key="k") for _ in range(40)]
        second = [b.all_reduce(np.ones(4), key="k") for _ in range(39)]
        wrong = b.all_reduce(np.ones(5), key="k")
        assert all(r.exception(30) is None for r in first[:39] + second)
        assert isinstance(first[39].exception(30), unjam.Mismatch)
        assert isinstance(wrong.exception(30), unjam.Mismatch)


def test_a_disagreement_on_a_use_long_ago():
    with unjam.init_all(2, stall_ms=50) as contexts:
        a, b = (context.group() for context in contexts)
        first = [a.all_reduce(np.ones(4)) for _ in range(100)]
        wrong = b.all_reduce(np.ones(8))
        for request in (wrong, first[0], first[99]):
            assert isinstance(request.exception(30), unjam.Mismatch)


def test_what_a_kind_does_not_use_need_not_agree():
    with unjam.init_all(2) as contexts:
        a, b = (context.group() for context in contexts)
        registered = b.register("broadcast", "k", "float64", op="max")
        y = np.zeros(4)
        requests = [a.broadcast(np.ones(4), key="k"), registered.run(y)]
        unjam.wait_all(requests, 30)
        assert (y == 1).all()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("order", ["fifo", "priority"])
def test_synchronisation_gets_through_a_long_progressing_collective(order, ranks):
    """The engine's stay is bounded although there is always something to move.

    A rank by itself can always move something, so that nothing but the bound ends a stay: 64 MiB
    are not copied within one. With a peer it may leave earlier, wherever it waits for that one, so
    how stays ended is a matter of time there; that they end is not.
    """
    with unjam.init_all(ranks, order=order, residency_us=1000) as contexts:
        groups = [context.group() for context in contexts]
        big = [np.ones(1 << 24, np.float32) for _ in groups]
        out = [np.zeros(1 << 24, np.float32) for _ in groups]
        calls = zip(groups, big, out, strict=True)
        requests = [group.all_reduce(x, y, key="big") for group, x, y in calls]
        contexts[0].device_synchronize(30)
        unjam.wait_all(requests, 60)
        stats = contexts[0].stats()
        assert stats.residency_quits > 0 or ranks > 1
        assert all((y == ranks).all() for y in out)


def test_hold_with_priorities_runs_the_first_that_may_start():
    with unjam.init_all(1, policy="hold", order="priority") as contexts:
        group = contexts[0].group()
        requests = [
            group.all_reduce(np.ones(1 << 20), key=key, priority=priority)
            for key, priority in (("x", 0), ("k", 0), ("k", 5), ("k", 9))
        ]
        unjam.wait_all(requests, 30)


def test_endless_timeouts():
    with unjam.init_all(1) as contexts:
        request = contexts[0].group().all_reduce(np.ones(1 << 22))
        request.wait(9e12)
        contexts[0].device_synchronize(9e12)
