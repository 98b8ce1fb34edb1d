"""Checks of the torch.distributed backend: torch_checks.py RANK SIZE PORT [DEVICE [CHECK…]].

Every rank runs all checks, or the named ones, in the same order and prints one JSON line a check;
test_torch_backend.py starts the ranks once and looks at each check's lines; at PORT is a store
that it keeps for them. Values are small
integers, so that every reduction is exact in every type, and references are computed from all
ranks' inputs.

On CUDA a call that is not asynchronous, and wait(), only order the current stream, but in
callbacks: what must be over on the host is `finished()`.
"""

import itertools
import json
import random
import sys
import threading
import time
import traceback
from contextlib import ExitStack
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

import unjam
import unjam.torch
from torch_tools import join_store, meet

LONG_S = 150  # for anything: to catch hangs, whatever else the machine does
SIZES = [0, 1, 7, 1000, 65537]
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.uint8, torch.int32, torch.int64]
RANK = SIZE = 0
DEVICE = torch.device("cpu")
CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


def values(rank, shape, dtype, salt=0, low=0, high=4):
    """Rank's input: the same wherever it is asked for."""
    generator = torch.Generator("cpu").manual_seed(1000 * salt + rank)
    drawn = torch.randint(low, high, shape, generator=generator, device="cpu")
    return drawn.to(DEVICE).to(dtype)


def everybody(shape, dtype, salt=0, **limits):
    return [values(r, shape, dtype, salt, **limits) for r in range(SIZE)]


def combined(tensors, op):
    wide = torch.float64 if tensors[0].is_floating_point() else torch.int64
    stacked = torch.stack([t.to(wide) for t in tensors])
    result = {
        dist.ReduceOp.SUM: lambda: stacked.sum(0),
        dist.ReduceOp.AVG: lambda: stacked.sum(0) / SIZE,
        dist.ReduceOp.PRODUCT: lambda: stacked.prod(0),
        dist.ReduceOp.MIN: lambda: stacked.amin(0) if len(stacked[0]) else stacked.sum(0),
        dist.ReduceOp.MAX: lambda: stacked.amax(0) if len(stacked[0]) else stacked.sum(0),
    }[op]()
    return result.to(tensors[0].dtype)


def same(actual, expected):
    assert actual.dtype == expected.dtype, (actual.dtype, expected.dtype)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    if not torch.equal(actual, expected):
        bad = (actual != expected).nonzero()[:3].tolist()
        raise AssertionError(
            f"{actual.dtype} {tuple(actual.shape)} differs at {bad}: "
            f"{actual.flatten()[:4].tolist()} {expected.flatten()[:4].tolist()}"
        )


def fails(kind, *words):
    """A context that wants this error, with these words in its message."""

    class Expected:
        text = ""

        def __enter__(self):
            return self

        def __exit__(self, type_, error, trace):
            assert error is not None, f"no {kind.__name__} with {words}"
            assert isinstance(error, kind), f"{type(error).__name__}: {error}"
            self.text = str(error)
            for word in words:
                assert word in str(error), f"{word!r} is not in: {error}"
            return True

    return Expected()


def finished(work):
    """Waits on the host, on every device; raises what went wrong."""
    assert work.wait(timedelta(seconds=LONG_S))
    assert work.is_completed() and work.is_success()


# ---- collectives against references ----


@check
def all_reduce_types_ops_sizes():
    ops = [dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX]
    for salt, (dtype, op, n) in enumerate(itertools.product(FLOATS + INTEGERS, ops, SIZES)):
        inputs = everybody((n,), dtype, salt)
        tensor = inputs[RANK].clone()
        dist.all_reduce(tensor, op)
        same(tensor, combined(inputs, op))


@check
def all_reduce_average():
    for salt, (dtype, n) in enumerate(itertools.product(FLOATS, SIZES)):
        inputs = [SIZE * t for t in everybody((n,), dtype, salt)]
        tensor = inputs[RANK].clone()
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        same(tensor, combined(inputs, dist.ReduceOp.AVG))


@check
def all_reduce_bool_is_logical():
    inputs = [t.bool() for t in everybody((100,), torch.int64, high=2)]
    some, every = torch.stack(inputs).any(0), torch.stack(inputs).all(0)
    ops = dist.ReduceOp
    for op, expected in [
        (ops.SUM, some),
        (ops.MAX, some),
        (ops.BOR, some),
        (ops.PRODUCT, every),
        (ops.MIN, every),
        (ops.BAND, every),
    ]:
        tensor = inputs[RANK].clone()
        dist.all_reduce(tensor, op)
        same(tensor, expected)


@check
def all_reduce_complex():
    for dtype in (torch.complex64, torch.complex128):
        inputs = [
            torch.complex(values(r, (9,), torch.float64, 1), values(r, (9,), torch.float64, 2))
            for r in range(SIZE)
        ]
        tensor = inputs[RANK].to(dtype, copy=True)
        dist.all_reduce(tensor)
        same(tensor, torch.stack(inputs).sum(0).to(dtype))


@check
def all_reduce_premultiplied():
    for factor in (2.0, torch.tensor([0.5])):
        inputs = [2 * t for t in everybody((33,), torch.float32)]
        tensor = inputs[RANK].clone()
        dist.all_reduce(tensor, dist._make_nccl_premul_sum(factor))
        same(tensor, torch.stack(inputs).sum(0) * factor)


@check
def reduce_scatter_premultiplied_keeps_its_input():
    inputs = everybody((SIZE * 5,), torch.float32)
    mine, output = inputs[RANK].clone(), torch.empty(5)
    dist.reduce_scatter_tensor(output, mine, dist._make_nccl_premul_sum(0.5))
    same(output, torch.stack(inputs).sum(0)[RANK * 5 : RANK * 5 + 5] * 0.5)
    same(mine, inputs[RANK])


@check
def broadcast_every_type_and_root():
    types = [*FLOATS, *INTEGERS, torch.int16, torch.bool, torch.complex64, torch.float8_e4m3fn]
    for salt, (dtype, root) in enumerate(itertools.product(types, range(SIZE))):
        for n in (0, 5, 4099):
            expected = values(root, (n,), torch.float32, salt).to(dtype)
            tensor = expected.clone() if root == RANK else torch.zeros(n).to(dtype)
            dist.broadcast(tensor, root)
            assert torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8))


@check
def tensors_that_are_channels_last():
    shape = (2, 3, 4, 5)
    images = [x.to(memory_format=torch.channels_last) for x in everybody(shape, torch.float32)]
    image = images[RANK]
    tensor = images[0].clone() if RANK == 0 else torch.zeros_like(image)
    assert tensor.is_contiguous(memory_format=torch.channels_last)
    dist.broadcast(tensor, 0)
    same(tensor, images[0])
    boxes = [torch.zeros_like(image) for _ in range(SIZE)]
    dist.all_gather(boxes, image)
    for box, want in zip(boxes, images, strict=True):
        same(box, want)
    many = torch.zeros(2 * SIZE, *shape[1:]).to(memory_format=torch.channels_last)
    dist.all_gather_into_tensor(many, image)
    same(many, torch.cat(images))
    boxes = [torch.zeros_like(image) for _ in range(SIZE)]
    dist.all_to_all(boxes, [image + r for r in range(SIZE)])
    for box, want in zip(boxes, images, strict=True):
        same(box, want + RANK)
    total = image.clone()
    dist.all_reduce(total)
    same(total, sum(images))
    # Parts without elements are as good as any.
    parts = [image[: 2 * (r == 0)] for r in range(SIZE)]
    boxes = [torch.zeros_like(image if RANK == 0 else image[:0]) for _ in range(SIZE)]
    dist.all_to_all(boxes, parts)
    boxes = [torch.zeros_like(image if r == 0 else image[:0]) for r in range(SIZE)]
    dist.all_gather(boxes, image if RANK == 0 else image[:0])
    same(boxes[0], images[0])


@check
def reduce_to_every_root():
    for root, n in itertools.product(range(SIZE), SIZES):
        inputs = everybody((n,), torch.float32, root)
        tensor = inputs[RANK].clone()
        dist.reduce(tensor, root)
        if root == RANK:
            same(tensor, combined(inputs, dist.ReduceOp.SUM))


@check
def all_gather_lists():
    for n, dtype in itertools.product(SIZES, (torch.float32, torch.int16, torch.bool)):
        inputs = everybody((n,), dtype, n, high=2)
        apart = [torch.empty(n, dtype=dtype) for _ in range(SIZE)]
        dist.all_gather(apart, inputs[RANK])
        together = list(torch.empty(SIZE * n, dtype=dtype).chunk(SIZE)) if n else apart
        dist.all_gather(together, inputs[RANK])
        for got in (apart, together):
            for a, b in zip(got, inputs, strict=True):
                same(a, b)


@check
def all_gather_uneven():
    inputs = [values(r, (3 * r + (r > 1), 2), torch.float32) for r in range(SIZE)]
    outputs = [torch.empty_like(t) for t in inputs]
    dist.all_gather(outputs, inputs[RANK])
    for a, b in zip(outputs, inputs, strict=True):
        same(a, b)


@check
def all_gather_without_waiting_fills_outputs():
    inputs = everybody((4000,), torch.float32)
    outputs = [torch.full((4000,), -1.0) for _ in range(SIZE)]
    dist.all_gather(outputs, inputs[RANK], async_op=True)  # the Work goes at once
    deadline = time.monotonic() + LONG_S
    while any((t == -1).any() for t in outputs) and time.monotonic() < deadline:
        time.sleep(0.01)
    for a, b in zip(outputs, inputs, strict=True):
        same(a, b)


@check
def all_gather_into_tensor_sizes():
    for n in SIZES:
        inputs = everybody((n, 3), torch.bfloat16, n)
        output = torch.empty((SIZE * n, 3), dtype=torch.bfloat16)
        dist.all_gather_into_tensor(output, inputs[RANK])
        same(output, torch.cat(inputs))
        mine = output[RANK * n : RANK * n + n]  # in place
        dist.all_gather_into_tensor(output, mine)
        same(output, torch.cat(inputs))


@check
def reduce_scatter_even_uneven_and_into_tensor():
    for n in SIZES:
        inputs = everybody((SIZE * n,), torch.float32, n)
        total = combined(inputs, dist.ReduceOp.SUM)
        output = torch.empty(n)
        dist.reduce_scatter_tensor(output, inputs[RANK])
        same(output, total[RANK * n : RANK * n + n])
        output.zero_()
        dist.reduce_scatter(
            output, [t.clone() for t in inputs[RANK].split(n)] if n else [torch.empty(0)] * SIZE
        )
        same(output, total[RANK * n : RANK * n + n])
    lengths = [2 * r + 1 for r in range(SIZE)]
    inputs = everybody((sum(lengths),), torch.int32, 77)
    output = torch.empty(lengths[RANK], dtype=torch.int32)
    dist.reduce_scatter(output, list(inputs[RANK].split(lengths)), dist.ReduceOp.MAX)
    same(output, combined(inputs, dist.ReduceOp.MAX).split(lengths)[RANK])


