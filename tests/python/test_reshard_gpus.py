"""Resharding of tensors on GPUs: ``python3 -m pytest -m gpu tests/python/test_reshard_gpus.py``."""

import itertools
import threading

import pytest

import unjam
from processes import workers
from unjam.cuda import gpus
from unjam.reshard import Layout, Plan, Replicate, Shard

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(gpus.lacking(2)), reason=gpus.lacking(2) or "GPUs are here"),
]


@pytest.fixture(scope="module")
def job():
    with unjam.init_all(2, device="cuda") as contexts:
        yield contexts


def on_each(contexts, function):
    """function(group, rank) in a thread for each rank, with its GPU current."""
    results, errors = {}, []

    def run(context):
        try:
            torch.cuda.set_device(context.rank)
            results[context.rank] = function(context.group(), context.rank)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)
            context.abort()

    threads = [threading.Thread(target=run, args=(context,)) for context in contexts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(len(contexts))]


def chunk(whole, placement, rank):
    return whole if placement == Replicate() else whole.chunk(2, placement.dim)[rank]


PAIRS = list(itertools.product([Replicate(), Shard(0), Shard(1)], repeat=2))


@pytest.mark.parametrize(("before", "after"), PAIRS)
@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.int64, torch.float16)],
)
def test_plans_on_gpus(job, before, after, dtype, wanted):
    whole = torch.arange(33 * 47).reshape(33, 47) % 100
    plan = Plan(
        Layout([0, 1], [before]),
        Layout([1, 0], [after]),
        {"w": ((33, 47), str(dtype)[6:], str(wanted)[6:])},
        max_bytes=1 << 20,
        window=4,
    )

    def run(group, rank):
        mine = chunk(whole, before, rank).to(dtype).cuda()
        target = torch.zeros_like(chunk(whole, after, 1 - rank).to(wanted)).cuda()
        turned = target.t().contiguous().t()  # of other strides
        for out in (target, turned):
            request = plan.run(group, src={"w": mine}, dst={"w": out}, key="w")
            request.wait()  # the stream
            kept = out.clone()
            torch.cuda.synchronize()
            request.synchronize(20)
            assert torch.equal(kept.cpu(), chunk(whole, after, 1 - rank).to(wanted))

    on_each(job, run)


def test_elsewhere_is_refused(job):
    plan = Plan(Layout([0], [Replicate()]), Layout([1], [Replicate()]), {"w": ((4,), "float32")})

    def run(group, rank):
        part = torch.zeros(4)
        with pytest.raises(unjam.InvalidArgument, match=r"'w' in \w+ on rank \d.*cuda:\d"):
            plan.run(group, **{"src" if rank == 0 else "dst": {"w": part}})
        part = part.cuda()
        plan.run(group, **{"src" if rank == 0 else "dst": {"w": part}}).synchronize(20)

    on_each(job, run)


def rank_main(rank, ranks, port, job_id):
    import itertools

    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor import Replicate as Whole
    from torch.distributed.tensor import Shard as Part

    import unjam
    import unjam.torch.reshard as reshard

    torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    with unjam.init(ranks, rank, bytes.fromhex(job_id), device="cuda") as context:
        group = context.group()
        mesh = DeviceMesh("cuda", [0, 1])
        whole = torch.arange(30 * 14, dtype=torch.float32).reshape(30, 14) % 100
        kinds = (Whole(), Part(0), Part(1))
        for number, (before, after) in enumerate(itertools.product(kinds, kinds)):
            local = whole if before == Whole() else whole.chunk(2, before.dim)[rank]
            mine = DTensor.from_local(local.cuda(), mesh, [before], run_check=False)
            got = reshard.redistribute(
                mine, mesh, [after], dtype=torch.bfloat16, group=group, key=f"x {number}"
            )
            wanted = whole if after == Whole() else whole.chunk(2, after.dim)[rank]
            assert got.device.type == "cuda"
            assert torch.equal(got.to_local().cpu(), wanted.to(torch.bfloat16))
        # A state_dict, forth and back, beside sums in another order on each rank.
        state = {f"layer {i}": torch.full((5, i + 1), float(i), device="cuda") for i in range(40)}
        other = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        there = reshard.Reshard.between(
            src=state if rank == 0 else None, dst=other if rank == 1 else None, group=group
        )
        ones = torch.ones(1000, device="cuda")
        for round_number in range(20):
            other["layer 7"].zero_()
            total = torch.zeros_like(ones)
            works = {}
            names = ["move", "sum"] if (rank + round_number) % 2 == 0 else ["sum", "move"]
            for name in names:
                if name == "move":
                    works[name] = there(
                        src=state if rank == 0 else None, dst=other if rank == 1 else None
                    )
                else:
                    works[name] = group.all_reduce(ones, total, key="sum")
            works["move"].wait(20)
            works["sum"].synchronize(20)
            assert float(total.sum()) == 2000.0
            if rank == 1:
                assert all(torch.equal(other[name], state[name]) for name in state)
    dist.destroy_process_group()


def test_dtensors_on_gpus():
    from torch_tools import make_store

    store = make_store()
    job_id = unjam.unique_id().hex()
    with workers() as harness:
        job = [
            harness.start(rank_main, rank, 2, store.port, job_id, name=f"rank {rank}")
            for rank in range(2)
        ]
        for process in job:
            process.ends(120)
