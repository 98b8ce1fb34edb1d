"""Unmodified torch with backend="nccl", and whose libnccl.so.2 is loaded: every result is checked.

    LD_PRELOAD=…/libnccl.so.2 torchrun --nproc-per-node 2 tests/nccl/torch_check.py [NAME...]

Prints a line a check on rank 0. Knows nothing of unjam.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist


def _expect(condition: bool, what: str) -> None:
    if not condition:
        raise AssertionError(f"rank {dist.get_rank()}: {what}")


def operations(device: torch.device) -> None:
    """Each of torch's operations once, of two sizes."""
    rank, size = dist.get_rank(), dist.get_world_size()
    total = size * (size + 1) // 2
    for count in (1000, 1 << 20):
        x = torch.full((count,), rank + 1.0, device=device)
        dist.all_reduce(x)
        _expect(bool((x == total).all()), "all_reduce")
        x.fill_(rank + 1.0)
        dist.all_reduce(x, op=dist.ReduceOp.AVG)
        _expect(bool((x == total / size).all()), "all_reduce AVG")
        x.fill_(rank + 1.0)
        dist.all_reduce(x, op=dist._make_nccl_premul_sum(0.5))
        _expect(bool((x == total / 2).all()), "all_reduce PREMUL_SUM")
        x.fill_(rank)
        dist.broadcast(x, 1)
        _expect(bool((x == 1).all()), "broadcast")
        x.fill_(rank + 1.0)
        dist.reduce(x, 0)
        _expect(rank != 0 or bool((x == total).all()), "reduce")
        parts = [torch.empty(count, device=device) for _ in range(size)]
        x.fill_(rank)
        dist.all_gather(parts, x)
        _expect(all(bool((p == r).all()) for r, p in enumerate(parts)), "all_gather")
        whole = torch.empty(count * size, device=device)
        dist.all_gather_into_tensor(whole, x)
        _expect(bool((whole.view(size, -1)[:, 0].cpu() == torch.arange(size)).all()), "into_tensor")
        dist.reduce_scatter_tensor(x, whole)
        _expect(bool((x == rank * size).all()), "reduce_scatter_tensor")
        given = torch.arange(size, device=device).repeat_interleave(count) + 10 * rank
        got = torch.empty_like(given)
        dist.all_to_all_single(got, given)
        wanted = torch.arange(size, device=device).repeat_interleave(count) * 10 + rank
        _expect(bool((got == wanted).all()), "all_to_all_single")
        x.fill_(rank)
        y = torch.empty_like(x)
        ops = [
            dist.P2POp(dist.isend, x, (rank + 1) % size),
            dist.P2POp(dist.irecv, y, (rank - 1) % size),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        _expect(bool((y == (rank - 1) % size).all()), "batch_isend_irecv")
        if rank == 0:
            dist.send(x, 1)
        elif rank == 1:
            dist.recv(y, 0)
            _expect(bool((y == 0).all()), "recv")
        with dist._coalescing_manager(device=device, async_ops=False):
            for tensor in (x, y):
                tensor.fill_(1.0)
                dist.all_reduce(tensor)
        _expect(bool((x == size).all()) and bool((y == size).all()), "coalesced")
    dist.barrier()


def objects(device: torch.device) -> None:
    """Objects, which travel as bytes."""
    rank, size = dist.get_rank(), dist.get_world_size()
    said: list[object] = [None] * size
    dist.all_gather_object(said, {"rank": rank, "text": "x" * (100 * rank)})
    _expect([s["rank"] for s in said] == list(range(size)), "all_gather_object")  # type: ignore
    one = ["hello" if rank == 0 else None]
    dist.broadcast_object_list(one, 0)
    _expect(one == ["hello"], "broadcast_object_list")


def _model(device: torch.device) -> torch.nn.Module:
    """The same on all ranks."""
    torch.manual_seed(3)
    layers = [torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 16)]
    return torch.nn.Sequential(*layers).to(device)


