"""Every kind of collective through Python, in and out of place, on every kind of buffer."""

import array

import numpy as np
import pytest

import unjam
from unjam import InvalidArgument, InvalidType, InvalidUsage, Mismatch

COUNTS = [0, 1, 7, 64, 1000, 100_003]


def values(rank, count, dtype=np.int64):
    return (np.arange(count) % 97 + 10 * rank + 1).astype(dtype)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("count", COUNTS)
def test_all_kinds(launch, ranks, count):
    total = sum(values(r, count) for r in range(ranks))
    root = ranks - 1

    def rank(context, group):
        mine = values(context.rank, count)
        place = mine.copy()
        out = np.full(count, -1)
        assert group.all_reduce(place).result(30) is place
        assert group.all_reduce(mine, out).result(30) is out
        np.testing.assert_array_equal(place, total)
        np.testing.assert_array_equal(out, total)

        gathered = np.full((ranks, count), -1)
        group.all_gather(mine, gathered).wait(30)
        np.testing.assert_array_equal(gathered, [values(r, count) for r in range(ranks)])
        gathered = np.full((ranks, count), -1)
        gathered[context.rank] = mine
        group.all_gather(gathered[context.rank], gathered).wait(30)
        np.testing.assert_array_equal(gathered, [values(r, count) for r in range(ranks)])

        parts = np.stack([mine + 1000 * r for r in range(ranks)])
        out = np.full(count, -1)
        group.reduce_scatter(parts, out).wait(30)
        np.testing.assert_array_equal(out, total + 1000 * ranks * context.rank)
        group.reduce_scatter(parts, parts[context.rank]).wait(30)
        np.testing.assert_array_equal(parts[context.rank], total + 1000 * ranks * context.rank)

        place, out = mine.copy(), np.full(count, -1)
        result = group.reduce(place, root=root).result(30)
        assert (result is place) == (context.rank == root)
        np.testing.assert_array_equal(place, total if context.rank == root else mine)
        group.reduce(mine, out, root=root).wait(30)
        np.testing.assert_array_equal(out, total if context.rank == root else np.full(count, -1))

        place = mine.copy()
        group.broadcast(place, root=root).wait(30)
        np.testing.assert_array_equal(place, values(root, count))
        out = np.full(count, -1)
        group.broadcast(mine, out, root=root).wait(30)
        np.testing.assert_array_equal(out, values(root, count))
        return True

    assert launch(ranks, rank) == [True] * ranks


@pytest.mark.parametrize("op", ["sum", "prod", "min", "max", "avg"])
def test_ops(launch, op):
    expected = {"sum": 6.0, "prod": 6.0, "min": 1.0, "max": 3.0, "avg": 2.0}[op]

    def rank(context, group):
        x = np.full(50, context.rank + 1.0)
        collective = group.register_all_reduce("again", "float64", op)
        assert collective.run(x.copy()).result(30)[49] == expected
        return group.all_reduce(x, op=op).result(30)

    for result in launch(3, rank):
        np.testing.assert_array_equal(result, expected)


def tensor(data, dtype):
    import torch

    return torch.tensor(data, dtype=getattr(torch, dtype))


def buffers():
    import ml_dtypes

    return {
        "numpy": lambda data: np.array(data, dtype=np.float32),
        "torch": lambda data: tensor(data, "float32"),
        "torch bfloat16": lambda data: tensor(data, "bfloat16"),
        "ml_dtypes": lambda data: np.array(data, dtype=ml_dtypes.bfloat16),
        "array.array": lambda data: array.array("f", data),
        "memoryview": lambda data: memoryview(array.array("d", data)),
    }


@pytest.mark.parametrize("name", list(buffers()))
def test_buffers(launch, name):
    if name.startswith("torch"):
        pytest.importorskip("torch")
    make = buffers()[name]

    def rank(context, group):
        x = make([1.0 + context.rank, 2.0, 3.0])
        result = group.all_reduce(x).result(30)
        assert result is x
        return [float(value) for value in x]

    assert launch(2, rank) == [[3.0, 4.0, 6.0]] * 2


def test_raw_memory(launch):
    def rank(context, group):
        x = bytearray(np.full(8, context.rank + 1, dtype=np.float32).tobytes())
        group.all_reduce(x, dtype="float32").wait(30)
        everyone = bytearray(4)
        group.all_gather(bytes([65 + context.rank] * 2), everyone).wait(30)
        text = bytearray(5)
        group.broadcast(b"hello" if context.rank == 0 else text, root=0).wait(30)
        return np.frombuffer(x, dtype=np.float32).tolist(), bytes(everyone), bytes(text)

    first, second = launch(2, rank)
    assert first[0] == second[0] == [3.0] * 8
    assert first[1] == second[1] == b"AABB"
    assert second[2] == b"hello"


