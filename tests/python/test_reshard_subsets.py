"""Parts of plans: without ranks, for some destinations, for some tensors."""

import ctypes
import random

import numpy as np
import pytest

import unjam
from unjam._lib import check, read_json
from unjam.reshard import Layout, Plan, Replicate, Shard, TensorSpec, Topology, _abi, nine

SOON_S = 60


def made(**more):
    """Two replicas of two shards, to three replicas of two shards in the other dimension."""
    return Plan(
        Layout([[0, 1], [2, 3]], [Replicate(), Shard(0)]),
        Layout([[4, 5], [6, 7], [8, 9]], [Replicate(), Shard(1)]),
        {"a": ((8, 6), "float32"), "b": ((4, 4), "int32", "int64"), "c": ((0, 3), "uint8")},
        **more,
    )


def parts_of(plan, rank):
    return {each["name"]: (each["src"], each["dst"]) for each in plan.rank(rank)["tensors"]}


def is_out(plan, rank):
    return all(each["src"] is each["dst"] is None for each in plan.rank(rank)["tensors"])


def test_a_part_is_the_plan_of_what_is_left():
    """The same digest as a plan that was made so: other ranks need not have come the same way."""
    whole = made(max_bytes=1 << 20, window=4, stripes=2)
    left = whole.without([3], tensors=["b"])
    same = Plan(
        Layout([[0, 1]], ["R", "S(0)"]),
        Layout([[4, 5], [6, 7], [8, 9]], ["R", "S(1)"]),
        {"c": ((0, 3), "uint8"), "a": ((8, 6), "float32")},
        max_bytes=1 << 20,
        window=4,
        stripes=2,
    )
    assert left.digest == same.digest and left.check() == same.check()
    assert left.digest != whole.digest
    assert set(left.dtypes()) == {"a", "c"} and left.ranks() == [0, 1, 4, 5, 6, 7, 8, 9]
    assert is_out(left, 2) and is_out(left, 3)
    again = left.without([7])
    assert again.ranks() == [0, 1, 4, 5, 8, 9] and again.check() > 0
    assert again.only([8, 9], tensors="a").ranks() == [0, 1, 8, 9]
    assert whole.without().digest == whole.digest == whole.only().digest
    assert whole.without([99]).digest == whole.digest


def test_ranks_move_up_as_the_group_numbers_them():
    hosts = Topology([0] * 4 + [1] * 6, list(range(4)) + list(range(6)))
    left = made(topology=hosts).without([2, 7], renumber=True)
    # 3 and 6 have lost their replicas; 2 and 7 are gone.
    assert left.ranks() == [0, 1, 3, 4, 6, 7]
    same = Plan(
        Layout([[0, 1]], ["R", "S(0)"]),
        Layout([[3, 4], [6, 7]], ["R", "S(1)"]),
        {"a": ((8, 6), "float32"), "b": ((4, 4), "int32", "int64"), "c": ((0, 3), "uint8")},
        Topology([0] * 3 + [1] * 5, [0, 1, 3, 0, 1, 2, 4, 5]),
    )
    assert left.digest == same.digest


def test_replicas_that_are_left_need_be_no_grid():
    """Whatever mesh dimensions they are told apart by."""
    plan = Plan(
        Layout([0], ["R"]),
        Layout(np.arange(1, 13).reshape(2, 6), ["R", "R"]),
        {"a": ((4,), "int32")},
    )
    assert plan.without([3]).ranks() == [0, 1, 2, *range(4, 13)]
    assert plan.only([2, 8]).ranks() == [0, 2, 8]
    assert plan.only([2, 9]).ranks() == [0, 2, 9]
    assert plan.only(range(1, 7)).ranks() == list(range(7))
    all_have_all = Plan(
        Layout([[0, 1], [2, 3], [4, 5]], ["R", "R"]), Layout([6], ["R"]), {"a": ((4,), "int32")}
    )
    left = all_have_all.without([0, 3, 4, 5])
    assert left.ranks() == [1, 2, 6] and left.check() == 4
    assert left.without([2]).ranks() == [1, 6]


