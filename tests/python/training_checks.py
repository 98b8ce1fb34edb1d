"""What the ranks of test_torch_training.py run: ``check(here)`` returns what JSON can hold.

The same checks run with gloo and with the backend under test, and the test compares what they
return. What can be known without another backend is asserted at once.
"""

import argparse
import copy
import itertools

import torch
import torch.distributed as dist
from torch import nn

from doors_checks import (  # noqa: F401 - found by name
    doors_copies,
    doors_megatron,
    doors_multicast,
    doors_refuse,
)
from meshes_checks import (  # noqa: F401 - found by name
    meshes_dtensor,
    meshes_fails,
    meshes_more,
    meshes_parts,
    meshes_refuses,
    meshes_steps,
    meshes_unet,
)
from pipeline_checks import (  # noqa: F401 - found by name
    pipeline_own,
    pipeline_own_early,
    pipeline_own_fails,
    pipeline_own_late,
    pipeline_own_refuses,
    pipeline_own_shuffled,
    pipeline_own_signal,
    pipeline_own_three,
)
from reshard_checks import (  # noqa: F401 - found by name
    reshard_crossed,
    reshard_described,
    reshard_own_job,
    reshard_pairs,
    reshard_parts,
    reshard_refuses,
    reshard_state_dict,
    reshard_types,
)


def settings(**changes):
    """An example's arguments."""
    known = {"device": "cpu", "steps": 4, "seed": 1, "limit": 100.0, "groups": 2}
    return argparse.Namespace(**{**known, **changes})


def plain(value):
    """Tensors as lists: floats keep all their bits."""
    if isinstance(value, torch.Tensor):
        if value.is_complex():
            value = torch.view_as_real(value)
        return value.detach().tolist()
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value


# ---- what users call ----


def collectives(here):
    """Every collective of torch.distributed, in the types and operators that gloo has, too."""
    rank, ranks = here.rank, here.ranks
    found = []

    def numbers(*shape, dtype=torch.float32, of=rank):
        g = torch.Generator().manual_seed(of + 100 * len(found))
        if dtype is torch.bool:
            return torch.randint(2, shape, generator=g).bool()
        return torch.randint(1, 5, shape, generator=g).to(dtype)

    types = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8]
    for dtype, op in itertools.product(types, ("SUM", "PRODUCT", "MIN", "MAX")):
        x = numbers(3, 5, dtype=dtype)
        dist.all_reduce(x, op=getattr(dist.ReduceOp, op))
        found.append(plain(x.double()))
    for x in (numbers(4).to(torch.complex64) * 1j, numbers(0), numbers(1).squeeze()):
        dist.all_reduce(x)
        found.append(plain(x))
    for root in range(ranks):
        x = numbers(5, dtype=torch.bool)
        dist.broadcast(x, src=root)
        found.append(plain(x))
        x = numbers(6)
        dist.reduce(x, dst=root)
        found.append(plain(x) if rank == root else None)
        parts = [torch.empty(3) for _ in range(ranks)] if rank == root else None
        dist.gather(numbers(3), parts, dst=root)
        found.append(plain(parts))
        parts = [numbers(2, 2) + i for i in range(ranks)] if rank == root else None
        y = torch.empty(2, 2)
        dist.scatter(y, parts, src=root)
        found.append(plain(y))
    parts = [torch.empty(2, 3) for _ in range(ranks)]
    dist.all_gather(parts, numbers(2, 3))
    found.append(plain(parts))
    whole = torch.empty(ranks * 2, 3)
    dist.all_gather_into_tensor(whole, numbers(2, 3))
    found.append(plain(whole))
    y = torch.empty(4)
    dist.reduce_scatter_tensor(y, numbers(ranks * 4))
    found.append(plain(y))
    y = torch.empty(3)
    dist.reduce_scatter(y, [numbers(3) + i for i in range(ranks)])
    found.append(plain(y))
    # What rank i sends to rank j: i + j + 1 numbers.
    send, receive = [rank + j + 1 for j in range(ranks)], [i + rank + 1 for i in range(ranks)]
    y = torch.empty(sum(receive))
    dist.all_to_all_single(y, numbers(sum(send)), receive, send)
    found.append(plain(y))
    dist.barrier()
    return found


