"""Memory that is registered: how long it lasts, what is refused, and results that peers store."""

import gc
import weakref

import numpy as np
import pytest

import unjam
from processes import workers
from rank_tools import say
from unjam import InvalidArgument, InvalidType, InvalidUsage, Mismatch, Resources
from unjam import registration as registrations

PATIENCE_S = 30


def windows(context):
    return context.info()["windows"]


def straight(context):
    return sum(lane["into_outputs"] for lane in context.info()["lanes"])


@pytest.fixture
def contexts():
    with unjam.init_all(2) as contexts:
        yield contexts


def test_lasts_until_it_is_closed(contexts):
    x = np.zeros(1000, np.float32)
    registered = contexts[0].register_memory(x)
    assert registered.ptr == x.ctypes.data and registered.nbytes == 4000
    assert repr(registered) == "<unjam.Registration of rank 0, 4000 bytes>"
    assert windows(contexts[0])["registered"] == 1 and windows(contexts[0])["bytes"] == 4000
    assert windows(contexts[1])["peers_mapped"] == 1
    registered.close()
    registered.close()
    assert registered.closed and repr(registered) == "<unjam.Registration of rank 0, closed>"
    assert windows(contexts[0])["registered"] == 0 == windows(contexts[1])["peers_mapped"]
    with contexts[0].register_memory((x.ctypes.data + 4, 100)) as some:
        assert some.ptr == x.ctypes.data + 4 and some.nbytes == 100
        assert windows(contexts[0])["registered"] == 1
    assert windows(contexts[0])["registered"] == 0


def test_the_context_keeps_the_memory():
    class Array(np.ndarray):
        pass

    with unjam.init_all(1) as (context,):
        x = np.zeros(100, np.float32).view(Array)
        there = weakref.ref(x)
        context.register_memory(x)
        del x
        gc.collect()
        assert there() is not None and windows(context)["registered"] == 1
    gc.collect()
    assert there() is None


def test_torch(contexts):
    torch = pytest.importorskip("torch")
    x = torch.zeros(8, dtype=torch.bfloat16)
    with contexts[0].register_memory(x) as registered:
        assert registered.ptr == x.data_ptr() and registered.nbytes == 16
    with pytest.raises(InvalidArgument, match="requires grad"):
        contexts[0].register_memory(torch.zeros(8, requires_grad=True))


def test_refusals(contexts):
    context, other = contexts
    x = np.zeros(100, np.float32)
    with context.register_memory(x):
        with pytest.raises(InvalidUsage, match="all are registered already"):
            context.register_memory(x)
        with pytest.raises(InvalidUsage, match="some are registered already"):
            context.register_memory(x[50:])
        with other.register_memory(x):  # by another rank
            pass
    frozen = x.copy()
    frozen.flags.writeable = False
    with pytest.raises(InvalidArgument, match="memory is read-only"):
        context.register_memory(frozen)
    with pytest.raises(InvalidArgument, match="0 bytes"):
        context.register_memory(x[:0])
    with pytest.raises(InvalidArgument, match="is NULL"):
        context.register_memory((0, 16))
    with pytest.raises(InvalidArgument, match="tuple of 3"):
        context.register_memory((1, 2, 3))
    with pytest.raises(InvalidArgument, match="bytes is -1"):
        context.register_memory((x.ctypes.data, -1))
    with pytest.raises(InvalidType, match="address must be an integer"):
        context.register_memory(("x", 16))
    with pytest.raises(InvalidType, match="memory is a list"):
        context.register_memory([1, 2])
    many = np.zeros(65 * 16, np.uint8)
    for i in range(64):
        context.register_memory(many[16 * i : 16 * i + 16])
    with pytest.raises(Resources, match="64 windows of this rank are registered"):
        context.register_memory(many[1024:])
    assert windows(context)["registered"] == 64
    closed = unjam.init_all(1)[0]
    closed.close()
    with pytest.raises(InvalidUsage, match="is closed"):
        closed.register_memory(x)


