"""What the examples share: arguments, ranks, a time limit, and what is printed at the end.

``python example.py`` starts the ranks itself, ends them after ``--limit`` seconds and says what
happened; ``torchrun --nproc-per-node N example.py`` works, too.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Imports, and unjam's adapter, which is compiled once: minutes on a machine that does other things.
START_S = 600
Run = Callable[[argparse.Namespace], "list[float]"]


def parser(ranks: int, steps: int) -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--backend", default="unjam", help="unjam, gloo (CPU), nccl (CUDA)")
    p.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    p.add_argument("--ranks", type=int, default=ranks, help="torchrun's number goes before")
    p.add_argument("--steps", type=int, default=steps)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--limit", type=float, default=60, help="seconds that ranks may take")
    p.add_argument("--json", action="store_true", help="print one line of JSON")
    return p


def main(run: Run, ranks: int = 2, steps: int = 10, more: Sequence[tuple[str, dict]] = ()) -> None:
    """Calls ``run(args)`` on each rank, its process group made; rank 0 prints what it returns."""
    p = parser(ranks, steps)
    for name, options in more:
        p.add_argument(name, **options)
    args = p.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        p.error("--device cuda: torch sees no GPU here")
    if "RANK" in os.environ:  # torchrun has started us
        rank_main(None, run, args)
        return
    # As torchrun does it: the ranks meet in a store of the process that starts them. Its port is
    # bound before they begin; one merely found free might be taken until rank 0 has imported torch.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(store.port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        WORLD_SIZE=str(args.ranks),
    )
    outcome = started(run, args)
    if outcome:  # what was right has been printed by rank 0
        show(args, outcome=outcome)
        sys.exit(1)


def started(run: Run, args: argparse.Namespace) -> str:
    """Runs the ranks as processes: "" if all was well, otherwise what happened."""
    # On CPUs the ranks are forked from one process that has imported what takes them seconds each:
    # torch, and what its optimizers import at first use. What was forked could not use CUDA.
    method = "spawn" if args.device == "cuda" else "forkserver"
    multiprocessing.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed"])
    joined = mp.get_context(method).Event()
    ranks = mp.start_processes(
        rank_main, (run, args, joined), args.ranks, join=False, start_method=method
    )
    end = time.monotonic() + START_S
    where = f"the ranks had not joined after {START_S} s"
    try:
        while not ranks.join(timeout=0.1):
            if joined.is_set():
                joined.clear()
                end = time.monotonic() + args.limit
                where = f"no end {args.limit:g} s after the ranks had joined"
            if time.monotonic() >= end:
                ask_where(ranks.processes, args)
                return f"hung: {where}"
    except mp.ProcessRaisedException as e:
        return "error: " + str(e).strip().splitlines()[-1]
    except mp.ProcessExitedException as e:
        return f"error: {e}"
    finally:
        for process in ranks.processes:
            process.kill()
    return ""


def ask_where(processes: Sequence[BaseProcess], args: argparse.Namespace) -> None:
    """The ranks print where their threads stand, and unjam what it waits for."""
    for process in processes:
        os.kill(process.pid, signal.SIGUSR1)
    if args.backend == "unjam":
        time.sleep(0.5)
        os.kill(processes[0].pid, signal.SIGUSR2)
    time.sleep(2.0)  # it asks the other ranks, a second at most


def rank_main(
    rank: int | None, run: Run, args: argparse.Namespace, joined: Event | None = None
) -> None:
    if rank is not None:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    local = int(os.environ["LOCAL_RANK"])
    if args.device == "cuda":
        torch.cuda.set_device(local % torch.cuda.device_count())  # unjam's ranks may share one
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1)
    backend(args.backend)
    dist.init_process_group(args.backend)
    if joined is not None and rank == 0:
        joined.set()
    began = time.monotonic()
    losses = run(args)
    if dist.get_rank() == 0:
        show(args, outcome="right", seconds=round(time.monotonic() - began, 3), losses=losses)
    dist.destroy_process_group()


def backend(name: str) -> None:
    """An installed unjam needs no import: torch finds it by its entry point."""
    if name == "unjam":
        import unjam.torch  # noqa: F401


def show(args: argparse.Namespace, **found: object) -> None:
    name = Path(sys.argv[0]).stem
    if args.json:
        print(json.dumps({"example": name, "backend": args.backend, **found}), flush=True)
        return
    print(f"{name} with {args.backend}: {found['outcome']}", flush=True)
    losses = found.get("losses")
    if losses:
        print("loss: " + " ".join(f"{loss:.4f}" for loss in losses), flush=True)


def mean_over_ranks(loss: torch.Tensor, group: dist.ProcessGroup | None = None) -> float:
    loss = loss.detach().clone()
    dist.all_reduce(loss, group=group)
    return loss.item() / dist.get_world_size(group)


def compare(found: Sequence[float], expected: Sequence[float], tolerance: float = 1e-4) -> None:
    """Raises where a curve is not what one process computes alone."""
    for step, (a, b) in enumerate(zip(found, expected, strict=True)):
        if not abs(a - b) <= tolerance * max(1.0, abs(b)):
            raise ArithmeticError(f"wrong: loss {a:.6f} in step {step}, alone {b:.6f}")
