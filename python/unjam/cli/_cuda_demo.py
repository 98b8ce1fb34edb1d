"""The demo on GPUs: the paper's programs with unjam, in one process and in one a GPU, and NCCL.

Where ranks share a GPU there is a process for each: in one process cudaDeviceSynchronize would wait
for the streams of ranks that wait for its caller. And NCCL refuses such a job.
"""

from __future__ import annotations

import argparse
import random
import time
from functools import partial

from rich.console import Console

from ..cuda import gpus
from ._console import make_console, make_table, print_block

_MOST_RANKS = 4
_NUMBERS = ["iterations", "results\nright", "ms per\niteration", "cost of\ndisorder"]
_NCCL_LIMIT_S = 10.0


def run(options: argparse.Namespace) -> int:
    """A short version of the demo on the GPUs that are there; status 1 if a program fails."""
    count = gpus.gpu_count()
    ranks = options.ranks or max(2, min(_MOST_RANKS, count))
    if lack := gpus.lacking(ranks, shared=count == 1):
        options.parser.error(f"argument --device: {lack}")
    shared = count < ranks
    from ..cuda.program import CudaProgram, Outcome, run_processes, run_threads

    started = time.perf_counter()
    seed = random.randrange(1_000_000) if options.seed is None else options.seed
    iterations = options.iterations or (20 if options.quick else 200)
    console = make_console()
    where = f"one GPU that {ranks} ranks share" if shared else f"{ranks} GPUs"
    block = partial(print_block, console)
    console.print()
    block(
        f"unjam demo, a short version on {where} ({gpus.describe()['gpu']}), seed {seed}; on the "
        "host: unjam demo --device host",
        0,
    )
    console.print()
    block(
        "Every rank calls the same eight all-reduces, 256 B to 1 MiB, each in its own random "
        "order:",
        0,
    )
    block("program 1: all calls at once, then wait;", 2)
    block("program 2: with cudaDeviceSynchronize between the calls.", 2)
    console.print()
    table = make_table("", ["program", "processes", *_NUMBERS], _NUMBERS, box=None)
    for number, device_sync in ((1, False), (2, True)):
        program = CudaProgram(ranks, iterations, seed, device_sync)
        ways = [("one a rank", run_processes)]
        if not shared:
            ways.insert(0, ("one for all GPUs", run_threads))
        for words, start in ways:
            found: Outcome = start(program)
            table.add_row(
                str(number),
                words,
                f"{iterations:,}",
                f"{found.results:,}",
                f"{1e3 * found.seconds['random'] / iterations:.2f}",
                f"{found.cost_of_disorder:.2f}",
            )
    console.print(table)
    console.print()
    block("[bold green]All complete, and every result right to the last bit.[/]", markup=True)
    block("Cost of disorder: the time in random order over the time in one order.")
    console.print()
    if shared:
        block("NCCL takes no two ranks on one GPU: to see it hang takes two GPUs.", 0)
        console.print()
    else:
        _show_nccl(console, ranks, seed, 1 if options.quick else options.tries or 2)
    console.print(
        f"Done in {time.perf_counter() - started:.0f} s. Again: unjam demo --seed {seed}\n"
    )
    return 0


def _show_nccl(console: Console, ranks: int, seed: int, tries: int) -> None:
    from ..cuda.nccl_program import try_nccl

    block = partial(print_block, console)
    block(
        "[bold]The same with NCCL[/], a communicator for each all-reduce and one stream a GPU, in "
        f"a child process that is ended after {_NCCL_LIMIT_S:.0f} s:",
        0,
        markup=True,
    )
    for number, device_sync in ((1, False), (2, True)):
        try:
            found = [
                try_nccl(ranks, seed + place, device_sync, limit_s=_NCCL_LIMIT_S)
                for place in range(tries)
            ]
        except (OSError, RuntimeError) as error:
            block(f"program {number}: could not be run: {error}")
            continue
        hung = [one for one in found if one.hung]
        after = f", the first after {hung[0].iterations} iterations" if hung else ""
        block(f"program {number}: hung in {len(hung)} of {tries} tries{after}")
    console.print()