@check
def gather_and_scatter():
    for root, n in itertools.product(range(SIZE), (0, 1, 5000)):
        inputs = everybody((n,), torch.float64, root)
        outputs = [torch.empty(n, dtype=torch.float64) for _ in range(SIZE)]
        dist.gather(inputs[RANK], outputs if RANK == root else None, dst=root)
        if RANK == root:
            for a, b in zip(outputs, inputs, strict=True):
                same(a, b)
        output = torch.empty(n, dtype=torch.float64)
        dist.scatter(output, inputs if RANK == root else None, src=root)
        same(output, inputs[RANK])


@check
def all_to_all_forms():
    for n in (0, 1, 3000):
        inputs = everybody((SIZE * n, 2), torch.float32, n)
        output = torch.empty_like(inputs[RANK])
        dist.all_to_all_single(output, inputs[RANK])
        expected = torch.cat([t[RANK * n : RANK * n + n] for t in inputs])
        same(output, expected)
    # Rank s sends (s + 2 d) % 5 rows to rank d: some send nothing.
    rows = [[(s + 2 * d) % 5 for d in range(SIZE)] for s in range(SIZE)]
    inputs = [values(s, (sum(rows[s]), 3), torch.int64, 5) for s in range(SIZE)]
    parts = [t.split(rows[s]) for s, t in enumerate(inputs)]
    received = [rows[s][RANK] for s in range(SIZE)]
    expected = torch.cat([parts[s][RANK] for s in range(SIZE)])
    output = torch.empty((sum(received), 3), dtype=torch.int64)
    dist.all_to_all_single(output, inputs[RANK], received, rows[RANK])
    same(output, expected)
    outputs = [torch.empty((k, 3), dtype=torch.int64) for k in received]
    dist.all_to_all(outputs, [p.contiguous() for p in parts[RANK]])
    same(torch.cat(outputs), expected)


@check
def all_to_all_with_split_sizes_on_one_rank_only():
    group = dist.new_group()
    even = [2] * SIZE if RANK == 0 else None
    x, y = torch.ones(2 * SIZE), torch.empty(2 * SIZE)
    work = dist.all_to_all_single(y, x, even, even, group=group, async_op=True)
    future = work.get_future()
    words = "barrier() as 'all_to_all by lists or split sizes'", "all_to_all(count=2, float32)"
    # Though on rank 0 some of the pairs are, and stay, pending.
    with fails(RuntimeError, *words):
        future.wait()
    with fails(dist.DistBackendError, *words):
        finished(work)
    # The form with split sizes keeps its place among the key's other calls.
    group = dist.new_group()
    works = [
        dist.all_to_all_single(y, x, [2] * SIZE, [2] * SIZE, group=group, async_op=True),
        dist.all_reduce(torch.ones(1), group=group, async_op=True),
    ]
    for work in works:
        finished(work)
    same(y, x)


@check
def coalesced_forms():
    shapes = [(3,), (1000,), (0,), (4, 5)]
    inputs = [everybody(s, torch.float32, i) for i, s in enumerate(shapes)]
    tensors = [of_all[RANK].clone() for of_all in inputs]
    with dist._coalescing_manager():
        for t in tensors:
            dist.all_reduce(t)
    for t, of_all in zip(tensors, inputs, strict=True):
        same(t, torch.stack(of_all).sum(0))
    outputs = [torch.empty((SIZE * s[0], *s[1:])) for s in shapes]
    with dist._coalescing_manager(async_ops=True) as manager:
        for o, of_all in zip(outputs, inputs, strict=True):
            dist.all_gather_into_tensor(o, of_all[RANK])
    manager.wait()
    for o, of_all in zip(outputs, inputs, strict=True):
        same(o, torch.cat(of_all))
    wide = [everybody((SIZE * 4, k), torch.float32, k) for k in (1, 6)]
    outputs = [torch.empty(4, k) for k in (1, 6)]
    with dist._coalescing_manager():
        for o, of_all in zip(outputs, wide, strict=True):
            dist.reduce_scatter_tensor(o, of_all[RANK])
    for o, of_all in zip(outputs, wide, strict=True):
        same(o, torch.stack(of_all).sum(0)[4 * RANK : 4 * RANK + 4])
    lists = [[torch.empty(2), torch.empty(3)] for _ in range(SIZE)]
    mine = [torch.full((2,), float(RANK)), torch.full((3,), float(RANK))]
    dist.all_gather_coalesced(lists, mine)
    assert all(int(t[0]) == r for r, two in enumerate(lists) for t in two)


# ---- point to point ----


@check
def send_recv_by_tags_in_any_order():
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    tags = list(range(12))
    order = tags.copy()
    random.Random(RANK).shuffle(order)
    sent = {t: torch.full((100 * t + 1,), float(100 * RANK + t)) for t in tags}
    got = {t: torch.empty(100 * t + 1) for t in tags}
    works = [dist.isend(sent[t], right, tag=t) for t in order]
    random.Random(-RANK).shuffle(order)
    works += [dist.irecv(got[t], left, tag=t) for t in order]
    for w in works:
        w.wait()
    for t in tags:
        assert (got[t] == 100 * left + t).all(), t


@check
def batch_isend_irecv_ring():
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    got = torch.empty(1 << 16)
    for work in dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, torch.full((1 << 16,), float(RANK)), right),
            dist.P2POp(dist.irecv, got, left),
        ]
    ):
        work.wait()
    assert (got == left).all()


@check
def recv_from_any_source():
    if RANK == 0:
        seen = set()
        for _ in range(SIZE - 1):
            tensor = torch.empty(3)
            source = dist.recv(tensor, None, tag=9)
            assert int(tensor[0]) == source, (tensor, source)
            seen.add(source)
        assert seen == set(range(1, SIZE))
    else:
        time.sleep(0.02 * (SIZE - RANK))
        dist.send(torch.full((3,), float(RANK)), 0, tag=9)


@check
def receives_from_anybody_keep_their_order():
    count = 40
    if RANK == 0:
        buffers = [torch.full((2,), -1.0) for _ in range(count)]
        works = [dist.irecv(buffer, None, tag=11) for buffer in buffers]
        dist.send(torch.ones(1), 1, tag=12)
        for work in works:
            work.wait()
        assert [int(buffer[0]) for buffer in buffers] == list(range(count)), buffers
    elif RANK == 1:
        dist.recv(torch.ones(1), 0, tag=12)
        chance = random.Random(count)
        for i in range(count):
            dist.send(torch.full((2,), float(i)), 0, tag=11)
            time.sleep(chance.random() * 1e-3)


@check
def object_collectives():
    mine = {"rank": RANK, "text": "x" * (1000 * RANK), "list": list(range(RANK))}
    objects = [None] * SIZE
    dist.all_gather_object(objects, mine)
    assert [o["rank"] for o in objects] == list(range(SIZE))
    box = [mine, None] if RANK == 1 else [None, None]
    dist.broadcast_object_list(box, src=1)
    assert box[0]["rank"] == 1
    gathered = [None] * SIZE if RANK == 0 else None
    dist.gather_object(mine, gathered, dst=0)
    assert RANK != 0 or [o["rank"] for o in gathered] == list(range(SIZE))
    out = [None]
    dist.scatter_object_list(out, [f"for {r}" for r in range(SIZE)] if RANK == 0 else None, src=0)
    assert out == [f"for {RANK}"]
    if RANK == 0:
        dist.send_object_list(["hello", 3], dst=1)
    elif RANK == 1:
        received = [None, None]
        dist.recv_object_list(received, src=0)
        assert received == ["hello", 3]


@check
def functional_collectives():
    group = dist.group.WORLD
    x = values(RANK, (SIZE * 6,), torch.float32)
    everything = everybody((SIZE * 6,), torch.float32)
    total = torch.stack(everything).sum(0)
    same(funcol.all_reduce(x, "sum", group) + 0, total)
    same(funcol.all_gather_tensor(x, 0, group) + 0, torch.cat(everything))
    same(funcol.reduce_scatter_tensor(x, "sum", 0, group) + 0, total[6 * RANK : 6 * RANK + 6])
    many = funcol.all_reduce_coalesced([x, 2 * x], "sum", group)
    same(many[0] + 0, total)
    same(many[1] + 0, 2 * total)
    swapped = funcol.all_to_all_single(x, None, None, group) + 0
    same(swapped, torch.cat([t[6 * RANK : 6 * RANK + 6] for t in everything]))
    same(funcol.broadcast(x, 0, group) + 0, everything[0])


# ---- Work ----


@check
def work_tells_its_state():
    tensor = torch.ones(5)
    work = None
    if RANK == 0:
        work = dist.all_reduce(tensor, async_op=True)
        time.sleep(0.05)
        assert not work.is_completed()
        some = "ranks " if SIZE > 2 else "rank "
        missing = some + ", ".join(str(r) for r in range(1, SIZE))
        missing += (" have" if SIZE > 2 else " has") + " not called it"
        end = time.monotonic() + LONG_S
        while True:
            with fails(dist.DistBackendError, "not complete within 50 ms") as failure:
                work.wait(timedelta(milliseconds=50))
            # Who does not answer within a second is left out.
            if missing in failure.text or time.monotonic() > end:
                break
        assert missing in failure.text, failure.text
        assert not work.is_completed()
    unjam.torch.barrier(key="apart")
    if RANK != 0:
        work = dist.all_reduce(tensor, async_op=True)
    assert work.wait() and work.wait()
    finished(work)
    assert tensor[0] == SIZE and work.result()[0] is not None


@check
def futures_chain_and_may_wait_for_other_collectives():
    second = torch.ones(3)

    def then(future):
        dist.all_reduce(second, group=KEYED, async_op=False)  # waits, in the future's callback
        return future.value()[0] + second[0]

    futures = [
        unjam.torch.all_reduce(torch.full((3,), float(i)), async_op=True, key=f"f{i}").get_future()
        for i in range(8)
    ]
    last = dist.all_reduce(torch.ones(3), async_op=True).get_future().then(then)
    assert last.wait()[0] == 2 * SIZE
    for i, future in enumerate(futures):
        assert future.wait()[0][0] == i * SIZE