@pytest.mark.parametrize("dims", [(0, 1, 2), (0, 2, 1), (2, 0, 1)])
def test_shards_stay_where_they_are_between_replicated_dimensions(dims):
    """Each rank that is left has the part that it had; layouts of their own have tensors, too."""
    grid, placements = np.arange(12).reshape(2, 3, 2), np.array(["R", "R", "S(0)"])
    own = np.array(["R", "R", "S(1)"])
    plan = Plan(
        Layout([12], ["R"]),
        Layout(grid.transpose(dims), placements[list(dims)].tolist()),
        {
            "a": ((5, 3), "int32"),
            "b": TensorSpec((4, 3), "int32", None, None, own[list(dims)].tolist()),
        },
    )
    left = plan.without([3, 4])  # with 2 and 5
    assert left.ranks() == [0, 1, *range(6, 13)] and left.check() == 4 * 15 + 4 * 12
    part = plan.only([6, 7, 10, 11])
    assert part.ranks() == [6, 7, 10, 11, 12] and part.check() == 2 * 15 + 2 * 12
    for rank in (6, 7, 10, 11):
        assert parts_of(left, rank) == parts_of(part, rank) == parts_of(plan, rank)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: made().without(range(4)), "rank 2 is in the source's only replica"),
        (lambda: made().without([4, 6, 9]), "rank 9 is in the destination's only replica"),
        (lambda: made().without(tensors=["a", "b", "c"]), "no tensor is left"),
        (lambda: made().without(tensors=["d"]), "the plan has no tensor 'd'"),
        (lambda: made().only(tensors=["aa"]), "no tensor 'aa'; did you mean 'a'?"),
        (lambda: made().only([4]), "[4] are no whole replicas of the destination: rank 5 has"),
        (lambda: made().only([4, 7]), "ranks 5, 6 have other parts"),
        (lambda: made().only([0]), "rank 0 is not in the destination's mesh"),
        (lambda: made().only([]), "no destination is left"),
        (lambda: made().without([-1]), "there is no rank -1"),
        (lambda: made().without([True]), "there is no rank True"),
        (lambda: nine(1).only([1]), "make a Plan"),
        (
            lambda: Plan(
                Layout([0, 1], ["R"]),
                Layout([2, 3], ["S(0)"]),
                {"a": ((4,), "int32"), "b": ((4,), "int32", None, ["S(0)"])},
            ).without([1]),
            "tensor 'b': rank 1 has a part of the source that no other rank has (S(0))",
        ),
        (
            lambda: Plan(
                Layout([0], ["R"]), Layout([2, 3], ["S(0)"]), {"a": ((4,), "int32")}
            ).without([3]),
            "tensor 'a': rank 3 has a part of the destination",
        ),
    ],
)
def test_what_cannot_be_left_out_is_named(call, words):
    with pytest.raises(unjam.InvalidArgument) as caught:
        call()
    assert words in str(caught.value)


def test_parts_run_on_all_ranks_of_the_group(launch):
    """Only a late replica gets the tensor; the ranks that have nothing to do go on at once."""

    def rank_main(context, group):
        rank = context.rank
        plan = made().only([6, 7], tensors=["a"])
        a = np.arange(48, dtype="float32").reshape(8, 6)
        src = {"a": np.array_split(a, 2)[rank % 2]} if rank < 4 else None
        if rank in (6, 7):
            out = {"a": np.zeros((8, 3), "float32")}
            plan.run(group, dst=out, key="late").wait(SOON_S)
            return (out["a"] == np.array_split(a, 2, 1)[rank - 6]).all()
        plan.run(group, src=src, key="late").wait(SOON_S)
        if rank in (4, 5, 8, 9):
            with pytest.raises(unjam.InvalidArgument, match='"a" of the destination on rank'):
                plan.run(group, dst={"a": np.zeros((8, 3), "float32")}, key="late")
        return True

    assert all(launch(10, rank_main))


