"""Plants mistakes in the kernels, one at a time, and says which the tests on the CPU find.

planted_mistakes.py [--list] [NAME ...]. A mistake is a file of src/ with other text, which stands
in front of the tree's own as a test of this folder is compiled. Each must make its test fail.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SLOTS = "device/cuda/exec/slots/"
PACKETS = "device/cuda/exec/packets/"
KERNELS = "device/cuda/kernels/"
CUDA_HEADERS = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"


@dataclass
class Mistake:
    name: str
    file: str  # of src/
    # Of each: text that is there once, and what stands there instead.
    changes: list[tuple[str, str]]
    test: str = "call_kernel_test"
    only: str = "CallKernel.*"  # as --gtest_filter
    seeds: int = 5  # as UNJAM_TEST_SEED, until one fails


MISTAKES = [
    Mistake(
        "a slice is published while a warp still moves it",
        SLOTS + "calls.cuh",
        [("< d.count(warps(), n - from)) break;", "< d.count(warps(), n - from) - 1) break;")],
    ),
    Mistake(
        "flags before what the header says",
        SLOTS + "publish.cuh",
        [
            (
                "if (news && out) store_headers(c, q, done, to);",
                "if (news && out) store_flags(c, q, done, to);",
            ),
            (
                "        publish_news(c, out, q, done, to);\n",
                "        if (out) store_headers(c, q, done, to);\n",
            ),
        ],
    ),
    Mistake(
        "a credit before the result that the slice was for",
        SLOTS + "calls.cuh",
        [("(!steps.gather_waits_for_sent || sent >=", "(true || sent >=")],
        only="CallKernel.*InPlace",
        seeds=20,
    ),
    Mistake(
        "a gather in front of what its pass still collects",
        SLOTS + "calls.cuh",
        [("(!steps.gather_waits_for_collected || collected >=", "(true || collected >=")],
        only="CallKernel.GathersWhatNobodyForgets",
        seeds=1,
    ),
    Mistake(
        "every lane asks the host all the time",
        SLOTS + "steer.cuh",
        [
            (
                "    const bool asks_host =\n        (now - last > kStillNs && now - asked >",
                "    const bool asks_host =\n        true || (now - last > 0 && now - asked >",
            )
        ],
        only="CallKernel.WaitsAndLetsTheHostBe",
        seeds=1,
    ),
    Mistake(
        "a rehearsal that gives slices to the movers",
        KERNELS + "call_by_slots.cuh",
        [
            (
                "steer_or_rehearse(slot_call_in(runs[run.rehearses ? 1 : 0]));",
                "steer_or_rehearse(slot_call_in(runs[0]));",
            )
        ],
    ),
    Mistake(
        "a slot is used before what was in it is taken",
        SLOTS + "calls.cuh",
        [
            (
                "if (slice < own) return transport.own_slot_is_free(behind);",
                "if (slice < own) return behind <= own;",
            )
        ],
    ),
    Mistake(
        "a pool slot that somebody has not taken yet",
        SLOTS + "publish.cuh",
        [
            (
                "is_free = use.step_end == 0 || load_acquire(until) >= use.step_end;",
                "is_free = true;",
            )
        ],
        only="CallKernel.BorrowsWhatIsTaken",
    ),
    Mistake(
        "pool slots go round too soon",
        SLOTS + "calls.cuh",
        [
            (
                "return behind < (slice < own + borrowed ? kSlotHeaders : own + borrowed);",
                "return behind < kSlotHeaders;",
            )
        ],
    ),
    Mistake(
        "who gives up says that more has gone out than has",
        SLOTS + "calls.cuh",
        [
            (
                "if (hop == kSends) return order().firsts_in(of.sent[peer]);",
                "if (hop == kSends) return of.moved[kSends];",
            )
        ],
        only="CallKernel.GivesUp*",
        seeds=20,
    ),
    Mistake(
        "movers go on to the next slice's place while it is described",
        SLOTS + "steer.cuh",
        [
            (
                "n == d + in_hand ||",
                "n == d + in_hand + 1 ||",
            )
        ],
    ),
    Mistake(
        "what has come is written over before it is moved",
        SLOTS + "watch.cuh",
        [("if (at.k >= taken + kCome) return", "if (at.k >= taken + kCome + 4) return")],
    ),
    Mistake(
        "the last credits are not told",
        SLOTS + "publish.cuh",
        [
            (
                "    news = !done && taken != 0 &&\n",
                "    news = false && taken != 0 &&\n",
            ),
        ],
        only="CallKernel.TellsTheLastCredits",
        seeds=5,
    ),
    Mistake(
        "a packet is believed without its flag",
        PACKETS + "places.cuh",
        [("return cuda_leaves::has_flag(found, flag);", "return true;")],
        seeds=1,
    ),
    Mistake(
        "a reduction is stored before all have voted",
        KERNELS + "call_by_packets.cuh",
        [
            (
                "  const bool done = __syncthreads_and(come) != 0;\n",
                "  if (is_mover() && come && call.reduces) store_held(call, w, held);\n"
                "  const bool done = __syncthreads_and(come) != 0;\n",
            )
        ],
        only="CallKernel.GivesUp*",
        seeds=20,
    ),
    Mistake(
        "no room is looked for before packets are sent",
        KERNELS + "call_by_packets.cuh",
        [("if (threadIdx.x == 0) s.ok = ok ? 1 : 0;", "if (threadIdx.x == 0) s.ok = 1;")],
        only="CallKernel.SendsPacketsWhereThereIsRoom",
        seeds=1,
    ),
    Mistake(
        "a lane's lease is not waited for",
        KERNELS + "call_in_stream.cuh",
        [
            (
                "const bool ok = taken && looks(!ahead);",
                "const bool ok = looks(!ahead);",
            )
        ],
        only="CallKernel.WaitsForItsLanesLeases",
        seeds=3,
    ),
    Mistake(
        "two-shot calls hand over one primitive too many",
        KERNELS + "call_by_packets.cuh",
        [
            (
                "handed.set_primitives_done(primitives);",
                "handed.set_primitives_done(2);",
            )
        ],
        only="CallKernel.GivesUp*",
        seeds=20,
    ),
    Mistake(
        "a slice with another call's description",
        SLOTS + "steer_several.cuh",
        [("    if (x.given_of[at] != its) {", "    if (false) {")],
        test="daemon_kernel_test",
        only="DaemonKernel.CallsThatGoTogether",
        seeds=3,
    ),
    Mistake(
        "a call of several is over before its flags are out",
        SLOTS + "publish_several.cuh",
        [
            (
                "done = done && of.sent[q] == c.order().slices();",
                "done = done;",
            )
        ],
        test="daemon_kernel_test",
        only="DaemonKernel.CallsThatGoTogether",
        seeds=10,
    ),
    Mistake(
        "a call that was left begins anew",
        KERNELS + "pipelined_batch.cuh",
        [
            (
                "const std::uint32_t done = c.has(thread) ? t.done[steps.primitives[thread]] : 0;",
                "const std::uint32_t done = 0;",
            )
        ],
        test="daemon_kernel_test",
        only="DaemonKernel.*",
        seeds=10,
    ),
    Mistake(
        "daemons' packets are taken before they have come",
        KERNELS + "packet_batch.cuh",
        [("    come = movers_agree(come);\n    if constexpr", "    if constexpr")],
        test="daemon_kernel_test",
        only="DaemonKernel.PacketsOfAllWarps",
        seeds=3,
    ),
    Mistake(
        "a slice is published before its copy is done",
        SLOTS + "carry.cuh",
        [
            (
                "return __reduce_min_sync(0xffffffff, posts ? finished :",
                "return __reduce_min_sync(0xffffffff, posts ? posted :",
            )
        ],
        only="CallKernelCarried.*",
    ),
    Mistake(
        "short rows end with their first piece",
        KERNELS + "boxes.cu",
        [("if (i >= box.rows * box.row) break;", "if (i >= kPieceUnits) break;")],
        test="boxes_kernel_test",
        only="BoxesKernel.*",
    ),
    Mistake(
        "elements of any alignment are loaded as aligned ones are stored",
        KERNELS + "boxes.cu",
        [
            (
                "    if (t < n) store<To>(places[t].to, convert<To>(values[t]));",
                "    if (t < n) *reinterpret_cast<To*>(reinterpret_cast<std::uintptr_t>("
                "places[t].to) / sizeof(To) * sizeof(To)) = convert<To>(values[t]);",
            )
        ],
        test="boxes_kernel_test",
        only="BoxesKernel.*",
    ),
    Mistake(
        "boxes of a batch begin where the first one does",
        KERNELS + "boxes.cu",
        [("    begin = end;\n", "")],
        test="boxes_kernel_test",
        only="BoxesKernel.*",
    ),
]


def planted(mistake: Mistake) -> str:
    """The file's text with the mistake."""
    text = (ROOT / "src" / mistake.file).read_text()
    for old, new in mistake.changes:
        if text.count(old) != 1:
            raise ValueError(f"{mistake.name}: {mistake.file} has {text.count(old)} times {old!r}")
        text = text.replace(old, new)
    return text


