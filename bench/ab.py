"""Two builds of the library side by side on one machine: is one slower than the other?

    python3 bench/ab.py BASE HEAD [ROW …] [--rounds N] [--json FILE]

BASE and HEAD are folders with libunjam.so.0 and libunjam_cuda.so. The program `gate` of
bench/gate.cu measures a row at a time. It runs three times at once: with BASE, with BASE again, and
with HEAD. Each round measures a row in all three, in the order base, again, head, and the next
round the other way round, so that what drifts falls on all alike.

A row passes if the median ratio of head to base is at most 1 + max(2 %, spread). The spread is the
90th percentile of how far base and its second process lie apart in a round. Bits must be equal, and
the shares of calls without the engine, and of calls begun early, no lower. Status 1 if not.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import selectors
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from unjam.bench.report import make_report, write_report
from unjam.cli._console import make_console, make_table

ROOT = Path(__file__).resolve().parent.parent
LEAST_ROUNDS = 5
TOLERANCE = 0.02
ANSWER_S = 120  # of a worker, before it counts as hung


class WorkerError(Exception):
    """A worker that failed, hung, or measures another library."""


class Worker:
    """One process of `gate` with a library of its own."""

    def __init__(self, name: str, gate: Path, folder: Path, options: Sequence[str]) -> None:
        self.name = name
        self._lines = b""
        self._process = subprocess.Popen(
            [gate, *options],
            env=os.environ | {"LD_LIBRARY_PATH": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._selector = selectors.DefaultSelector()
        assert self._process.stdout is not None
        self._selector.register(self._process.stdout, selectors.EVENT_READ)
        try:
            library = Path(self._answer("its start").get("library", ""))
            if library.resolve().parent != folder.resolve():
                raise WorkerError(f"{name}: {library} is measured, not {folder}'s")
        except BaseException:
            self.kill()
            raise

    def ask(self, what: str) -> dict[str, Any]:
        """The answer to a line."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(what.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # its end is what the answer is
        return self._answer(what)

    def end(self) -> None:
        """Lets it close its job."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"end\n")
        self._process.stdin.close()
        self._process.wait(ANSWER_S)

    def kill(self) -> None:
        """Whatever it does."""
        self._process.kill()
        self._process.wait()

    def _answer(self, what: str) -> dict[str, Any]:
        # What is no JSON is said by the watchdog: it goes to the user.
        assert self._process.stdout is not None
        while True:
            while b"\n" in self._lines:
                line, self._lines = self._lines.split(b"\n", 1)
                if line.startswith(b"{"):
                    answer: dict[str, Any] = json.loads(line)
                    if "error" in answer:
                        raise WorkerError(f"{self.name}: {answer['error']}")
                    return answer
                print(f"{self.name}: {line.decode(errors='replace')}", file=sys.stderr)
            if not self._selector.select(ANSWER_S):
                raise WorkerError(f"{self.name} has not answered to {what} in {ANSWER_S} s")
            read = os.read(self._process.stdout.fileno(), 1 << 16)
            if not read:
                status = self._process.wait()
                raise WorkerError(f"{self.name} ended with status {status} in {what}")
            self._lines += read


@dataclass
class Row:
    """A row's measurements, by worker: microseconds and bits."""

    name: str
    us: dict[str, list[float]] = field(default_factory=dict)
    bits: dict[str, set[str]] = field(default_factory=dict)

    def add(self, worker: str, answer: dict[str, Any]) -> None:
        self.us.setdefault(worker, []).append(float(answer["us"]))
        self.bits.setdefault(worker, set()).add(str(answer["bits"]))

    def ratios(self, worker: str) -> list[float]:
        """Of a worker to base, round by round."""
        return [x / base for x, base in zip(self.us[worker], self.us["base"], strict=True)]

    def ratio(self) -> float:
        return median(self.ratios("head"))

    def spread(self) -> float:
        """How far equal builds lie apart: the 90th percentile."""
        apart = sorted(abs(ratio - 1) for ratio in self.ratios("again"))
        return apart[min(len(apart) - 1, int(0.9 * len(apart)))]

    def allowed(self) -> float:
        return max(TOLERANCE, self.spread())

    def verdict(self) -> str:
        # Where one build gives different bits from time to time, nothing follows from them.
        same = self.bits["base"] | self.bits["again"]
        if len(same) == 1 and self.bits["head"] != same:
            return "BITS"
        if self.ratio() > 1 + self.allowed():
            return "SLOWER"
        return "faster" if self.ratio() < 1 - self.allowed() else "equal"

    def report(self) -> dict[str, Any]:
        return {
            "row": self.name,
            "us": self.us,
            "ratio": self.ratio(),
            "spread": self.spread(),
            "verdict": self.verdict(),
        }


