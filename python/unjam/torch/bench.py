"""What a call costs through torch.distributed: ``python -m unjam.torch.bench [--peer gloo] …``.

Starts the ranks as processes of this machine; in each, process groups of unjam and of the peer are
used by turns, a block of calls each. Times are of rank 0, in microseconds, a median over the blocks
with the first and third quartiles:

* ``call``: ``all_reduce(async_op=True)`` until it returns;
* ``wait``: then, ``wait()`` until it returns (CUDA: the stream is ordered behind it);
* ``both``: call and wait, and on CUDA a synchronisation of the stream: the data are there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

BLOCK = 20  # calls in a row of one library


@dataclass
class Row:
    """One size, one library."""

    backend: str
    bytes: int
    call_us: list[float]  # first quartile, median, third
    wait_us: list[float]
    both_us: list[float]


def main(words: list[str] | None = None) -> int:
    """Starts the ranks, or is one of them."""
    parser = argparse.ArgumentParser(prog="python -m unjam.torch.bench", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--peer", help="gloo (cpu) or nccl (cuda), the default of the device")
    parser.add_argument("--sizes", default="4,1024,65536,1048576", help="bytes, with commas")
    parser.add_argument("--blocks", type=int, default=30, help=f"of {BLOCK} calls, of each size")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    options.peer = options.peer or {"cpu": "gloo", "cuda": "nccl"}[options.device]
    if options.rank is not None:
        return _rank(options)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    given = sys.argv[1:] if words is None else words
    command = [sys.executable, "-m", "unjam.torch.bench", *given, "--port", str(port), "--rank"]
    ranks = [subprocess.Popen([*command, str(rank)]) for rank in range(options.ranks)]
    try:
        return max(abs(rank.wait()) for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()


def _rank(options: argparse.Namespace) -> int:
    import unjam.torch  # noqa: F401 - registers the backend

    torch.set_num_threads(1)
    rank, size = options.rank, options.ranks
    device = torch.device(options.device, rank if options.device == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", options.port, size, rank == 0)
    dist.init_process_group(options.peer, store=store, rank=rank, world_size=size)
    groups = {options.peer: dist.group.WORLD, "unjam": dist.new_group(backend="unjam")}
    rows = []
    for nbytes in (int(word) for word in options.sizes.split(",")):
        tensor = torch.zeros(max(nbytes // 4, 1), device=device)
        times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in groups}
        for _ in range(options.blocks + 1):
            for name, group in groups.items():
                times[name].append(_block(tensor, group))
        for name, found in times.items():
            columns = list(zip(*found[1:], strict=True))  # the first one warms up
            rows.append(Row(name, nbytes, *(_quartiles(column) for column in columns)))
    if rank == 0:
        _show(rows, options)
    dist.destroy_process_group()
    return 0


def _block(tensor: torch.Tensor, group: Any) -> tuple[float, float, float]:
    """Microseconds a call: call, wait, both. The collective itself keeps the ranks in step."""
    call = wait = both = 0.0
    for _ in range(BLOCK):
        begun = time.perf_counter()
        work = dist.all_reduce(tensor, group=group, async_op=True)
        called = time.perf_counter()
        work.wait()
        waited = time.perf_counter()
        if tensor.is_cuda:
            torch.cuda.current_stream().synchronize()
        done = time.perf_counter()
        call += called - begun
        wait += waited - called
        both += done - begun
    return tuple(1e6 * t / BLOCK for t in (call, wait, both))  # type: ignore[return-value]


def _quartiles(values: Any) -> list[float]:
    ordered = list(values)
    if len(ordered) < 2:
        return [ordered[0]] * 3
    return statistics.quantiles(ordered, n=4)


def _show(rows: list[Row], options: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"all_reduce through torch.distributed, {options.ranks} ranks, us a call")
    for column in ("bytes", "backend", "call", "wait", "both"):
        table.add_column(column, justify="left" if column == "backend" else "right")
    for row in rows:
        cells = (
            f"{q[1]:.1f} ({q[0]:.1f}-{q[2]:.1f})" for q in (row.call_us, row.wait_us, row.both_us)
        )
        table.add_row(str(row.bytes), row.backend, *cells)
    Console(width=100).print(table)
    if options.json:
        about = {
            "command": f"python -m unjam.torch.bench --ranks {options.ranks} --device "
            f"{options.device} --peer {options.peer} --blocks {options.blocks}",
            "machine": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
            "torch": torch.__version__,
        }
        text = json.dumps({**about, "rows": [asdict(row) for row in rows]}, indent=1)
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