def beyond_gloo(here):
    """What gloo lacks, against numbers that are known."""
    rank, ranks = here.rank, here.ranks
    x = torch.full((5,), float(rank))
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    assert x.tolist() == [(ranks - 1) / 2] * 5
    y = torch.empty(3)
    dist.reduce_scatter_tensor(y, torch.full((3 * ranks,), float(rank)), op=dist.ReduceOp.AVG)
    assert y.tolist() == [(ranks - 1) / 2] * 3
    # From rank i to rank j: i + j + 1 numbers, which say so; 0 to and from rank 0.
    parts = [torch.empty(0 if 0 in (rank, i) else i + rank + 1) for i in range(ranks)]
    given = [
        torch.full((0 if 0 in (rank, j) else rank + j + 1,), 10.0 * rank + j) for j in range(ranks)
    ]
    dist.all_to_all(parts, given)
    for i, part in enumerate(parts):
        assert part.tolist() == [10.0 * i + rank] * part.numel()
    # Lists of different sizes: each rank owns as many numbers as its rank, and one.
    parts = [torch.empty(i + 1) for i in range(ranks)]
    dist.all_gather(parts, torch.full((rank + 1,), float(rank)))
    for i, part in enumerate(parts):
        assert part.tolist() == [float(i)] * (i + 1)
    return []


def keys(here):
    """The doors to keys, each used in an order that only this rank has."""
    import unjam

    rank, ranks = here.rank, here.ranks
    total = ranks * (ranks - 1) / 2
    order = list(range(4))
    order = order[rank:] + order[:rank]
    groups = {i: unjam.keyed_group(dist.group.WORLD, f"door{i}") for i in range(4)}
    for door in ("context", "word", "group", "nested"):
        boxes = {i: torch.full((100 + i,), float(rank + 10 * i)) for i in range(4)}
        works = []
        for i in order:
            if door == "context":
                with unjam.key(f"key{i}"):
                    works.append(dist.all_reduce(boxes[i], async_op=True))
            elif door == "word":
                works.append(unjam.all_reduce(boxes[i], async_op=True, key=f"word{i}"))
            elif door == "group":
                works.append(dist.all_reduce(boxes[i], group=groups[i], async_op=True))
            else:
                with unjam.key(f"outer{i % 2}"), unjam.key(f"inner{i // 2}"):
                    works.append(dist.all_reduce(boxes[i], async_op=True))
        for work in works:
            work.wait()
        for i, box in boxes.items():
            assert box.tolist() == [total + 10 * i * ranks] * len(box), (door, i)
    return []


