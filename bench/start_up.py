"""How long the processes of a job take to meet, on the host device.

    python bench/start_up.py [--processes 2,8,64,128] [--runs 5] [--library A.so --library B.so]

All processes are there, and have used the library, before the clock starts; it stops when the last
one has its context. Libraries are measured in turn, run by run. Figures: the median of the runs,
and the least of them, in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_S = 120


def rank_main(rank: int, ranks: int, name: bytes, go: int, done: int, end: int) -> None:
    """One process, forked: its moment of being there, then it waits for the end."""
    import unjam

    with unjam.init_all(1, device="host", lanes=1):
        pass  # a forked process gets its memory as it touches it: not while the clock runs
    os.read(go, 1)  # until the other end is closed
    before = time.process_time_ns()
    with unjam.init(ranks, rank, name, device="host", lanes=1):
        os.write(done, f"{time.monotonic_ns()} {time.process_time_ns() - before}\n".encode())
        os.read(end, 1)


def measure(ranks: int) -> tuple[float, float]:
    """Milliseconds from the common start to the last process's context, and of all cores."""
    import unjam

    name = unjam.unique_id()
    go, start = os.pipe()
    take, done = os.pipe()
    end, stop = os.pipe()
    children = []
    for rank in range(ranks):
        if (pid := os.fork()) == 0:
            code = 1
            try:
                for unused in (start, take, stop):
                    os.close(unused)
                rank_main(rank, ranks, name, go, done, end)
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
    os.close(done)
    time.sleep(0.1 + ranks / 100)  # until all wait
    began = time.monotonic_ns()
    os.close(start)
    with os.fdopen(take) as said:
        lines = [said.readline().split() for _ in range(ranks)]
    os.close(stop)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    os.close(go)
    os.close(end)
    if any(codes) or not all(lines):
        raise SystemExit(f"{ranks} processes: a rank has failed, see above")
    last = max(int(moment) for moment, _ in lines)
    return (last - began) / 1e6, sum(int(cores) for _, cores in lines) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", default="2,8,64,128")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--library", action="append", default=[])
    parser.add_argument("--once", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once is not None:
        print(json.dumps(measure(options.once)))
        return
    libraries = options.library or [os.environ.get("UNJAM_LIBRARY", "")]
    print(f"{'processes':>9}  {'median ms':>9}  {'least ms':>9}  {'cores ms':>9}  library")
    for ranks in map(int, options.processes.split(",")):
        times: dict[str, list[tuple[float, float]]] = {library: [] for library in libraries}
        for _ in range(options.runs):
            for library in libraries:
                env = dict(os.environ, PYTHONPATH=str(ROOT / "python"))
                if library:
                    env["UNJAM_LIBRARY"] = library
                command = [sys.executable, __file__, "--once", str(ranks)]
                ran = subprocess.run(
                    command, env=env, stdout=subprocess.PIPE, timeout=PATIENCE_S, check=False
                )
                if ran.returncode == 0:
                    times[library].append(json.loads(ran.stdout))
        for library, of in times.items():
            text = f"{'refused':>9}" + 22 * " "
            if of:
                walls, cores = zip(*of, strict=True)
                figures = (statistics.median(walls), min(walls), statistics.median(cores))
                text = "  ".join(f"{figure:9.1f}" for figure in figures)
            print(f"{ranks:9}  {text}  {library or 'as installed'}", flush=True)


if __name__ == "__main__":
    main()
