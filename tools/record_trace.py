"""Records a small training job for `unjam simulate --trace`: record_trace.py OUT [--ranks N].

Starts N processes (default 4, an even number) that train a small model: DDP across tensor-parallel
pairs, and two all-reduces a step in each pair. Writes the flight-recorder dump of each rank to OUT,
and with --profile its profiler trace too. With --backend nccl it needs one GPU a rank; gloo needs
none. tests/fixtures/traces/gloo is made by this script.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any


def _train(
    rank: int, ranks: int, backend: str, rendezvous: str, out: Path, steps: int, profiled: bool
) -> None:
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile

    torch.manual_seed(1)
    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=ranks)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    tensor_parallel = data_parallel = None
    for first in range(0, ranks, 2):
        group = dist.new_group([first, first + 1], group_desc="tensor_parallel")
        tensor_parallel = group if rank // 2 == first // 2 else tensor_parallel
    for first in range(2):
        group = dist.new_group(list(range(first, ranks, 2)), group_desc="data_parallel")
        data_parallel = group if rank % 2 == first else data_parallel
    layers = [torch.nn.Linear(64, 64) for _ in range(4)]
    model = torch.nn.Sequential(*layers).to(device)
    ddp = torch.nn.parallel.DistributedDataParallel(
        model, bucket_cap_mb=0.02, process_group=data_parallel
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    activities = [ProfilerActivity.CPU]
    if backend == "nccl":
        activities.append(ProfilerActivity.CUDA)

    def step() -> None:
        optimizer.zero_grad()
        x = ddp(torch.randn(8, 64, device=device))
        for _ in range(2):
            activation = x.detach().clone()
            dist.all_reduce(activation, group=tensor_parallel)
        x.square().mean().backward()
        optimizer.step()
        if backend == "nccl":
            torch.cuda.synchronize()

    step()  # DDP settles its buckets
    dist.barrier()
    with profile(activities=activities) if profiled else contextlib.nullcontext() as recorded:
        for _ in range(steps):
            step()
    if recorded is not None:
        path = out / f"rank{rank}.json"
        recorded.export_chrome_trace(str(path))
        _shrink(path)
    c10d = torch._C._distributed_c10d
    dump = c10d._dump_nccl_trace if backend == "nccl" else c10d._dump_fr_trace
    (out / f"{backend}_trace_rank_{rank}").write_bytes(dump(includeStackTraces=False))
    dist.destroy_process_group()


def _shrink(path: Path) -> None:
    """Keeps what tells of collectives and synchronisations, compressed."""
    trace: dict[str, Any] = json.loads(path.read_text())

    def matters(event: dict[str, Any]) -> bool:
        name = event.get("name", "")
        return (
            name == "record_param_comms"
            or name.startswith(("gloo:", "nccl:"))
            or event.get("cat") == "cuda_runtime"
        )

    trace["traceEvents"] = [e for e in trace["traceEvents"] if matters(e)]
    # Says where the recording machine keeps things; nothing reads it.
    trace.pop("traceName", None)
    path.unlink()
    with gzip.GzipFile(f"{path}.gz", "wb", mtime=0) as file:
        file.write(json.dumps(trace, indent=1).encode())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    if options.ranks < 2 or options.ranks % 2:
        parser.error("--ranks: must be even")
    # The flight recorder is off unless it has room.
    os.environ.setdefault("TORCH_NCCL_TRACE_BUFFER_SIZE", "10000")
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "10000")
    import torch.multiprocessing as multiprocessing

    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (
            options.ranks,
            options.backend,
            f"file://{folder}/rendezvous",
            options.out.resolve(),
            options.steps,
            options.profile,
        )
        multiprocessing.spawn(_train, arguments, nprocs=options.ranks)
    print(f"recorded in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
