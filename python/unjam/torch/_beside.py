"""What the benchmarks beside a peer share: their options, their ranks, and how figures are kept."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

AFTER_FAILURE_S = 5  # in which the other ranks may say what they saw


def parser(module: str, doc: str | None) -> argparse.ArgumentParser:
    """The options that all have."""
    p = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--ranks", type=int, default=2)
    p.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    p.add_argument("--peer", help="gloo (cpu) or nccl (cuda), the default of the device")
    p.add_argument("--limit", type=float, default=1200, help="seconds, after which ranks are ended")
    p.add_argument("--json", type=Path, help="write the figures here, too")
    p.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    p.add_argument("--port", type=int, help=argparse.SUPPRESS)
    return p


def parse(p: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    options = p.parse_args(words)
    options.peer = options.peer or {"cpu": "gloo", "cuda": "nccl"}[options.device]
    return options


def start(module: str, options: argparse.Namespace, words: Sequence[str]) -> int:
    """Runs the ranks as processes of this machine: 0 if all ended well.

    One that fails leaves the others waiting for it, so they are ended soon after.
    """
    # The store is made here, so that its port is bound before the ranks begin. A port that was
    # merely found free might be taken until rank 0 has imported torch.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-m", module, *words, "--port", str(store.port), "--rank"]
    ranks = [subprocess.Popen([*command, str(rank)]) for rank in range(options.ranks)]
    end = time.monotonic() + options.limit
    try:
        while True:
            codes = [rank.poll() for rank in ranks]
            if None not in codes:
                return max(abs(code) for code in codes if code is not None)
            if any(codes):
                end = min(end, time.monotonic() + AFTER_FAILURE_S)
            if time.monotonic() > end:
                late = ", ".join(str(r) for r, code in enumerate(codes) if code is None)
                print(f"{module}: ended rank {late}, which had not come to an end", file=sys.stderr)
                return 1
            time.sleep(0.05)
    finally:
        for rank in ranks:
            rank.kill()


def join(options: argparse.Namespace, backend: str) -> torch.device:
    """Makes the default process group, of ``backend``; the device of this rank, which is set."""
    import unjam.torch  # noqa: F401 - registers the backend

    torch.set_num_threads(1)
    rank, size = options.rank, options.ranks
    device = torch.device(options.device, rank if options.device == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", options.port, is_master=False)  # start()'s
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    return device


def quartiles(values: Iterable[float]) -> list[float]:
    """First quartile, median, third."""
    ordered = list(values)
    if len(ordered) < 2:
        return [ordered[0]] * 3
    return statistics.quantiles(ordered, n=4)


def write(options: argparse.Namespace, command: str, rows: Any, **more: Any) -> None:
    """The figures, and what they were taken with, where ``--json`` asks for them."""
    if not options.json:
        return
    about = {
        "command": command,
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        **more,
    }
    if options.device == "cuda":
        about["gpu"] = torch.cuda.get_device_name()
    options.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