def test_not_while_calls_are_pending(contexts):
    groups = [context.group() for context in contexts]
    x = np.ones(10_000, np.float32)
    registered = contexts[0].register_memory(x)
    pending = groups[0].all_reduce(x, key="k")
    with pytest.raises(InvalidUsage, match=r"with 1 invocation\(s\) pending, among them key 'k'"):
        registered.close()
    assert not registered.closed
    groups[1].all_reduce(np.ones(10_000, np.float32), key="k").wait(PATIENCE_S)
    pending.wait(PATIENCE_S)
    registered.close()
    assert (x == 2).all()


def test_after_a_failed_call_the_memory_is_kept(contexts):
    groups = [context.group() for context in contexts]
    x = np.ones(100_000, np.float32)
    registered = contexts[0].register_memory(x)
    there = weakref.ref(x)
    kept = len(registrations._stored_into)
    failed = groups[0].all_reduce(x, key="k")
    groups[1].all_reduce(np.ones(7, np.float32), key="k")
    assert isinstance(failed.exception(PATIENCE_S), Mismatch)
    with pytest.raises(Mismatch, match="may still store there"):
        registered.close()
    assert registered.closed
    del failed, x, registered
    gc.collect()
    assert there() is not None and len(registrations._stored_into) == kept + 1


def test_aborted_with_memory_registered():
    kept = len(registrations._stored_into)
    contexts = unjam.init_all(2)
    x = np.ones(100_000, np.float32)
    contexts[0].register_memory(x)
    contexts[0].group().all_reduce(x)
    contexts[0].abort()
    for context in contexts:
        context.close()
    assert len(registrations._stored_into) == kept + 1


def test_all_that_peers_store(launch):
    def rank(context, group):
        count, n = 100_000, context.size
        memory = np.full(2 * n * count + 4, -1, np.float32)
        offset = -memory.ctypes.data // 4 % 4  # to a multiple of 16 bytes
        x = np.arange(count, dtype=np.float32) % 1000 + context.rank
        with context.register_memory(memory):
            for i in range(3):
                out = memory[offset : offset + count]
                group.all_reduce(x, out, key="all_reduce").wait(PATIENCE_S)
                assert (out == n * (np.arange(count) % 1000) + n * (n - 1) // 2).all()
                assert memory[offset + count] == -1
                group.all_gather(x, memory[offset : offset + n * count]).wait(PATIENCE_S)
                gathered = memory[offset : offset + n * count].reshape(n, count)
                assert (gathered - np.arange(n)[:, None] == np.arange(count) % 1000).all()
                out = memory[offset : offset + count]
                out[:] = x
                group.broadcast(out, root=i % n, key="broadcast").wait(PATIENCE_S)
                assert (out == np.arange(count) % 1000 + i % n).all()
                memory[:] = -1
        return straight(context)

    for algorithm in ("ring", "rsag"):
        assert sum(launch(3, rank, algorithm=algorithm)) > 0


def rank_of_a_job():
    with unjam.init_from_environment() as context:
        x = np.full(100_000, context.rank, np.float32)
        with context.register_memory(x):
            context.group().all_reduce(x).wait(30)
        found = context.info()
        say([float(x[0]), float(x[-1]), sum(lane["into_outputs"] for lane in found["lanes"])])
        found = found["windows"]
        say([found["peers_mapped"], found["not_shared"], found["left"], found["registered"]])
        say(found["not_shared_because"])


def test_processes_of_the_host_device_go_on_through_slots():
    with workers() as harness:
        job = harness.job(3, rank_of_a_job)
        for process in job:
            assert process.said() == [3.0, 3.0, 0]
            assert process.said() == [0, 1, 0, 0]
            assert process.said() == "memory of the host device is this process's alone"
        for process in job:
            process.ends()
