"""Two builds of the library side by side on one machine: is one slower than the other?

    python3 bench/ab.py BASE HEAD [ROW …] [--draws N] [--json FILE]

BASE and HEAD are folders with libunjam.so.0 and libunjam_cuda.so. The program `gate` of
bench/gate.cu measures a row at a time. It runs three times at once: with BASE, with BASE again, and
with HEAD. Each round measures a row in all three, in an order that turns from round to round, so
that what drifts falls on all alike.

Processes with the same library differ too, by some percent for as long as they live: by where their
memory lies. So the three are started anew some times, in another order each time; such a draw gives
the median of its rounds.

A row passes if the median ratio of head to base is at most 1 + max(2 %, spread). The spread is
how far from 1 the same median of base's two processes comes in 90 of 100 such measurements, by
resampling the draws. Bits must be equal, and
the shares of calls without the engine, and of calls begun early, no lower. Status 1 if not.
"""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import json
import os
import random
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
LEAST_DRAWS = 5
ROUNDS = 4  # of a draw
TOLERANCE = 0.02
RESAMPLES = 1000
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
        try:
            self._process.stdin.write(b"end\n")
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # its status is what counts
        try:
            status = self._process.wait(ANSWER_S)
        except subprocess.TimeoutExpired:
            raise WorkerError(f"{self.name} has not ended in {ANSWER_S} s") from None
        if status != 0:
            raise WorkerError(f"{self.name} ended with status {status} when it closed its job")

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
    """A row's measurements, by worker: microseconds, draw by draw, and bits."""

    name: str
    us: dict[str, list[float]] = field(default_factory=dict)
    bits: dict[str, set[str]] = field(default_factory=dict)

    def ratios(self, worker: str) -> list[float]:
        """Of a worker to base, draw by draw."""
        return [x / base for x, base in zip(self.us[worker], self.us["base"], strict=True)]

    def ratio(self) -> float:
        return median(self.ratios("head"))

    def spread(self) -> float:
        """How far equal builds seem apart by chance: the 90th percentile of resampled medians."""
        ratios = self.ratios("again")
        chance = random.Random(0)
        apart = sorted(
            abs(median(chance.choices(ratios, k=len(ratios))) - 1) for _ in range(RESAMPLES)
        )
        return apart[int(0.9 * RESAMPLES)]

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


def draw(workers: dict[str, Worker], rows: Sequence[Row]) -> None:
    """All rows, round by round."""
    us: dict[tuple[str, str], list[float]] = {}
    for number in range(ROUNDS):
        for row in rows:
            order = list(workers) if number % 2 == 0 else list(reversed(workers))
            for name in order:
                answer = workers[name].ask(row.name)
                us.setdefault((row.name, name), []).append(float(answer["us"]))
                row.bits.setdefault(name, set()).add(str(answer["bits"]))
    for row in rows:
        for name in workers:
            row.us.setdefault(name, []).append(median(us[row.name, name]))


def measure(
    gate: Path, folders: dict[str, Path], wanted: Sequence[str], draws: int, words: Sequence[str]
) -> tuple[list[Row], dict[str, dict[str, int]]]:
    """All draws; the rows, and how many calls each worker has done in which way.

    Raises:
        WorkerError: a worker failed; none is left.
    """
    rows: list[Row] = []
    counts: dict[str, dict[str, int]] = {name: {} for name in folders}
    orders = itertools.cycle(itertools.permutations(folders))
    for number in range(draws):
        workers: dict[str, Worker] = {}
        try:
            for name in next(orders):
                workers[name] = Worker(name, gate, folders[name], words)
            if not rows:
                rows = [Row(r) for r in choose(workers["base"].ask("rows")["rows"], wanted)]
            draw(workers, rows)
            for name, worker in workers.items():
                for what, n in worker.ask("counts").items():
                    counts[name][what] = counts[name].get(what, 0) + int(n)
            for worker in workers.values():
                worker.end()
        except BaseException:
            for worker in workers.values():
                worker.kill()
            raise
        print(f"draw {number + 1} of {draws}", file=sys.stderr, flush=True)
    return rows, counts


def shares(counts: dict[str, dict[str, int]]) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Shares of calls, by worker, and which of them are lower with head."""
    found = {
        name: {what: n / max(own["calls"], 1) for what, n in own.items() if what != "calls"}
        for name, own in counts.items()
    }
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
    console = make_console(plain_width=100)
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
    parser.add_argument("--draws", type=int, default=24, help="at least 5 (default: 24)")
    parser.add_argument("--gate", type=Path, default=ROOT / "build/cuda/gpu/gate")
    parser.add_argument("--ranks", type=int, help="default: all GPUs")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    if options.draws < LEAST_DRAWS:
        parser.error(f"argument --draws: at least {LEAST_DRAWS}: fewer say nothing")
    for folder in (options.base, options.head):
        if not (folder / "libunjam.so.0").is_file():
            parser.error(f"{folder} has no libunjam.so.0: give a build's folder")
    if not options.gate.is_file():
        parser.error(f"{options.gate} is not built: cmake --build build/cuda --target gpu_gate")
    ranks = [] if options.ranks is None else ["--ranks", str(options.ranks)]
    folders = {"base": options.base, "again": options.base, "head": options.head}
    try:
        rows, counts = measure(options.gate, folders, options.rows, options.draws, ranks)
    except WorkerError as error:
        print(f"ab: {error}", file=sys.stderr)
        return 1
    found, lower = shares(counts)
    show(rows, found, lower)
    if options.json:
        command = ["python3", "bench/ab.py", *(arguments or sys.argv[1:])]
        report = make_report([row.report() for row in rows], "cuda", command)
        report["shares"] = found
        write_report(options.json, report)
    return 1 if lower or any(row.verdict().isupper() for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
