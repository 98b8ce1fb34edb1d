"""What it costs that calls can be seen: a 1 KiB all-reduce through torch, per call.

bench/observing_cost.py [--device cuda] [--other CHECKOUT] [--json FILE]

One job for each setting, all started at once; one of them runs at a time, a block of calls, and the
blocks go round in the order A B C … C B A. The setting "off" has two jobs: how far these two are
apart says what can be told apart at all.

    off        no recorder (TORCH_FR_BUFFER_SIZE=0), no profiler, no NVTX tool
    recorder   the flight recorder, as it is without any setting
    stacks     the same, with the places in the program (UNJAM_TORCH_STACKS=1)
    nvtx       an NVTX tool that does nothing (compiled here)
    profiler   torch.profiler over each block
    other      "off" with the package of another checkout: what was before, say
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOL = """
#include <cstddef>
#include <cstdint>
struct Callbacks { size_t size; int (*get_module)(int, void****, unsigned*); };
static void* create(const char*) { static int domain; return &domain; }
static uint64_t start(void*, const void*) { return 1; }
static void end(void*, uint64_t) {}
extern "C" int InitializeInjectionNvtx2(const void* (*get_table)(uint32_t)) {
  const auto* callbacks = static_cast<const Callbacks*>(get_table(1));
  void*** table = nullptr;
  unsigned entries = 0;
  if (callbacks == nullptr || !callbacks->get_module(5, &table, &entries) || entries < 13) return 0;
  *table[2] = reinterpret_cast<void*>(start);
  *table[3] = reinterpret_cast<void*>(end);
  *table[12] = reinterpret_cast<void*>(create);
  return 1;
}
"""


def rank_main(rank: int, ranks: int, store: str, device: str, size: int, profiled: bool) -> None:
    """A rank: runs a block for each number that it reads, and answers with nanoseconds per call."""
    import contextlib

    import torch
    import torch.distributed as dist

    import unjam.torch  # noqa: F401

    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("unjam", init_method=f"file://{store}", rank=rank, world_size=ranks)
    x = torch.zeros(size // 4, device=device)

    def run(calls: int) -> float:
        dist.barrier()
        begun = time.perf_counter_ns()
        for _ in range(calls):
            dist.all_reduce(x)
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter_ns() - begun) / calls

    run(200)
    print("ready", flush=True)
    for line in sys.stdin:
        scope = contextlib.nullcontext()
        if profiled:
            scope = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        with scope:
            took = run(int(line))
        print(took, flush=True)
    dist.destroy_process_group()


class Job:
    """The ranks of one setting."""

    def __init__(
        self, name: str, options: argparse.Namespace, folder: Path, package: Path, **env: str
    ) -> None:
        self.name = name
        self.blocks: list[float] = []
        environment = {**os.environ, **env, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"}
        store = str(folder / f"store {name}")
        profiled = str(int(name == "profiler"))
        words = [str(options.ranks), store, options.device, str(options.bytes), profiled]
        self._ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", str(rank), *words],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=(folder / f"{name} {rank}.err").open("w"),
                text=True,
            )
            for rank in range(options.ranks)
        ]

    def _answers(self) -> list[str]:
        answers = []
        for process in self._ranks:
            assert process.stdout is not None
            answers.append(process.stdout.readline().strip())
        return answers

    def wait(self) -> bool:
        return self._answers() == ["ready"] * len(self._ranks)

    def run(self, calls: int) -> None:
        """A block; the slowest rank's time counts."""
        for process in self._ranks:
            assert process.stdin is not None
            process.stdin.write(f"{calls}\n")
            process.stdin.flush()
        self.blocks.append(max(float(answer) for answer in self._answers()))

    def end(self) -> None:
        for process in self._ranks:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._ranks:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def make_jobs(options: argparse.Namespace, folder: Path) -> list[Job]:
    own = ROOT / "python"
    off = {"TORCH_FR_BUFFER_SIZE": "0"}
    jobs = [
        Job("off", options, folder, own, **off),
        Job("off again", options, folder, own, **off),
        Job("recorder", options, folder, own, TORCH_FR_BUFFER_SIZE="2000"),
        Job("stacks", options, folder, own, TORCH_FR_BUFFER_SIZE="2000", UNJAM_TORCH_STACKS="1"),
        Job("profiler", options, folder, own, **off),
    ]
    (folder / "tool.cc").write_text(TOOL)
    library = folder / "libtool.so"
    command = [os.environ.get("CXX", "g++"), "-O2", "-shared", "-fPIC", str(folder / "tool.cc")]
    subprocess.run([*command, "-o", str(library)], check=True)
    jobs.append(Job("nvtx", options, folder, own, NVTX_INJECTION64_PATH=str(library), **off))
    if options.other:
        jobs.append(Job("other", options, folder, options.other / "python", **off))
    return jobs


def show(found: dict[str, list[float]]) -> None:
    base = statistics.median(found["off"]), min(found["off"])
    print(
        f"{'setting':<10} {'us a call':>10} {'half of blocks':>18} {'more':>7} {'least':>7} ",
        end="",
    )
    print(f"{'more':>7}")
    for name, blocks in found.items():
        low, middle, high = statistics.quantiles(blocks, n=4)
        least = min(blocks)
        more = [
            f"{(mine - off) / 1000:+.2f}" for mine, off in zip((middle, least), base, strict=True)
        ]
        if name == "off":
            more = ["", ""]
        between = f"{low / 1000:.2f} to {high / 1000:.2f}"
        print(f"{name:<10} {middle / 1000:>10.2f} {between:>18} {more[0]:>7} ", end="")
        print(f"{least / 1000:>7.2f} {more[1]:>7}")
    print('What is not farther from "off" than "off again" cannot be told from nothing.')


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--bytes", type=int, default=1024)
    parser.add_argument("--calls", type=int, default=1000, help="of a block")
    parser.add_argument("--rounds", type=int, default=20, help="there and back: two blocks each")
    parser.add_argument("--other", type=Path, help="a checkout to compare with")
    parser.add_argument("--json", type=Path, help="where the blocks' figures are written")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jobs = make_jobs(options, folder)
        try:
            for job in jobs:
                if not job.wait():
                    errors = [path.read_text() for path in sorted(folder.glob(f"{job.name} *.err"))]
                    print(f"{job.name} does not start:\n" + "\n".join(errors), file=sys.stderr)
                    return 1
            for _ in range(options.rounds):
                for job in [*jobs, *reversed(jobs)]:
                    job.run(options.calls)
        finally:
            for job in jobs:
                job.end()
        found = {job.name: job.blocks for job in jobs}
    show(found)
    if options.json:
        settings = {name: getattr(options, name) for name in ("device", "ranks", "bytes", "calls")}
        options.json.write_text(json.dumps({**settings, "ns_per_call": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank, ranks, store, device, size, profiled = sys.argv[2:]
        rank_main(int(rank), int(ranks), store, device, int(size), profiled == "1")
    else:
        sys.exit(main())
