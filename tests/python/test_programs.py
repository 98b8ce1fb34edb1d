"""The paper's two programs, and the deadlock they have when collectives hold and wait."""

import dataclasses
import itertools

import numpy as np
import pytest

from unjam import late_rank, programs
from unjam.programs import Edge, Program
from unjam.stats import Stats


@pytest.mark.parametrize("device_sync", [False, True])
@pytest.mark.parametrize("seed", [0, 1])
def test_programs(device_sync, seed):
    program = Program(iterations=20, seed=seed, device_sync=device_sync, data="mixed")
    first = programs.run(program)["random"]
    assert first.iterations == 20
    assert first.results == 20 * 8 * 8
    assert first.stats.submitted == first.stats.completed == 20 * 8 * 8
    assert first.stats.preemptions > 0
    assert len(first.digest) == 64
    assert programs.run(program)["random"].digest == first.digest


def test_other_settings_give_the_same_bits():
    """Scheduling must not show in the results; what the ranks agree on may."""
    program = Program(iterations=5, data="floats", ranks=4)
    digests = {
        programs.run(dataclasses.replace(program, config=config))["random"].digest
        for config in (
            {},
            {"policy": "fixed"},
            {"quantum_slices": 1},
            {"pool_slots": 0},
            {"block_threads": 4},
            {"residency_us": 50},
            {"delay_seed": 5, "delay_max_us": 200},
        )
    }
    assert len(digests) == 1


def test_both_orders_in_turn():
    parts = programs.run(Program(iterations=7, orders=("random", "consistent"), batch=3))
    assert [part.iterations for part in parts.values()] == [7, 7]
    assert all(part.seconds > 0 and part.ms_per_iteration > 0 for part in parts.values())
    assert parts["random"].digest != parts["consistent"].digest


def test_progress():
    steps = []
    programs.run(Program(ranks=2, iterations=7, batch=3, sizes=(256,)), steps.append)
    assert steps == [3, 3, 1]


def test_a_wrong_result_is_found(monkeypatch):
    right = programs.call_all

    def wrong(group, keys, buffers, order, device_sync, timeout=None):
        requests = right(group, keys, buffers, order, device_sync, timeout)
        if group.rank == 1:
            requests[0].wait(30)
            buffers[order[0]][5] += 1
        return requests

    monkeypatch.setattr(programs, "call_all", wrong)
    for data in ("integers", "floats"):
        with pytest.raises(programs.WrongResult, match=r"iteration \d, all-reduce [A-H] .* \[5\]"):
            programs.run(Program(ranks=2, iterations=2, data=data))


def test_orders():
    orders = programs.random_orders(3, 50, 8, 8)
    assert orders.shape == (50, 8, 8)
    assert (np.sort(orders, axis=2) == np.arange(8)).all()
    assert all(len(np.unique(one, axis=0)) == 8 for one in orders)
    assert (orders == programs.random_orders(3, 50, 8, 8)).all()
    one = programs.consistent_orders(3, 50, 8, 8)
    assert (one == one[:, :1]).all()
    assert len(np.unique(one[:, 0], axis=0)) > 25


@pytest.mark.parametrize("device_sync", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_hold_deadlocks_and_names_a_true_cycle(device_sync, seed):
    one = programs.try_hold(seed=seed, device_sync=device_sync)
    assert one.deadlocked
    assert one.problem == ""
    assert one.text
    for edge in one.cycle:
        assert f"rank {edge.rank}" in one.text and edge.key in one.text
        assert edge.rank in range(8) and edge.key in "ABCDEFGH"


def test_hold_completes_in_one_order():
    orders = programs.consistent_orders(0, 1, 8, 8)[0]
    for device_sync in (False, True):
        one = programs.try_hold(device_sync=device_sync, orders=orders)
        assert not one.deadlocked and one.cycle == ()


def test_hold_with_a_long_cycle():
    """Each rank waits for the next: three ranks, three collectives, groups of all."""
    orders = np.array([[0, 1, 2], [1, 2, 0], [2, 0, 1]])
    one = programs.try_hold(ranks=3, sizes=(256, 256, 256), orders=orders)
    assert one.deadlocked and one.problem == ""


def test_cycle_problem():
    orders = np.array([[0, 1], [1, 0]])
    true = [Edge(0, "A", 1), Edge(1, "B", 0)]
    assert programs.cycle_problem(true, orders, "AB") == ""
    wrong = {
        "empty": [],
        "twice": [Edge(0, "A", 0), Edge(0, "A", 0)],
        "waits for rank": [Edge(0, "A", 1), Edge(1, "B", 2)],
        "calls B before A": [Edge(0, "B", 1), Edge(1, "A", 0)],
        "never calls": [Edge(0, "A", 1), Edge(1, "C", 0)],
    }
    for message, cycle in wrong.items():
        assert message in programs.cycle_problem(cycle, orders, "ABC"), message


def test_cycle_text():
    cycle = (Edge(0, "A", 2), Edge(2, "H", 0))
    assert programs.cycle_text(cycle) == (
        "rank 0 runs all-reduce A (256 B) and waits for rank 2, "
        "which runs all-reduce H (1 MiB) and waits for rank 0."
    )


def test_hold_cycles_of_all_order_pairs():
    """Two ranks, three collectives: a deadlock exactly where the orders differ, by brute force."""
    for mine, theirs in itertools.product(itertools.permutations(range(3)), repeat=2):
        orders = np.array([mine, theirs])
        one = programs.try_hold(ranks=2, sizes=(256, 512, 1024), orders=orders)
        assert one.deadlocked == (mine != theirs)
        assert one.problem == ""


def test_late_rank():
    for policy in ("fixed", "adaptive"):
        outcome = late_rank.run(
            late_rank.LateRank(collectives=10, iterations=2, config={"policy": policy})
        )
        assert outcome.ms_per_iteration > 0
        assert outcome.queued_ms >= 0 and outcome.queued_ms_max >= outcome.queued_ms
        assert outcome.stats.completed == 4 * 10 * 2


def test_stats_arithmetic():
    a, b = Stats(submitted=5, lanes=2, pending=1), Stats(submitted=2, lanes=2)
    assert (a - b) == Stats(submitted=3, lanes=2, pending=1)
    assert (a + b) == Stats(submitted=7, lanes=4, pending=1)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("device_sync", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_soak(seed, device_sync):
    """1,000 iterations: complete, right, the same bits on all ranks and in a second run."""
    program = Program(iterations=1000, seed=seed, device_sync=device_sync, data="mixed")
    first, second = (programs.run(program)["random"] for _ in range(2))
    assert first.results == second.results == 64_000
    assert first.digest == second.digest
    one = programs.try_hold(seed=seed, device_sync=device_sync)
    assert one.deadlocked and one.problem == ""
