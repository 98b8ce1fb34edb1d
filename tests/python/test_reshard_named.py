"""unjam.torch.Reshard on ranks that are threads: keys of its parts, and what it refuses.

What ranks of a process group do is in reshard_checks.py, which test_torch_reshard.py runs.
"""

import pytest

torch = pytest.importorskip("torch")

import unjam  # noqa: E402
from unjam.reshard import Plan  # noqa: E402
from unjam.torch import Reshard  # noqa: E402

SOON_S = 60


def spec(*ranks):
    return {"shape": [4], "dtype": "float32", "mesh": list(ranks), "placements": ["R"]}


def made(group, **more):
    """From rank 0, "a" to rank 1 and "b" to rank 2: two pairs of meshes, so two plans."""
    src = {"a": spec(0), "b": spec(0)}
    return Reshard(src, {"a": spec(1), "b": spec(2)}, group, **more)


def test_a_part_has_the_keys_of_the_whole(launch, monkeypatch):
    """With another number, a run of a part would meet one of the whole's other plans."""
    keys = [set() for _ in range(3)]
    run = Plan.run

    def noted(plan, group, **more):
        keys[group.rank].add(more["key"])
        return run(plan, group, **more)

    monkeypatch.setattr(Plan, "run", noted)

    def rank_main(context, group):
        part = made(group).only(tensors=["b"])
        out = torch.zeros(4)
        src = {"b": torch.arange(4.0)} if context.rank == 0 else None
        part(src, {"b": out} if context.rank == 2 else None).wait(SOON_S)
        return context.rank != 2 or torch.equal(out, torch.arange(4.0))

    assert all(launch(3, rank_main))
    assert keys == [{"reshard/1"}] * 3


def test_ranks_outside_the_group_are_no_numbers_in_it(launch):
    """Rank 1 of a group of ranks 2 to 4 is not its second member."""

    def rank_main(context, group):
        if context.rank < 2:
            return True
        own = context.group([2, 3, 4])
        sync = Reshard({"a": spec(2)}, {"a": spec(3)}, own)
        with pytest.raises(unjam.InvalidArgument, match="rank 1 is not in the group"):
            sync.only([1])
        return sync.only([3]).plans[0].ranks() == [0, 1]

    assert all(launch(5, rank_main))


def test_a_tensor_that_its_mesh_does_not_have_here_is_refused(launch):
    """It would never be moved, and nobody would say so; a part looks at the whole's meshes."""

    def rank_main(context, group):
        sync = made(group)
        box = {"a": torch.zeros(4)}
        if context.rank == 2:
            for call in (sync, sync.only(tensors=["b"])):
                with pytest.raises(unjam.InvalidArgument, match="'a' of the destination is given"):
                    call(dst=box)
                with pytest.raises(unjam.InvalidArgument, match=r"rank 2, .* its mesh \[0\]"):
                    call(src=box)
        if context.rank == 1:  # left out by the part alone
            sync.only(tensors=["b"])._check(box, sync._dst, "destination")
        return True

    assert all(launch(3, rank_main))


def test_a_part_without_a_dead_rank_says_who_is_gone(launch):
    """Its group still has that rank; nobody waits for it."""

    def rank_main(context, group):
        sync = Reshard({"a": spec(0)}, {"a": spec(1, 2)}, group)
        if context.rank == 2:
            context.abort()
            return True
        while 2 not in context.absent():
            pass
        box = {"a": torch.zeros(4)}
        side = {"src": box} if context.rank == 0 else {"dst": box}
        with pytest.raises(unjam.Peer, match="rank 2"):
            sync.without([2])(**side)
        plan = sync.plans[0].without([2], renumber=True)
        plan.run(group.shrink(), **side, key="after").wait(SOON_S)
        return True

    assert all(launch(3, rank_main))
