"""Memory of a rank's heap: how it is had and given back, and as buffers of every collective."""

import gc
import os

import numpy as np
import pytest

import unjam
from processes import workers
from rank_tools import say
from unjam import InvalidArgument, InvalidType, InvalidUsage, Resources
from unjam._buffers import buffer_of
from unjam._devices import ANY_CUDA

HEAP = 1 << 20


def usage(context):
    return context.info()["heap"]


def used(context):
    gc.collect()
    return usage(context)["used"]


@pytest.fixture
def context():
    with unjam.init_all(1, heap_bytes=HEAP) as (context,):
        yield context


def test_is_a_buffer(context):
    memory = context.alloc(4000)
    assert memory.nbytes == 4000 and memory.ptr % 512 == 0 and memory.ptr
    assert repr(memory) == "<unjam.Memory of rank 0, 4000 bytes>"
    x = np.frombuffer(memory, "float32")
    assert x.size == 1000 and x.flags.writeable and x.ctypes.data == memory.ptr
    x[:] = 7
    assert bytes(memory[:4]) == np.float32(7).tobytes()
    assert memoryview(memory).nbytes == 4000
    assert not hasattr(memory, "__cuda_array_interface__")


def test_torch_takes_it(context):
    torch = pytest.importorskip("torch")
    memory = context.alloc(16)
    tensor = torch.frombuffer(memory, dtype=torch.bfloat16)
    tensor.fill_(2)
    assert tensor.data_ptr() == memory.ptr
    assert context.group().all_reduce(tensor).result(30).tolist() == [2.0] * 8


def test_arrays_keep_it(context):
    x = np.frombuffer(context.alloc(1000), "int8")
    y = x[10:20]
    del x
    assert used(context) == 1024
    del y
    assert used(context) == 0


def test_pending_calls_keep_it(pair):
    with unjam.init_all(2, heap_bytes=HEAP) as contexts:
        groups = [context.group() for context in contexts]
        pending = groups[0].all_reduce(contexts[0].alloc(64), dtype="float32")
        assert used(contexts[0]) == 512
        x = contexts[1].alloc(64)
        np.frombuffer(x, "float32")[:] = 1
        groups[1].all_reduce(x, dtype="float32").wait(30)
        pending.wait(30)
        del pending
        assert used(contexts[0]) == 0


def test_close(context):
    memory = context.alloc(100)
    memory.close()
    assert used(context) == 0 and memory.ptr == 0
    assert repr(memory) == "<unjam.Memory of rank 0, closed>"
    other = context.alloc(100)
    memory.close()  # nothing: the place is another's
    assert used(context) == 512
    with context.alloc(5000) as block:
        assert usage(context)["allocations"] == 2
    assert block.ptr == 0 and usage(context)["allocations"] == 1
    assert other.ptr


def test_no_bytes(context):
    memory = context.alloc(0)
    assert memory.nbytes == 0 and memory.ptr == 0 and len(memory) == 0
    memory.close()
    assert used(context) == 0


def test_errors(context):
    with pytest.raises(Resources, match=rf"no room for 2000000 bytes: of {HEAP} bytes {HEAP} are"):
        context.alloc(2_000_000)
    with pytest.raises(Resources, match="no room for 25769803776 bytes"):
        context.alloc(24 << 30)
    with pytest.raises(InvalidArgument, match="nbytes 9223372036854775808 is out of range"):
        context.alloc(1 << 63)
    with pytest.raises(InvalidArgument, match="nbytes is -1"):
        context.alloc(-1)
    with pytest.raises(InvalidType, match="nbytes must be an integer"):
        context.alloc("1K")
    with unjam.init_all(1) as (other,), pytest.raises(Resources, match="set UNJAM_HEAP"):
        other.alloc(1)
    closed = unjam.init_all(1, heap_bytes=HEAP)[0]
    closed.close()
    with pytest.raises(InvalidUsage, match="is closed"):
        closed.alloc(1)


def test_outlives_its_context():
    with unjam.init_all(1, heap_bytes=HEAP) as (context,):
        x = np.frombuffer(context.alloc(800), "float64")
        x[:] = 3
    x += 1
    assert x.sum() == 400


def test_setting(monkeypatch):
    monkeypatch.setenv("UNJAM_HEAP", "2M")
    with unjam.init_all(1) as (context,):
        assert context.info()["settings"]["UNJAM_HEAP"] == 2 << 20
        assert usage(context) == {
            "bytes": 2 << 20,
            "used": 0,
            "largest_free": 2 << 20,
            "allocations": 0,
        }
    with unjam.init_all(1, heap_bytes=0) as (context,):
        assert usage(context)["bytes"] == 0


def test_too_large(python):
    limited = """
import resource, unjam
resource.setrlimit(resource.RLIMIT_AS, (1 << 36, 1 << 36))
try:
    unjam.init_all(1, heap_bytes=1 << 38)
except unjam.System as error:
    print(error)
"""
    finished = python("-c", limited)
    assert f"({1 << 38} of these bytes are UNJAM_HEAP's" in finished.stdout, finished.stderr


