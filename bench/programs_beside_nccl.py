"""The paper's programs 1 and 2 on GPUs, unjam beside NCCL: who completes, and what disorder costs.

    python3 bench/programs_beside_nccl.py [--ranks N] [--tries N] [--json FILE] [--program 1|2]…

Each program runs in one process that drives all GPUs and in a process for each, one stream a GPU,
with the same seeds for both libraries. Of unjam every result is checked, and the cost of disorder
is the time in random order over that in one order, of iterations that alternate. NCCL first shows
in one order that the harness is sound; a try hangs if the random orders are not complete in time.

Every try is made by child processes with a time limit: what hangs on a GPU cannot be ended from
within. Status 1 if unjam fails in a try, or if NCCL cannot be run; that NCCL hangs, or does not, is
a result. The file is written anew after each row.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from unjam.bench.report import make_report, write_report
from unjam.cli._console import (
    add_json_file,
    duration,
    make_console,
    make_table,
    natural,
    positive,
    rank_count,
)
from unjam.cuda import gpus

_MOST_RANKS = 4
_PROGRAMS = {1: False, 2: True}  # → cudaDeviceSynchronize between the calls
_PROCESSES = {"one": False, "one a rank": True}
_START_S = 180.0  # of a try with unjam, for torch, for joining and for a wait that is too long
_ITERATION_S = 0.05  # the most for one, in both orders
_WORDS = 2000  # characters of an error
_NUMBERS = [
    "unjam\ncompleted",
    "results\nchecked",
    "cost of disorder\nmedian (min-max)",
    "NCCL\nhung",
    "iterations before\nit hung, median",
]

Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs all tries, prints a line for each row and then the table, writes the file."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.child is not None:
        return _child(options.child)
    ranks = options.ranks or max(2, min(_MOST_RANKS, gpus.gpu_count()))
    if ranks < 2:
        parser.error("argument --ranks: 1 is not at least 2")
    if lack := gpus.lacking(ranks):
        parser.error(f"argument --ranks: {lack}")
    options.ranks = ranks
    numbers = sorted(set(options.program or _PROGRAMS))
    seeds = list(range(options.seed, options.seed + options.tries))
    _say(
        f"programs {', '.join(map(str, numbers))} on {ranks} GPUs, {options.iterations} iterations,"
        f" seeds {seeds[0]} to {seeds[-1]}; at most "
        f"{len(numbers) * len(_PROCESSES) * _most_s(options) / 60:.0f} min, if all hangs"
    )
    rows: list[Row] = []
    for number in numbers:
        for words in _PROCESSES:
            begin = time.monotonic()
            rows.append(_row(number, words, options, seeds))
            _say(f"{_line(rows[-1])} ({time.monotonic() - begin:.0f} s)")
            if options.json is not None:
                write_report(options.json, _report(rows, options, seeds, arguments))
    console = make_console()
    console.print(_table(rows, options))
    return int(any(row["unjam_failed"] or row["nccl_failed"] for row in rows))


def unjam_try(program: dict[str, Any], processes: bool) -> dict[str, Any]:
    """Runs a program with unjam.

    Args:
        program: fields of ``CudaProgram``.
        processes: one for each rank.

    Returns:
        Seconds by order, and results checked.

    Raises:
        RuntimeError: a wait took too long, or a result is wrong, or else; the message says.
        TimeoutError: it did not end.
    """
    given = json.dumps({"program": program, "processes": processes})
    command = [sys.executable, str(Path(__file__).resolve()), "--child", given]
    told = run_limited(command, _unjam_s(program["iterations"]))
    return json.loads(told.strip().splitlines()[-1])


def run_limited(command: Sequence[str], limit_s: float) -> str:
    """What a command prints; after the time limit it is killed, with all that it started.

    Raises:
        RuntimeError: it failed; the message holds its last words.
        TimeoutError: it took longer.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # its children are in its process group
    )
    try:
        told, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        told, _ = process.communicate()
        words = told.strip()[-_WORDS:]
        raise TimeoutError(f"not complete after {limit_s:g} s; its words:\n{words}") from None
    finally:
        if process.returncode != 0:  # who succeeds has ended what it started
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode:
        words = told.strip()[-_WORDS:]
        raise RuntimeError(f"ended with status {process.returncode}; its words:\n{words}")
    return told


def _child(given: dict[str, Any]) -> int:
    """A try with unjam: the last line printed is JSON."""
    from unjam.cuda.program import CudaProgram, run_processes, run_threads

    run = run_processes if given["processes"] else run_threads
    print(json.dumps(asdict(run(CudaProgram(**given["program"])))), flush=True)
    return 0


def _unjam_s(iterations: int) -> float:
    return _START_S + _ITERATION_S * iterations


def _most_s(options: argparse.Namespace) -> float:
    """The longest that a row may take."""
    from unjam.cuda.nccl_program import START_S

    return options.tries * (_unjam_s(options.iterations) + START_S + options.limit_s)


