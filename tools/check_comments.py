"""Checks that comments below src/ name no machine, no laboratory note and no past event.

What was measured, where and when, is true of a day: figures live in bench/results/ and on the pages
made of them, notes in lab/. A comment says why, and what breaks otherwise.
"""

from __future__ import annotations

import re
from pathlib import Path

from common import ROOT, Failure, main_wrapper

SUFFIXES = {".h", ".cc", ".cu", ".cuh", ".c"}
COMMENT = re.compile(r"(?<!:)//(.*)$")
FORBIDDEN = {
    re.compile(r"\b[AHBL]\d{2,3}s?\b"): "names a machine",
    re.compile(r"\blab/"): "points to a laboratory note",
    re.compile(r"\bprobe that\b"): "names a probe that is not here",
    re.compile(r"\b(?:GPUs?|ranks?|jobs?) hung\b"): "tells what happened once",
    re.compile(r"\b\d[\d.,]* (?:us|ms|GB/s|%) (?:instead|each|faster|slower)\b"): "has a figure",
}
# What is about the machines that they name.
ABOUT_MACHINES = {"device/cuda/host/nvlink.h", "device/cuda/host/nvlink.cc"}


def faults(name: str, text: str) -> list[str]:
    """What is wrong with the comments of a file, by its path relative to src/."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        comment = COMMENT.search(line)
        if comment is None:
            continue
        for pattern, what in FORBIDDEN.items():
            match = pattern.search(comment[1])
            if match and not (what == "names a machine" and name in ABOUT_MACHINES):
                found.append(f"src/{name}:{number}: {what}: {match[0]}")
    return found


def check(root: Path) -> list[str]:
    """The same of all files below a repository's src/."""
    source = root / "src"
    found = []
    for path in sorted(source.rglob("*")):
        if path.suffix in SUFFIXES:
            found += faults(path.relative_to(source).as_posix(), path.read_text())
    return found


def main() -> None:
    found = check(ROOT)
    if found:
        raise Failure("comments have faults:\n" + "\n".join(found))


if __name__ == "__main__":
    main_wrapper(main)
