"""Plans of resharding are carried out: element by element right, or named."""

import os
import random
import signal
import threading

import numpy as np
import pytest

import unjam
from processes import SOON_S, workers
from rank_tools import error_of, hear, say
from unjam.reshard import Layout, Plan, Replicate, Shard, StridedShard, Topology

SEED = int(os.environ.get("UNJAM_TEST_SEED", random.randrange(1 << 30)))


def cut(tensor, mesh, place, placements):
    """A rank's own part, by NumPy alone: mesh dimension after mesh dimension."""
    indices = [np.arange(size) for size in tensor.shape]
    for size, at, placement in zip(mesh, place, placements, strict=True):
        if isinstance(placement, Replicate):
            continue
        of = indices[placement.dim]
        pieces = chunks(of, getattr(placement, "split_factor", 1))
        indices[placement.dim] = np.concatenate(
            [chunks(piece, size)[at] for piece in pieces] or [of[:0]]
        )
    return tensor[np.ix_(*indices)] if tensor.ndim else tensor.copy()


def chunks(indices, n):
    """As torch.chunk, filled up with empty ones."""
    size = -(-len(indices) // n) or 1
    return [indices[i * size : (i + 1) * size] for i in range(n)]


def part(layout, placements, rank, tensor):
    """Of a rank; None: it is not in the mesh."""
    where = np.argwhere(layout.ranks == rank)
    if not len(where):
        return None
    return cut(tensor, layout.ranks.shape, where[0], placements)


def numbers(shape, dtype="float32"):
    return (np.arange(int(np.prod(shape))) % 251).reshape(shape).astype(dtype)


def parts(layout, rank, tensors, placements=None):
    found = {}
    for name, tensor in tensors.items():
        mine = part(layout, (placements or {}).get(name, layout.placements), rank, tensor)
        if mine is not None:
            found[name] = mine
    return found


def empty(wanted):
    return {name: np.full_like(x, 77) for name, x in wanted.items()}


def check_equal(got, wanted, where):
    for name, x in wanted.items():
        np.testing.assert_array_equal(got[name], x, err_msg=f"{where}: {name}")


def ranks_of(*layouts):
    return 1 + max(int(layout.ranks.max()) for layout in layouts)


def pieces(window):
    """Options: bundles as short as they may be, so that there are several."""
    return {"max_bytes": 4096 * window, "window": window}


def move(launch, src, dst, tensors, **options):
    """All ranks' parts arrive; `tensors` are the whole ones."""
    specs = {name: (x.shape, str(x.dtype)) for name, x in tensors.items()}

    def rank_main(context, group):
        plan = Plan(src, dst, specs, **options)
        wanted = parts(dst, context.rank, tensors)
        out = empty(wanted)
        plan.run(group, src=parts(src, context.rank, tensors), dst=out).wait(SOON_S)
        check_equal(out, wanted, f"rank {context.rank} of {src} -> {dst}")

    launch(ranks_of(src, dst), rank_main)


# ---- right ----

HALVES = [Replicate(), Shard(0), Shard(1)]


@pytest.mark.parametrize("first", HALVES, ids=str)
@pytest.mark.parametrize("second", HALVES, ids=str)
def test_two_dimensions_to_one(launch, first, second):
    src = Layout([[0, 1], [2, 3]], [first, second])
    for placement in HALVES:
        move(launch, src, Layout([4, 5, 6], [placement]), {"w": numbers((7, 5))})


def test_random_layouts(launch):
    rng = random.Random(SEED)
    print("UNJAM_TEST_SEED", SEED)

    def layout(ranks, ndims):
        shape = rng.choice(
            [(len(ranks),), (2, len(ranks) // 2)] if len(ranks) % 2 == 0 else [(len(ranks),)]
        )
        kinds = [Replicate(), *(Shard(d) for d in range(ndims)), StridedShard(0, 2)]
        return Layout(np.reshape(ranks, shape), [rng.choice(kinds) for _ in shape])

    for _ in range(12):
        ndims = rng.choice([1, 2, 3])
        ranks = rng.sample(range(6), rng.choice([2, 3, 4]))
        others = rng.sample(range(6), rng.choice([2, 3, 4]))  # some in both
        tensors = {
            f"t{i}": numbers([rng.choice([0, 1, 3, 8, 40]) for _ in range(ndims)], dtype)
            for i, dtype in enumerate(["float32", "uint8", "int64"])
        }
        move(
            launch,
            layout(ranks, ndims),
            layout(others, ndims),
            tensors,
            topology=Topology.equal(6, rng.choice([1, 2, 3])),
            **pieces(rng.choice([1, 2, 8])),
        )


def test_chains_over_hosts_hand_on(launch):
    """One sender, replicas on three hosts of two ranks each: others hand on."""
    move(
        launch,
        Layout([0], [Replicate()]),
        Layout([[2, 3], [4, 5], [6, 7]], [Replicate()] * 2),
        {"w": numbers((330, 9)), "b": numbers((5,), "int64")},
        topology=Topology.equal(8, 2),
        **pieces(2),
    )


def test_strides_and_signs(launch):
    """Views are read and written where they are: transposed, every other row, backwards."""
    whole = numbers((8, 6), "int32")
    src, dst = Layout([0, 1], [Shard(0)]), Layout([2, 3], [Shard(1)])

    def rank_main(context, group):
        plan = Plan(src, dst, {"w": ((8, 6), "int32")})
        if context.rank < 2:
            mine = np.zeros((6, 8), "int32")[:, ::2].T[::-1]
            mine[...] = part(src, src.placements, context.rank, whole)
            plan.run(group, src={"w": mine}).wait(SOON_S)
            return
        around = np.full((16, 6), -1, "int32")
        plan.run(group, dst={"w": around[::2, ::2]}).wait(SOON_S)
        np.testing.assert_array_equal(
            around[::2, ::2], part(dst, dst.placements, context.rank, whole)
        )
        assert (around[1::2] == -1).all() and (around[:, 1::2] == -1).all()

    launch(4, rank_main)


@pytest.mark.parametrize(
    "wide, narrow",
    [("float64", "float32"), ("float32", "float16"), ("int64", "int32"), ("float32", "uint8")],
)
def test_types_are_cast_either_way(launch, wide, narrow):
    """Elements travel as the narrow type."""
    values = np.arange(48).reshape(6, 8)
    src, dst = Layout([0, 1], [Shard(0)]), Layout([2, 3], [Shard(1)])

    def rank_main(context, group):
        for key, before, after in (("down", wide, narrow), ("up", narrow, wide)):
            plan = Plan(src, dst, {"w": ((6, 8), before, after)})
            assert plan.info()["received"] == 48 * np.dtype(narrow).itemsize
            whole = values.astype(before) + np.dtype(before).type(0.25)
            mine = parts(src, context.rank, {"w": whole})
            wanted = parts(dst, context.rank, {"w": whole.astype(after)})
            out = empty(wanted)
            plan.run(group, src=mine, dst=out, key=key).wait(SOON_S)
            check_equal(out, wanted, f"rank {context.rank}, {key}")

    launch(4, rank_main)


def test_raw_memory_is_taken_for_what_the_plan_says(launch):
    bits = np.array([0x3F80, 0x4000, 0xC0A0, 0x7F80], "uint16")  # 1, 2, -5, infinity

    def rank_main(context, group):
        plan = Plan(Layout([0], ["R"]), Layout([1], ["R"]), {"w": ((4,), "bfloat16", "float32")})
        if context.rank == 0:
            plan.run(group, src={"w": bits}).wait(SOON_S)
            return
        out = np.zeros(4, "float32")
        plan.run(group, dst={"w": out}).wait(SOON_S)
        np.testing.assert_array_equal(out, np.array([1, 2, -5, np.inf], "float32"))

    launch(2, rank_main)


def test_ranks_in_no_mesh_take_part_in_the_agreement(launch):
    def rank_main(context, group):
        plan = Plan(Layout([0], ["R"]), Layout([1], ["R"]), {"w": ((3,), "float32")})
        out = {"w": np.zeros(3, "float32")}
        sides = [{"src": {"w": np.ones(3, "float32")}}, {"dst": out}, {}]
        plan.run(group, **sides[context.rank]).wait(SOON_S)
        assert context.rank != 1 or out["w"].sum() == 3

    launch(3, rank_main)


def test_identity_and_swaps_on_one_mesh(launch):
    mesh = [0, 1]
    whole = numbers((6, 4))
    src, dst = Layout(mesh, [Shard(0)]), Layout(mesh, [Shard(1)])

    def rank_main(context, group):
        mine = parts(src, context.rank, {"w": whole})
        wanted = parts(dst, context.rank, {"w": whole})
        out = empty(wanted)
        Plan(src, dst, {"w": ((6, 4), "float32")}).run(group, src=mine, dst=out).wait(SOON_S)
        check_equal(out, wanted, f"rank {context.rank}")
        same = Plan(src, src, {"w": ((6, 4), "float32")})
        same.run(group, src=mine, dst=mine).wait(SOON_S)  # it stays where it is
        check_equal(mine, parts(src, context.rank, {"w": whole}), f"rank {context.rank}")

    launch(2, rank_main)


# ---- any order ----


def test_two_reshardings_and_a_collective_in_crossed_order(launch):
    """Ranks begin them in different orders, and wait in different orders."""
    forth = Layout([0, 1], [Shard(0)]), Layout([2, 3], [Shard(1)])
    back = Layout([2, 3], [Replicate()]), Layout([0, 1], [Shard(0)])
    whole = {"w": numbers((64, 128))}
    rng = random.Random(SEED)
    print("UNJAM_TEST_SEED", SEED)
    orders = [[rng.sample(range(3), 3) for _ in range(4)] for _ in range(2)]

    def rank_main(context, group):
        plans = [
            Plan(*sides, {"w": ((64, 128), "float32")}, **pieces(2)) for sides in (forth, back)
        ]
        for _ in range(5):
            outs = [empty(parts(sides[1], context.rank, whole)) for sides in (forth, back)]
            total = np.ones(100, "float32")

            def start(which, outs=outs, total=total):
                if which == 2:
                    return group.all_reduce(total, key="training")
                mine = parts((forth, back)[which][0], context.rank, whole)
                return plans[which].run(group, src=mine, dst=outs[which], key=f"sync{which}")

            begun = {which: start(which) for which in orders[0][context.rank]}
            for which in orders[1][context.rank]:
                begun[which].wait(SOON_S)
            for sides, out in zip((forth, back), outs, strict=True):
                check_equal(out, parts(sides[1], context.rank, whole), f"rank {context.rank}")
            assert (total == 4).all()

    launch(4, rank_main)


def test_runs_under_one_key_come_one_after_the_other(launch):
    """Nobody waits between them: the second one's data is that of the second one."""
    src, dst = Layout([0], ["R"]), Layout([1, 2], ["R"])

    def rank_main(context, group):
        plan = Plan(
            src,
            dst,
            {"w": ((3000,), "int64")},
            **pieces(2),
        )
        outs = [{"w": np.zeros(3000, "int64")} for _ in range(4)]
        requests = []
        for i, out in enumerate(outs):
            side = {"dst": out} if context.rank else {"src": {"w": np.full(3000, i)}}
            requests.append(plan.run(group, key="w", **side))
        unjam.wait_all(requests, SOON_S)
        assert context.rank == 0 or [set(out["w"]) for out in outs] == [{0}, {1}, {2}, {3}]

    launch(3, rank_main)


def test_more_bundles_than_keys_have_room(launch):
    """24 bundles, and room for 16 keys under way; for all that others have yet to take, too."""
    src, dst = Layout([0], ["R"]), Layout([1, 2], ["R"])

    def rank_main(context, group):
        plan = Plan(src, dst, {"w": ((12000,), "int64")}, **pieces(64))
        out = {"w": np.zeros(12000, "int64")}
        side = {"dst": out} if context.rank else {"src": {"w": np.arange(12000)}}
        plan.run(group, key="w", **side).wait(SOON_S)
        assert context.rank == 0 or (out["w"] == np.arange(12000)).all()

    launch(3, rank_main, max_active_keys=16)


def test_callbacks_and_futures(launch):
    def rank_main(context, group):
        plan = Plan(Layout([0], ["R"]), Layout([1], ["R"]), {"w": ((3,), "float32")})
        side = {"src" if context.rank == 0 else "dst": {"w": np.ones(3, "float32")}}
        told = threading.Event()
        request = plan.run(group, key="a", callback=lambda _: told.set(), **side)
        assert told.wait(SOON_S) and request.test()
        later = threading.Event()
        plan.run(group, key="b", **side).add_done_callback(lambda _: later.set())
        assert later.wait(SOON_S)
        assert request.incomplete() == []

    launch(2, rank_main)


# ---- refused ----


def one_to_one(**more):
    return Plan(
        Layout([0], [Shard(0)]), Layout([1], [Shard(0)]), {"w": ((4, 2), "float32")}, **more
    )


W = np.zeros((4, 2), "float32")


@pytest.mark.parametrize(
    "given, words",
    [
        ({}, '"w" of the source on rank 0 is missing: give the rank\'s own part, of shape (4, 2)'),
        ({"src": {"w": W[:2]}}, "has shape (2, 2), and the rank's own part has (4, 2)"),
        ({"src": {"w": W.astype("float64")}}, "has type float64, and the plan says float32"),
        ({"src": {"w": W, "v": W}}, '"v" of the source on rank 0 is not in the plan: leave it out'),
        ({"src": {"w": W}, "dst": {"w": W}}, '"w" of the destination on rank 0 is given, and the'),
        ({"src": {"w": [1, 2]}}, "tensor 'w' in src on rank 0 is a list, not memory"),
        ({"src": {"w": W.astype("complex64")}}, "has elements of type complex64"),
        ({"src": [W]}, "src is a list: give a dict"),
        ({"src": {3: W}}, "src has the name 3"),
        ({"src": {"w": W}, "key": "a\0b"}, "contains a NUL"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value[:30],
)
def test_bad_parts_are_refused_and_nothing_is_submitted(given, words):
    with unjam.init_all(2) as contexts:
        groups = [context.group() for context in contexts]
        plan = one_to_one()
        with pytest.raises(unjam.InvalidArgument) as caught:
            plan.run(groups[0], **given)
        assert words in str(caught.value)
        good = plan.run(groups[0], src={"w": W + 5})
        out = {"w": W.copy()}
        assert plan.run(groups[1], dst=out).result(SOON_S) is out
        good.wait(SOON_S)
        assert (out["w"] == 5).all()


def test_bad_destinations_are_refused():
    frozen = W.copy()
    frozen.flags.writeable = False
    with unjam.init_all(2) as contexts:
        groups = [context.group() for context in contexts]
        with pytest.raises(unjam.InvalidArgument, match="'w' in dst on rank 1 is read-only"):
            one_to_one().run(groups[1], dst={"w": frozen})
        spread = np.lib.stride_tricks.as_strided(W, (4, 2), (0, 4))
        with pytest.raises(unjam.InvalidArgument, match="all indices of dimension 0"):
            one_to_one().run(groups[1], dst={"w": spread})
        with pytest.raises(unjam.InvalidArgument, match="group is a Context|group is a"):
            one_to_one().run(contexts[0], src={"w": W})


def test_overlapping_memory_is_refused():
    plan = Plan(
        Layout([0], ["R"]), Layout([0], ["R"]), {"a": ((4,), "int32"), "b": ((4,), "int32")}
    )
    memory = np.arange(16, dtype="int32")
    with unjam.init_all(1) as contexts:
        group = contexts[0].group()
        src = {"a": memory[0:4], "b": memory[4:8]}
        with pytest.raises(unjam.InvalidArgument) as caught:
            plan.run(group, src=src, dst={"a": memory[8:12], "b": memory[3:7]})
        assert '"b" of the destination on rank 0 overlaps the memory of the source tensor "' in str(
            caught.value
        )
        plan.run(group, src=src, dst={"a": memory[8:12], "b": memory[12:16]}).wait(SOON_S)
        assert (memory[8:16] == np.arange(8)).all()


def test_ranks_that_the_group_has_not_are_refused():
    plan = Plan(Layout([0], ["R"]), Layout([7], ["R"]), {"w": ((4,), "int32")})
    with unjam.init_all(2) as contexts, pytest.raises(unjam.InvalidArgument) as caught:
        plan.run(contexts[0].group(), src={"w": np.zeros(4, "int32")})
    assert "destination mesh has rank 7, and the group has 2 ranks" in str(caught.value)


def test_too_little_staging_is_refused():
    with pytest.raises(unjam.InvalidArgument, match="max_bytes"):
        one_to_one(max_bytes=16, window=32)


def test_different_plans_are_named_and_nothing_is_written(launch):
    def rank_main(context, group):
        dtype = "float32" if context.rank == 2 else "float64"
        plan = Plan(Layout([0], ["R"]), Layout([1, 2], ["R"]), {"w": ((4,), "float64", dtype)})
        out = {"w": np.full(4, 9, dtype)}
        side = {"dst": out} if context.rank else {"src": {"w": np.ones(4)}}
        request = plan.run(group, key="w", **side)
        with pytest.raises(unjam.Mismatch) as caught:
            request.wait(SOON_S)
        words = str(caught.value)
        assert "on ranks 0, 1" in words and "on rank 2" in words and "Nothing was moved" in words
        assert plan.digest in words
        assert (out["w"] == 9).all()
        assert request.incomplete() == ([] if context.rank == 0 else ["w"])
        # The key goes on.
        again = one_to_one()
        sides = [{"src": {"w": W + 3}}, {"dst": {"w": W.copy()}}, {}]
        again.run(group, key="w", **sides[context.rank]).wait(SOON_S)

    launch(3, rank_main)


def test_a_context_cannot_go_while_a_run_is_pending():
    with unjam.init_all(2) as contexts:
        request = one_to_one().run(contexts[0].group(), src={"w": W})
        with pytest.raises(unjam.InvalidUsage, match="pending"):
            contexts[0].close()
        contexts[0].abort()
        assert isinstance(request.exception(SOON_S), unjam.Aborted)
        contexts.abort()


# ---- a rank that dies ----


def test_a_rank_that_goes_before_all_agree_leaves_nobody_waiting():
    """One rank's agreement fails; another one's, made by hand, has not: it waits for a bundle."""
    with unjam.init_all(4) as contexts:
        groups = [context.group() for context in contexts]
        plan = Plan(Layout([0], ["R"]), Layout([1, 2], ["R"]), {"w": ((1000,), "float64")})
        data = {"w": np.ones(1000)}
        run = plan.run(groups[0], src=data, key="w")
        keys = [
            (f"w bundle {i}", hop["rank"], bundle["bytes"])
            for i, bundle in enumerate(plan.info(bundles=True)["bundle_list"])
            for hop in bundle["hops"]
            if hop["parent"] == 0
        ]
        waits = [groups[rank].recv(np.zeros(size, "uint8"), 0, key=key) for key, rank, size in keys]
        out = {"w": np.zeros(1000)}
        third = plan.run(groups[2], dst=out, key="w")
        contexts[3].abort()
        for wait in waits:
            assert isinstance(wait.exception(SOON_S), unjam.UnjamError)
        error = run.exception(SOON_S)
        assert isinstance(error, unjam.Peer) and "All tensors of rank 0 are complete" in str(error)
        contexts[1].abort()
        assert isinstance(third.exception(SOON_S), unjam.Peer)
        assert third.incomplete() == ["w"]
        contexts.abort()


def rank_of_a_chain():
    """Bundles of "all" go from rank 0 to three hosts in chains, those of "part" to each alone. Rank
    0's neighbour in the first chain goes when it has handed on the first bundle."""
    from unjam.reshard import Layout, Plan, TensorSpec

    context = unjam.init_from_environment()
    group, rank, size = context.group(), context.rank, 1 << 16
    plan = Plan(
        Layout([0], ["R"]),
        Layout([1, 2, 3], ["R"]),
        {
            "all": ((size,), "uint8"),
            "part": TensorSpec((3, 100), "float32", dst=["S(0)"]),
        },
        max_bytes=1 << 15,
        window=8,
        stripes=1,
    )
    ways = [
        [hop["rank"] for hop in bundle["hops"]] for bundle in plan.info(bundles=True)["bundle_list"]
    ]
    first = next(i for i, way in enumerate(ways) if len(way) == 4)
    chain = ways[first]
    assert ways.count(chain) > 1 and sum(len(way) == 2 for way in ways) == 3, ways
    if rank == chain[1]:
        # What a run does up to there, by hand.
        digests, mine = np.zeros(4, "uint64"), np.array([int(plan.digest, 16)], "uint64")
        group.all_gather(mine, digests, key="w").wait(40)
        step = next(step for step in plan.rank(rank)["steps"] if step["bundle"] == first)
        handed, key = np.zeros(step["bytes"], "uint8"), f"w bundle {first}"
        group.recv(handed, 0, key=key).wait(40)
        group.send(handed, chain[2], key=key).wait(40)
        group.send(np.zeros(8, "uint8"), chain[2], key=key).wait(40)
        say("handed on")
        hear()
    whole = {"all": np.full(size, 5, "uint8"), "part": np.ones((3, 100), "float32")}
    wanted = {"all": whole["all"], "part": whole["part"][:1]}
    out = {name: np.zeros_like(x) for name, x in wanted.items()}
    run = plan.run(group, key="w", **({"dst": out} if rank else {"src": whole}))
    say("begun")
    error = error_of(run.wait, 40)
    right = [name for name in out if (out[name] == wanted[name]).all()]
    say([rank, error, run.incomplete(), right])
    os._exit(0)


def test_a_rank_that_dies_in_the_middle_costs_what_it_was_to_hand_on():
    with workers() as harness:
        ranks = harness.job(4, rank_of_a_chain)
        words = [(rank, rank.said()) for rank in ranks]
        for rank, word in words:
            if word == "handed on":
                rank.signal(signal.SIGKILL)
        told = [rank.said() for rank, word in words if word == "begun"]
        assert len(told) == 3
        for rank, error, missing, right in told:
            if rank == 0:  # what it has sent may have found room at the one that is gone
                assert missing == []
                assert error is None or "All tensors of rank 0 are complete" in error[1]
                continue
            assert missing == ["all"] and right == ["part"], error
            assert error[0] == "Peer" and f'Not complete on rank {rank}: "all"' in error[1]
