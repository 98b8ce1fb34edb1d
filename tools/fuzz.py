"""make fuzz: coverage-guided fuzzing of the control layer, by clang's libFuzzer.

fuzz.py [--seconds N] [--keep] [TARGET...]   (targets: TARGETS below)
Each target runs N seconds (default 60) on one core at low priority, from the inputs in
tests/fuzz/corpus/TARGET/ on. --keep then puts a minimal set of inputs of the same coverage there.
The unit test control_fuzz_test replays these inputs with any compiler.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from common import ROOT, Failure, main_wrapper, run, say

TARGETS = ["messages", "channel", "rendezvous", "agent_messages", "agent"]
BUILD = ROOT / "build" / "fuzz"
CORPUS = ROOT / "tests" / "fuzz" / "corpus"
LONGEST = {  # bytes of an input
    "messages": 2048,
    "channel": 4096,
    "rendezvous": 1024,
    "agent_messages": 2048,
    "agent": 1024,
}
FLAGS = ["-std=c++20", "-O1", "-g", "-fno-omit-frame-pointer", "-pthread"]
SANITIZERS = "fuzzer,address,undefined"


def compiler() -> str:
    """The clang++ that has libFuzzer; CLANGXX names another than the one in PATH."""
    program = os.environ.get("CLANGXX") or shutil.which("clang++")
    if program is None:
        raise Failure(
            "fuzzing needs clang++, which was not found (Debian, Ubuntu: apt-get install clang; "
            "or set CLANGXX). The kept inputs run without it: control_fuzz_test."
        )
    with tempfile.TemporaryDirectory() as folder:
        probe = Path(folder) / "probe.cc"
        probe.write_text(
            "#include <cstddef>\n#include <string>\n"
            'extern "C" int LLVMFuzzerTestOneInput(const unsigned char* d, std::size_t n) '
            "{ return std::string(d, d + n).size() > 1u << 30; }\n"
        )
        command = [
            program,
            "-std=c++20",
            f"-fsanitize={SANITIZERS}",
            probe,
            "-o",
            f"{folder}/probe",
        ]
        result = subprocess.run(command, check=False, capture_output=True, text=True)
    if result.returncode != 0:
        raise Failure(
            f"{program} cannot build with -fsanitize={SANITIZERS}: its libFuzzer runtime or a C++ "
            f"library is missing (Debian, Ubuntu: apt-get install libclang-rt-dev):\n"
            f"{result.stderr.strip()[-600:]}"
        )
    return program


def build(program: str, target: str) -> Path:
    """Compiles one target; all of it, since that takes seconds."""
    BUILD.mkdir(parents=True, exist_ok=True)
    binary = BUILD / target
    sources = [
        ROOT / "tests/fuzz/fuzz.cc",
        ROOT / "src/base/fork_guard.cc",
        *sorted((ROOT / "src/control").glob("*.cc")),
    ]
    includes = [f"-I{ROOT}", f"-I{ROOT / 'src'}", f"-I{ROOT / 'include'}"]
    define = f"-DUNJAM_FUZZ_TARGET={target}"
    run([program, *FLAGS, f"-fsanitize={SANITIZERS}", define, *includes, *sources, "-o", binary])
    return binary


def fuzz(binary: Path, target: str, seconds: int) -> Path:
    """Runs a target; what it finds new goes to build/fuzz/TARGET.found."""
    found = BUILD / f"{target}.found"
    found.mkdir(exist_ok=True)
    kept = CORPUS / target
    kept.mkdir(parents=True, exist_ok=True)
    seeds = BUILD / f"{target}.seeds"
    shutil.rmtree(seeds, ignore_errors=True)
    seeds.mkdir()
    run([binary, "-runs=0"], env=dict(os.environ, UNJAM_FUZZ_SEEDS=str(seeds)), capture_output=True)
    limits = [f"-max_total_time={seconds}", f"-max_len={LONGEST[target]}", "-timeout=20"]
    artifacts = f"-artifact_prefix={BUILD}/{target}-"
    options = [*limits, artifacts, "-rss_limit_mb=2048", "-print_final_stats=1", "-verbosity=1"]
    log = BUILD / f"{target}.log"
    with log.open("w") as out:
        command = ["nice", "-n", "19", binary, *options, found, kept, seeds]
        result = subprocess.run(command, check=False, stdout=out, stderr=subprocess.STDOUT)
    lines = log.read_text(errors="replace").splitlines()
    for line in lines:
        if line.startswith("stat::number_of_executed_units") or " DONE " in line:
            say(f"{target}: {line.strip()}")
    if result.returncode != 0:
        raise Failure("\n".join(lines[-60:]) + f"\n{target}: found something; all of it: {log}")
    return found


def keep(binary: Path, target: str, found: Path) -> None:
    """The smallest set of inputs with the coverage of all that there are."""
    kept = CORPUS / target
    merged = BUILD / f"{target}.merged"
    shutil.rmtree(merged, ignore_errors=True)
    merged.mkdir()
    command = ["nice", "-n", "19", binary, "-merge=1", f"-max_len={LONGEST[target]}"]
    run([*command, merged, kept, found, BUILD / f"{target}.seeds"], capture_output=True)
    shutil.rmtree(kept)
    shutil.copytree(merged, kept)
    size = sum(path.stat().st_size for path in kept.iterdir())
    say(f"{target}: {len(list(kept.iterdir()))} inputs kept, {size} bytes")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    unknown = set(options.targets) - set(TARGETS)
    if unknown:
        raise Failure(f"no target {', '.join(sorted(unknown))}: there are {', '.join(TARGETS)}")
    program = compiler()
    for target in options.targets or TARGETS:
        say(f"{target}: building, then {options.seconds} s")
        binary = build(program, target)
        found = fuzz(binary, target, options.seconds)
        if options.keep:
            keep(binary, target, found)
    return 0


if __name__ == "__main__":
    main_wrapper(main)