@check
def collectives_in_callbacks_meet_whatever_comes_between():
    """Each is matched by what it follows. As torch's powerSGD_hook calls them, bucket by bucket.

    All are alike, so that those that met wrongly would give wrong sums, and no error.
    """
    rng = random.Random(RANK)

    def nap():
        if rng.random() < 0.5:
            time.sleep(0.004 * rng.random())

    def filled(value):  # in other threads, too, where there is no default device
        return torch.full((5,), float(value), device=DEVICE)

    def chain(i):
        def second(_):
            nap()
            works = [dist.all_reduce(filled(10 * i + k), async_op=True) for k in range(2)]
            return [work.get_future().wait()[0] for work in works]

        def third(future):
            nap()
            both = future.value()
            dist.all_reduce(both[1])
            return torch.cat(both)

        return dist.all_reduce(filled(i), async_op=True).get_future().then(second).then(third)

    also = []

    def twice(i):
        """Two callbacks of one future, of which each makes calls, and callbacks, of its own."""
        future = dist.all_reduce(filled(i), async_op=True).get_future()

        def inner(name):
            def run(_):
                nap()
                deeper = dist.all_reduce(filled(name), async_op=True).get_future()
                also.append(deeper.then(lambda f: dist.all_reduce(f.value()[0]) or f.value()[0]))

            return run

        future.add_done_callback(inner(i + 0.25))
        return future.then(inner(i + 0.5))

    for _ in range(4):
        also.clear()
        futures, others = [], []
        for i in range(10):
            futures.append(chain(i))
            others.append(twice(i))
            nap()
            x = filled(1000 + i)
            dist.all_reduce(x)
            assert x[0] == SIZE * (1000 + i), x
        for i, future in enumerate(futures):
            found = future.wait()
            assert found[0] == SIZE * 10 * i and found[5] == SIZE * SIZE * (10 * i + 1), (i, found)
        for other in others:
            other.wait()
        end = time.monotonic() + LONG_S
        while len(also) < 20 and time.monotonic() < end:
            time.sleep(0.001)
        sums = sorted(float(future.wait()[0]) for future in also)
        wanted = [SIZE * SIZE * (i + part) for i in range(10) for part in (0.25, 0.5)]
        assert sums == wanted, sums


@check
def in_callbacks_threads_wait_and_streams_do_not():
    """Callbacks' streams share hardware queues: one that waits keeps others' from running."""
    if DEVICE.type == "cpu":
        return
    store = dist.distributed_c10d._get_default_store()
    through = []

    def own():  # rank 0's long before the others'
        if RANK != 0:
            time.sleep(0.2)
        return torch.full((5,), float(RANK), device=DEVICE)

    def callback(_):
        called = own()
        dist.all_reduce(called)
        through.append(torch.cuda.current_stream(DEVICE).query())
        waited_for = own()
        dist.all_reduce(waited_for, async_op=True).wait()
        through.append(torch.cuda.current_stream(DEVICE).query())
        return called + waited_for

    first = torch.ones(1)
    if RANK != 0:
        store.wait(["callback added"])  # rank 0's is not called in the thread that adds it
    future = dist.all_reduce(first, async_op=True).get_future().then(callback)
    if RANK == 0:
        store.set("callback added", "1")
    same(future.wait(), torch.full((5,), float(SIZE * (SIZE - 1))))
    assert RANK != 0 or SIZE == 1 or through == [True, True], through


@check
def power_sgd_does_not_depend_on_when_callbacks_run():
    """It calls further collectives in the callbacks of each bucket's first."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    def trained(seed):
        rng = random.Random(seed)
        torch.manual_seed(5)  # of what it draws itself
        model = torch.nn.Sequential(*[torch.nn.Linear(48, 48) for _ in range(5)]).to(DEVICE)
        parallel = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.02)
        state = power.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        parallel.register_comm_hook(state, power.powerSGD_hook)
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        for step in range(12):
            for layer in list(model)[1:]:

                def hook(gradient):
                    if rng.random() < 0.3:
                        time.sleep(0.003 * rng.random())
                    return gradient

                layer.forward_hook = layer.register_forward_hook(
                    lambda _, __, output, hook=hook: output.register_hook(hook) and None
                )
            optimizer.zero_grad()
            generator = torch.Generator("cpu").manual_seed(step + RANK)
            inputs = torch.rand(4, 48, generator=generator, device="cpu").to(DEVICE)
            parallel(inputs).square().sum().backward()
            optimizer.step()
            for layer in list(model)[1:]:
                layer.forward_hook.remove()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    first, second = trained(RANK), trained(100 + RANK)
    same(second, first)
    of_all = torch.empty(SIZE * first.numel())
    dist.all_gather_into_tensor(of_all, first)
    for part in of_all.chunk(SIZE):
        same(part, first)


@check
def callbacks_whose_order_nothing_tells_need_a_key():
    if SIZE != 2:
        return

    def ones(n):
        return torch.ones(n, device=DEVICE)  # in other threads there is no default

    def passed_on():
        return dist.isend(ones(2), 1) if RANK == 0 else dist.irecv(ones(2), 0)

    with fails(RuntimeError, "all_reduce", "in which order", "give it a key"):
        passed_on().get_future().then(lambda _: dist.all_reduce(ones(1))).wait()

    def with_key(_):
        y = ones(2)
        with unjam.torch.key("in a callback"):
            dist.all_reduce(y)
        return y

    assert passed_on().get_future().then(with_key).wait()[0] == SIZE
    keyed = unjam.keyed_group(None, "in a callback")
    assert passed_on().get_future().then(summed(6, group=keyed)).wait() == 6 * SIZE
    # What torch makes of futures has no context: its callbacks run where the last one completes.
    futures = [dist.all_reduce(ones(1), async_op=True).get_future() for _ in range(2)]
    # Nor does it know of devices, so that nobody waits for the callback's stream but itself.
    number = torch.futures.collect_all(futures).then(lambda f: with_key(f)[0].item()).wait()
    assert number == SIZE


def called(value, key="", **to):
    """An all-reduce of this, on the checks' device: in other threads there is no default one."""
    x = torch.full((3,), float(value), device=DEVICE)
    if key:
        return unjam.torch.all_reduce(x, async_op=True, key=key, **to)
    return dist.all_reduce(x, async_op=True, **to)


def summed(value, **to):
    """A callback that gives the sum."""
    return lambda _: called(value, **to).get_future().wait()[0][0].item()


NAMES = 256  # of contexts, context.h


@check
def names_of_contexts_come_again_only_when_they_are_free():
    begun, gate = threading.Event(), threading.Event()

    def future(value):
        with unjam.torch.key("few names"):
            return called(value).get_future()

    def late(_):
        begun.set()
        assert gate.wait(LONG_S)
        return summed(1)(None)

    results = []
    # A callback may be run by whoever adds it.
    first = threading.Thread(target=lambda: results.append(future(1).then(late).wait()))
    first.start()
    assert begun.wait(LONG_S)
    for _ in range(NAMES - 1):
        future(1).wait()
    with fails(RuntimeError, "all_reduce", "have not ended", "several keys"):
        future(1).then(summed(2)).wait()
    gate.set()
    first.join()
    assert results == [SIZE]
    for _ in range(NAMES - 1):
        future(1).wait()
    again = future(1)
    assert again.then(summed(3)).wait() == 3 * SIZE
    assert again.then(summed(4)).wait() == 4 * SIZE


@check
def contexts_of_calls_whose_callbacks_are_added_late():
    """To more calls than there are names: each meets its like, or is refused."""
    futures = [called(i).get_future() for i in range(NAMES + 40)]
    sums = []
    for i, future in enumerate(futures):
        then = future.then(summed(i))
        if i < 40:
            then.wait()  # so that its name is free for another
        sums.append(then)
    for i, then in enumerate(sums):
        assert then.wait() == SIZE * i
    with fails(RuntimeError, "the later one has had some"):
        futures[0].then(summed(0)).wait()


@check
def contexts_do_not_depend_on_who_takes_futures_and_when():
    works = [called(i) for i in range(6)]
    for work in works:
        finished(work)
    if RANK == 0:
        for work in works[:3]:
            work.get_future().wait()  # looked at on one rank only
    order = list(range(6))
    random.Random(RANK).shuffle(order)
    sums = {}
    for i in order:  # complete ones, so that callbacks are called at once
        threading.Thread(
            target=lambda i=i: sums.update({i: works[i].get_future().then(summed(i)).wait()})
        ).start()
    end = time.monotonic() + LONG_S
    while len(sums) < 6 and time.monotonic() < end:
        time.sleep(0.001)
    assert sums == {i: SIZE * i for i in range(6)}, sums
    # A keyed group that one rank has made, and destroyed, before.
    if RANK == 0:
        alone = unjam.keyed_group(None, "made anew")
        dist.destroy_process_group(alone)
    again = unjam.keyed_group(None, "made anew")
    assert called(1, group=again).get_future().then(summed(5)).wait() == 5 * SIZE


@check
def callbacks_in_callbacks_have_contexts_of_their_own():
    rng = random.Random(RANK)
    sums = {}
    done = threading.Semaphore(0)

    def nap():
        if rng.random() < 0.5:
            time.sleep(0.003 * rng.random())

    def deeper(level, value):
        def run(future):
            nap()
            sums[value] = summed(value)(None)
            if level:
                # To what it was called with, to its own call's future, and behind that.
                future.then(deeper(level - 1, 10 * value + 1))
                mine = called(value).get_future()
                mine.then(deeper(level - 1, 10 * value + 2)).then(deeper(level - 1, 10 * value + 3))
            done.release()

        return run

    first = called(1).get_future()
    first.then(deeper(3, 1)).then(deeper(2, 3))
    first.then(deeper(3, 2))  # from here, while the other one may be adding, too
    for _ in range(40 + 13 + 40):
        assert done.acquire(timeout=LONG_S)
    assert len(sums) == 93 and all(sums[v] == SIZE * v for v in sums), sums

    # What two callbacks of one chain add, and what then runs in another order on every rank.
    boxes = [torch.zeros(1, device=DEVICE) for _ in range(2)]
    later = [dist.irecv(b, (RANK - 1) % SIZE, tag=i).get_future() for i, b in enumerate(boxes)]
    inner = []

    def adds(i):
        def slow(_):
            time.sleep(0.05 * ((i + RANK) % 2))
            return summed(i)(None)

        return lambda _: inner.append(later[i].then(slow))

    called(1).get_future().then(adds(0)).then(adds(1)).wait()
    dist.barrier()  # nobody adds to a future that is complete, whose callback would wait for others
    for i, box in enumerate([torch.ones(1, device=DEVICE) for _ in range(2)]):
        dist.isend(box, (RANK + 1) % SIZE, tag=i).wait()
    assert [future.wait() for future in inner] == [0, SIZE]

    def forever(left):
        def run(_):
            return called(left).get_future().then(forever(left - 1)).wait() if left else None

        return run

    assert called(1).get_future().then(forever(10)).wait() is None
    with fails(RuntimeError, "17th level", "outside of callbacks"):
        called(1).get_future().then(forever(30)).wait()


