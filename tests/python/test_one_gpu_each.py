"""Processes that see one GPU each, by CUDA_VISIBLE_DEVICES, as Slurm and Kubernetes start them.

On a machine with two GPUs or more: ``python3 -m pytest -m gpu tests/python/test_one_gpu_each.py``.
"""

import pytest

torch = pytest.importorskip("torch")

import unjam  # noqa: E402
from processes import workers  # noqa: E402
from unjam.cuda import gpus  # noqa: E402
from unjam.cuda.program import CudaProgram, run_processes  # noqa: E402

pytestmark = pytest.mark.gpu

GPUS = min(torch.cuda.device_count(), 4)
needs_two = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")


@needs_two
@pytest.mark.parametrize("device_sync", [False, True], ids=["program-1", "program-2"])
def test_programs(device_sync):
    found = run_processes(CudaProgram(GPUS, 20, 1, device_sync), one_gpu_each=True)
    assert found.results == GPUS * 2 * 20 * 8


def kinds_in_memory(memory):
    """Every kind through buffers of one sort, small and large; says what was wrong."""
    import torch

    heap = {"heap_bytes": 256 << 20} if memory == "heap" else {}
    with unjam.init_from_environment(device="cuda", **heap) as context:  # noqa: F821
        assert torch.cuda.device_count() == 1 and context.device == "cuda:0"
        group, rank, size = context.group(), context.rank, context.size
        wrong = []
        for count in (1 << 8, 3 << 18):
            full = count * size
            if memory == "heap":
                block = context.alloc(4 * full)
                y = torch.as_tensor(block, device="cuda").view(torch.float32)
            else:
                y = torch.zeros(full, device="cuda")
            mark = context.register_memory(y) if memory == "registered" else None
            y.fill_(rank + 1)
            group.all_reduce(y, key="a").synchronize(30)
            if not bool((y == size * (size + 1) / 2).all()):
                wrong.append(f"all_reduce of {full}")
            x = torch.full((count,), rank + 1.0, device="cuda")
            group.all_gather(x, out=y, key="b").synchronize(30)
            expected = torch.arange(1.0, size + 1, device="cuda").repeat_interleave(count)
            if not torch.equal(y, expected):
                wrong.append(f"all_gather of {full}")
            y.fill_(float(rank))
            group.broadcast(y, root=size - 1, key="c").synchronize(30)
            if not bool((y == size - 1).all()):
                wrong.append(f"broadcast of {full}")
            group.barrier().synchronize(30)
            if mark is not None:
                mark.close()
        say(wrong)  # noqa: F821


def start_all(harness, worker, *arguments):
    job = unjam.unique_id().rstrip(b"\0").hex()
    return [
        harness.start(
            worker,
            *arguments,
            name=f"rank {rank}",
            UNJAM_ID=job,
            UNJAM_RANK=rank,
            UNJAM_RANKS=GPUS,
            CUDA_VISIBLE_DEVICES=gpus.visible_as_one(rank),
        )
        for rank in range(GPUS)
    ]


@needs_two
@pytest.mark.parametrize("memory", ["usual", "registered", "heap"])
def test_kinds(memory):
    with workers() as harness:
        for process in start_all(harness, kinds_in_memory, memory):
            assert process.said(120) == []
            process.ends()


def torch_rank(rank, size, file):
    """A group of CUDA tensors, made as a script under Slurm makes it."""
    import torch
    import torch.distributed as dist

    import unjam.torch  # noqa: F401  where the package is not installed

    torch.cuda.init()  # it means to use its GPU
    dist.init_process_group("unjam", init_method=f"file://{file}", rank=rank, world_size=size)
    x = torch.full((1 << 20,), rank + 1.0, device="cuda")
    dist.all_reduce(x)
    say([float(x[0]), float(x[-1]), str(x.device)])  # noqa: F821
    dist.barrier()
    dist.destroy_process_group()


@needs_two
def test_torch(tmp_path):
    with workers() as harness:
        ranks = [
            harness.start(
                torch_rank,
                rank,
                GPUS,
                str(tmp_path / "store"),
                CUDA_VISIBLE_DEVICES=gpus.visible_as_one(rank),
            )
            for rank in range(GPUS)
        ]
        total = GPUS * (GPUS + 1) / 2
        for process in ranks:
            assert process.said(240) == [total, total, "cuda:0"]
            process.ends()
