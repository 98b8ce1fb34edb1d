"""Prints registers and spills of every kernel, and fails where there are too many.

The engine's kernel has an SM for a block of 512 threads, so it may use 128 registers. Of what it
calls, a rare path may spill a little; what spills more than a KiB is a mistake.

ptxas_report.py BUILD_DIR reads the *.ptxas files that tools/nvcc_log.sh leaves beside the objects
of the .cu files in compile_commands.json. ptxas counts the registers that a function called through
a pointer saves for its caller as spills, and so does this: they cost the same.

Each file's figures are also held against tools/ptxas_baseline.json: what is more than a tenth worse
fails, and so does a function that is compiled by itself and not in the list there, or no more.
ptxas_report.py --write BUILD_DIR writes the list and the figures anew. Seconds are told only.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import ROOT, Failure, main_wrapper

ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
PROPERTIES = re.compile(r"Function properties for (\w+)")
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers(.*)")
CUMULATIVE = re.compile(r"(\d+) bytes cumulative stack size")
SHARED = re.compile(r"(\d+) bytes smem")
SOURCES = ROOT / "src" / "device" / "cuda"
# The toolkit's own device functions, such as the slow paths of division.
FOREIGN = re.compile(r"^(__internal_|__nv_|__cuda_)")
# What nvcc makes of a file's own namespace.
LOCAL = re.compile(r"_INTERNAL_\w+::|\(anonymous namespace\)::")

BASELINE = ROOT / "tools" / "ptxas_baseline.json"
WORSE = 1.1  # than the baseline, at most
SECONDS = re.compile(r"Compile time = ([\d.]+) ms")
FATBIN = re.compile(r"\.nv_fatbin\s+PROGBITS\s+\w+\s+\w+\s+(\w+)")
MAX_ROWS = 20  # of device functions that spill
MOST_REGISTERS = 128  # of a kernel: 65536 for 512 threads
# Of a function, in either direction. All leaves are in one: some tens of bytes each. Of a call in a
# stream 600 are the eight units that two ranks' movers have under way of two-shot calls, and worth
# it: with four, and less spilled, 8 MiB took 53 us instead of 43 (lab/nccl-notes.md). What a call
# hands over is among them: no row of bench/ab.sh is slower for it.
MOST_SPILL_BYTES = 3840
# Of a thread of a kernel, with all that it calls: what CUDA has for each at first
# (cudaLimitStackSize). A launch that wants more lets the driver resize the memory of all threads,
# which waits for kernels that run, and those may wait for peers. (Where it is more, the library
# raises the limit as it begins, for all kernels of the process.)
MOST_STACK_BYTES = 1024
MOST_STACK_BYTES_UNMEASURED = {"sm_80": 1280}
# For GPUs that it is compiled for but was never measured on: what is fast there is not known.
MOST_SPILL_BYTES_UNMEASURED = {"sm_80": 8192}


@dataclass
class Function:
    """What ptxas said about one function on one architecture."""

    file: str
    arch: str
    symbol: str
    is_kernel: bool
    stack: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    registers: int | None = None
    shared: int = 0

    @property
    def spills(self) -> bool:
        return self.worst_spill != 0

    @property
    def most_spill(self) -> int:
        return MOST_SPILL_BYTES_UNMEASURED.get(self.arch, MOST_SPILL_BYTES)

    @property
    def most_stack(self) -> int:
        return MOST_STACK_BYTES_UNMEASURED.get(self.arch, MOST_STACK_BYTES)

    @property
    def worst_spill(self) -> int:
        """Bytes, of the direction that has more."""
        return max(self.spill_stores, self.spill_loads)


def parse(text: str, file: str) -> list[Function]:
    """The functions of one ptxas log, kernels and the device functions that were not inlined."""
    functions: dict[tuple[str, str], Function] = {}
    arch = "?"
    kernel: Function | None = None
    current: Function | None = None

    def function(symbol: str, is_kernel: bool) -> Function:
        return functions.setdefault((arch, symbol), Function(file, arch, symbol, is_kernel))

    for line in text.splitlines():
        if match := ENTRY.search(line):
            arch = match[2]
            kernel = current = function(match[1], True)
        elif match := PROPERTIES.search(line):
            current = function(match[1], False)
        elif (match := FRAME.search(line)) and current is not None:
            current.stack, current.spill_stores, current.spill_loads = map(int, match.groups())
        elif (match := USED.search(line)) and (owner := current or kernel) is not None:
            owner.registers = int(match[1])
            if shared := SHARED.search(match[2]):
                owner.shared = int(shared[1])
            if cumulative := CUMULATIVE.search(match[2]):
                owner.stack = int(cumulative[1])
    return list(functions.values())


def _short_names(symbols: list[str]) -> dict[str, str]:
    """Symbols demangled, without parameters, unjam's namespaces and return types."""
    try:
        output = subprocess.run(
            ["c++filt", "--no-params"], input="\n".join(symbols), text=True, capture_output=True
        ).stdout.splitlines()
    except FileNotFoundError:
        output = symbols
    short = [LOCAL.sub("", name).removeprefix("void ").replace("unjam::", "") for name in output]
    return dict(zip(symbols, short, strict=True))