def point_to_point(here):
    """A ring in both directions, with tags crossed, in the world and in a group."""
    rank, ranks = here.rank, here.ranks
    found = []
    to, source = (rank + 1) % ranks, (rank - 1) % ranks
    works = [dist.isend(torch.full((3,), 10.0 * tag + rank), to, tag=tag) for tag in (1, 2)]
    boxes = {tag: torch.empty(3) for tag in (2, 1)}  # received in the other order
    for tag, box in boxes.items():
        works.append(dist.irecv(box, source, tag=tag))
    for work in works:
        work.wait()
    for tag, box in boxes.items():
        assert box.tolist() == [10.0 * tag + source] * 3
    if rank == 0:
        for _ in range(1, ranks):
            box = torch.empty(1)
            sender = dist.recv(box)
            assert box.item() == sender
    else:
        dist.send(torch.tensor([float(rank)]), 0)
    dist.barrier()
    pair = sorted((rank, rank ^ 1))
    groups = [dist.new_group([i, i + 1]) for i in range(0, ranks, 2)]
    group = groups[rank // 2]
    x, y = torch.tensor([float(rank)] * 1000), torch.empty(1000)
    ops = [
        dist.P2POp(dist.isend, x, rank ^ 1, group),
        dist.P2POp(dist.irecv, y, rank ^ 1, group),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert y.mean().item() == rank ^ 1
    dist.all_reduce(x, group=group)
    assert x[0].item() == sum(pair)
    found.append(plain(x[:2]))
    return found


def objects(here):
    """The object collectives."""
    rank, ranks = here.rank, here.ranks
    mine = {"rank": rank, "text": "x" * (100 * rank + 1)}
    everybody = [None] * ranks
    dist.all_gather_object(everybody, mine)
    gathered = [None] * ranks if rank == 1 else None
    dist.gather_object(mine, gathered, dst=1)
    told = [mine, rank] if rank == 0 else [None, None]
    dist.broadcast_object_list(told, src=0)
    got = [None]
    dist.scatter_object_list(got, [{"for": r} for r in range(ranks)] if rank == 0 else None, src=0)
    assert got == [{"for": rank}]
    post = [None, None]
    if rank == 0:
        for r in range(1, ranks):
            dist.send_object_list([r, "letter"], dst=r)
    else:
        dist.recv_object_list(post, src=0)
        assert post == [rank, "letter"]
    return [everybody, gathered, told, post]


def differentiable(here):
    """torch.distributed.nn.functional, whose gradients are collectives."""
    import torch.distributed.nn.functional as F

    found, world = [], dist.group.WORLD  # their default is what was the world at their import
    x = (torch.arange(4 * here.ranks) + here.rank).float().requires_grad_()
    parts = list(x.chunk(here.ranks))
    ys = [
        F.all_reduce(x * 2, group=world),
        torch.cat(F.all_gather(x, world)),
        F.reduce_scatter(torch.empty(4), parts, group=world),
        F.all_to_all_single(torch.empty_like(x), x, group=world),
        F.broadcast(x, 0, world),
    ]
    for y in ys:
        x.grad = None
        (y * (torch.arange(y.numel()) + here.rank)).sum().backward()
        found.append([plain(y), plain(x.grad)])
    return found


# ---- DTensor ----


def redistribute(here):
    """From every placement to every placement, even and uneven, on one mesh dimension."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (here.ranks,))
    shapes = [(8, 8), (7, 5), (1, 3), (2, 9), (0, 4)]
    for shape, dtype in itertools.product(shapes, (torch.float32, torch.int64)):
        _redistribute(mesh, shape, dtype, 1)
    _redistribute(mesh, (7, 5), torch.bfloat16, 1)
    return []


def redistribute_2d(here):
    """The same on a 2 x 2 mesh: every pair of placements, to every other."""
    from torch.distributed.device_mesh import init_device_mesh

    _redistribute(init_device_mesh("cpu", (2, 2)), (5, 3), torch.float32, 2)
    return []


def _redistribute(mesh, shape, dtype, dimensions):
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    whole = torch.arange(shape[0] * shape[1]).reshape(shape).to(dtype)
    ends = [Replicate(), Shard(0), Shard(1)]
    starts = [*ends, Partial("sum"), Partial("max")]
    for start in itertools.product(starts, repeat=dimensions):
        if Partial("max") in start and Partial("sum") in start:
            continue  # their order matters: DTensor refuses
        # Partial: whatever sums to (or has as its maximum) the whole.
        kept = [Replicate() if p.is_partial() else p for p in start]
        local = distribute_tensor(whole, mesh, kept).to_local().clone()
        for dimension, placement in enumerate(start):
            if placement.is_partial() and mesh.get_local_rank(dimension) != 0:
                local = local * 0 if placement == Partial("sum") else local - 1
        for end in itertools.product(ends, repeat=dimensions):
            # Uneven shards: the shape cannot be told from the local part.
            x = DTensor.from_local(
                local, mesh, start, run_check=False, shape=whole.shape, stride=whole.stride()
            )
            y = x.redistribute(mesh, end)
            expected = distribute_tensor(whole, mesh, end).to_local()
            assert torch.equal(y.to_local(), expected), (shape, start, end, y.to_local(), expected)
            assert torch.equal(y.full_tensor(), whole), (shape, start, end)
        _to_partial_and_back(x)


def _to_partial_and_back(x):
    """From Replicate, the only placement from which torch goes to Partial (for itself only)."""
    from torch.distributed.tensor import DTensor, Partial
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor._redistribute import redistribute_local_tensor

    if any(p.is_partial() for p in x.placements):
        return
    to = tuple(Partial() if p.is_replicate() else p for p in x.placements)
    target = DTensorSpec(x.device_mesh, to, tensor_meta=x._spec.tensor_meta)
    local = redistribute_local_tensor(x.to_local(), x._spec, target)
    partial = DTensor.from_local(
        local, x.device_mesh, to, run_check=False, shape=x.shape, stride=x.stride()
    )
    back = partial.redistribute(x.device_mesh, x.placements)
    assert torch.equal(back.to_local(), x.to_local()), (x.placements, to)


def tensor_parallel(here):
    """The small GPT, split over all ranks but for data parallelism 2 on 4 ranks."""
    import fsdp_tp_gpt

    return fsdp_tp_gpt.train(settings(steps=3))


def dtensor_program(here):
    """Operations on sharded tensors, forward and backward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (here.ranks,))
    g = torch.Generator().manual_seed(1)
    whole = [torch.randn(7, 5, generator=g), torch.randn(5, 6, generator=g)]
    found = []
    for placements in itertools.product([Shard(0), Shard(1), Replicate()], repeat=2):
        parts = [
            distribute_tensor(t, mesh, [p]).requires_grad_()
            for t, p in zip(whole, placements, strict=True)
        ]
        alone = [t.clone().requires_grad_() for t in whole]
        results = []
        for a, b in (parts, alone):
            y = (a @ b).softmax(dim=1)
            loss = (y.sum(dim=0).square().mean() + a.norm()) * y.max()
            loss.backward()
            results.append(loss)
        torch.testing.assert_close(results[0].full_tensor(), results[1])
        for a, b in zip(parts, alone, strict=True):
            torch.testing.assert_close(a.grad.full_tensor(), b.grad)
        found.append(plain(results[0].full_tensor()))
    return found


def loss_parallel(here):
    """Cross entropy on logits that stay sharded along the classes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import loss_parallel

    mesh = init_device_mesh("cpu", (here.ranks,))
    logits = torch.linspace(-1, 1, 8 * 12).reshape(8, 12).sin()
    target = torch.arange(8) % 12
    x = distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
    with loss_parallel():
        loss = nn.functional.cross_entropy(x, target)
        loss.backward()
    alone = logits.clone().requires_grad_()
    expected = nn.functional.cross_entropy(alone, target)
    expected.backward()
    torch.testing.assert_close(loss.full_tensor(), expected)
    torch.testing.assert_close(x.grad.full_tensor(), alone.grad)
    return plain(loss.full_tensor())


# ---- training ----


def ddp(here):
    import ddp_cnn

    return ddp_cnn.train(settings(steps=6))


def _regression(here, model, steps=4, hook=None, parameters=None):
    """A loss curve of a model from 6 to 3 numbers."""
    optimizer = torch.optim.SGD(parameters or model.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        g = torch.Generator().manual_seed(step * here.ranks + here.rank)
        x = torch.randn(8, 6, generator=g)
        loss = (model(x) - x[:, :3].tanh()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if hook is not None:
            losses.append(hook())
        optimizer.step()
        losses.append(loss.item())
    return losses


class Uneven(nn.Module):
    """Sizes that no number of ranks divides, and a layer that is not always used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b, self.c = nn.Linear(6, 7), nn.Linear(7, 5), nn.Linear(5, 3)
        self.unused = nn.Linear(3, 3)

    def forward(self, x):
        return self.c(self.b(self.a(x).tanh()).tanh())


def ddp_options(here):
    """Unused parameters, views of buckets, no_sync, compressing hooks, uneven inputs."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.distributed.algorithms.join import Join
    from torch.nn.parallel import DistributedDataParallel

    found = []
    model = DistributedDataParallel(Uneven(), find_unused_parameters=True)
    found.append(_regression(here, model))
    model = DistributedDataParallel(
        Uneven(), find_unused_parameters=True, gradient_as_bucket_view=True, bucket_cap_mb=0.0001
    )
    with model.no_sync():
        model(torch.ones(1, 6)).sum().backward()
    found.append(_regression(here, model))
    for hook in (default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook):
        model = DistributedDataParallel(Uneven(), find_unused_parameters=True)
        model.register_comm_hook(None, hook)
        found.append(_regression(here, model))
    model = DistributedDataParallel(nn.Linear(6, 3))
    with Join([model]):
        for step in range(here.rank + 1):
            model(torch.full((2, 6), float(step))).sum().backward()
    found.append(plain(model.module.weight.grad))
    # Averages over the ranks that still have data: their number is summed in the forward pass.
    model = DistributedDataParallel(nn.Linear(6, 3))
    with model.join(divide_by_initial_world_size=False):
        for step in range(2 * here.rank + 1):
            model(torch.full((2, 6), float(step))).sum().backward()
    found.append(plain(model.module.weight.grad))
    return found


def _small_buckets(model, **options):
    """DDP with a bucket for every layer or so."""
    from torch.nn.parallel import DistributedDataParallel

    first, dist._DEFAULT_FIRST_BUCKET_BYTES = dist._DEFAULT_FIRST_BUCKET_BYTES, 1
    try:
        return DistributedDataParallel(model, bucket_cap_mb=0.0001, **options)
    finally:
        dist._DEFAULT_FIRST_BUCKET_BYTES = first


class Checkpointed(nn.Module):
    """Layers whose backward passes lie inside of the model's; the first one's does not."""

    def __init__(self, after_first=None):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)] + [nn.Linear(6, 3)])
        self.after_first = after_first

    def forward(self, x):
        from torch.utils.checkpoint import checkpoint

        x = self.layers[0](x)
        if self.after_first is not None:
            x.register_hook(self.after_first)
        for layer in self.layers[1:]:
            x = checkpoint(layer, x.tanh(), use_reentrant=True)
        return x


def ddp_passes(here):
    """Backward passes of all shapes: DDP's futures are completed at their ends."""
    ready_made = dist.BuiltinCommHookType
    found = []
    for hook in (ready_made.ALLREDUCE, ready_made.FP16_COMPRESS):  # in C++
        model = _small_buckets(Uneven(), find_unused_parameters=True)
        model._register_builtin_comm_hook(hook)
        found.append(_regression(here, model))
    for options in ({}, {"static_graph": True}):
        found.append(_regression(here, _small_buckets(Checkpointed(), **options)))
    # Gradients that several passes add up, the last of which averages.
    model = _small_buckets(Checkpointed())
    with model.no_sync():
        model(torch.full((2, 6), 0.1 * here.rank)).square().sum().backward()
    model(torch.ones(2, 6)).sum().backward()
    found.append([plain(p.grad) for p in model.parameters()])
    # Two models in one pass, one behind the other and one beside.
    one, two, other = (_small_buckets(m) for m in (nn.Linear(6, 6), Checkpointed(), Checkpointed()))
    x = torch.full((2, 6), 0.1 * here.rank)
    for _ in range(3):
        (two(one(x).tanh()).square().sum() + other(x).sum()).backward()
    found.append([plain(p.grad) for m in (one, two, other) for p in m.parameters()])
    return found


def ddp_inner_pass_goes_on(here):
    """Inside of a pass nobody waits at the end of an inner one, though a bucket is under way."""
    store = dist.distributed_c10d._get_default_store()
    turn = [0]

    def after_first(grad):  # the outer pass, behind the inner ones
        if here.rank == 0:
            store.set(f"behind the inner passes {turn[0]}", "")

    model = _small_buckets(Checkpointed(after_first))
    for turn[0] in range(3):  # the first, and the one behind it, make buckets anew
        loss = model(torch.full((2, 6), 0.1 * here.rank)).sum()
        if here.rank != 0:
            store.wait([f"behind the inner passes {turn[0]}"])
        loss.backward()
    return []


def ddp_pass_fails(here):
    """Backward passes that end with an error, a bucket under way: the rest goes on."""

    class Trouble(Exception):
        pass

    def trouble(grad):
        raise Trouble

    model = _small_buckets(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))
    hidden = model.module[0].register_forward_hook(lambda *a: a[2].register_hook(trouble) and None)
    for _ in range(3):
        try:
            model(torch.ones(2, 6)).sum().backward()
            raise AssertionError("no trouble")
        except Trouble:
            pass
        except RuntimeError as error:  # DDP's, of the pass before
            assert "finished reduction in the prior iteration" in str(error)
    hidden.remove()
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.tolist() == [here.ranks] * 3
    return _regression(here, _small_buckets(Uneven(), find_unused_parameters=True))