def measure(workers: dict[str, Worker], names: Sequence[str], rounds: int) -> list[Row]:
    """All rows, round by round."""
    rows = [Row(name) for name in names]
    for number in range(rounds):
        for row in rows:
            order = list(workers) if number % 2 == 0 else list(reversed(workers))
            for name in order:
                row.add(name, workers[name].ask(row.name))
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return rows


def shares(workers: dict[str, Worker]) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Shares of calls, by worker, and which of them are lower with head."""
    found: dict[str, dict[str, float]] = {}
    for name, worker in workers.items():
        counts = worker.ask("counts")
        calls = max(counts.pop("calls"), 1)
        found[name] = {what: n / calls for what, n in counts.items()}
    lower = []
    for what, share in found["head"].items():
        pair = found["base"][what], found["again"][what]
        # A call more or less follows from when ranks come.
        if share < min(pair) - max(0.01, abs(pair[0] - pair[1])):
            lower.append(what)
    return found, lower


def choose(known: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """Those of the known rows that the patterns name; all for none."""
    for pattern in wanted:
        if not fnmatch.filter(known, pattern):
            raise WorkerError(f"no row {pattern}; there are: {', '.join(known)}")
    return [r for r in known if not wanted or any(fnmatch.fnmatch(r, w) for w in wanted)]


def show(rows: Sequence[Row], found: dict[str, dict[str, float]], lower: Sequence[str]) -> None:
    """The table."""
    numbers = ["base us", "head us", "ratio", "A/A", "allowed"]
    table = make_table("Head beside base", ["row", *numbers, "verdict"], numbers)
    for row in rows:
        table.add_row(
            row.name,
            f"{median(row.us['base']):.2f}",
            f"{median(row.us['head']):.2f}",
            f"{row.ratio():.3f}",
            f"{row.spread():.1%}",
            f"{1 + row.allowed():.3f}",
            row.verdict(),
        )
    console = make_console()
    console.print(table)
    for what, share in found["head"].items():
        verdict = "LOWER" if what in lower else "not lower"
        console.print(f"{what}: {share:.1%} of calls, {found['base'][what]:.1%} at base: {verdict}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints the table, writes the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("base", type=Path, help="folder of the library to compare with")
    parser.add_argument("head", type=Path, help="folder of the library to judge")
    parser.add_argument("rows", nargs="*", help="such as 'stream/*' (default: all)")
    parser.add_argument("--rounds", type=int, default=6, help="at least 5 (default: 6)")
    parser.add_argument("--gate", type=Path, default=ROOT / "build/cuda/gpu/gate")
    parser.add_argument("--ranks", type=int, help="default: all GPUs")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    if options.rounds < LEAST_ROUNDS:
        parser.error(f"argument --rounds: at least {LEAST_ROUNDS}: fewer say nothing")
    for folder in (options.base, options.head):
        if not (folder / "libunjam.so.0").is_file():
            parser.error(f"{folder} has no libunjam.so.0: give a build's folder")
    if not options.gate.is_file():
        parser.error(f"{options.gate} is not built: cmake --build build/cuda --target gpu_gate")
    ranks = [] if options.ranks is None else ["--ranks", str(options.ranks)]
    folders = {"base": options.base, "again": options.base, "head": options.head}
    workers: dict[str, Worker] = {}
    try:
        for name, folder in folders.items():
            workers[name] = Worker(name, options.gate, folder, ranks)
        names = choose(workers["base"].ask("rows")["rows"], options.rows)
        rows = measure(workers, names, options.rounds)
        found, lower = shares(workers)
    except WorkerError as error:
        for worker in workers.values():
            worker.kill()
        print(f"ab: {error}", file=sys.stderr)
        return 1
    for worker in workers.values():
        worker.end()
    show(rows, found, lower)
    if options.json:
        command = ["python3", "bench/ab.py", *(arguments or sys.argv[1:])]
        report = make_report([row.report() for row in rows], "cuda", command)
        report["shares"] = found
        write_report(options.json, report)
    return 1 if lower or any(row.verdict().isupper() for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
