"""The recipes of docs/torch-recipes.md, and the other examples, beside NCCL on this machine's GPUs.

    python3 tests/python/gpu_recipes.py                       # 2 or 4 ranks, a table at the end
    python3 tests/python/gpu_recipes.py --only pipeline,d --peer none
    python3 tests/python/gpu_recipes.py --device cpu          # beside gloo

With ``--peer none`` ranks may share GPUs (``--ranks 4`` on a machine with one).

``--only`` takes letters of recipes (d: both runs of it, d1: that with ``--groups 1``) and parts of
programs' names. For a machine that is there for a short time: ``--seconds`` is for everything, and
``--start-limit`` for what comes before a run's ``--limit``. The adapter should be built before.

Each runs as a process group of its own, which is killed as a whole at its time limit. With unjam it
must be right (the two threads on one stream, a circle of the program's own: explained by name);
what the peer does is printed and never asked for. All output is kept in $OUT/recipes, or in
./gpu-results/recipes. Exit status 0: all was as it must be with unjam.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from processes import environment
from torch_tools import EXAMPLES, build_adapter

PEER = {"cpu": "gloo", "cuda": "nccl"}
START_S = 60  # for imports and joining: the limit of a run counts from there


@dataclass(frozen=True)
class Run:
    """A program with its options."""

    label: str  # what --only may call it, and the page the recipe's letter
    name: str
    words: tuple[str, ...] = ()
    peer: bool = True  # whether to run it with the peer, too
    wants: int = 2  # ranks for all that it is meant to show
    note: str = ""  # what is missing with two
    circle: bool = False  # must hang, and be explained
    gpus_only: bool = False

    def title(self) -> str:
        return " ".join([self.name, *self.words])


RUNS = (
    Run("a", "recipes/random_grad_order", wants=4, note="data parallelism only"),
    Run("b", "recipes/two_threads"),
    Run("b1", "recipes/two_threads", ("--streams", "1"), circle=True, gpus_only=True),
    Run("c", "recipes/three_groups", wants=4, note="two groups meet, not three"),
    Run("d", "recipes/local_wait"),
    Run("d1", "recipes/local_wait", ("--groups", "1")),
    Run("e", "recipes/expert_order"),
    Run("f", "recipes/sync_beside_training"),
    Run("g", "recipes/big_refit"),
    Run("ddp", "ddp_cnn", peer=False),
    Run("fsdp", "fsdp_tp_gpt", peer=False, wants=4, note="tensor parallelism only"),
    Run("pipeline", "pipeline", peer=False),
)


def chosen(words: list[str]) -> list[Run]:
    """The runs that --only names.

    Raises:
        ValueError: a word names none.
    """
    found = []
    for word in (part for text in words for part in text.split(",") if part):
        fits = [
            run
            for run in RUNS
            if word in (run.label, run.label.rstrip("1")) or (len(word) > 2 and word in run.title())
        ]
        if not fits:
            raise ValueError(f"no program is named by {word!r}")
        found += fits
    return [run for run in RUNS if run in found]


@dataclass
class Outcome:
    words: str  # right, wrong, hangs, explained, error
    seconds: float
    detail: str = ""


def attempt(
    run: Run,
    backend: str,
    device: str,
    ranks: int,
    limit: float,
    logs: Path,
    start_limit: float = START_S,
) -> Outcome:
    """Runs it, within the two limits together, and kills what is left of it."""
    path = EXAMPLES / f"{run.name}.py"
    command = [sys.executable, str(path), "--json", "--backend", backend, "--device", device]
    command += ["--ranks", str(ranks), "--limit", str(limit), *run.words]
    label = re.sub(r"\W+", "-", f"{path.stem} {' '.join(run.words)}").strip("-")
    log = logs / f"{label}-{ranks}-{backend}.log"
    env = environment(GLOO_SOCKET_IFNAME="lo", PYTHONUNBUFFERED="1")
    began = time.monotonic()
    with log.open("w") as out:
        out.write(" ".join(command) + "\n")
        out.flush()
        process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(limit + start_limit)
        except subprocess.TimeoutExpired:
            pass
        finally:
            try:  # the ranks, too, whoever has ended before
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
    return judge(log.read_text(errors="replace"), time.monotonic() - began, run.circle)


def judge(text: str, seconds: float, circle: bool = False) -> Outcome:
    """What a log says."""
    said = [line for line in text.splitlines() if line.startswith('{"example"')]
    if not said:
        return Outcome("hangs", seconds, "no word until the limit, while joining or later")
    found = json.loads(said[-1])
    outcome = found["outcome"]
    if outcome == "right":
        return Outcome("right", found["seconds"])
    if outcome.startswith("hung"):
        if circle and explained(text):
            return Outcome("explained", seconds, "hung, as it must")
        return Outcome("hangs", seconds, outcome)
    return Outcome("wrong" if "wrong: " in outcome else "error", seconds, outcome)


def explained(text: str) -> bool:
    """Whether unjam named both operations of the circle, as pending on two ranks at least."""
    lines = [line for line in text.splitlines() if line.startswith("unjam: ")]
    ranks = {m[1] for line in lines if (m := re.match(r"unjam: rank (\d+): [1-9]", line))}
    named = " ".join(line for line in lines if "called by: " in line)
    return len(ranks) >= 2 and "all_reduce(" in named and "send_recv(" in named


def gpus() -> int:
    import torch

    return torch.cuda.device_count()


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=list(PEER), default="cuda")
    parser.add_argument("--ranks", type=int, help="default: 4 where there are as many GPUs, else 2")
    parser.add_argument("--peer", help="nccl or gloo, the default of the device; none: unjam alone")
    parser.add_argument(
        "--only", nargs="+", default=[], help="these: letters, or parts of names, also with commas"
    )
    parser.add_argument("--limit", type=float, default=60, help="seconds, with unjam")
    parser.add_argument("--circle-limit", type=float, default=10, help="of what must hang")
    parser.add_argument("--peer-limit", type=float, default=20, help="seconds, with the peer")
    parser.add_argument(
        "--start-limit", type=float, default=START_S, help="until ranks have joined"
    )
    parser.add_argument("--seconds", type=float, help="for all: begins no run that may take longer")
    options = parser.parse_args(words)
    try:
        runs = chosen(options.only) if options.only else list(RUNS)
    except ValueError as error:
        parser.error(f"--only: {error}: there are {', '.join(run.label for run in RUNS)}")
    began = time.monotonic()
    peer = options.peer or PEER[options.device]
    there = gpus() if options.device == "cuda" else 4
    ranks = options.ranks or (4 if there >= 4 else 2)
    if there == 0:
        parser.error("torch sees no GPU here")
    if there < ranks and peer != "none":
        parser.error(f"{ranks} ranks need as many GPUs with {peer}: torch sees {there}")
    logs = Path(os.environ.get("OUT", "gpu-results")) / "recipes"
    logs.mkdir(parents=True, exist_ok=True)
    build_adapter()
    table, bad = [], 0

    def tried(run: Run, backend: str, limit: float) -> Outcome | None:
        limits = limit + options.start_limit
        if options.seconds and time.monotonic() - began + limits > options.seconds:
            return None
        return attempt(
            run, backend, options.device, ranks, limit, logs, start_limit=options.start_limit
        )

    for run in runs:
        if run.gpus_only and options.device != "cuda":
            table.append((run.title(), "-", "skipped: needs GPUs", "", "", ""))
            continue
        ours = tried(run, "unjam", options.circle_limit if run.circle else options.limit)
        if ours is None:
            table.append((run.title(), str(ranks), "not run: --seconds", "", "", ""))
            bad += 1
            continue
        good = ours.words == ("explained" if run.circle else "right")
        bad += not good
        theirs = None
        if run.peer and peer != "none":
            theirs = tried(run, peer, options.peer_limit)
        row = (run.title(), str(ranks), *shown(ours, good), *shown(theirs))
        print(f"{row[0]}: {row[2]} | {row[4]}", flush=True)
        for backend, outcome in (("unjam", ours), (peer, theirs)):
            if outcome is not None and outcome.detail:
                print(f"    {backend}: {outcome.detail[:300]}", flush=True)
        table.append(row)
        if ranks < run.wants:
            left = f"skipped: needs {run.wants} ranks (with {ranks}: {run.note})"
            table.append((run.title(), str(run.wants), left, "", "", ""))
    text = as_table(("program", "ranks", "unjam", "s", peer, "s"), table)
    (logs / "table.txt").write_text(text + "\n")
    print(f"\n{text}\nlogs: {logs}")
    return 1 if bad else 0


def shown(outcome: Outcome | None, good: bool = True) -> tuple[str, str]:
    if outcome is None:
        return "-", ""
    return outcome.words + ("" if good else "  <-- must not be"), f"{outcome.seconds:.1f}"


def as_table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = (head, tuple("-" * width for width in widths), *rows)
    return "\n".join(
        "| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    )


if __name__ == "__main__":
    sys.exit(main())