@check
def no_two_callbacks_have_one_context():
    """Ways to have come by one name. The two run in another order on every rank."""

    def both(first, second):
        found = {}
        turn = threading.Event()

        def run(i, add):
            if (i + RANK) % 2:
                turn.wait(0.2)
            found[i] = add(summed(i + 1)).wait()
            turn.set()

        threads = [threading.Thread(target=run, args=to) for to in enumerate([first, second])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == {0: SIZE, 1: 2 * SIZE}, found

    def future(key=""):
        return called(1, key).get_future()

    def nothing(_):
        return 0

    # Added by callbacks of calls under other keys.
    third, fourth, a, b = future("kc"), future("kc"), future("ka"), future("kb")
    both(
        lambda f: a.then(lambda _: third.then(f).wait()),
        lambda f: b.then(lambda _: fourth.then(f).wait()),
    )
    # Added to what callbacks of one chain have called.
    a = future().then(lambda _: future())
    b = a.then(lambda _: future())
    c, d = a.wait(), b.wait()
    both(c.then, d.then)
    # Chained to what another call's callback has added.
    a, b = future(), future()
    chained = a.then(lambda _: b.then(nothing)).wait()
    both(chained.then, lambda f: b.then(lambda _: a.then(f).wait()))
    # In a callback, groups are counted apart: this rank's own is not called on others.
    own = dist.new_group([RANK], use_local_synchronization=True)

    def calls(_):
        for _ in range(RANK):
            called(1, group=own).wait()
        return future()

    assert future().then(calls).wait().then(summed(3)).wait() == 3 * SIZE
    # What is chained to callbacks that were refused a name, on one rank.
    held = threading.Event()
    if RANK != 0:
        held.set()
    with unjam.torch.key("refused"):
        slow = future()
        adding = threading.Event()

        def hold(_):
            adding.set()
            assert held.wait(LONG_S)

        holding = threading.Thread(target=lambda: slow.then(hold).wait())
        holding.start()
        assert adding.wait(LONG_S)
        for _ in range(NAMES - 1):
            future().wait()
        late = future()
    a, b = late.then(nothing), late.then(nothing)
    held.set()
    holding.join()
    both(a.then, b.then)
    dist.destroy_process_group(own)


@check
def sends_in_callbacks_go_by_the_callers_key():
    if SIZE != 2:
        return
    box = torch.zeros(3, device=DEVICE)

    def sent(x, tag):
        dist.send(x, 1 - RANK, tag=tag)
        # The future has no tensor, so whoever waits for it does not wait for the callback's stream.
        if DEVICE.type == "cuda":
            torch.cuda.current_stream().synchronize()

    with unjam.torch.key("there"):
        if RANK == 0:
            dist.send(torch.full((3,), 7.0, device=DEVICE), 1, tag=4)
            dist.recv(box, 1, tag=4)
            assert box[0] == 8
            called(1).get_future().then(lambda _: sent(box, 5)).wait()
        else:
            dist.irecv(box, 0, tag=4).get_future().then(lambda _: sent(box + 1, 4)).wait()
            called(1).get_future()
            dist.recv(box, 0, tag=5)
            assert box[0] == 8


@check
def keys_hold_in_threads_that_work_for_a_backward_pass():
    """As those are in which autograd evaluates nodes on CUDA. (A very deep pass has one, too.)"""
    seen = []

    class Deep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, depth):
            ctx.depth = depth
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            if ctx.depth == 0:
                value = 1.0 if unjam.torch.current_key() == "a" else 100.0
                total = torch.full((3,), value, device=DEVICE)
                dist.all_reduce(total, async_op=True).wait(timedelta(seconds=LONG_S))
                seen.append((unjam.torch.current_key(), threading.get_native_id(), total[0].item()))
            else:
                with torch.enable_grad():
                    x = torch.ones(1, device=DEVICE, requires_grad=True)
                    Deep.apply(x, ctx.depth - 1).sum().backward()
            return gradient, None

    def run(name):
        with unjam.torch.key(name):
            x = torch.ones(1, device=DEVICE, requires_grad=True)
            Deep.apply(x, 80).sum().backward()

    names = ["a", "b"]
    if RANK % 2 and DEVICE.type == "cpu":  # a GPU has one thread for all passes
        names.reverse()
    threads = [threading.Thread(target=run, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    assert sorted((key, total) for key, _, total in seen) == [("a", SIZE), ("b", 100.0 * SIZE)]
    callers = {thread.native_id for thread in threads}
    assert not callers & {ident for _, ident, _ in seen}, "no pass was so deep"
    assert unjam.torch.current_key() == ""


class Spied(dist.ProcessGroup):
    """A process group for DDP whose user keeps the Works that DDP takes futures of."""

    def __init__(self, group):
        super().__init__(RANK, SIZE)
        self._inner, self.works = group, []

    def allreduce(self, tensors, options=None):
        if not isinstance(options, dist.AllreduceOptions):
            options = dist.AllreduceOptions()
        self.works.append(self._inner.allreduce(tensors, options))
        return self.works[-1]

    def allgather(self, outputs, inputs, options=None):
        return self._inner.allgather(outputs, inputs, options or dist.AllgatherOptions())

    def broadcast(self, tensors, options=None):
        return self._inner.broadcast(tensors, options or dist.BroadcastOptions())

    def getBackendName(self):  # noqa: N802, torch's name
        return "spied"

    def getSize(self):  # noqa: N802
        return SIZE


@check
def python_has_futures_of_its_own_of_what_ddp_takes_too():
    """DDP's are completed at the end of the backward pass; a user's callbacks are not for there."""
    if DEVICE.type != "cpu":
        return  # there, too, but the host has mostly seen the end by then
    spied = Spied(dist.group.WORLD)
    # A bucket each: while the gradients of the first are computed, the second's are on their way.
    first, second = (torch.nn.Linear(600, 600, bias=False) for _ in range(2))
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(first, second), process_group=spied, bucket_cap_mb=1
    )
    model(torch.ones(4, 600)).sum().backward()  # in the first pass all is one bucket
    spied.works.clear()
    behind, met, futures = threading.Event(), [], []

    def inside(_):
        assert len(spied.works) == 1
        futures.append(spied.works[0].get_future())
        here, adding = threading.get_ident(), [True]

        def done(_):
            # On a busy machine it is complete when this is added, which calls it here and now.
            at_once = bool(adding) and threading.get_ident() == here
            met.append(at_once or behind.wait(LONG_S))

        futures[0].add_done_callback(done)
        adding.clear()

    hook = first.register_forward_hook(lambda _, __, output: output.register_hook(inside) and None)
    output = model(torch.ones(4, 600)).sum()
    if RANK != 0:
        time.sleep(0.3)  # so the first rank waits at the end of its pass, mostly
    output.backward()
    behind.set()
    hook.remove()
    end = time.monotonic() + LONG_S
    while not met and time.monotonic() < end:
        time.sleep(0.001)
    assert met == [True], "the callback has kept the pass from ending"

    # And whoever waits inside of the pass does not wait for its end.
    spied.works.clear()
    seen = []

    def waits_inside(_):
        seen.append(spied.works[0].get_future().wait()[0].clone())

    again = first.register_forward_hook(
        lambda _, __, output: output.register_hook(waits_inside) and None
    )
    model.zero_grad()
    model(torch.ones(4, 600)).sum().backward()
    again.remove()
    same(seen[0].view(600, 600), second.weight.grad)


@check
def tensors_live_until_the_operation_is_complete():
    if RANK == 0:
        for i in range(20):  # nobody keeps the tensors or the Work
            unjam.torch.all_reduce(torch.full((5000,), 1.0), async_op=True, key=f"gone {i}")
            torch.full((5000,), 7.0)
    unjam.torch.barrier(key="gone")
    if RANK != 0:
        tensors = [torch.full((5000,), 1.0) for _ in range(20)]
        works = [
            unjam.torch.all_reduce(t, async_op=True, key=f"gone {i}") for i, t in enumerate(tensors)
        ]
        for w in works:
            w.wait()
        assert all((t == SIZE).all() for t in tensors)


# ---- any order ----


@check
def keys_in_a_different_order_on_every_rank():
    for round_ in range(20):
        names = [f"layer{i}" for i in range(20)]
        random.Random(f"{round_} {RANK}").shuffle(names)
        tensors = {name: torch.full((1 + 500 * int(name[5:]),), float(RANK)) for name in names}
        works = [unjam.torch.all_reduce(tensors[n], async_op=True, key=n) for n in names]
        random.Random(f"wait {round_} {RANK}").shuffle(works)
        for w in works:
            w.wait()
        for t in tensors.values():
            assert (t == sum(range(SIZE))).all()


@check
def waiting_in_crossed_orders_while_others_are_pending():
    # Each waits for its second call first: with one global order nobody would get there.
    a, b = torch.ones(100), torch.ones(100)
    pairs = [("a", a), ("b", b)]
    if RANK % 2:
        pairs.reverse()
    works = {name: unjam.torch.all_reduce(t, async_op=True, key=name) for name, t in pairs}
    works[pairs[1][0]].wait()
    works[pairs[0][0]].wait()
    assert a[0] == SIZE and b[0] == SIZE


@check
def calls_and_receives_from_anybody_wait_for_room():
    """Rank 0 makes more calls than there is room for before the others make any."""
    room = 64 if DEVICE.type == "cuda" else 512
    tensors = [values(RANK, (5,), torch.float32, salt=k) for k in range(room + 100)]
    store = dist.distributed_c10d._get_default_store()
    works = []

    def calls():
        for k, tensor in enumerate(tensors):
            with unjam.key(f"room {k}"):
                works.append(dist.all_reduce(tensor, async_op=True))

    sent, received = values(1, (3,), torch.float32), torch.zeros(3, device=DEVICE)
    if RANK == 0:
        caller = threading.Thread(target=calls)
        caller.start()
        made = 0
        # Until it stands; other checks' keys may take some of the room.
        while made < room - 30 or len(works) != made:
            made = len(works)
            time.sleep(0.3)
        assert made <= room
        receive = dist.irecv(received, None, tag=78)
        store.set("no room", "1")
        caller.join()
        receive.wait()
        same(received, sent)
    else:
        if RANK == 1:
            send = dist.isend(sent, 0, tag=78)
        store.wait(["no room"])
        time.sleep(0.3)  # while rank 0 looks for who has sent
        calls()
        if RANK == 1:
            send.wait()
    for k, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
        work.wait()
        same(tensor, sum(everybody((5,), torch.float32, salt=k)))


@check
def nested_keys_and_keyed_groups():
    key = unjam.torch.key
    with key("outer"):
        with key("inner"):
            assert unjam.torch.current_key() == "outer/inner"
            x = torch.ones(2)
            dist.all_reduce(x)
        assert unjam.torch.current_key() == "outer"
    assert unjam.torch.current_key() == ""
    assert x[0] == SIZE
    again = unjam.keyed_group(None, "k")
    assert again is KEYED and again.size() == SIZE and again.rank() == RANK
    assert dist.get_backend(again) == "unjam"
    assert dist.get_process_group_ranks(again) == list(range(SIZE))
    deeper = unjam.keyed_group(again, "deeper")
    groups = [dist.group.WORLD, again, deeper]
    if RANK % 2:
        groups.reverse()
    tensors = [torch.ones(3) for _ in groups]
    works = [
        dist.all_reduce(t, group=g, async_op=True) for t, g in zip(tensors, groups, strict=True)
    ]
    for w in works:
        w.wait()
    assert all(t[0] == SIZE for t in tensors)
    same(funcol.all_reduce(torch.ones(4), "sum", again) + 0, torch.full((4,), float(SIZE)))


@check
def names_that_look_alike_when_joined():
    one, two = unjam.keyed_group(None, "layer"), unjam.keyed_group(None, "layer/0")
    a, b = torch.full((3,), 1.0), torch.full((3,), 100.0)

    def first():
        with unjam.torch.key("0"):
            return dist.all_reduce(a, group=one, async_op=True)

    def second():
        return dist.all_reduce(b, group=two, async_op=True)

    for work in [first(), second()] if RANK % 2 == 0 else [second(), first()]:
        work.wait()
    assert a[0] == SIZE and b[0] == 100 * SIZE, (a, b)
    inner = unjam.keyed_group(unjam.keyed_group(None, "a"), "b")
    assert unjam.keyed_group(None, "a#b") is not inner


@check
def overlapping_groups_in_any_order():
    members = [c for k in range(2, SIZE + 1) for c in itertools.combinations(range(SIZE), k)]
    groups = [(m, dist.new_group(list(m))) for m in members]
    mine = [(m, g) for m, g in groups if RANK in m]
    for round_ in range(10):
        random.Random(f"{round_} {RANK}").shuffle(mine)
        calls = [
            (
                m,
                t := torch.full((round_ * 999 + 1,), float(RANK)),
                dist.all_reduce(t, group=g, async_op=True),
            )
            for m, g in mine
        ]
        for m, tensor, work in calls:
            work.wait()
            assert (tensor == sum(m)).all(), (m, tensor)
    for m, g in groups:
        if RANK in m:
            dist.destroy_process_group(g)


@check
def keyed_groups_end_with_the_group_that_they_are_of():
    group = dist.new_group(range(SIZE))
    keyed = unjam.keyed_group(group, "one")
    deeper = unjam.keyed_group(keyed, "two")
    let_go = unjam.keyed_group(group, "three")
    dist.destroy_process_group(let_go)
    for g in (group, keyed, deeper):
        dist.all_reduce(torch.ones(1, device=DEVICE), group=g)
    # One that nobody answers: its end is the group's.
    received = torch.empty(1, device=DEVICE)
    work = dist.irecv(received, group=deeper)
    dist.destroy_process_group(group)
    with fails(RuntimeError, "was destroyed"):
        work.wait()
    for g in (keyed, deeper):
        with fails(RuntimeError, "was destroyed"):
            dist.all_reduce(torch.ones(1, device=DEVICE), group=g)
        dist.destroy_process_group(g)
    dist.all_reduce(torch.ones(1, device=DEVICE))


@check
def two_threads_two_groups_opposite_orders():
    # (A default device is a thread's own.)
    one, two = unjam.keyed_group(None, "one"), unjam.keyed_group(None, "two")
    errors = []

    def drive(group, seed):
        # On one stream, the two would be a circle of the program's own.
        stream = torch.cuda.Stream(DEVICE) if DEVICE.type == "cuda" else None
        try:
            with torch.cuda.stream(stream):
                for i in range(50):
                    x = torch.full((17 * i + 1,), float(RANK), device=DEVICE)
                    dist.all_reduce(x, group=group)
                    assert (x == sum(range(SIZE))).all()
                    if random.Random(f"{seed} {i}").random() < 0.2:
                        time.sleep(0.001)
        except Exception as error:
            errors.append(error)

    threads = [
        threading.Thread(target=drive, args=(g, f"{RANK} {i}")) for i, g in enumerate((one, two))
    ]
    if RANK % 2:
        threads.reverse()
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors, errors


@check
def a_full_stream_keeps_no_other_thread_from_its_calls():
    # A stream takes a thousand kernels, then whoever launches one waits for room.
    if DEVICE.type == "cpu":
        return
    groups = [dist.new_group(range(SIZE)) for _ in range(2)]
    streams = [torch.cuda.Stream(DEVICE) for _ in groups]
    tensors = [torch.zeros(100, device=DEVICE) for _ in groups]
    torch.cuda.synchronize()
    calls, made = 1500, 0

    def run_ahead():
        nonlocal made
        with torch.cuda.device(DEVICE), torch.cuda.stream(streams[0]):
            for _ in range(calls):
                dist.all_reduce(tensors[0], group=groups[0])
                made += 1

    ahead = threading.Thread(target=run_ahead)
    if RANK != 0:
        ahead.start()
        last = -1
        while last != made:
            last = made
            time.sleep(0.3)
        assert made < calls, "the stream took all calls"
    with torch.cuda.stream(streams[1]):
        for _ in range(10):
            dist.all_reduce(tensors[1], group=groups[1])
            dist.all_reduce(tensors[1], group=groups[1], async_op=True).wait()
        streams[1].synchronize()  # rank 0 waits for the others' calls here
    if RANK == 0:
        ahead.start()
    ahead.join()
    streams[0].synchronize()
    for group in groups:
        dist.destroy_process_group(group)


@check
def a_full_stream_keeps_no_other_thread_waiting():
    # What is left to do with results, here copies, goes into the stream of whoever waits for them.
    # (A future's callback may wait: torch makes events for it, which CUDA does not while a thread
    # waits for room in a stream.)
    if DEVICE.type == "cpu":
        return
    groups = [dist.new_group(range(SIZE)) for _ in range(3)]
    streams = [torch.cuda.Stream(DEVICE) for _ in groups]
    tensors = [torch.zeros(100, device=DEVICE) for _ in groups]
    parts = [[torch.zeros(100, device=DEVICE) for _ in range(SIZE)] for _ in range(40)]
    torch.cuda.synchronize()
    through = False

    def wait_in_full_stream(works):
        nonlocal through
        with torch.cuda.device(DEVICE), torch.cuda.stream(streams[0]):
            dist.all_reduce(tensors[0], group=groups[0])  # rank 0 calls it last
            for _ in range(950):
                tensors[0].add_(1)
            for work in works:
                work.wait()
        through = True

    # Waited for before they are complete, by all but rank 0.
    with torch.cuda.stream(streams[1]):
        works = []
        if RANK != 0:
            works = [dist.all_gather(p, tensors[1], group=groups[1], async_op=True) for p in parts]
            waits = threading.Thread(target=wait_in_full_stream, args=(works,))
            waits.start()
            time.sleep(1)
        dist.barrier()
        assert not through, "the stream took all that was left to do"
        if RANK == 0:
            for p in parts:
                dist.all_gather(p, tensors[1], group=groups[1])
        for _ in range(10):
            dist.all_reduce(tensors[2], group=groups[2])
            streams[1].synchronize()
            for work in works:
                work.is_completed()
        assert RANK == 0 or not through, "nothing was full"
    dist.barrier()
    if RANK == 0:
        dist.all_reduce(tensors[0], group=groups[0])
    else:
        waits.join()
    torch.cuda.synchronize()
    for group in groups:
        dist.destroy_process_group(group)


@check
def names_of_keys_never_meet_what_the_backend_adds():
    group = unjam.keyed_group(None, "apart")
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    sent = {name: torch.full((2,), float(i)) for i, name in enumerate(("tag", "key", "plain"))}
    got = {name: torch.empty(2) for name in sent}
    works = []
    with unjam.torch.key("#tag 3"):
        works.append(dist.isend(sent["key"], right))
    works.append(dist.isend(sent["tag"], right, tag=3))
    works.append(dist.irecv(got["tag"], left, tag=3))  # the other way round
    with unjam.torch.key("#tag 3"):
        works.append(dist.irecv(got["key"], left))
    for w in works:
        w.wait()
    assert got["tag"][0] == 0 and got["key"][0] == 1, got
    with unjam.torch.key("#all_to_all"):
        w = dist.isend(sent["plain"], right)
    rows = [1] * SIZE
    output = torch.empty(SIZE)
    dist.all_to_all_single(output, torch.full((SIZE,), 10.0 + RANK), rows, rows)
    same(output, torch.arange(SIZE, dtype=torch.float32) + 10)
    with unjam.torch.key("#all_to_all"):
        dist.recv(got["plain"], left)
    w.wait()
    assert got["plain"][0] == 2
    # A keyed group is not the key of its name.
    x, y = torch.ones(3), torch.full((3,), 2.0)
    calls = [
        lambda: unjam.torch.all_reduce(x, key="apart", async_op=True),
        lambda: dist.all_reduce(y, group=group, async_op=True),
    ]
    for w in [call() for call in (calls[::-1] if RANK else calls)]:
        w.wait()
    assert x[0] == SIZE and y[0] == 2 * SIZE


# ---- beside autograd, other threads, other modes ----


@check
def collectives_have_no_gradient():
    rows = [2] * SIZE
    leaf = torch.ones(2 * SIZE, requires_grad=True)
    for splits in (([], []), (rows, rows)):
        output = torch.zeros(2 * SIZE)
        dist.all_to_all_single(output, leaf, *(s or None for s in splits))
        assert not output.requires_grad
        output = torch.zeros(2 * SIZE, requires_grad=True)
        dist.all_to_all_single(output, leaf.detach(), *(s or None for s in splits))
        assert output.is_leaf
    outputs = [torch.zeros(2 * SIZE) for _ in range(SIZE)]
    dist.all_gather(outputs, leaf)
    assert not outputs[0].requires_grad


@check
def inference_tensors_are_filled_by_whoever_comes_first():
    with torch.inference_mode():
        outputs = [torch.full((1000,), -1.0) for _ in range(SIZE)]
        work = dist.all_gather(outputs, torch.full((1000,), float(RANK)), async_op=True)
        time.sleep(0.2)
        work.wait()
    assert [int(t[0]) for t in outputs] == list(range(SIZE))


@check
def completed_means_that_outputs_are_there():
    outputs = [torch.empty(1 << 18) for _ in range(SIZE)]
    for _ in range(10):
        for t in outputs:
            t.fill_(-1)
        work = dist.all_gather(outputs, torch.ones(1 << 18), async_op=True)
        while not work.is_completed():
            time.sleep(0)
        assert all((t == 1).all() for t in outputs)
        work.wait()


@check
def several_threads_wait_for_one_work():
    for round_ in range(10):
        outputs = [torch.empty(5000) for _ in range(SIZE)]
        work = dist.all_gather(outputs, torch.full((5000,), float(RANK)), async_op=True)
        seen = []

        def wait(work=work, seen=seen, outputs=outputs):
            work.wait()
            seen.append([int(t[0]) for t in outputs])

        future = work.get_future()
        threads = [threading.Thread(target=wait) for _ in range(4)]
        for t in threads:
            t.start()
        future.wait()
        for t in threads:
            t.join()
        assert seen == [list(range(SIZE))] * 4, round_


@check
def blocked_calls_let_other_python_threads_run():
    store = dist.distributed_c10d._get_default_store()
    x = torch.ones(1)
    if RANK == 0:
        calls = threading.Event()

        def take_turns():
            calls.wait()
            for _ in range(40):  # long enough for the caller to be inside of its call
                time.sleep(0.005)
            store.set("other threads run", "1")

        other = threading.Thread(target=take_turns, daemon=True)
        other.start()
        work = dist.all_reduce(x, async_op=True)
        calls.set()
        work.synchronize()  # on the CPU until the others come
        finished(work)
        other.join()
    else:
        store.wait(["other threads run"], timedelta(seconds=LONG_S))
        dist.all_reduce(x)


@check
def refused_coalesced_call_leaves_nothing_behind():
    if RANK == 0:
        lists = [[torch.empty(2), torch.empty(3)] for _ in range(SIZE)]
        with fails(ValueError, "as large as the input"):
            dist.all_gather_coalesced(lists, [torch.full((2,), 5.0), torch.ones(4)])
    output = torch.empty(2 * SIZE)
    dist.all_gather_into_tensor(output, torch.full((2,), float(RANK)))
    same(output, torch.arange(SIZE, dtype=torch.float32).repeat_interleave(2))


@check
def destroyed_keyed_group_ends_only_its_own_receives():
    group = unjam.keyed_group(None, "passing")
    if RANK == 0:
        tensor = torch.zeros(1)
        work = dist.irecv(tensor, None, tag=77)
        own = dist.irecv(torch.zeros(1), None, group=group)
        dist.destroy_process_group(group)
        dist.barrier()
        work.wait()
        assert tensor[0] == 5
        with fails(dist.DistBackendError, "destroyed"):
            own.wait()
    else:
        dist.destroy_process_group(group)
        dist.barrier()
        if RANK == 1:
            dist.send(torch.full((1,), 5.0), 0, tag=77)


@check
def aborted_subgroup_ends_alone():
    group = dist.new_group()
    x = torch.ones(2)
    dist.all_reduce(x, group=group)
    dist.barrier()
    if RANK == 0:
        work = dist.all_reduce(x, group=group, async_op=True)
        threading.Timer(0.2, lambda: dist.distributed_c10d._abort_process_group(group)).start()
        with fails(dist.DistBackendError, "aborted"):
            finished(work)
        with fails(dist.DistBackendError, "aborted"):
            work.wait()  # also where it would have a stream wait, for ever
    else:
        time.sleep(0.1)
    y = torch.ones(2)
    dist.all_reduce(y)
    assert y[0] == SIZE
    if RANK != 0:
        dist.destroy_process_group(group)


@check
def a_backward_pass_of_ddp_orders_the_stream():
    """Plain DDP, and keyed: on CUDA the host goes on while a peer is late; the stream waits."""
    store = dist.distributed_c10d._get_default_store()
    for keyed in (False, True):
        torch.manual_seed(7)
        layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
        model = torch.nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=0.03)
        if keyed:
            unjam.torch.ddp.keyed(model, "late")
        for step in range(5):  # buckets are made anew behind the first
            model.zero_grad()
            loss = model(values(RANK, (4, 64), torch.float32, step)).sum()
            unjam.torch.barrier(key="set")
            through = f"a backward pass, {keyed}, {step}"
            if RANK == 1 and step > 1:
                if DEVICE.type == "cuda":
                    store.wait([through], timedelta(seconds=LONG_S))
                else:
                    time.sleep(0.5)
            loss.backward()
            if RANK == 0:
                store.set(through, "1")
            alone = [torch.zeros_like(p) for p in layers.parameters()]
            for r in range(SIZE):
                of_rank = layers(values(r, (4, 64), torch.float32, step)).sum()
                found = torch.autograd.grad(of_rank, list(layers.parameters()))
                for into, g in zip(alone, found, strict=True):
                    into += g / SIZE
            for p, expected in zip(layers.parameters(), alone, strict=True):
                torch.testing.assert_close(p.grad, expected)


