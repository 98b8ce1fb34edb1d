"""stress: programs 1 and 2 with many seeds: complete, right, same bits again; hold deadlocks."""

from __future__ import annotations

import argparse
import textwrap
import time

from .. import programs
from ..cuda import gpus
from ..programs import Program
from ._console import lane_count, make_console, make_table, positive, rank_count, seed_number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("--program", choices=["1", "2", "both"], default="both")
    parser.add_argument(
        "--ranks", type=rank_count, default=8, help="ranks, as threads (default: 8)"
    )
    parser.add_argument("--iterations", type=positive, default=1000, help="a run (default: 1000)")
    parser.add_argument("--seeds", type=positive, default=20, help="how many (default: 20)")
    parser.add_argument("--first-seed", type=seed_number, default=0)
    parser.add_argument(
        "--repeat", type=positive, default=2, help="runs with each seed, same bits (default: 2)"
    )
    parser.add_argument("--data", choices=["integers", "floats", "mixed"], default="mixed")
    parser.add_argument("--policy", choices=["adaptive", "fixed"], default="adaptive")
    parser.add_argument("--lanes", type=lane_count, default=None, help="blocks a rank")
    parser.add_argument(
        "--delays", action="store_true", help="inject random delays at every wait (delay_seed)"
    )
    parser.add_argument(
        "--device", choices=("host", "cuda"), default="host", help="cuda: a GPU for each rank"
    )
    parser.add_argument("--processes", action="store_true", help="on GPUs: a process for each, too")
    parser.add_argument("--no-hold", action="store_true", help="leave out the tries to deadlock")


def run(options: argparse.Namespace) -> int:
    """One line a seed and program; status 1 if anything is not as it must be."""
    if options.device == "cuda" and (lack := gpus.lacking(options.ranks)):
        options.parser.error(f"argument --device: {lack}")
    one = _one if options.device == "host" else _one_on_gpus
    console = make_console()
    wanted = {"1": (False,), "2": (True,), "both": (False, True)}[options.program]
    rows = []
    failures = 0
    started = time.perf_counter()
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for device_sync in wanted:
            row, problem = one(options, seed, device_sync)
            failures += bool(problem)
            rows.append(row)
            text = "  ".join(part.replace(" ", "\0") for part in row)  # parts stay whole
            text = textwrap.fill(text, 80, subsequent_indent=10 * " ").replace("\0", " ")
            print(text + (f"\n{'':10}FAILED: {problem}" if problem else ""), flush=True)
    table = make_table("", ["runs", "failures", "seconds"], ["runs", "failures", "seconds"])
    table.add_row(str(len(rows)), str(failures), f"{time.perf_counter() - started:.0f}")
    console.print(table)
    return 1 if failures else 0


def _one(options: argparse.Namespace, seed: int, device_sync: bool) -> tuple[list[str], str]:
    config: dict[str, object] = {"policy": options.policy, "lanes": options.lanes}
    if options.delays:
        config["delay_seed"] = seed + 1
    program = Program(
        ranks=options.ranks,
        iterations=options.iterations,
        seed=seed,
        device_sync=device_sync,
        data=options.data,
        config=config,
    )
    problem = ""
    parts = [programs.run(program)["random"] for _ in range(options.repeat)]
    if len({part.digest for part in parts}) > 1:
        problem = "other bits in another run"
    first = parts[0]
    row = [
        f"seed {seed:>3}",
        f"program {1 + device_sync}",
        f"{sum(part.results for part in parts):,} results right",
        f"digest {first.digest[:12]}",
        f"{first.ms_per_iteration:.2f} ms/iteration",
        f"{first.per_block(first.stats.preemptions):,.0f} preemptions/block",
        f"{first.stats.quits / options.ranks:,.0f} quits/rank",
    ]
    if not options.no_hold and options.ranks > 1:
        hold = programs.try_hold(options.ranks, seed, device_sync)
        if not hold.deadlocked:
            problem = problem or "hold did not deadlock"
        problem = problem or hold.problem
        row.append("hold: " + ("true cycle" if hold.deadlocked and not hold.problem else "?"))
    return row, problem


def _one_on_gpus(
    options: argparse.Namespace, seed: int, device_sync: bool
) -> tuple[list[str], str]:
    """A wrong result or a hang is raised; nothing else can be wrong."""
    from ..cuda.program import CudaProgram, run_processes, run_threads

    program = CudaProgram(options.ranks, options.iterations, seed, device_sync)
    settings: dict[str, object] = {"policy": options.policy, "lanes": options.lanes}
    if options.delays:
        settings["delay_seed"] = seed + 1
    row = [f"seed {seed:>3}", f"program {1 + device_sync}"]
    found = {"one process": run_threads(program, **settings)}
    if options.processes:
        found["one a GPU"] = run_processes(program, **_environment(settings))
    for words, outcome in found.items():
        row.append(
            f"{words}: {outcome.results:,} results right, "
            f"{1e3 * outcome.seconds['random'] / options.iterations:.2f} ms/iteration, "
            f"{outcome.cost_of_disorder:.2f} x one order"
        )
    return row, ""


def _environment(settings: dict[str, object]) -> dict[str, str]:
    """Settings as variables, as processes take them."""
    return {
        f"UNJAM_{name.upper()}": str(value) for name, value in settings.items() if value is not None
    }