def test_different_memory_on_each_rank(launch):
    """What counts is the type of the elements, not the object that holds them."""
    torch = pytest.importorskip("torch")

    def rank(context, group):
        make = [
            np.ones(4, np.float64),
            torch.ones(4, dtype=torch.float64),
            array.array("d", [1] * 4),
        ]
        x = make[context.rank]
        group.all_reduce(x).wait(30)
        return [float(value) for value in x]

    assert launch(3, rank) == [[3.0] * 4] * 3


@pytest.mark.parametrize(
    "kind", ["all_reduce", "all_gather", "reduce_scatter", "reduce", "broadcast"]
)
def test_registered(launch, kind):
    def rank(context, group):
        run = group.register(kind, "key", np.float32, root=1)
        assert (run.kind.label, run.key, run.dtype.label, run.group) == (
            kind,
            "key",
            "float32",
            group,
        )
        out = []
        for use in range(3):
            x = np.full(4, context.rank + 1 + use, np.float32)
            y = np.zeros(8 if kind == "all_gather" else 2, np.float32)
            if kind in ("all_gather", "reduce_scatter"):
                out.append(run.run(x, y).result(30).tolist())
            else:
                run.run(x).wait(30)
                out.append(x.tolist())
        run.close()
        run.close()
        with pytest.raises(InvalidUsage, match="deregistered"):
            run.run(np.zeros(4, np.float32))
        return out

    expected = {
        "all_reduce": [[[3.0 + 2 * use] * 4 for use in range(3)]] * 2,
        "all_gather": [[[1.0 + use] * 4 + [2.0 + use] * 4 for use in range(3)]] * 2,
        "reduce_scatter": [[[3.0 + 2 * use] * 2 for use in range(3)]] * 2,
        "reduce": [
            [[1.0 + use] * 4 for use in range(3)],
            [[3.0 + 2 * use] * 4 for use in range(3)],
        ],
        "broadcast": [[[2.0 + use] * 4 for use in range(3)]] * 2,
    }[kind]
    assert launch(2, rank) == expected


def test_registered_checks_the_type(pair):
    _, (group, _) = pair
    run = group.register_all_reduce("k", "bfloat16")
    with pytest.raises(InvalidArgument, match="bfloat16 is wanted"):
        run.run(np.zeros(4, np.float32))
    with pytest.raises(InvalidArgument, match="root 2 is not a rank"):
        group.register_broadcast("k", "float32", root=2)
    with pytest.raises(InvalidArgument, match="kind 'all_at_once' is unknown"):
        group.register("all_at_once", "k", "float32")
    for kind in ("barrier", "send_recv"):
        with pytest.raises(InvalidArgument, match=f"a {kind} is not registered"):
            group.register(kind, "other", "float32")
    with pytest.raises(InvalidArgument, match="op 'mean' is unknown: use one of sum"):
        group.register_all_reduce("k", "float32", "mean")


def test_a_wrong_call_submits_nothing(pair):
    contexts, (group, other) = pair
    before = contexts[0].stats().submitted
    x = np.zeros(8, np.float32)
    wrong = [
        (lambda: group.all_reduce(x.astype(np.complex64)), InvalidArgument),
        (lambda: group.all_reduce([1.0]), InvalidType),
        (lambda: group.all_reduce(x, op="mean"), InvalidArgument),
        (lambda: group.all_reduce(x, op=3.0), InvalidType),
        (lambda: group.all_reduce(x, key="a\0b"), InvalidArgument),
        (lambda: group.all_reduce(x, key=3), InvalidType),
        (lambda: group.all_reduce(x, x[:4]), InvalidArgument),
        (lambda: group.all_gather(x, x), InvalidArgument),
        (lambda: group.reduce(x, root=2), InvalidArgument),
        (lambda: group.broadcast(x, root=-1), InvalidArgument),
        (lambda: group.broadcast(x, root="0"), InvalidType),
        (lambda: group.all_reduce(bytes(8)), InvalidArgument),
    ]
    for call, error in wrong:
        with pytest.raises(error):
            call()
    assert contexts[0].stats().submitted == before
    requests = [g.all_reduce(np.ones(3)) for g in (group, other)]
    unjam.wait_all(requests, 30)


def test_keys_match_in_any_order(launch):
    keys = [f"key {i}" for i in range(50)]

    def rank(context, group):
        order = np.random.default_rng(context.rank).permutation(len(keys))
        data = [np.full(1 + 37 * i, i + context.rank, dtype=np.int64) for i in range(len(keys))]
        requests = [group.all_reduce(data[i], key=keys[i]) for i in order]
        unjam.wait_all(requests, 60)
        for i, x in enumerate(data):
            np.testing.assert_array_equal(x, 4 * i + 6)

    launch(4, rank)