def ddp_keyed(here):
    """DDP's buckets under keys. gloo has no keys: the same numbers without."""
    from torch.nn.parallel import DistributedDataParallel

    found = []
    for options in ({}, {}, {"static_graph": True}):
        torch.manual_seed(5)
        model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)), nn.Linear(6, 3))
        model = DistributedDataParallel(model, bucket_cap_mb=0.0001, **options)
        if here.keyed:
            import unjam.torch

            if found:
                assert unjam.torch.ddp.keyed(model, f"model {len(found)}") is model
            else:
                model.register_comm_hook(None, unjam.torch.ddp.comm_hook)
        found.append(_regression(here, model))
    assert found[0] == found[1] == found[2]
    return found


def ddp_keyed_joined(here):
    """Keyed DDP in join(): who has no more data takes part in the others' averages."""

    def trained(name, **options):
        torch.manual_seed(5)
        model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)), nn.Linear(6, 3))
        model = _small_buckets(model)
        if here.keyed:
            import unjam.torch

            if name:
                unjam.torch.ddp.keyed(model, name)
            else:
                model.register_comm_hook(None, unjam.torch.ddp.comm_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        losses = []
        with model.join(**options):
            for step in range(3 + 2 * here.rank):
                optimizer.zero_grad()
                loss = model(torch.full((2, 6), 0.1 * (step + here.rank))).square().sum()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return [losses, plain(list(model.parameters()))]  # of the last one, on all

    found = [trained("joined"), trained("")]
    if here.keyed:  # as with all hooks
        assert trained("alone", divide_by_initial_world_size=False) == found[0]
    return found


def zero_optimizer(here):
    """The optimizer's state sharded over ranks: broadcasts of what each one owns."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(Uneven(), find_unused_parameters=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    losses = []
    for step in range(3):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step + 9 * here.rank))
        loss = (model(x) - x[:, :3]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _sharded(model, mesh=None, **options):
    from torch.distributed.fsdp import fully_shard

    for child in model.children():
        fully_shard(child, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def _fsdp_model():
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 9), nn.LayerNorm(9), nn.Linear(9, 3)
    )


def _clip(model):
    def hook():
        return nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor().item()

    return hook


def fsdp(here):
    """FSDP2: uneven shards, clipped gradients, mixed precision, accumulated gradients."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    model = _sharded(_fsdp_model())
    found = [_regression(here, model, hook=_clip(model))]
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = _sharded(_fsdp_model(), mp_policy=low, reshard_after_forward=False)
    found.append(_regression(here, model))
    model = _sharded(_fsdp_model())
    model.set_requires_gradient_sync(False)
    model(torch.ones(1, 6)).sum().backward()
    model.set_requires_gradient_sync(True)
    found.append(_regression(here, model))
    return found


def fsdp_keyed(here):
    """FSDP2 whose all-gathers and reduce-scatters have keys; with gloo, without."""
    model = _sharded(_fsdp_model())
    if here.keyed:
        import unjam.torch

        unjam.torch.fsdp.keyed(model)
    return _regression(here, model)


def fsdp_hybrid(here):
    """Sharded over 2 ranks, replicated over 2."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = _sharded(_fsdp_model(), mesh=mesh)
    return _regression(here, model, hook=_clip(model))


def fsdp_first(here):
    """FullyShardedDataParallel, FSDP2's predecessor."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    found = []
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        model = FullyShardedDataParallel(
            _fsdp_model(),
            sharding_strategy=strategy,
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
        found.append(_regression(here, model, hook=lambda m=model: m.clip_grad_norm_(0.1).item()))
    return found


def local_sgd(here):
    """Parameters averaged every second step."""
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    torch.manual_seed(here.rank)
    model = nn.Linear(6, 3)
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        PeriodicModelAverager(period=2, warmup_steps=1),
    )
    for step in range(4):
        optimizer.zero_grad()
        model(torch.full((2, 6), float(step + here.rank))).square().mean().backward()
        optimizer.step()
    return plain(model.weight)


def pipeline(here):
    import pipeline

    return pipeline.train(settings(steps=3))


def pipeline_interleaved(here):
    """Two stages per rank, each way around the ring, shapes told by the first run."""
    from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

    torch.manual_seed(6)
    layers = [nn.Linear(6, 6) for _ in range(2 * here.ranks)]
    mine = range(here.rank, 2 * here.ranks, here.ranks)
    cpu = torch.device("cpu")
    stages = [PipelineStage(layers[i], i, len(layers), cpu) for i in mine]
    schedule = ScheduleInterleaved1F1B(stages, 2 * here.ranks, loss_fn=nn.functional.mse_loss)
    losses = []
    x = torch.randn(4 * here.ranks, 6, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        if here.rank == 0:
            schedule.step(x)
        elif here.rank == here.ranks - 1:
            schedule.step(target=x, losses=losses)
        else:
            schedule.step()
    grads = [layers[i].weight.grad for i in mine]
    return [plain(losses), plain(grads)]


def pipeline_v(here):
    """A V-shaped schedule: at its foot a rank has two stages in a row, and sends to itself."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble

    count, parts = 2 * here.ranks, 2 * here.ranks
    layers = [nn.Linear(6, 6) for _ in range(count)]  # the same on all ranks
    alone = [copy.deepcopy(layer) for layer in layers]
    x, y = torch.randn(2 * parts, 6), torch.randn(2 * parts, 6)
    mine = [here.rank, count - 1 - here.rank]
    cpu = torch.device("cpu")
    stages = [PipelineStage(layers[i], i, count, cpu) for i in mine]
    schedule = ScheduleZBVZeroBubble(stages, parts, loss_fn=nn.functional.mse_loss)
    if here.rank == 0:  # has the first stage, and the last
        schedule.step(x, target=y, losses=[])
    else:
        schedule.step()
    for part, target in zip(x.chunk(parts), y.chunk(parts), strict=True):
        (nn.functional.mse_loss(nn.Sequential(*alone)(part), target) / parts).backward()
    for i in mine:
        torch.testing.assert_close(layers[i].weight.grad, alone[i].weight.grad)


def pipeline_orders(here):
    """Orders of unjam.pipeline on torch's runtime: sums of gradients are those of Schedule1F1B."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    from unjam import InvalidArgument
    from unjam.pipeline import Order, gpipe, split_backward
    from unjam.torch.pipeline import Eager1F1B, Ordered

    torch.manual_seed(8)
    parts, cpu = 3 * here.ranks, torch.device("cpu")
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(here.ranks)]
    x, y = torch.randn(2 * parts, 6), torch.randn(2 * parts, 6)
    first, last = here.rank == 0, here.rank == here.ranks - 1

    def ends_with(make):
        """Losses and gradients of two steps."""
        module = copy.deepcopy(layers[here.rank])
        schedule = make(PipelineStage(module, here.rank, here.ranks, cpu))
        losses, kept = [], []
        for _ in range(2):
            module.zero_grad()
            more = {"target": y, "losses": losses} if last else {}
            schedule.step(*([x] if first else []), **more)
            kept.append([p.grad.clone() for p in module.parameters()])
        return plain(losses), kept

    expected = ends_with(lambda stage: Schedule1F1B(stage, parts, nn.functional.mse_loss))
    found = []
    for options in (
        {},
        {"ahead": 0.5},
        {"split": True},
        {"split": True, "delay": 2},
        {"split": True, "delay": [0] * (here.ranks - 1) + [4]},
        {"scale_grads": False},
    ):
        losses, grads = ends_with(
            lambda stage, options=options: Eager1F1B(
                stage, parts, nn.functional.mse_loss, **options
            )
        )
        assert losses == expected[0], options
        scale = 1 if options.get("scale_grads", True) else parts
        for ours, theirs in zip(grads, expected[1], strict=True):
            for a, b in zip(ours, theirs, strict=True):
                torch.testing.assert_close(a, scale * b, rtol=1e-5, atol=1e-7)
        found.append(plain(grads))
    order = split_backward(gpipe(here.ranks, parts), 1)
    losses, grads = ends_with(lambda stage: Ordered([stage], order, nn.functional.mse_loss))
    torch.testing.assert_close(grads, expected[1], rtol=1e-5, atol=1e-7)
    found.append(plain(grads))

    # Forwards alone, which no loss needs.
    stage = PipelineStage(copy.deepcopy(layers[here.rank]), here.rank, here.ranks, cpu)
    schedule = Eager1F1B(stage, parts, nn.functional.mse_loss, split=True)
    with torch.no_grad():
        out = schedule.eval(*([x] if first else []), **({"target": y} if last else {}))
        if last:
            torch.testing.assert_close(out, nn.Sequential(*layers)(x))

    stage = PipelineStage(copy.deepcopy(layers[here.rank]), here.rank, here.ranks, cpu)
    for wrong, words in (
        (lambda: Eager1F1B(stage, 0), "microbatches=0 is out of range"),
        (lambda: Eager1F1B(stage, 4, delay=1), "give split=True, too"),
        (lambda: Ordered([stage], gpipe(here.ranks + 1, 4)), "make an order for these"),
        (lambda: Ordered([], order), "there are no stages"),
        (lambda: Ordered([stage], Order(order.rows[1:] + order.rows[:1])), "give the stages that"),
    ):
        try:
            wrong()
        except InvalidArgument as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"nothing is wrong where {words!r} should be")
    return [expected[0], found]


