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
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from . import _beside

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
    words = sys.argv[1:] if words is None else words
    parser = _beside.parser("unjam.torch.bench", __doc__)
    parser.add_argument("--sizes", default="4,1024,65536,1048576", help="bytes, with commas")
    parser.add_argument("--blocks", type=int, default=30, help=f"of {BLOCK} calls, of each size")
    options = _beside.parse(parser, words)
    if options.rank is None:
        return _beside.start("unjam.torch.bench", options, words)
    return _rank(options)


def _rank(options: argparse.Namespace) -> int:
    device = _beside.join(options, options.peer)
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
            rows.append(Row(name, nbytes, *(_beside.quartiles(column) for column in columns)))
    if options.rank == 0:
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
    command = (
        f"python -m unjam.torch.bench --ranks {options.ranks} --device {options.device} "
        f"--peer {options.peer} --blocks {options.blocks}"
    )
    _beside.write(options, command, [asdict(row) for row in rows])


if __name__ == "__main__":
    sys.exit(main())