class Compiler:
    """Compiles tests of this folder; what they all need, once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.flags = ["-std=c++20", "-O1", "-w", f"-I{ROOT / 'tests/simt'}", f"-I{ROOT / 'src'}"]
        self.flags += [f"-I{ROOT / 'include'}", f"-I{ROOT}", "-isystem", str(CUDA_HEADERS)]
        sources = sorted((ROOT / "src/plan").glob("*.cc"))
        sources += sorted((ROOT / "src/plan/algorithms").glob("*.cc"))
        plans = folder / "plans.cc"
        plans.write_text("".join(f'#include "{s}"\n' for s in sources if s.name != "describe.cc"))
        self.compile(plans, folder / "plans.o", ["-Dunjam=unjam_on_cpu"], own=False)
        self.compile(ROOT / "tests/simt/machine.cc", folder / "machine.o", [])

    def compile(self, source: Path, to: Path, more: list[str], own: bool = True) -> None:
        flags = self.flags if own else [f for f in self.flags if "tests/simt" not in f]
        run = ["g++", *more, *flags, "-c", str(source), "-o", str(to)]
        subprocess.run(run, check=True)

    def test(self, mistake: Mistake) -> Path:
        front = self.folder / "front"
        file = front / mistake.file
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(planted(mistake))
        program = self.folder / mistake.test
        try:
            source = ROOT / "tests/simt" / f"{mistake.test}.cc"
            self.compile(source, program.with_suffix(".o"), [f"-I{front}"])
        finally:
            file.unlink()
        objects = [program.with_suffix(".o"), self.folder / "plans.o", self.folder / "machine.o"]
        libraries = ["-lgtest", "-lgtest_main", "-lpthread"]
        subprocess.run(["g++", *map(str, objects), *libraries, "-o", str(program)], check=True)
        return program


def find(program: Path, mistake: Mistake) -> str:
    """What the test says as it finds the mistake; "": it does not."""
    for seed in range(1, mistake.seeds + 1):
        environment = {**os.environ, "UNJAM_TEST_SEED": str(seed)}
        run = subprocess.run(
            [str(program), f"--gtest_filter={mistake.only}", "--gtest_fail_fast"],
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=600,
        )
        if run.returncode == 0:
            continue
        lines = [line for line in run.stdout.splitlines() if line.startswith("  ")]
        said = lines[1].strip() if len(lines) > 1 else f"it ended with {run.returncode}"
        return f"seed {seed}: {said[:90]}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of names of mistakes; none: all")
    parser.add_argument("--list", action="store_true", help="names them, and plants none")
    options = parser.parse_args()
    chosen = [
        m for m in MISTAKES if not options.names or any(part in m.name for part in options.names)
    ]
    if options.list:
        for mistake in chosen:
            planted(mistake)
            print(mistake.name)
        return 0
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        compiler = Compiler(Path(folder))
        for mistake in chosen:
            begun = time.monotonic()
            found = find(compiler.test(mistake), mistake)
            missed += not found
            said = found or "NOT FOUND"
            print(f"{mistake.name}: {said} ({time.monotonic() - begun:.0f} s)", flush=True)
    print(f"{missed} of {len(chosen)} should have been found, and were not")
    return 1 if missed or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