def pipeline_orders_of_two(here):
    """Two stages a rank: around the ring, and V-shaped, where a rank sends to itself."""
    from torch.distributed.pipelining import PipelineStage

    from unjam.pipeline import Action, Order
    from unjam.torch.pipeline import Ordered

    torch.manual_seed(9)
    ranks, count, parts, cpu = here.ranks, 2 * here.ranks, 5, torch.device("cpu")
    layers = [nn.Linear(6, 6) for _ in range(count)]
    x, y = torch.randn(2 * parts, 6), torch.randn(2 * parts, 6)
    alone = copy.deepcopy(nn.Sequential(*layers))
    for part, target in zip(x.chunk(parts), y.chunk(parts), strict=True):
        (nn.functional.mse_loss(alone(part), target) / parts).backward()
    for second in (lambda rank: ranks + rank, lambda rank: count - 1 - rank):
        order = Order(
            [
                [Action(stage, kind, k) for stage, kind in several for k in range(parts)]
                for rank in range(ranks)
                for a, b in [(rank, second(rank))]
                for several in [[(a, "F"), (b, "F"), (b, "B"), (a, "B")]]
            ]
        )
        mine = {i: copy.deepcopy(layers[i]) for i in (here.rank, second(here.rank))}
        stages = [PipelineStage(module, i, count, cpu) for i, module in mine.items()]
        schedule = Ordered(stages, order, nn.functional.mse_loss)
        more = {"target": y, "losses": []} if count - 1 in mine else {}
        schedule.step(*([x] if here.rank == 0 else []), **more)
        for i, module in mine.items():
            torch.testing.assert_close(module.weight.grad, alone[i].weight.grad)