# ---- what is wrong is said ----


@check
def a_stream_under_capture_is_refused():
    if DEVICE.type != "cuda":
        return
    x, before, box = torch.ones(5), torch.ones(3), torch.empty(5 * SIZE)
    calls = [
        lambda: dist.all_reduce(x),
        lambda: dist.all_reduce(x, async_op=True),
        lambda: dist.all_gather_into_tensor(box, x),
        lambda: dist.isend(x, (RANK + 1) % SIZE, tag=3),
        lambda: dist.irecv(x, None, tag=3),
        lambda: dist.barrier(),
    ]
    if RANK == 0:  # pending until the others call it
        pending = unjam.torch.all_reduce(before, async_op=True, key="before")
        calls.append(pending.wait)
    for call in calls:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            x.mul_(1)  # a graph of nothing would be warned of
            with fails(dist.DistBackendError, "captured", "CUDA graph", "outside of the capture"):
                call()
    unjam.torch.barrier(key="refused")
    if RANK != 0:
        pending = unjam.torch.all_reduce(before, async_op=True, key="before")
    finished(pending)
    assert before[0] == SIZE
    dist.all_reduce(x)  # nothing was submitted by any of them
    assert x[0] == SIZE
    dist.all_reduce(x, async_op=True).wait()
    assert x[0] == SIZE * SIZE


