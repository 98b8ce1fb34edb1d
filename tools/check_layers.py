"""Checks that #include points downwards only (docs: CONTRIBUTING.md, "Layers").

Every file below src/ belongs to the layer that its folder names and may include its own layer and
those below it. Also: no cycles, no "../", and the public header only where the C API is made.

And names of algorithms stand only where plans are made: what runs a plan knows its program, or what
that was lowered to, never which algorithm it is of.
"""

from __future__ import annotations

import re
from pathlib import Path

from common import ROOT, Failure, main_wrapper

# From the ground up.
LAYERS = [
    "base",
    "program",
    "device",
    "transport",
    "plan",
    "engine",
    "control",
    "reshard",
    "runtime",
    "api",
]
# Stand alone: may use base only, and nothing but the C API may use them.
ISLANDS = {"sim"}
# The devices have two floors. Interfaces (src/device/*.h) stand below transport; what runs the
# engine on a device (a kernel, a pool of threads) must see the engine, so it stands on it.
DEVICE_IMPLEMENTATIONS = {"device/host", "device/cuda"}
# The rooms of the CUDA device, from the ground up: what only GPUs have; loops that move data; who
# runs where; a rank's state and the engine's device; what executes lowered plans; kernels; the
# host's side, which launches them.
CUDA_ROOMS = ["hardware", "leaves", "placement", "dev", "exec", "kernels", "host"]
# May name the public header: it is the contract of the top layers.
SEES_PUBLIC_HEADER = {"runtime", "api"}

# What runs plans, and what lowering emits.
KNOW_NO_ALGORITHM = (
    "engine/",
    "program/",
    "plan/lower",
    "plan/needs_engine",
    "plan/order_rule",
    "device/cuda/exec/",
)
ALGORITHM_ROW = re.compile(r'^\s*\{"(\w+)", \w+_serves,', re.MULTILINE)
# English words, too: these are an algorithm's name in front of such a word.
ENGLISH = {"ring"}

INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
SOURCES = {".h", ".cc", ".cu", ".cuh", ".c"}


def layer(path: str) -> str:
    """The layer of a path relative to src/: "engine", or "device/host"."""
    parts = path.split("/")
    inner = "/".join(parts[:2])
    return inner if inner in DEVICE_IMPLEMENTATIONS else parts[0]


def _rank(name: str) -> int:
    """The height of a layer."""
    return LAYERS.index("engine" if name in DEVICE_IMPLEMENTATIONS else name)


def _room_fault(user: str, used: str) -> str | None:
    """The same of two files of the CUDA device."""
    rooms = [path.split("/")[2] for path in (user, used)]
    unknown = [room for room in rooms if room not in CUDA_ROOMS]
    if unknown:
        return f"{unknown[0]} is no room that tools/check_layers.py knows"
    upper, lower = (CUDA_ROOMS.index(room) for room in rooms)
    return f"{rooms[0]} stands below {rooms[1]}" if lower > upper else None


def _fault(user: str, used: str) -> str | None:
    """Why `user` may not include `used` (both relative to src/), or None."""
    if used.startswith("../") or "/../" in used:
        return "write the path from src/, without ../"
    if used.startswith("unjam/"):
        here = layer(user)
        return None if here in SEES_PUBLIC_HEADER else f"{here} must not know the public header"
    if not (ROOT / "src" / used).is_file():
        return "there is no such file below src/"
    upper, lower = layer(user), layer(used)
    if upper == lower:
        return _room_fault(user, used) if upper == "device/cuda" else None
    if lower in ISLANDS:
        return None if upper == "api" else f"{lower} stands alone"
    if upper in ISLANDS:
        return None if lower == "base" else f"{upper} stands alone and may use base only"
    known = {*LAYERS, *DEVICE_IMPLEMENTATIONS}
    unknown = [name for name in (upper, lower) if name not in known]
    if unknown:
        return f"{unknown[0]} is no layer that tools/check_layers.py knows"
    if lower in DEVICE_IMPLEMENTATIONS and upper in DEVICE_IMPLEMENTATIONS:
        return "one device must not use the other"
    if lower in DEVICE_IMPLEMENTATIONS and upper in ("engine", "device"):
        return f"{upper} must not know what a device is made of"
    if _rank(lower) > _rank(upper):
        return f"{upper} stands below {lower}"
    return None


def _cycle(graph: dict[str, list[str]]) -> list[str] | None:
    """Some cycle of the include graph, first file repeated at the end, or None."""
    done: set[str] = set()
    path: list[str] = []

    def visit(node: str) -> list[str] | None:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return None
        path.append(node)
        for following in graph.get(node, []):
            found = visit(following)
            if found:
                return found
        path.pop()
        done.add(node)
        return None

    for start in graph:
        found = visit(start)
        if found:
            return found
    return None


def _algorithm_names(src: Path) -> re.Pattern[str]:
    """What a file that knows no algorithm must not say: "two_shot", "two-shot", "TwoShot", …"""
    names = ALGORITHM_ROW.findall((src / "plan" / "registry.h").read_text())
    if not names:
        raise Failure("tools/check_layers.py finds no rows in src/plan/registry.h")
    patterns = []
    for name in names:
        pattern = name.replace("_", "[-_ ]?")
        patterns.append(rf"{pattern}e?s? plans?" if name in ENGLISH else rf"{pattern}e?s?")
    return re.compile(rf"(?<![a-z])(?:k?)({'|'.join(patterns)})(?![a-z])", re.IGNORECASE)


def _named_algorithms(src: Path) -> list[str]:
    names = _algorithm_names(src)
    faults = []
    for path in sorted(p for p in src.rglob("*") if p.suffix in SOURCES):
        file = path.relative_to(src).as_posix()
        if not file.startswith(KNOW_NO_ALGORITHM):
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            found = names.search(line)
            if found:
                faults.append(f"src/{file}:{number}: names an algorithm: {found[1]}")
    return faults


def check(root: Path) -> list[str]:
    """One line for each fault below root/src."""
    faults: list[str] = []
    graph: dict[str, list[str]] = {}
    src = root / "src"
    for path in sorted(p for p in src.rglob("*") if p.suffix in SOURCES):
        user = path.relative_to(src).as_posix()
        text = path.read_text()
        graph[user] = INCLUDE.findall(text)
        for match in INCLUDE.finditer(text):
            fault = _fault(user, match[1])
            if fault:
                line = text.count("\n", 0, match.start()) + 1
                faults.append(f"src/{user}:{line}: includes {match[1]}: {fault}")
    cycle = _cycle(graph)
    if cycle:
        faults.append("include cycle: " + " -> ".join(cycle))
    if (src / "plan" / "registry.h").is_file():
        faults += _named_algorithms(src)
    return faults


def main() -> int:
    faults = check(ROOT)
    if faults:
        raise Failure("the layers are not kept:\n" + "\n".join(faults))
    return 0


if __name__ == "__main__":
    main_wrapper(main)