def _row(number: int, words: str, options: argparse.Namespace, seeds: list[int]) -> Row:
    """All tries of a program with one process, or with one a rank."""
    from unjam.cuda.nccl_program import try_nccl

    sync, processes = _PROGRAMS[number], _PROCESSES[words]
    ours: list[Row] = []
    theirs: list[Row] = []
    for seed in seeds:
        program = {
            "ranks": options.ranks,
            "iterations": options.iterations,
            "seed": seed,
            "device_sync": sync,
        }
        try:
            found = unjam_try(program, processes)
            cost = found["seconds"]["random"] / found["seconds"]["consistent"]
            ours.append({"seed": seed, **found, "cost_of_disorder": round(cost, 4)})
        except Exception as error:
            ours.append(_failure("unjam", number, words, seed, error))
    for seed in seeds:
        try:
            tried = try_nccl(
                options.ranks, seed, sync, options.iterations, options.limit_s, processes
            )
            theirs.append({"seed": seed, **asdict(tried)})
        except Exception as error:
            theirs.append(_failure("NCCL", number, words, seed, error))
    right = [one for one in ours if "error" not in one]
    costs = [one["cost_of_disorder"] for one in right]
    ran = [one for one in theirs if "error" not in one]
    before = [one["iterations"] for one in ran if one["hung"]]
    return {
        "program": number,
        "processes": words,
        "ranks": options.ranks,
        "iterations": options.iterations,
        "tries": len(seeds),
        "unjam_completed": len(right),
        "unjam_failed": len(ours) - len(right),
        "results": sum(one["results"] for one in right),
        "cost_of_disorder": median(costs) if costs else None,
        "cost_of_disorder_low": min(costs, default=None),
        "cost_of_disorder_high": max(costs, default=None),
        "nccl_completed": len(ran) - len(before),
        "nccl_hung": len(before),
        "nccl_failed": len(theirs) - len(ran),
        "nccl_iterations_before": median(before) if before else None,
        "unjam_tries": ours,
        "nccl_tries": theirs,
    }


def _failure(library: str, number: int, words: str, seed: int, error: Exception) -> Row:
    """A try that failed, and says so at once."""
    text = f"{type(error).__name__}: {error}"
    _say(f"{library} failed in program {number}, processes: {words}, seed {seed}: {text}")
    return {"seed": seed, "error": text}


def _line(row: Row) -> str:
    """A row in words."""
    checked = f"{row['results']:,} results checked"
    ours = f"unjam completed {_of(row, 'unjam_completed')} tries, {checked}"
    theirs = f"NCCL hung in {_of(row, 'nccl_hung')} tries{_not_run(row)}"
    return (
        f"program {row['program']}, processes: {row['processes']}: {ours}, cost of disorder "
        f"{_cost(row)}; {theirs}, after {_before(row)} iterations (median)"
    )


def _table(rows: list[Row], options: argparse.Namespace) -> Table:
    title = (
        f"{options.ranks} ranks, {options.iterations} iterations a try; NCCL hung: not complete "
        f"after {options.limit_s:g} s"
    )
    table = make_table(title, ["program", "processes", *_NUMBERS], _NUMBERS)
    for row in rows:
        table.add_row(
            str(row["program"]),
            row["processes"],
            _of(row, "unjam_completed"),
            f"{row['results']:,}",
            _cost(row),
            _of(row, "nccl_hung") + _not_run(row),
            _before(row),
        )
    return table


def _of(row: Row, name: str) -> str:
    return f"{row[name]} of {row['tries']}"


def _cost(row: Row) -> str:
    if row["cost_of_disorder"] is None:
        return "-"
    middle, low, high = (row[f"cost_of_disorder{end}"] for end in ("", "_low", "_high"))
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def _not_run(row: Row) -> str:
    return f", {row['nccl_failed']} not run" if row["nccl_failed"] else ""


def _before(row: Row) -> str:
    before = row["nccl_iterations_before"]
    return "-" if before is None else f"{before:g}"


def _report(
    rows: list[Row],
    options: argparse.Namespace,
    seeds: list[int],
    arguments: Sequence[str] | None,
) -> dict[str, Any]:
    """The JSON file: as of ``unjam bench``, and the seeds."""
    given = sys.argv[1:] if arguments is None else arguments
    command = ["python3", "bench/programs_beside_nccl.py", *given]
    return make_report(rows, "cuda", command) | {
        "seeds": seeds,
        "limit_s": options.limit_s,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="The paper's programs 1 and 2 on GPUs, unjam beside NCCL."
    )
    parser.add_argument(
        "--ranks",
        type=rank_count,
        help=f"ranks, a GPU each (default: the GPUs, at most {_MOST_RANKS})",
    )
    parser.add_argument(
        "--program",
        type=int,
        choices=list(_PROGRAMS),
        action="append",
        help="only this one; may be repeated (default: both)",
    )
    parser.add_argument(
        "--iterations", type=positive, default=200, help="of each try (default: 200)"
    )
    parser.add_argument(
        "--tries", type=positive, default=5, help="of each library in each row (default: 5)"
    )
    parser.add_argument(
        "--limit-s",
        type=duration,
        default=10.0,
        help="seconds for NCCL's iterations, after which they hang (default: 10)",
    )
    parser.add_argument("--seed", type=natural, default=1, help="of the first try (default: 1)")
    add_json_file(parser)
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    return parser


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    # An end from outside ends the children too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