@check
def bad_tensors_and_arguments():
    x = torch.ones(4, 4)
    with fails(ValueError, "contiguous", ".contiguous()"):
        dist.all_reduce(x.t()[1:])
    with fails(ValueError, "on the CPU or a CUDA device", "meta"):  # torch itself passes these by
        dist.group.WORLD._get_backend(DEVICE).allreduce([torch.ones(3, device="meta")])
    if DEVICE.type == "cuda" and torch.cuda.device_count() > 1:
        other = torch.device("cuda", (DEVICE.index + 1) % torch.cuda.device_count())
        with fails(ValueError, f"a tensor is on {other}", f"joined with {DEVICE}", "device_id"):
            dist.all_reduce(torch.ones(3, device=other))
    with fails(TypeError, "Short"):
        dist.all_reduce(torch.ones(3, dtype=torch.int16))
    with fails(TypeError, "bool"):
        dist.all_reduce(torch.ones(3, dtype=torch.bool), dist.ReduceOp.AVG)
    with fails(ValueError, "bitwise"):
        dist.all_reduce(torch.ones(3, dtype=torch.int32), dist.ReduceOp.BXOR)
    with fails((TypeError, ValueError)):
        dist.all_reduce(torch.ones(3, dtype=torch.complex64), dist.ReduceOp.MAX)
    with fails(TypeError, "to_dense"):
        dist.all_reduce(torch.ones(3).to_sparse())
    with fails(ValueError, "output has 5"):
        dist.all_gather_into_tensor(torch.empty(5), torch.ones(3))
    with fails(TypeError, "same type"):
        dist.all_gather_into_tensor(torch.empty(3 * SIZE, dtype=torch.int32), torch.ones(3))
    image = torch.ones(SIZE, 3, 4, 5)
    last = image.to(memory_format=torch.channels_last)
    boxes = [torch.empty_like(image) for _ in range(SIZE)]
    many = torch.empty(SIZE * SIZE, 3, 4, 5)
    for call in (
        lambda: dist.all_gather(boxes, last),
        lambda: dist.all_gather_into_tensor(many, last),
        lambda: dist.reduce_scatter(image, [last] * SIZE),
        lambda: dist.all_to_all(boxes, [last] * SIZE),
        lambda: dist.all_to_all_single(image, last),
        lambda: dist.all_to_all_single(image, last, [1] * SIZE, [1] * SIZE),
    ):
        with fails(ValueError, "channels last", ".contiguous("):
            call()
    with fails(ValueError, "input has"):
        dist.reduce_scatter_tensor(torch.empty(5), torch.ones(3))
    with fails(ValueError, "split sizes"):
        dist.all_to_all_single(torch.empty(4 * SIZE), torch.ones(4 * SIZE), [1] * SIZE, [1] * SIZE)
    with fails(ValueError, "not a multiple"):
        dist.all_to_all_single(torch.empty(SIZE + 1), torch.ones(SIZE + 1))
    with fails(Exception):
        dist.broadcast(torch.ones(2), SIZE)
    with fails(ValueError, "not empty"), unjam.torch.key(""):
        pass
    with fails(TypeError, "str"), unjam.torch.key(3):
        pass
    y = torch.ones(2)
    dist.all_reduce(y)  # nothing was submitted by any of them
    assert y[0] == SIZE


@check
def disagreement_fails_on_all():
    first = RANK == 0
    calls = {
        "count=4": lambda **to: dist.all_reduce(torch.ones(3 + first), **to),
        "float64": lambda **to: dist.all_reduce(
            torch.ones(3, dtype=torch.float64 if first else torch.float32), **to
        ),
        "max": lambda **to: dist.all_reduce(
            torch.ones(3), dist.ReduceOp.MAX if first else dist.ReduceOp.SUM, **to
        ),
        "broadcast": lambda **to: (
            dist.all_reduce(torch.ones(3), **to)
            if first
            else dist.broadcast(torch.ones(3), 0, **to)
        ),
    }

    def gathered(first_type, others_type, count):
        """Elsewhere twice as many elements of half the size."""
        dtype, n = (first_type, count) if first else (others_type, 2 * count)
        output, part = torch.ones(SIZE * n, dtype=dtype), torch.ones(n, dtype=dtype)
        return lambda **to: dist.all_gather_into_tensor(output, part, **to)

    def reduced(first_op, others_op, dtype=torch.float32):
        tensor = torch.ones(3, dtype=dtype)
        return lambda **to: dist.all_reduce(tensor, first_op if first else others_op, **to)

    # What travels alike, and does not mean the same. (Of complex tensors torch itself passes on the
    # real numbers in them, and says nothing of it.)
    premultiplied = dist._make_nccl_premul_sum
    greatest = dist.ReduceOp.MAX
    calls |= {
        "uint8, max) as 'bool'": reduced(greatest, greatest, torch.bool if first else torch.uint8),
        "uint8) as 'int16'": gathered(torch.int16, torch.uint8, 2),
        "as 'premul_sum 2'": reduced(premultiplied(2.0), dist.ReduceOp.SUM),
        "as 'premul_sum 0.1'": reduced(premultiplied(0.1), premultiplied(0.2)),
    }
    image = torch.ones(2, 3, 4, 5)
    if first:
        image = image.to(memory_format=torch.channels_last)

    def reduced_image(factor, tensor):
        return lambda **to: dist.all_reduce(tensor.clone(), premultiplied(factor), **to)

    calls |= {
        "as 'channels last'": lambda **to: dist.all_reduce(image, **to),
        "as 'channels last premul_sum -1.2": reduced_image(-1.2345678901234567e-300, image),
        "as 'bool channels last'": lambda **to: dist.all_gather(
            [image.bool() for _ in range(SIZE)], image.bool(), **to
        ),
    }
    for what, call in calls.items():
        with fails(dist.DistBackendError, what):
            finished(call(group=dist.new_group(), async_op=True))
    # A call that is refused has not multiplied.
    group, factor = dist.new_group(), torch.full((3,), 5.0)
    with fails(dist.DistBackendError, "count=4"):
        finished(dist.all_reduce(torch.ones(3 + first), group=group, async_op=True))
    for call in (dist.all_reduce, lambda *of, **to: dist.reduce(of[0], 0, of[1], **to)):
        with fails(dist.DistBackendError, "count=4"):
            call(factor, premultiplied(2.0), group=group)
    assert factor[0] == 5
    x = torch.ones(2)
    dist.all_reduce(x)
    assert x[0] == SIZE


