"""The demo on GPUs: the paper's programs with unjam, in one process and in one a GPU, and NCCL.

Where ranks share a GPU there is a process for each: in one process cudaDeviceSynchronize would wait
for the streams of ranks that wait for its caller. And NCCL refuses such a job.
"""

from __future__ import annotations

import argparse
import random
import time

from rich.console import Console

from ..cuda import gpus
from ._console import make_console, make_table

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
    console.print(
        f"\nunjam demo, a short version on {where} ({gpus.describe()['gpu']}), seed {seed}; on the "
        "host: unjam demo --device host\n"
    )
    console.print(
        "Every rank calls the same eight all-reduces, 256 B to 1 MiB, but each in its own random "
        "order:\n"
        "  [bold]program 1[/]  all calls at once, then wait;\n"
        "  [bold]program 2[/]  with cudaDeviceSynchronize between the calls.\n",
        markup=True,
    )
    table = make_table("", ["program", "processes", *_NUMBERS], _NUMBERS)
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
    console.print(
        "   [bold green]All complete, and every result right to the last bit.[/]\n", markup=True
    )
    if shared:
        console.print("NCCL takes no two ranks on one GPU: to see it hang takes two GPUs.\n")
    else:
        _show_nccl(console, ranks, seed, 1 if options.quick else options.tries or 2)
    console.print(
        f"Done in {time.perf_counter() - started:.0f} s. Again: unjam demo --seed {seed}\n"
    )
    return 0


def _show_nccl(console: Console, ranks: int, seed: int, tries: int) -> None:
    from ..cuda.nccl_program import try_nccl

    console.print(
        "[bold]The same with NCCL[/], a communicator for each all-reduce and one stream a GPU, in "
        f"a\n   child process that is ended after {_NCCL_LIMIT_S:.0f} s:",
        markup=True,
    )
    for number, device_sync in ((1, False), (2, True)):
        try:
            found = [
                try_nccl(ranks, seed + place, device_sync, limit_s=_NCCL_LIMIT_S)
                for place in range(tries)
            ]
        except (OSError, RuntimeError) as error:
            console.print(f"   program {number}: could not be run: {error}")
            continue
        hung = [one for one in found if one.hung]
        after = f", the first after {hung[0].iterations} iterations" if hung else ""
        console.print(f"   program {number}: hung in {len(hung)} of {tries} tries{after}")
    console.print()