def _train(one: torch.nn.Module, many: torch.nn.Module, device: torch.device, batches: int) -> None:
    """`one` has all data, `many` this rank's part."""
    rank, size = dist.get_rank(), dist.get_world_size()
    data = torch.randn(batches, 8 * size, 256, generator=torch.Generator().manual_seed(5))
    for net, part in ((one, slice(None)), (many, slice(8 * rank, 8 * rank + 8))):
        sgd = torch.optim.SGD(net.parameters(), lr=0.05)
        for batch in data.to(device):
            sgd.zero_grad()
            net(batch[part]).square().mean().backward()
            sgd.step()


def ddp(device: torch.device) -> None:
    """DistributedDataParallel gives what one process gives with all data."""
    one = _model(device)
    many = torch.nn.parallel.DistributedDataParallel(_model(device), [device.index])
    _train(one, many, device, batches=32)
    for a, b in zip(one.parameters(), many.parameters(), strict=True):
        _expect(torch.allclose(a, b, atol=1e-5), "DDP's parameters differ from one process's")


def fsdp(device: torch.device) -> None:
    """FSDP2 trains, and its parameters are one process's."""
    from torch.distributed.fsdp import fully_shard

    one, many = _model(device), _model(device)
    fully_shard(many[0])  # type: ignore[index]
    fully_shard(many)
    _train(one, many, device, batches=16)
    for a, b in zip(one.parameters(), many.parameters(), strict=True):
        whole = b.full_tensor()  # type: ignore[attr-defined]
        _expect(torch.allclose(a, whole, atol=1e-5), "FSDP's parameters differ from one process's")


def _make(groups: list[dist.ProcessGroup], device: torch.device) -> None:
    """The first call in each, which makes its communicator: so all ranks have the same order."""
    for group in groups:
        dist.all_reduce(torch.ones(1, device=device), group=group)
    torch.cuda.synchronize()


def crossed(device: torch.device) -> None:
    """Several groups, called in another random order on each rank, then a synchronisation."""
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group() for _ in range(8)]
    tensors = [torch.empty(2 << 20, device=device) for _ in groups]
    order = random.Random(100 + rank)
    _make(groups, device)
    for _ in range(30):
        for tensor in tensors:
            tensor.fill_(1.0)
        turn = list(range(len(groups)))
        order.shuffle(turn)
        works = [dist.all_reduce(tensors[i], group=groups[i], async_op=True) for i in turn]
        torch.cuda.synchronize()
        for work in works:
            work.wait()
        _expect(all(bool((t == size).all()) for t in tensors), "a wrong sum")
    for group in groups:
        dist.destroy_process_group(group)


def one_synchronises(device: torch.device) -> None:
    """Rank 0 calls A, synchronises its device, calls B; the others call B, then A."""
    rank, size = dist.get_rank(), dist.get_world_size()
    a, b = dist.new_group(), dist.new_group()
    _make([a, b], device)
    x, y = torch.empty(1 << 20, device=device), torch.empty(1 << 20, device=device)
    for _ in range(20):
        x.fill_(1.0)
        y.fill_(1.0)
        if rank == 0:
            works = [dist.all_reduce(x, group=a, async_op=True)]
            torch.cuda.synchronize()
            works.append(dist.all_reduce(y, group=b, async_op=True))
        else:
            works = [dist.all_reduce(y, group=b, async_op=True)]
            works.append(dist.all_reduce(x, group=a, async_op=True))
        for work in works:
            work.wait()
        _expect(bool((x == size).all()) and bool((y == size).all()), "a wrong sum")


CHECKS: tuple[Callable[[torch.device], None], ...] = (
    operations,
    objects,
    ddp,
    fsdp,
    crossed,
    one_synchronises,
)


def main() -> int:
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    device = torch.device("cuda", local)
    dist.init_process_group("nccl", device_id=device if os.environ.get("EAGER") == "1" else None)
    wanted = sys.argv[1:]
    for check in CHECKS:
        if wanted and check.__name__ not in wanted:
            continue
        begin = time.monotonic()
        check(device)
        torch.cuda.synchronize()
        dist.barrier()
        if dist.get_rank() == 0:
            print(f"ok {check.__name__} {time.monotonic() - begin:.1f} s", flush=True)
    version = ".".join(map(str, torch.cuda.nccl.version()))
    if dist.get_rank() == 0:
        print(f"torch_check: done, {dist.get_world_size()} ranks, NCCL {version}", flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