def table(functions: list[Function]) -> str:
    """Every kernel, then the device functions: the largest, and all that spill."""
    names = _short_names(sorted({f.symbol for f in functions}))
    lines = [f"{'kernel':<56} {'arch':<8}{'regs':>5}{'stack':>7}{'spill st/ld':>13}{'smem':>8}"]

    def row(f: Function) -> str:
        registers = "-" if f.registers is None else str(f.registers)
        spill = f"{f.spill_stores}/{f.spill_loads}"
        figures = f"{registers:>5}{f.stack:>7}{spill:>13}{f.shared:>8}"
        return f"{names[f.symbol][:55]:<56} {f.arch:<8}{figures}"

    kernels = [f for f in functions if f.is_kernel]
    lines += [row(f) for f in sorted(kernels, key=lambda f: (f.symbol, f.arch))]
    others = [f for f in functions if not f.is_kernel]
    if others:
        deepest = max(others, key=lambda f: f.stack)
        lines.append(
            f"and {len(others)} device functions that were not inlined, "
            f"{sum(f.spills for f in others)} with spills; "
            f"largest stack frame {deepest.stack} B in {names[deepest.symbol][:60]}"
        )
        spilling = sorted((f for f in others if f.spills), key=lambda f: -f.spill_stores)
        lines += [row(f) for f in spilling[:MAX_ROWS]]
        if len(spilling) > MAX_ROWS:
            lines.append(f"... and {len(spilling) - MAX_ROWS} more that spill")
    return "\n".join(lines)


def build_logs(build: Path) -> list[Path]:
    """The logs of the .cu files that the library is compiled from, not of ones since removed."""
    entries = json.loads((build / "compile_commands.json").read_text())
    commands = [
        entry["command"].split()
        for entry in entries
        if entry["file"].endswith(".cu") and SOURCES in Path(entry["file"]).parents
    ]
    commands = [words for words in commands if "-ptx" not in words]  # what is not assembled
    logs = [build / f"{words[words.index('-o') + 1]}.ptxas" for words in commands]
    missing = [log.name for log in logs if not log.is_file()]
    if missing:
        raise Failure(f"not compiled yet: {', '.join(missing)}")
    return logs


def figures(functions: list[Function], log: Path) -> dict[str, Any]:
    """What the baseline has of a file: kernels, code, and functions by themselves."""
    names = _short_names(sorted({f.symbol for f in functions}))
    sections = subprocess.run(
        ["readelf", "-SW", str(log.with_suffix(""))], capture_output=True, text=True, check=True
    ).stdout
    code = FATBIN.search(sections)
    return {
        "code_bytes": int(code[1], 16) if code else 0,
        "kernels": {
            names[f.symbol]: {
                "registers": f.registers or 0,
                "stack_bytes": f.stack,
                "spill_store_bytes": f.spill_stores,
                "spill_load_bytes": f.spill_loads,
                "shared_bytes": f.shared,
            }
            for f in functions
            if f.is_kernel
        },
        "functions": sorted({names[f.symbol] for f in functions if not f.is_kernel}),
    }


