"""Plans of resharding move what torch's DTensor holds: executed on torch's own local tensors."""

import itertools
import random

import numpy as np
import pytest

torch = pytest.importorskip("torch")
placement_types = pytest.importorskip("torch.distributed.tensor.placement_types")

from torch.distributed.tensor._utils import (  # noqa: E402
    _compute_local_shape_and_global_offset,
)

from unjam._errors import InvalidArgument  # noqa: E402
from unjam.reshard import Layout, Plan, Topology  # noqa: E402

Shard, Replicate = placement_types.Shard, placement_types.Replicate
Partial, Strided = placement_types.Partial, placement_types._StridedShard

MESHES = [((2, 2), (4,)), ((4,), (2, 2)), ((2, 3), (2, 2)), ((3,), (2, 2, 2))]
SHAPES = [(7, 5), (8, 12), (3, 4), (9,), (1, 6), (5, 0)]


def local_of(tensor, mesh, coordinate, placements):
    """As distribute_tensor() cuts, mesh dimension by mesh dimension."""
    for size, place, placement in zip(mesh, coordinate, placements, strict=True):
        if isinstance(placement, Replicate):
            continue
        pieces, _ = placement._split_tensor(tensor, size, with_padding=False, contiguous=True)
        tensor = pieces[place]
    return tensor


def placements_of(ndims):
    """One mesh dimension's, of a tensor with so many dimensions."""
    dims = range(ndims)
    return [
        Replicate(),
        *map(Shard, dims),
        *(Strided(d, split_factor=f) for d in dims for f in (2, 3)),
    ]


def coordinates(mesh):
    return list(itertools.product(*(range(size) for size in mesh)))


def box(array, start, size):
    return array[tuple(slice(s, s + n) for s, n in zip(start, size, strict=True))]


def execute(plan, source, wanted):
    """Runs all ranks' steps on numpy arrays; gives what the destinations hold then."""
    ranks = {rank: plan.rank(rank) for rank in range(max([*source, *wanted]) + 1)}
    result = {rank: np.full(array.shape, -1) for rank, array in wanted.items()}
    sent = {}
    for rank, mine in ranks.items():
        for step in mine["steps"]:
            if step["parent"] < 0:
                pieces = [box(source[rank], s["start"], s["size"]).ravel() for s in step["pack"]]
                sent[step["bundle"]] = np.concatenate(pieces)
    for rank, mine in ranks.items():
        for step in mine["steps"]:
            for s in step["unpack"]:
                count = int(np.prod(s["size"]))
                first = s["at"] // 8
                piece = sent[step["bundle"]][first : first + count].reshape(s["size"])
                box(result[rank], s["start"], s["size"])[...] = piece
        for c in mine["copies"]:
            box(result[rank], c["dst_start"], c["size"])[...] = box(
                source[rank], c["src_start"], c["size"]
            )
    return result


def check_pair(shape, src_mesh, src, dst_mesh, dst, overlap):
    full = torch.arange(int(np.prod(shape))).reshape(shape)
    sides = []
    first = 0
    for mesh, placements in ((src_mesh, src), (dst_mesh, dst)):
        locals_of = {}
        for rank, coordinate in enumerate(coordinates(mesh), first):
            local = local_of(full, mesh, coordinate, placements)
            size, offset = _compute_local_shape_and_global_offset(
                shape, mesh, list(coordinate), placements
            )
            assert tuple(local.shape) == tuple(size)
            if local.numel():
                assert local.ravel()[0] == full[offset]
            locals_of[rank] = local.numpy()
        size = int(np.prod(mesh))
        layout = Layout(np.arange(first, first + size).reshape(mesh), placements)
        sides.append((layout, locals_of))
        first = 0 if overlap else size
    (src_layout, source), (dst_layout, wanted) = sides
    ranks = 1 + max([*source, *wanted])
    plan = Plan(src_layout, dst_layout, {"w": (shape, "int64")}, Topology.equal(ranks, 2))
    for rank, array in {**source, **wanted}.items():
        (told,) = plan.rank(rank)["tensors"]
        for side, of in (("src", source), ("dst", wanted)):
            assert told[side] == (list(of[rank].shape) if rank in of else None), array
    for rank, array in execute(plan, source, wanted).items():
        np.testing.assert_array_equal(array, wanted[rank])


@pytest.mark.parametrize(("src_mesh", "dst_mesh"), MESHES)
def test_all_ranks_get_what_dtensor_says(src_mesh, dst_mesh):
    draw = random.Random(5)
    for shape in SHAPES:
        pairs = list(
            itertools.product(
                itertools.product(placements_of(len(shape)), repeat=len(src_mesh)),
                itertools.product(placements_of(len(shape)), repeat=len(dst_mesh)),
            )
        )
        for src, dst in draw.sample(pairs, min(len(pairs), 40)):
            overlap = draw.random() < 0.3
            try:
                check_pair(shape, src_mesh, src, dst_mesh, dst, overlap)
            except Exception as error:
                raise AssertionError(f"{shape}: {src_mesh} {src} -> {dst_mesh} {dst}") from error


def test_fsdp2_beside_tensor_parallelism():
    src = (Strided(0, split_factor=2), Shard(0))
    check_pair((16, 3), (2, 2), src, (4,), (Shard(0),), False)
    check_pair((13, 3), (2, 2), src, (4,), (Shard(1),), False)


def test_a_device_mesh_is_taken_as_it_is():
    class Mesh:  # a DeviceMesh needs a process group
        mesh = torch.arange(4).reshape(2, 2)

    layout = Layout(Mesh(), [Shard(0), Replicate()])
    assert layout.ranks.tolist() == [[0, 1], [2, 3]]
    assert str(layout) == "2x2 ranks, S(0), R"


def test_a_partial_sum_is_refused():
    with pytest.raises(InvalidArgument, match="redistribute on the source mesh first"):
        Layout([0, 1], [Partial()])