def test_one_key_keeps_its_order(pair):
    _, groups = pair
    data = [[np.full(10, 10.0 * n + r) for n in range(20)] for r in range(2)]
    requests = []
    for r, group in enumerate(groups):
        for n in range(20):
            if n % 3 == 2:
                requests.append(group.broadcast(data[r][n], root=0, key="k"))
            else:
                requests.append(group.all_reduce(data[r][n], key="k"))
    unjam.wait_all(requests, 30)
    for n in range(20):
        expected = 10.0 * n if n % 3 == 2 else 20.0 * n + 1
        for r in range(2):
            np.testing.assert_array_equal(data[r][n], expected)


def test_groups(launch):
    def rank(context, everyone):
        assert (everyone.rank, everyone.size, everyone.ranks) == (context.rank, 4, (0, 1, 2, 3))
        pairs = context.group([context.rank ^ 1, context.rank][:: 1 if context.rank % 2 else -1])
        evens = context.group([2, 0], "evens") if context.rank in (0, 2) else None
        x = np.full(3, 1 << context.rank)
        y, z = x.copy(), x.copy()
        requests = [everyone.all_reduce(x), pairs.all_reduce(y)]
        if evens is not None:
            assert evens.ranks == (2, 0) and evens.name == "evens"
            assert evens.rank == (0 if context.rank == 2 else 1)
            requests.append(evens.broadcast(z, root=0))
        unjam.wait_all(requests[::-1], 30)
        pairs.close()
        pairs.close()
        with pytest.raises(InvalidUsage, match="closed"):
            pairs.all_reduce(x)
        return int(x[0]), int(y[0]), int(z[0])

    assert launch(4, rank) == [(15, 3, 4), (15, 3, 2), (15, 12, 4), (15, 12, 8)]


@pytest.mark.parametrize("ranks", [[0, 0], [1], [0, 4], [-1, 0], []])
def test_wrong_groups(pair, ranks):
    contexts, _ = pair
    with pytest.raises(InvalidArgument):
        contexts[0].group(ranks)


def test_same_members_different_groups(pair):
    contexts, _ = pair
    x = [np.full(3, float(r)) for r in range(2)]
    y = [np.full(3, 10.0 * r) for r in range(2)]
    groups = [[context.group(name=name) for name in ("a", "a", "b")] for context in contexts]
    requests = [groups[0][0].all_reduce(x[0]), groups[0][1].all_reduce(y[0])]
    requests += [groups[1][1].all_reduce(y[1]), groups[1][0].all_reduce(x[1])]
    unjam.wait_all(requests, 30)
    assert x[0][0] == x[1][0] == 1.0
    assert y[0][0] == y[1][0] == 10.0


@pytest.mark.parametrize(
    ("calls", "word"),
    [
        ((lambda g: g.all_reduce(np.zeros(4)), lambda g: g.all_reduce(np.zeros(5))), "count"),
        (
            (lambda g: g.all_reduce(np.zeros(4)), lambda g: g.all_reduce(np.zeros(4, np.int64))),
            "float64",
        ),
        (
            (lambda g: g.all_reduce(np.zeros(4)), lambda g: g.all_reduce(np.zeros(4), op="max")),
            "max",
        ),
        ((lambda g: g.all_reduce(np.zeros(4)), lambda g: g.broadcast(np.zeros(4))), "broadcast"),
        (
            (lambda g: g.broadcast(np.zeros(4)), lambda g: g.broadcast(np.zeros(4), root=1)),
            "root",
        ),
    ],
)
def test_mismatch_says_what_differs(calls, word):
    with unjam.init_all(2, stall_ms=100) as contexts:
        groups = [c.group() for c in contexts]
        requests = [call(group) for group, call in zip(groups, calls, strict=True)]
        errors = [request.exception(30) for request in requests]
        assert any(isinstance(error, Mismatch) for error in errors), errors
        assert any(word in str(error) for error in errors), errors
        # A root only sends, and may be done before the other rank's call is made: then it learns of
        # the disagreement by the asynchronous error and the key. Nobody else is told of success.
        may_be_done = [error is None and word == "root" for error in errors]
        for context, group, error, done in zip(contexts, groups, errors, may_be_done, strict=True):
            assert done or isinstance(error, Mismatch), errors
            assert isinstance(context.async_error(), Mismatch)
            with pytest.raises(Mismatch):
                group.all_reduce(np.zeros(4))
        contexts.abort()


def test_priority_order(launch):
    def rank(context, group):
        data = [np.full(5000, float(context.rank)) for _ in range(10)]
        requests = [group.all_reduce(x, key=str(i), priority=i) for i, x in enumerate(data)]
        urgent = group.register_all_reduce("urgent", "float64", priority=100)
        requests.append(urgent.run(np.zeros(3)))
        unjam.wait_all(requests, 30)
        return float(data[9][-1])

    assert launch(2, rank, order="priority") == [1.0, 1.0]