def test_survivors_go_on_with_what_is_left(launch):
    """After a death: shrink the group, and run the plan without the rank."""

    def rank_main(context, group):
        rank = context.rank
        if rank == 2:
            context.abort()
            return True
        while rank != 2 and 2 not in context.absent():
            pass
        left = group.shrink()
        plan = made().without([2], renumber=True)
        a = np.arange(48, dtype="float32").reshape(8, 6)
        b, c = np.arange(16, dtype="int32").reshape(4, 4), np.zeros((0, 3), "uint8")
        if rank in (0, 1):
            halves = [np.array_split(x, 2)[rank] for x in (a, b, c)]
            src = dict(zip("abc", halves, strict=True))
            plan.run(left, src=src, key="after").wait(SOON_S)
            return True
        if rank == 3:
            plan.run(left, key="after").wait(SOON_S)
            return True
        out = {
            "a": np.zeros((8, 3), "float32"),
            "b": np.zeros((4, 2), "int64"),
            "c": np.zeros((0, 2 - rank % 2), "uint8"),
        }
        plan.run(left, dst=out, key="after").wait(SOON_S)
        column = rank % 2
        return (out["a"] == np.array_split(a, 2, 1)[column]).all() and (
            out["b"] == np.array_split(b, 2, 1)[column]
        ).all()

    assert all(launch(10, rank_main))


def without_in_c(plan, ranks, tensors, renumber):
    """The digest of what unjamReshardWithout gives; None, and the message, where it refuses."""
    lib = _abi.reshard_library()
    names = [name.encode() for name in tensors]
    left = _abi.Handle()
    numbers = (ctypes.c_int32 * len(ranks))(*ranks)
    texts = (ctypes.c_char_p * len(names))(*names)
    try:
        check(
            lib.unjamReshardWithout(
                plan._handle, numbers, len(ranks), texts, len(names), renumber, ctypes.byref(left)
            )
        )
    except unjam.InvalidArgument as error:
        return None, str(error)
    info = read_json(lambda *buffer: lib.unjamReshardInfo(left, 0, *buffer))
    check(lib.unjamReshardDestroy(left))
    return info["digest"], ""


def test_c_leaves_the_same_out():
    """Ranks may come to what is left by C or by Python, and have one plan; or neither has one."""
    seed = 20260101
    draw = random.Random(seed)
    refused = 0
    for number in range(60):
        dims = [draw.choice([1, 2, 3]) for _ in range(draw.choice([1, 2, 3]))]
        size = int(np.prod(dims))
        kinds = [draw.choice([Replicate(), Replicate(), Shard(0), Shard(1)]) for _ in dims]
        grid = np.array(draw.sample(range(size + 2), size)).reshape(dims)
        other = [draw.choice([Replicate(), Shard(0)])]
        topology = Topology.equal(20, 4, 2) if draw.random() < 0.5 else None
        plan = Plan(
            Layout(grid, kinds),
            Layout(list(range(8, 12)), other),
            {"a": ((12, 6), "float32"), "b": ((4, 4), "int32", "int64")},
            topology,
        )
        gone = draw.sample(range(13), draw.randint(0, 3))
        tensors = draw.choice([[], ["b"], ["a"]])
        renumber = draw.random() < 0.5
        found, words = without_in_c(plan, gone, tensors, renumber)
        try:
            wanted = plan.without(gone, tensors=tensors, renumber=renumber).digest
        except unjam.InvalidArgument as error:
            refused += 1
            assert found is None, (seed, number)
            for part in ("a part of the source", "a part of the dest", "'s only replica"):
                assert (part in words) == (part in str(error)), (seed, number, words)
            continue
        assert found == wanted, (seed, number, words)
    assert 0 < refused < 60
    assert "no tensor" in without_in_c(made(), [], ["d"], 0)[1]
    assert "no tensor is left" in without_in_c(made(), [], ["a", "b", "c"], 0)[1]
