"""Ranks of several hosts: processes that pretend to be on hosts of their own, on loopback."""

import os
import time

import numpy as np
import pytest

import hosts_tools
import unjam
from hosts_tools import job
from processes import workers
from rank_tools import run_all, say

CARRIERS = [
    "plugin",
    pytest.param("ucx", marks=pytest.mark.skipif(hosts_tools.ucx() is None, reason="no UCX")),
]


@pytest.fixture
def harness():
    with workers() as harness:
        yield harness


def reduces():
    with unjam.init_from_environment() as context:
        world = context.group()
        for count in (1, 1000, 300_000):
            x = np.full(count, context.rank + 1, dtype=np.float32)
            world.all_reduce(x).wait(40)
            assert (x == sum(range(1, context.size + 1))).all(), (context.rank, count, x)
        say(context.size)


@pytest.mark.parametrize("by", CARRIERS)
@pytest.mark.parametrize("hosts", [(1, 1), (2, 2), (1, 3)])
def test_all_reduce(harness, hosts, by):
    ranks = job(harness, hosts, reduces, by=by)
    for rank in ranks:
        assert rank.said() == sum(hosts)
    for rank in ranks:
        rank.ends()


def all_kinds(roots):
    import kinds_of_all

    with unjam.init_from_environment() as context:
        kinds_of_all.check(context, roots)


@pytest.mark.parametrize("algorithm", ["auto", "ring", "one_shot", "rsag", "hierarchical", "pat"])
def test_all_kinds(harness, algorithm):
    for rank in job(harness, (2, 2), all_kinds, [0, 3], UNJAM_ALGORITHM=algorithm):
        rank.ends()


def in_the_background():
    with unjam.init_from_environment() as context:
        for i in range(10):
            request = context.group().all_reduce(np.ones(1000), key=str(i % 3))
            while not request.test():
                time.sleep(0.002)
    say("done")


def test_calls_for_which_nobody_waits(harness):
    """Lanes are woken by couriers, and by processes of the same host."""
    for rank in job(harness, (1, 2), in_the_background):
        assert rank.said() == "done"
        rank.ends()


def threads(first):
    """Two ranks of this process."""
    import kinds_of_all

    unique = bytes.fromhex(os.environ["UNJAM_ID"]).ljust(128, b"\0")

    def body(rank):
        with unjam.init(4, rank, unique) as context:
            kinds_of_all.check(context, [1, 2])

    run_all([lambda rank=rank: body(rank) for rank in (first, first + 1)])


def test_ranks_of_one_process(harness):
    """Two processes on two hosts, with two ranks each."""
    two = [place for place in hosts_tools.places((2, 2)) if place["UNJAM_RANK"] % 2 == 0]
    ranks = [
        harness.start(threads, place["UNJAM_RANK"], **place, **hosts_tools.carrier("plugin"))
        for place in two
    ]
    for rank in ranks:
        rank.ends()


def in_the_heap():
    with unjam.init_from_environment() as context:
        world, rank, ranks = context.group(), context.rank, context.size
        for count in (100, 50_000, 400_000):
            memory = context.alloc(4 * count)
            x = np.frombuffer(memory, dtype=np.float32)
            for root in range(ranks):
                x[:] = rank + 1
                world.all_reduce(x, key="sum").wait(40)
                assert (x == ranks * (ranks + 1) / 2).all()
                x[:] = rank
                world.broadcast(x, root=root, key="root").wait(40)
                assert (x == root).all()
            del x
            memory.close()
        peers = {peer["rank"]: (peer["host"], peer["carrier"]) for peer in context.info()["peers"]}
        say(peers)


def test_outputs_in_the_heap(harness):
    """Peers of the same host store into them, others use slots. And info() says who is where."""
    ranks = job(harness, (2, 2), in_the_heap, UNJAM_HEAP="16M")
    for n, rank in enumerate(ranks):
        for peer, (host, carrier) in rank.said().items():
            assert host == f"host{int(peer) // 2}"
            assert ("unjam-test" in carrier) == (int(peer) // 2 != n // 2)
        rank.ends()


def with_torch(rank, port):
    import torch
    import torch.distributed as dist

    import unjam.torch

    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("unjam", init_method=where, rank=rank, world_size=4)
    x = torch.full((1000,), float(rank + 1))
    dist.all_reduce(x)
    assert (x == 10).all()
    parts = [torch.zeros(5) for _ in range(4)]
    dist.all_gather(parts, torch.full((5,), float(rank)))
    assert [int(part[0]) for part in parts] == [0, 1, 2, 3]
    dist.destroy_process_group()
    say(unjam.torch.__name__)


def test_torch(harness):
    """CPU tensors; the job's id comes by torch's store."""
    pytest.importorskip("torch")
    port = hosts_tools.free_port()
    ranks = []
    for n, place in enumerate(hosts_tools.places((2, 2))):
        for name in ("UNJAM_ID", "UNJAM_RANK", "UNJAM_RANKS"):
            del place[name]
        place.update(hosts_tools.carrier("plugin"))
        ranks.append(harness.start_with_torch(with_torch, n, port, name=f"rank {n}", **place))
    for rank in ranks:
        assert rank.said(120) == "unjam.torch"
        rank.ends()


def program(seed, iterations, device_sync):
    """The paper's program 1 or 2: all-reduces on 8 keys, on each rank in orders of its own."""
    from unjam import programs

    sizes = [64, 256, 1024, 4096, 16384, 65536, 200_000, 400_000]
    with unjam.init_from_environment() as context:
        world, rank, ranks = context.group(), context.rank, context.size
        orders = programs.random_orders(seed, iterations, ranks, len(sizes))
        keys = programs.key_names(len(sizes))
        for i in range(iterations):
            buffers = [
                np.arange(size // 4, dtype=np.float32) % 64 + 100 * rank + i % 50 for size in sizes
            ]
            requests = programs.call_all(world, keys, buffers, orders[i, rank], device_sync, 60)
            unjam.wait_all(requests)
            for size, got in zip(sizes, buffers, strict=True):
                want = ranks * (np.arange(size // 4) % 64 + i % 50) + 100 * sum(range(ranks))
                assert np.array_equal(got, want), (rank, i, size, seed)
        stats = context.stats()
        say(stats.preemptions)


@pytest.mark.parametrize("device_sync", [False, True])
@pytest.mark.parametrize("by", CARRIERS)
def test_programs_in_disorder(harness, device_sync, by):
    """Each process is a host of its own."""
    ranks = job(harness, (1, 1, 1, 1), program, 7, 8, device_sync, by=by)
    for rank in ranks:
        rank.said()
    for rank in ranks:
        rank.ends()


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("device_sync", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_programs_soak(harness, seed, device_sync):
    for rank in job(harness, (2, 2, 2, 2), program, seed, 1000, device_sync):
        rank.wait(1800)
        rank.ends()
