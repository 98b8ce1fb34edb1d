"""Processes that see one GPU each beside processes that see all: the paper's programs on GPUs.

    python3 bench/one_gpu_each.py [--ranks N] [--rounds N] [--iterations N] [--json FILE]

Slurm, Ray and Kubernetes start a rank with CUDA_VISIBLE_DEVICES set to its own GPU. Programs 1 and
2 run with a process for each rank, in rounds that alternate (all, one, one, all), every result is
checked. Printed are the medians of the programs' times, their ratio, and how far rounds that see
all GPUs differ among themselves: a ratio within that spread says nothing. Status 1 if a result is
wrong or a process fails.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from statistics import median
from typing import Any

from unjam.bench.report import make_report, write_report
from unjam.cli._console import add_json_file, make_console, make_table, natural, rank_count
from unjam.cuda import gpus

_PROGRAMS = {1: False, 2: True}  # → cudaDeviceSynchronize between the calls

Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the rounds, prints the table, writes the file."""
    parser = _parser()
    options = parser.parse_args(arguments)
    ranks = options.ranks or gpus.gpu_count()
    if ranks < 2:
        parser.error("argument --ranks: at least 2 GPUs are needed")
    if lack := gpus.lacking(ranks):
        parser.error(f"argument --ranks: {lack}")
    rows = [_measured(options, ranks, number) for number in _PROGRAMS]
    make_console().print(_table(rows))
    if options.json:
        command = ["bench/one_gpu_each.py", *(arguments or sys.argv[1:])]
        write_report(options.json, make_report(rows, "cuda", ["python3", *command]))
    return 0


def _measured(options: argparse.Namespace, ranks: int, number: int) -> Row:
    """Times of one program in both views."""
    from unjam.cuda.program import CudaProgram, run_processes

    program = CudaProgram(ranks, options.iterations, options.seed, _PROGRAMS[number])
    seconds: dict[bool, list[float]] = {False: [], True: []}
    checked = 0
    for turn in range(options.rounds):
        for one in (False, True) if turn % 2 == 0 else (True, False):
            outcome = run_processes(program, one_gpu_each=one)
            seconds[one].append(sum(outcome.seconds.values()))
            checked += outcome.results
            view = "one GPU" if one else "all GPUs"
            print(f"program {number}, {view}: {seconds[one][-1]:.3f} s", flush=True)
    both, one = seconds[False], seconds[True]
    return {
        "program": number,
        "iterations": options.iterations,
        "results": checked,
        "all_s": both,
        "one_s": one,
        "ratio": median(one) / median(both),
        "spread": (max(both) - min(both)) / median(both),
    }


def _table(rows: Sequence[Row]) -> Any:
    names = ["program", "results right", "sees all, s", "sees one, s", "ratio", "spread of all"]
    table = make_table("Programs by processes, by what a process sees", names, names)
    for row in rows:
        table.add_row(
            str(row["program"]),
            f"{row['results']:,}",
            f"{median(row['all_s']):.3f}",
            f"{median(row['one_s']):.3f}",
            f"{row['ratio']:.3f}",
            f"{row['spread']:.1%}",
        )
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--ranks", type=rank_count, help="default: all GPUs")
    parser.add_argument("--rounds", type=natural, default=4, help="of each view (default: 4)")
    parser.add_argument("--iterations", type=natural, default=200, help="(default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="of call orders (default: 0)")
    add_json_file(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