# ---- compiled ----


def functional(here):
    """Functional collectives, as they are."""
    return _functional(here, _program(here))


def functional_autograd(here):
    """Functional collectives with gradients."""
    import torch.distributed._functional_collectives as funcol

    world, found = dist.group.WORLD, []
    send = [2] * here.ranks
    x = (torch.arange(2 * here.ranks).float() + here.rank).requires_grad_()
    for y in (
        funcol.all_to_all_single_autograd(x * 2, send, send, world),
        funcol.all_gather_tensor_autograd(x * 2, 0, world),
        funcol.reduce_scatter_tensor_autograd(x * 2, "sum", 0, world),
    ):
        x.grad = None
        (y * (torch.arange(y.numel()) + here.rank)).sum().backward()
        found.append([plain(y + 0), plain(x.grad + 0)])
    found.append(plain(funcol.permute_tensor(x.detach(), [*range(1, here.ranks), 0], world) + 0))
    return found


def compiled(here):
    """The same under torch.compile."""
    torch._dynamo.reset()  # nothing that was compiled with the other backend
    return _functional(here, torch.compile(_program(here), backend="aot_eager", fullgraph=True))


def _program(here):
    import torch.distributed._functional_collectives as funcol

    group = dist.group.WORLD
    send = [2] * here.ranks

    def program(x):
        a = funcol.all_reduce(x, "sum", group) + 1
        b = funcol.all_gather_tensor(x * 2, 0, group)
        c = funcol.reduce_scatter_tensor(b, "sum", 0, group)
        d = funcol.all_to_all_single(x, send, send, group)
        e = funcol.broadcast(x, here.ranks - 1, group)
        f, g = funcol.all_reduce_coalesced([x, x * 3], "max", group)
        h, i = funcol.all_gather_into_tensor_coalesced([x, d], group)
        j, k = funcol.reduce_scatter_tensor_coalesced([h, b], ["sum", "sum"][0], [0, 0], group)
        return [a, b, c, d, e, f, g, h, i, j, k]

    return program