@check
def a_failure_that_wait_could_not_tell_is_told_by_the_next_barrier():
    group = dist.new_group()
    if RANK != 0:
        time.sleep(1)  # rank 0's wait is in its stream by then, and its barrier called
    errors = []
    for call in (
        lambda: dist.all_reduce(torch.ones(3 + (RANK == 0)), group=group),
        lambda: unjam.torch.barrier(group=group, key="another"),  # behind it in the stream
    ):
        try:
            call()
        except dist.DistBackendError as error:
            errors.append(str(error))
    assert len(errors) == 1 and "count=4" in errors[0], errors
    if DEVICE.type == "cuda" and RANK == 0:
        with fails(dist.DistBackendError, "out of use", "count=4"):
            unjam.torch.all_reduce(torch.ones(3), group=group, key="a third")
    dist.destroy_process_group(group)
    x = torch.ones(2)
    dist.all_reduce(x)  # other groups go on
    assert x[0] == SIZE


@check
def a_failed_work_says_so_whenever_it_is_asked():
    group = dist.new_group()
    outputs = [torch.zeros(3) for _ in range(SIZE)]
    work = dist.all_gather(outputs, torch.ones(3), group=group, async_op=True)
    if RANK == 0:
        finished(work)
        work = dist.all_gather(outputs, torch.ones(3), group=group, async_op=True)
    else:
        finished(work)
        outputs = [torch.zeros(2) for _ in range(SIZE)]
        work = dist.all_gather(outputs, torch.ones(2), group=group, async_op=True)
    end = time.monotonic() + LONG_S
    while not work.is_completed() and time.monotonic() < end:
        time.sleep(0.001)
    assert work.is_completed() and not work.is_success()
    for _ in range(2):
        with fails(dist.DistBackendError, "count=3"):
            work.wait()
    with fails(RuntimeError, "count=3"):
        work.get_future().wait()


@check
def a_destroyed_group_says_so():
    group = dist.new_group()
    backend = group._get_backend(DEVICE)
    x = torch.ones(2)
    dist.all_reduce(x, group=group)
    dist.destroy_process_group(group)
    with fails(dist.DistBackendError, "destroyed"):
        backend.allreduce([x], dist.AllreduceOptions()).wait()


@check
def explain_names_the_missing():
    over = torch.ones(2)
    unjam.torch.all_reduce(over, key="over")
    assert over[0] == SIZE
    # On all ranks; by other means than operations, which look at those before them.
    meet(dist.distributed_c10d._get_default_store(), "over", SIZE)
    work = None
    if RANK == 0:
        work = unjam.torch.all_reduce(torch.ones(3), async_op=True, key="late")
        time.sleep(0.05)
        others = ", ".join(str(r) for r in range(1, SIZE))
        end = time.monotonic() + LONG_S
        while True:
            text = unjam.explain()
            # A rank with a thread inside of CUDA (first calls are slow) says only that: soon over.
            told = "key 'late'" in text and f"not called by: {others}" in text
            if told or time.monotonic() > end:
                break
        # What is complete is not pending, though on CUDA nobody has looked at it since.
        assert told and "key 'over'" not in text, text
    unjam.torch.barrier(key="said")
    if RANK != 0:
        work = unjam.torch.all_reduce(torch.ones(3), async_op=True, key="late")
    work.wait()


@check
def disagreement_names_keys():
    """Calls of different sizes in different orders: an order for each key is the cure."""
    group = dist.new_group()
    sizes = [3, 4] if RANK == 0 else [4, 3]
    # One call alone: where the ranks have met already, a second is refused, in other words.
    work = dist.all_reduce(torch.ones(sizes[0]), group=group, async_op=True)
    with fails(dist.DistBackendError, 'with unjam.key("name")', "in different orders"):
        finished(work)
    tensors = [torch.ones(n) for n in sizes]
    works = [
        unjam.torch.all_reduce(x, group=group, key=str(len(x)), async_op=True) for x in tensors
    ]
    for work, x in zip(works, tensors, strict=True):
        finished(work)
        assert x[0] == SIZE


@check
def equal_counts_of_other_shapes_meet():
    """Elements are counted, as torch does; of what shape they are is each rank's own affair."""
    flat = torch.arange(6.0)
    x = flat.clone().reshape({0: (3, 2), 1: (2, 3)}.get(RANK, (6,)))
    for call in (lambda: dist.all_reduce(x), lambda: dist.broadcast(x, 0)):
        call()
        same(x.flatten(), SIZE * flat)
    scalar = torch.tensor(1.0) if RANK == 0 else torch.ones(1)
    dist.all_reduce(scalar)
    assert float(scalar) == SIZE
    if RANK == 0:
        dist.send(torch.ones(2, 3), 1)
    elif RANK == 1:
        y = torch.zeros(6)
        dist.recv(y, 0)
        same(y, torch.ones(6))


def to_itself(group, sends_first, tag=0, value=1.0, shape=(3,)):
    """Both calls of a message to oneself in this group: what is received, and the works."""
    me = dist.get_group_rank(group, RANK)
    sent, got = torch.full(shape, value), torch.zeros(shape)
    calls = [
        lambda: dist.isend(sent, group=group, tag=tag, group_dst=me),
        lambda: dist.irecv(got, group=group, tag=tag, group_src=me),
    ]
    works = [call() for call in (calls if sends_first else calls[::-1])]
    return got, works


@check
def messages_to_oneself():
    ranks = list(range(SIZE))
    groups = [dist.group.WORLD, dist.new_group(ranks[::-1]), dist.new_group([SIZE - 1])]
    for group in groups[: 3 if RANK == SIZE - 1 else 2]:
        for sends_first in (True, False):
            got, works = to_itself(group, sends_first, value=2.0 + RANK)
            for work in works:
                finished(work)
            same(got, torch.full((3,), 2.0 + RANK))
        # Several at a time, of several tags, and large ones.
        both = [
            to_itself(group, i % 3 == 0, tag=i % 2, value=float(i), shape=(1 << (4 * i), 2))
            for i in range(5)
        ]
        for i, (got, works) in reversed(list(enumerate(both))):
            for work in works:
                finished(work)
            same(got, torch.full((1 << (4 * i), 2), float(i)))
    # A batch with the neighbours, as V-shaped pipeline schedules make it.
    left, right = (RANK - 1) % SIZE, (RANK + 1) % SIZE
    got = {peer: torch.zeros(2) for peer in (left, RANK, right)}
    ops = [dist.P2POp(dist.irecv, x, peer) for peer, x in got.items()]
    ops += [dist.P2POp(dist.isend, torch.full((2,), float(RANK)), peer) for peer in got]
    for work in dist.batch_isend_irecv(ops):
        finished(work)
    assert all(float(x[0]) == peer for peer, x in got.items()), got
    # From any source that may be oneself; under a key; in a keyed group; beside collectives.
    x, y = torch.full((2,), 7.0), torch.zeros(2)
    receive = dist.irecv(y, None, tag=21)
    with unjam.torch.key("m"):
        keyed = to_itself(dist.group.WORLD, True, tag=21)
    works = [dist.isend(x, RANK, tag=21), *keyed[1], *to_itself(KEYED, False)[1]]
    dist.all_reduce(torch.ones(1))
    for work in works:
        finished(work)
    finished(receive)
    same(y, x)
    assert receive._source_rank() == RANK


@check
def messages_to_oneself_that_differ_fail():
    for dtype, count, words in (
        (torch.float32, 4, "receives count=4"),
        (torch.int32, 3, "int32"),
        (torch.bool, 12, "as 'bool'"),
    ):
        for sends_first in (True, False):
            group = dist.new_group()
            calls = [
                lambda g=group: dist.isend(torch.ones(3), RANK, group=g),
                lambda g=group, n=count, t=dtype: dist.irecv(
                    torch.zeros(n, dtype=t), RANK, group=g
                ),
            ]
            works = [call() for call in (calls if sends_first else calls[::-1])]
            for work in works:
                with fails(dist.DistBackendError, "itself", words, "[ranks disagree]"):
                    finished(work)
    x = torch.ones(2)
    dist.all_reduce(x)
    assert x[0] == SIZE


@check
def a_message_to_oneself_needs_both_calls():
    group = dist.new_group(timeout=timedelta(seconds=1))
    work = dist.isend(torch.ones(3), RANK, group=group)
    with fails(dist.DistBackendError, "not complete within", "receive that meets it"):
        work.wait()
    assert not work.is_completed()
    told = unjam.torch.explain()
    assert "without its receive" in told, told
    finished(dist.irecv(torch.zeros(3), RANK, group=group))
    finished(work)
    # What torch itself refuses stays refused.
    with fails(ValueError, "same as the rank of the current process"):
        dist.send(torch.ones(1), RANK)


@check
def calls_of_one_key_that_meet_the_wrong_ones_are_found():
    def compared(*calls):
        found = [str(f) for f in crossings_of(calls)]
        return [f for f in found if "mixed up" in f]

    def one():
        return dist.all_reduce(torch.ones(2, 3), async_op=True)

    def two():
        return dist.all_reduce(torch.ones(2, 3), async_op=True)

    def shaped(*shape):
        return dist.all_reduce(torch.ones(shape), async_op=True)

    crossed = compared(*((one, two) if RANK == 0 else (two, one)))
    if RANK == 0:
        assert len(crossed) == SIZE - 1, crossed
        assert "torch_checks.py:" in crossed[0] and "unjam.key" in crossed[0], crossed
        assert "of use" not in crossed[0] and "Float of [2, 3]" in crossed[0], crossed
    # Of one line, but of other shapes.
    shapes = [(2, 3), (3, 2)]
    calls = [lambda s=s: shaped(*s) for s in (shapes if RANK == 0 else shapes[::-1])]
    assert len(compared(*calls)) == (SIZE - 1 if RANK == 0 else 0)
    # In one order; under keys; at places of a rank's own; of a root's own.
    assert compared(one, two, one) == []
    keyed = [
        lambda: unjam.torch.all_reduce(torch.ones(2), async_op=True, key="1"),
        lambda: unjam.torch.all_reduce(torch.ones(2), async_op=True, key="2"),
    ]
    assert compared(*(keyed if RANK == 0 else keyed[::-1])) == []
    assert compared(*[one if RANK == 0 else two] * 4) == []
    sends = lambda root: dist.broadcast(torch.ones(2), root, async_op=True)  # noqa: E731
    gets = lambda root: dist.broadcast(torch.ones(2), root, async_op=True)  # noqa: E731
    turns = [lambda r=r: (sends if r == RANK else gets)(r) for r in range(SIZE)]
    assert compared(*turns) == []


@check
def order_is_compared():
    assert unjam.check_order("list") == []
    names = ["p\t1", "q"] if RANK else ["q", "p\t1"]
    for w in [unjam.torch.all_reduce(torch.ones(1), async_op=True, key=n) for n in names]:
        w.wait()
    found = unjam.check_order("off")
    if RANK == 0:
        text = [str(c) for c in found]
        assert len(found) == SIZE - 1, text
        assert "key 'q'" in text[0].split("before")[0] and r"key 'p\t1'" in text[0], text
    else:
        assert found == []


