"""What the ranks of test_torch_reshard.py run: ``check(here)``; what they know is asserted here.

Whole tensors are known to all, and torch says what a rank's part of one is.
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import unjam
import unjam.torch

HALVES = [Replicate(), Shard(0), Shard(1)]


def whole(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-100, 100, shape, generator=generator).to(dtype)


def mesh_of(ranks):
    return DeviceMesh("cpu", ranks)


def is_in(mesh):
    return dist.get_rank() in mesh.mesh


def part(tensor, mesh, placements):
    """As torch cuts it; nobody is asked."""
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def moved(tensor, source, before, target, after, dtype=None):
    """The tensor on the other mesh; None on ranks that are not in that."""
    if is_in(source):
        x = part(tensor, source, before)
        return unjam.torch.redistribute(x, target, after, dtype=dtype)
    return unjam.torch.receive(target, after, tensor.shape, dtype or tensor.dtype)


def reshard_pairs(here):
    """Every pair of placements, on meshes that are apart, overlap, or are the same ranks."""
    pairs = [
        ([0, 1], [2, 3]),
        ([0, 1], [1, 2, 3]),
        ([[0, 1], [2, 3]], [3, 1, 0, 2]),
        ([1, 2, 3], [[0, 1], [2, 3]]),
    ]
    done = 0
    for ranks, others in pairs:
        source, target = mesh_of(ranks), mesh_of(others)
        for before in itertools.product(HALVES, repeat=source.ndim):
            for after in itertools.product(HALVES, repeat=target.ndim):
                tensor = whole(7, 5)
                y = moved(tensor, source, before, target, after)
                if y is None:
                    assert not is_in(target)
                    continue
                assert y.placements == after and y.device_mesh == target
                assert torch.equal(y.to_local(), part(tensor, target, after).to_local())
                # (torch's own groups have their ranks in ascending order.)
                if others != [3, 1, 0, 2]:
                    assert torch.equal(y.full_tensor(), tensor), (before, after)
                done += 1
    return done


def reshard_types(here):
    """Casts give torch's bits; types that unjam does not know are moved as they are."""
    source, target = mesh_of([0, 1]), mesh_of([2, 3])
    for before, after in [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float16),
        (torch.float64, torch.float32),
        (torch.float32, torch.float8_e4m3fn),
        (torch.float8_e5m2, torch.bfloat16),
        (torch.int64, torch.int32),
        (torch.int32, torch.float64),
        (torch.bool, torch.bool),
        (torch.int16, torch.int16),
        (torch.complex64, torch.complex64),
    ]:
        tensor = whole(6, 4).to(torch.float32).add_(0.3).to(before)
        y = moved(tensor, source, [Shard(0)], target, [Shard(1)], after)
        if y is not None:
            wanted = part(tensor.to(after), target, [Shard(1)]).to_local()
            assert y.dtype is after
            assert torch.equal(y.to_local().float().nan_to_num(), wanted.float().nan_to_num())
    return True


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(10, 12)
        self.down = nn.Linear(12, 10)
        self.norm = nn.LayerNorm(10)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        return self.norm(self.down(torch.relu(self.up(x))))


PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def trainer_and_rollout():
    """FSDP2 over tensor parallelism on 2 x 2 ranks, and tensor parallelism on four."""
    torch.manual_seed(3)
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    trainer = parallelize_module(Model(), both["tp"], PLAN)
    fully_shard(trainer, mesh=both["dp"])
    torch.manual_seed(4)
    rollout = parallelize_module(Model(), init_device_mesh("cpu", (4,)), PLAN)
    return trainer, rollout


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def reshard_state_dict(here):
    """Weights of a trainer, into a generator's own parameters, between two steps."""
    trainer, rollout = trainer_and_rollout()
    trainer.steps += 7
    sync = unjam.torch.Reshard.between(trainer.state_dict(), rollout.state_dict(), key="weights")
    optimizer = torch.optim.SGD(trainer.parameters(), 0.1)
    for step in range(3):
        trainer(torch.ones(4, 10) * (step + 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        work = sync(trainer.state_dict(), rollout.state_dict())
        work.wait()
        assert work.is_completed() and work.incomplete() == []
        state = rollout.state_dict()
        for name, tensor in trainer.state_dict().items():
            assert torch.equal(full(tensor), full(state[name])), name
    assert int(rollout.steps) == 7
    return len(sync.plans)


def reshard_described(here):
    """Planned from texts; a plain tensor is a copy on each rank of the side."""
    source, target = mesh_of([0, 1]), mesh_of([2, 3])
    w, b = whole(6, 5), whole(9)
    src = {"w": part(w, source, [Shard(0)]), "b": b} if is_in(source) else None
    dst = None
    if is_in(target):
        dst = {"w": part(w * 0, target, [Shard(1)]), "b": torch.zeros_like(b)}
    texts = [
        unjam.torch.Reshard.describe(src) if src else None,
        unjam.torch.Reshard.describe(dst) if dst else None,
    ]
    told = [None] * 4
    dist.all_gather_object(told, texts)
    sync = unjam.torch.Reshard(told[0][0], told[2][1], key="described")
    sync(src, dst).wait()
    if dst:
        assert torch.equal(dst["w"].to_local(), part(w, target, [Shard(1)]).to_local())
        assert torch.equal(dst["b"], b)
    return True


def reshard_refuses(here):
    """Each mistake is named on all ranks that make it, and later calls go on."""
    source, target = mesh_of([0, 1]), mesh_of([2, 3])
    tensor = whole(4, 4)
    inside = is_in(source)
    x = part(tensor, source, [Shard(0)]) if inside else None

    def fails(words, call):
        with pytest.raises(ValueError) as caught:
            call()
        assert words in str(caught.value), str(caught.value)

    if inside:
        partial = DTensor.from_local(tensor, source, [Partial()], run_check=False)
        fails(
            "redistribute on the source mesh first",
            lambda: unjam.torch.redistribute(partial, target, [Shard(0)]),
        )
        fails(
            "give the destination no partial placement",
            lambda: unjam.torch.redistribute(x, target, [Partial()]),
        )
        fails("not a Tensor", lambda: unjam.torch.redistribute(tensor, target, [Shard(0)]))

    def call(rows, placement):
        if inside:
            return unjam.torch.redistribute(x, target, [Shard(0)])
        return unjam.torch.receive(target, [placement], (rows, 4), torch.float32)

    fails("on rank 0 and float32 (5, 4) with S(0)", lambda: call(5, Shard(0)))
    fails("with S(1) on [2, 3] on rank 2", lambda: call(4, Shard(1)))
    # Nobody, and not all of those who have it.
    fails(
        "no rank has called redistribute",
        lambda: unjam.torch.receive(target, [Shard(0)], (4, 4), torch.float32),
    )
    if here.rank == 0:
        fails(
            "rank 1 has not given it",
            lambda: unjam.torch.redistribute(x, target, [Shard(0)]),
        )
    else:
        fails(
            "rank 1 has not given it",
            lambda: unjam.torch.receive(target, [Shard(0)], (4, 4), torch.float32),
        )

    src = {"w": x} if inside else None
    dst = None if inside else {"w": part(tensor, target, [Shard(1)])}
    between = unjam.torch.Reshard.between
    if inside:
        fails("'b' is in the source", lambda: between({**src, "b": tensor}, dst))
    else:
        fails("'b' is in the source", lambda: between(src, dst))
    if here.rank == 1:
        fails("rank 1 has not given it", lambda: between({}, None))
    else:
        fails("rank 1 has not given it", lambda: between(src, dst))
    sync = between(src, dst)
    if inside:
        again = {"w": part(tensor, source, [Shard(1)])}
        fails("was described as float32 (4, 4) with S(0)", lambda: sync(again))
        fails("'v' was not described", lambda: sync({**src, "v": tensor}))
        fails(f'"w" of the source on rank {here.rank} is missing', sync)
    sync(src, dst).wait()
    pair = dist.new_group([0, 1])
    if inside:
        fails(
            "mesh has rank 2, and the group has 2 ranks",
            lambda: unjam.torch.redistribute(x, target, [Shard(0)], group=pair),
        )
    return True


def reshard_crossed(here):
    """Two reshardings and training's collectives, begun and waited for in another order on each
    rank."""
    source, target = mesh_of([0, 1]), mesh_of([2, 3])
    w = whole(40, 30)
    syncs = {
        key: unjam.torch.Reshard.between(
            {"w": part(w, source, [Shard(0)])} if is_in(source) else None,
            {"w": part(w * 0, target, [Shard(1)])} if is_in(target) else None,
            key=key,
        )
        for key in ("a", "b")
    }
    for step in range(10):
        outs = {}
        begun = {}
        total = torch.ones(50)
        names = ["a", "b", "sum"]
        shift = (here.rank + step) % 3
        for name in names[shift:] + names[:shift]:
            if name == "sum":
                with unjam.torch.key("training"):
                    begun[name] = dist.all_reduce(total, async_op=True)
                continue
            scale = step + (2 if name == "a" else 3)
            src = {"w": part(w * scale, source, [Shard(0)])} if is_in(source) else None
            outs[name] = {"w": part(w * 0, target, [Shard(1)])} if is_in(target) else None
            begun[name] = syncs[name](src, outs[name])
        for name in sorted(begun, reverse=here.rank % 2 == 1):
            begun[name].wait()
        assert (total == 4).all()
        for name, extra in (("a", 2), ("b", 3)):
            if outs[name]:
                wanted = part(w * (step + extra), target, [Shard(1)]).to_local()
                assert torch.equal(outs[name]["w"].to_local(), wanted)
    return True


def reshard_own_job(here):
    """Process groups of another backend: a job of unjam's beside them."""
    told = [unjam.unique_id() if here.rank == 0 else None]
    dist.broadcast_object_list(told, src=0)
    with unjam.init(here.ranks, here.rank, told[0], device="host") as context:
        group = context.group()
        source, target = mesh_of([0, 1]), mesh_of([2, 3])
        w = whole(5, 6)
        y = None
        if is_in(source):
            x = part(w, source, [Shard(0)])
            unjam.torch.redistribute(x, target, [Shard(1)], group=group)
        else:
            y = unjam.torch.receive(target, [Shard(1)], w.shape, w.dtype, group=group)
        assert y is None or torch.equal(y.full_tensor(), w)
    return True


def reshard_parts(here):
    """A Reshard for one replica, for one tensor, and without a replica."""
    source, target = mesh_of([0, 1]), mesh_of([[2], [3]])
    w, b = whole(6, 4), whole(3)

    def state(scale, mesh, placements):
        if not is_in(mesh):
            return None
        return {
            "w": part(w * scale, mesh, placements),
            "b": part(b * scale, mesh, [Replicate()] * mesh.ndim),
        }

    def src(scale):
        return state(scale, source, [Shard(0)])

    dst = state(0, target, [Replicate(), Shard(1)])
    sync = unjam.torch.Reshard.between(src(1), dst, key="parts")
    late = sync.only([3], key="late")
    late(src(2), dst).wait()
    wanted = {2: 0, 3: 2}
    if dst:
        assert torch.equal(dst["w"].to_local(), w * wanted[here.rank])
    sync.only(tensors=["b"])(src(5), dst).wait()  # under the key of the whole one
    sync.without([3])(src(3), dst).wait()
    sync.without(tensors=["b"])(src(4), dst).wait()
    if dst:
        assert torch.equal(dst["w"].to_local(), w * 4)
        assert torch.equal(dst["b"].to_local(), b * {2: 3, 3: 5}[here.rank])
    for call, words in (
        (lambda: sync.only(tensors=["x"]), "no tensor 'x' was described"),
        (lambda: sync.without(tensors=["b", "w"]), "no tensor is left"),
        (lambda: sync.without([0]), "rank 0 has a part of the source that no other rank has"),
    ):
        with pytest.raises(ValueError) as caught:
            call()
        assert words in str(caught.value), str(caught.value)
    return True
