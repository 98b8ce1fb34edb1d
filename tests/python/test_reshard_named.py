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