def crossings_of(calls):
    """What check_order says, on rank 0, of these calls; elsewhere nothing."""
    unjam.check_order("list")
    for work in [call() for call in calls]:
        work.wait()
    return [str(c) for c in unjam.check_order("off")]


@check
def circles_are_found_where_nothing_crosses():
    if SIZE < 3:
        return
    pairs = {ends: dist.new_group(list(ends)) for ends in ((0, 1), (1, 2), (0, 2))}
    order = {0: ((0, 1), (0, 2)), 1: ((1, 2), (0, 1)), 2: ((0, 2), (1, 2))}.get(RANK, ())

    def call(ends):
        return lambda: dist.all_reduce(torch.ones(1), group=pairs[ends], async_op=True)

    found = crossings_of(call(ends) for ends in order)
    if RANK == 0:
        assert len(found) == 1 and "a circle" in found[0], found
        assert all(f"rank {r} calls all_reduce" in found[0] for r in range(3)), found


@check
def sends_cross_collectives_but_not_each_other():
    group = dist.new_group()
    x = torch.ones(3)

    def together():
        return dist.all_reduce(torch.ones(1), group=group, async_op=True)

    ends = [lambda: dist.isend(x, 1, tag=3), lambda: dist.irecv(torch.ones(3), 1)]
    if RANK == 1:
        ends = [lambda: dist.isend(x, 0), lambda: dist.irecv(torch.ones(3), 0, tag=3)]
    if RANK > 1:
        ends = []
    assert crossings_of([*ends, together]) == []  # rank 0 sends first, and so does rank 1
    found = crossings_of([*ends, together] if RANK == 0 else [together, *ends])
    if RANK == 0:
        assert len(found) == 2 and "calls them the other way round" in found[0], found
        assert any("send from rank 0 to rank 1 (use 2 of key '#tag 3'" in f for f in found), found


def split(parent, lists):
    """dist.split_group(), which torch from 2.12 on refuses to machines without an accelerator."""
    with ExitStack() as stack:
        if DEVICE.type == "cpu":
            cuda = torch.device("cuda")
            for name, value in (("is_available", True), ("current_accelerator", cuda)):
                patch = mock.patch.object(torch.accelerator, name, return_value=value)
                stack.enter_context(patch)
        return dist.split_group(parent, lists)


@check
def split_groups_meet_whatever_else_a_rank_has():
    """torch numbers them by the groups that this rank has, of which a keyed group is one."""
    world = dist.group.WORLD
    bound = world.bound_device_id
    world.bound_device_id = DEVICE if DEVICE.type == "cuda" else torch.device("cuda:0")
    try:
        if RANK == 0:
            unjam.keyed_group(None, "only on rank 0")
        everybody = list(range(SIZE))
        halves = [everybody[: SIZE // 2], everybody[SIZE // 2 :]]
        mine = halves[RANK >= SIZE // 2]
        for parent in (None, unjam.keyed_group(None, "split")):
            # Twice the same ranks: two groups, which may be used in any order.
            twins = [split(parent, [everybody]) for _ in range(2)]
            half = split(parent, halves)
            calls = [(twins[0], 1, everybody), (twins[1], 2, everybody), (half, 3, mine)]
            works = []
            for group, factor, ranks in calls if RANK else calls[::-1]:
                assert dist.get_process_group_ranks(group) == ranks
                x = torch.full((5,), float(factor * (RANK + 1)))
                works.append((dist.all_reduce(x, group=group, async_op=True), x, factor, ranks))
            for work, x, factor, ranks in works:
                finished(work)
                same(x, torch.full((5,), float(factor * sum(r + 1 for r in ranks))))
        # Who is in none of them; there new_group() tells the parent's backend.
        none = (None, dist.GroupMember.NON_GROUP_MEMBER)  # before torch 2.15, and since
        assert (split(None, [[1]]) in none) == (RANK != 1)
        if RANK == 1:
            world.bound_device_id = bound  # the job of the checks for CPUs has no GPU
        alone = dist.new_group([1])
        assert (alone is dist.GroupMember.NON_GROUP_MEMBER) == (RANK != 1)
    finally:
        world.bound_device_id = bound


@check
def tensors_in_the_heap():
    def used():
        infos = map(json.loads, unjam.torch._extension.extension().default_world().info())
        return {i["device"]: i["heap"] for i in infos}["cuda" if DEVICE.type == "cuda" else "host"][
            "used"
        ]

    before = used()
    x = unjam.torch.empty(1000, device=DEVICE)
    out = unjam.torch.empty((SIZE, 1000), device=DEVICE)
    assert x.device == DEVICE and x.shape == (1000,) and out.shape == (SIZE, 1000)
    assert x.dtype == torch.float32
    assert unjam.torch.empty([3, 0], dtype=torch.bfloat16, device=DEVICE).dtype == torch.bfloat16
    assert used() > before
    # Either side in the heap, or both.
    for inputs in (x, torch.empty(1000)):
        for outputs in (out, torch.empty(SIZE, 1000)):
            inputs.copy_(values(RANK, (1000,), torch.float32))
            outputs.fill_(-1)
            dist.all_gather_into_tensor(outputs, inputs)
            same(outputs, torch.stack(everybody((1000,), torch.float32)))
            dist.reduce_scatter_tensor(inputs, outputs)
            same(inputs, SIZE * values(RANK, (1000,), torch.float32))
    x.copy_(values(RANK, (1000,), torch.float32))
    dist.all_reduce(x)
    same(x, sum(everybody((1000,), torch.float32)))
    kind = torch.OutOfMemoryError if DEVICE.type == "cuda" else dist.DistBackendError
    words = ["memory"] if DEVICE.type == "cuda" else ["no room for", "UNJAM_HEAP"]
    with fails(kind, *words):
        unjam.torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    if DEVICE.type == "cuda":
        pool = unjam.torch.memory_pool()
        assert unjam.torch.memory_pool(DEVICE) is pool
        with torch.cuda.use_mem_pool(pool):
            large = torch.ones(3 << 20)
        taken = used()
        assert taken >= before + (12 << 20)
        dist.all_reduce(large)
        same(large, torch.full_like(large, SIZE))
        assert used() == taken
    else:
        with fails(ValueError, "sizes"):
            unjam.torch.empty(-1)
        del x, out, inputs, outputs
        deadline = time.monotonic() + LONG_S
        while used() != before:  # other threads let go of what the last calls have kept
            assert time.monotonic() < deadline, used()
            dist.barrier()


@check
def registered_tensors():
    def windows():
        infos = map(json.loads, unjam.torch._extension.extension().default_world().info())
        place = "cuda" if DEVICE.type == "cuda" else "host"
        return {i["device"]: i["windows"] for i in infos}[place]["registered"]

    before = windows()
    x = torch.empty(200_000)
    registration = unjam.torch.register_memory(x)
    assert windows() == before + 1 and not registration.closed
    with fails(dist.DistBackendError, "registered already"):
        unjam.torch.register_memory(x[:8])
    for _ in range(3):
        x.copy_(values(RANK, (200_000,), torch.float32))
        dist.all_reduce(x)
        same(x, sum(everybody((200_000,), torch.float32)))
    registration.close()
    registration.close()
    assert windows() == before and registration.closed
    with unjam.torch.register_memory(x[100_000:]) as half:
        assert windows() == before + 1 and not half.closed
        part = x[100_000:]
        part.copy_(values(RANK, (100_000,), torch.float32))
        dist.broadcast(part, 0)
        same(part, values(0, (100_000,), torch.float32))
    assert windows() == before
    with fails(ValueError, "not contiguous"):
        unjam.torch.register_memory(x.view(2, -1).t())
    with fails(ValueError, "nothing to register"):
        unjam.torch.register_memory(x[:0])


@check
def backend_surface():
    group = dist.group.WORLD
    backend = group._get_backend(DEVICE)
    assert backend.name() == "unjam" and backend.supports_splitting
    import copy

    assert copy.deepcopy(backend.options)._timeout == backend.options._timeout
    backend.options._timeout = timedelta(seconds=77)
    backend._set_sequence_number_for_group()
    before = backend._get_sequence_number_for_group()
    dist.barrier()
    assert backend._get_sequence_number_for_group() == before + 1
    assert dist.get_backend() == "unjam"
    # What torch asks with init_process_group(device_id=) and new_group(device_id=).
    backend.eager_connect_single_device(DEVICE)
    if DEVICE.type == "cpu":
        with fails(ValueError, "joined without GPUs", "torch.cuda.set_device", "device_id="):
            backend.eager_connect_single_device(torch.device("cuda:0"))


@check
def a_callback_that_waits_ends_with_the_job():
    """It ends the default process group, and so must be the last one."""
    assert CHECKS[-1].__name__ == "a_callback_that_waits_ends_with_the_job"
    if SIZE == 1:
        return
    store = dist.distributed_c10d._get_default_store()
    found = []

    def callback(_):
        try:  # of the others nobody calls it
            unjam.torch.all_reduce(torch.ones(3, device=DEVICE), key="forsaken")
        except BaseException as error:
            found.append(error)
            raise

    if RANK != 0:
        store.wait(["forsaken"])  # rank 0's callback is not called in the thread that adds it
    future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
    if RANK != 0:
        future.wait()
        # Those who left before would be what the call ends for.
        store.wait(["forsaken no more"], timedelta(seconds=LONG_S))
        dist.destroy_process_group()
        return
    try:
        future = future.then(callback)
        store.set("forsaken", "1")
        end = time.monotonic() + LONG_S
        while "key 'forsaken" not in unjam.explain():
            assert time.monotonic() < end, unjam.explain()
            time.sleep(0.01)
        dist.destroy_process_group()
        with fails(RuntimeError, "unjam: all_reduce:", "abort"):
            future.wait()
        assert isinstance(found[0], dist.DistBackendError), found
    finally:
        store.set("forsaken no more", "1")


def main():
    global RANK, SIZE, KEYED, DEVICE
    RANK, SIZE, port = (int(word) for word in sys.argv[1:4])
    if sys.argv[4:5] == ["cuda"]:
        DEVICE = torch.device("cuda", RANK % torch.cuda.device_count())
        torch.cuda.set_device(DEVICE)
        torch.set_default_device(DEVICE)  # what the checks make lies there
    torch.set_num_threads(1)
    store = join_store(port, SIZE)
    dist.init_process_group(
        "unjam", store=store, rank=RANK, world_size=SIZE, timeout=timedelta(seconds=LONG_S + 50)
    )
    KEYED = unjam.keyed_group(None, "k")
    wanted = sys.argv[5:]
    for function in [f for f in CHECKS if not wanted or f.__name__ in wanted]:
        begun = time.monotonic()
        try:
            function()
            error = None
        except Exception:
            error = traceback.format_exc()
        line = {"check": function.__name__, "error": error, "s": time.monotonic() - begun}
        print(json.dumps(line), flush=True)
        if error is not None:
            break  # ranks are no longer in step
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