def _functional(here, program):
    x = torch.arange(2 * here.ranks * 3).reshape(-1, 3).float() + here.rank
    return plain([t + 0 for t in program(x)])


def compiled_ddp(here):
    """A compiled model under DDP, whose graph is cut at the buckets."""
    from torch.nn.parallel import DistributedDataParallel

    torch._dynamo.reset()
    torch.manual_seed(5)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)), nn.Linear(6, 3))
    first, dist._DEFAULT_FIRST_BUCKET_BYTES = dist._DEFAULT_FIRST_BUCKET_BYTES, 100
    try:
        model = DistributedDataParallel(model, bucket_cap_mb=0.0001)
        return _regression(here, torch.compile(model, backend="aot_eager"), steps=2)
    finally:
        dist._DEFAULT_FIRST_BUCKET_BYTES = first


# ---- checkpoints ----


def checkpoint(here):
    """Distributed checkpoints: a sharded model and its optimizer, saved and loaded."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def trained(steps):
        model = _sharded(_fsdp_model())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for step in range(steps):
            model(torch.full((2, 6), 0.1 * step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    def state(model, optimizer):
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments}

    def whole(model):
        return [plain(p.full_tensor()) for p in model.parameters()]

    saved = trained(3)
    dcp.save(state(*saved), checkpoint_id=here.folder / "now")
    dcp.async_save(state(*saved), checkpoint_id=here.folder / "later").result()
    found = []
    for name in ("now", "later"):
        model, optimizer = trained(1)
        assert whole(model) != whole(saved[0])
        box = state(model, optimizer)
        dcp.load(box, checkpoint_id=here.folder / name)
        set_state_dict(
            model, optimizer, model_state_dict=box["model"], optim_state_dict=box["optimizer"]
        )
        assert whole(model) == whole(saved[0])
        found.append(whole(model))
    return found


# ---- the recipes ----


def recipe_random_grad_order(here):
    import random_grad_order

    return random_grad_order.train(settings())


def recipe_two_threads(here):
    import two_threads

    return two_threads.train(settings(steps=10, streams=2))


def recipe_three_groups(here):
    import three_groups

    return three_groups.train(settings(steps=3))


def recipe_local_wait(here):
    import local_wait

    return local_wait.train(settings())


def recipe_local_wait_one_group(here):
    import local_wait

    return local_wait.train(settings(groups=1))


def recipe_expert_order(here):
    import expert_order

    return expert_order.train(settings(steps=5))


def recipe_sync_beside_training(here):
    import sync_beside_training

    return sync_beside_training.train(settings(steps=20))


def recipe_big_refit(here):
    import big_refit

    return big_refit.train(settings(steps=1, tensors=90, backend=here.backend))