def test_a_child_leaves_it_to_the_parent(context):
    memory = context.alloc(100)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            memory.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert used(context) == 512


def test_on_a_gpu_it_says_where_it_is(context):
    memory = unjam.Memory._allocate(context, 96, place=0)  # host memory, told otherwise
    found = buffer_of(memory, "x", "float32")
    assert (found.address, found.elements, found.writable) == (memory.ptr, 24, True)
    assert found.device == ANY_CUDA and found.keep is memory
    with pytest.raises(TypeError):
        memoryview(memory)
    del memory, found
    assert used(context) == 0


def test_may_be_left_at_the_end_of_the_program(python):
    finished = python(
        "-c",
        "import numpy, unjam\n"
        "context = unjam.init_all(1, heap_bytes=4096)[0]\n"
        "memory = context.alloc(100)\n"
        "x = numpy.frombuffer(context.alloc(100), 'int8')\n"
        "import sys; sys.kept = context.alloc(100)\n",
    )
    assert (finished.returncode, finished.stderr) == (0, "")


# ---- as buffers ----


def all_kinds(context, count):
    """Every collective and a ring of sends, with input, output or both in the heap."""
    group, rank, ranks, root = context.group(), context.rank, context.size, context.size - 1

    def heap(shape):
        n = int(np.prod(shape))
        if n == 0:  # which numpy.frombuffer refuses
            return plain(shape)
        return np.frombuffer(context.alloc(8 * n), "int64").reshape(shape)

    def plain(shape):
        return np.zeros(shape, "int64")

    def mine(of):
        return np.arange(count) % 97 + 1000 * of

    total = sum(mine(r) for r in range(ranks))
    everyone = np.stack([mine(r) for r in range(ranks)])
    for place_in, place_out in ((heap, heap), (heap, plain), (plain, heap)):

        def run(kind, given, shape, expected, place_in=place_in, place_out=place_out, **options):
            x, out = place_in(np.shape(given)), place_out(shape)
            x[...], out[...] = given, -1
            getattr(group, kind)(x, out, **options).wait(60)
            np.testing.assert_array_equal(out, expected, err_msg=kind)
            np.testing.assert_array_equal(x, given, err_msg=kind)

        run("all_reduce", mine(rank), count, total)
        run("all_gather", mine(rank), (ranks, count), everyone)
        run("reduce_scatter", everyone + rank, count, ranks * mine(rank) + sum(range(ranks)))
        run("all_to_all", everyone + rank, (ranks, count), [mine(rank) + r for r in range(ranks)])
        nothing = np.full(count, -1)
        run("reduce", mine(rank), count, total if rank == root else nothing, root=root)
        run("broadcast", mine(rank), count, mine(root), root=root)
        shape = (ranks, count)
        whole = everyone if rank == root else np.full(shape, -1)
        run("gather", mine(rank), shape, whole, root=root)
        run("scatter", everyone, count, mine(rank), root=root)
        x, out = place_in(count), place_out(count)
        x[...] = mine(rank)
        if ranks > 1:
            sent = group.send(x, (rank + 1) % ranks)
            group.recv(out, (rank - 1) % ranks).wait(60)
            sent.wait(60)
            np.testing.assert_array_equal(out, mine((rank - 1) % ranks))
    x = heap(count)
    x[...] = mine(rank)
    group.all_reduce(x).wait(60)
    np.testing.assert_array_equal(x, total)
    whole = heap((ranks, count))
    whole[rank] = mine(rank)
    group.all_gather(whole[rank], whole).wait(60)
    np.testing.assert_array_equal(whole, everyone)
    whole[...] = everyone
    group.reduce_scatter(whole, whole[rank]).wait(60)
    np.testing.assert_array_equal(whole[rank], ranks * mine(rank))


@pytest.mark.parametrize("algorithm", ["auto", "ring", "rsag"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_all_kinds(ranks, algorithm):
    def rank(context):
        for count in (0, 1, 1000, 30_011):
            all_kinds(context, count)
        gc.collect()
        return usage(context)["allocations"]

    assert unjam.launch(ranks, rank, heap_bytes=64 << 20, algorithm=algorithm) == [0] * ranks


def rank_of_a_job(source):
    names = {"np": np, "unjam": unjam}
    exec(source, names)
    with unjam.init_from_environment() as context:
        for count in (1, 30_011):
            names["all_kinds"](context, count)
        say(context.info()["heap"]["bytes"])


def test_all_kinds_between_processes():
    import inspect

    with workers() as harness:
        job = harness.job(3, rank_of_a_job, inspect.getsource(all_kinds), UNJAM_HEAP="64M")
        for process in job:
            assert process.said() == 64 << 20
        for process in job:
            process.ends()