def worse(name: str, now: dict[str, Any], then: dict[str, Any]) -> list[str]:
    """How a file's figures are worse than the baseline's; of seconds nothing is said."""
    found = []
    pairs = [(name, "code_bytes", now["code_bytes"], then["code_bytes"])]
    for kernel, its in now["kernels"].items():
        if kernel not in then["kernels"]:
            found.append(f"{name}: {kernel} is not in the baseline")
            continue
        pairs += [
            (f"{name}: {kernel}", what, its[what], then["kernels"][kernel][what]) for what in its
        ]
    for where, what, has, had in pairs:
        if has > WORSE * had:
            found.append(f"{where}: {has} {what}, {had} in the baseline")
    new, old = set(now["functions"]), set(then["functions"])
    found += [f"{name}: {f} is a new function by itself" for f in sorted(new - old)]
    found += [f"{name}: {f} is no function by itself any more" for f in sorted(old - new)]
    return found


def hold_to_baseline(by_log: dict[Path, list[Function]], write: bool) -> None:
    """Compares with the baseline, or writes it."""
    baseline: dict[str, Any] = json.loads(BASELINE.read_text()) if BASELINE.is_file() else {}
    found: list[str] = []
    for log, functions in by_log.items():
        archs = "+".join(sorted({f.arch for f in functions}))
        name = log.name.removesuffix(".o.ptxas")
        now = figures(functions, log)
        seconds = round(sum(map(float, SECONDS.findall(log.read_text()))) / 1000)
        print(f"{name}, {archs}: {now['code_bytes']} bytes, {seconds} s of ptxas")
        if write:
            baseline.setdefault(archs, {})[name] = now
        elif name in baseline.get(archs, {}):
            found += worse(name, now, baseline[archs][name])
        else:
            print(f"no baseline of {name} for {archs}")
    if write:
        BASELINE.write_text(json.dumps(baseline, indent=1, sort_keys=True) + "\n")
    if found:
        raise Failure(
            "worse than tools/ptxas_baseline.json (mend it, or write a new one with --write and "
            "say why):\n  " + "\n  ".join(found)
        )


def main() -> int:
    arguments = [a for a in sys.argv[1:] if a != "--write"]
    if len(arguments) != 1:
        raise Failure("usage: ptxas_report.py [--write] BUILD_DIR")
    by_log = {
        log: [f for f in parse(log.read_text(), log.name) if not FOREIGN.match(f.symbol)]
        for log in build_logs(Path(arguments[0]))
    }
    functions = [f for of_log in by_log.values() for f in of_log]
    if not any(f.is_kernel for f in functions):
        raise Failure(f"no kernel was compiled in {arguments[0]}: nothing to report")
    print(table(functions), flush=True)
    names = _short_names(sorted({f.symbol for f in functions}))
    wrong = [
        f"{names[f.symbol]} ({f.arch}) spills {f.worst_spill} bytes, more than {f.most_spill}"
        for f in functions
        if f.worst_spill > f.most_spill
    ]
    wrong += [
        f"{names[f.symbol]} ({f.arch}) uses {f.registers} registers, more than {MOST_REGISTERS}"
        for f in functions
        if f.is_kernel and (f.registers or 0) > MOST_REGISTERS
    ]
    wrong += [
        f"{names[f.symbol]} ({f.arch}) has {f.stack} bytes a thread in memory, "
        f"more than {f.most_stack}"
        for f in functions
        if f.is_kernel and f.stack > f.most_stack
    ]
    if wrong:
        raise Failure("see the table above:\n  " + "\n  ".join(wrong))
    hold_to_baseline(by_log, write="--write" in sys.argv)
    architectures = sorted({f.arch for f in functions})
    spilling = sum(f.spills for f in functions)
    found = f"{spilling} functions spill a little" if spilling else "no spills"
    print(f"{found}, on {', '.join(architectures)}", flush=True)
    return 0


if __name__ == "__main__":
    main_wrapper(main)
