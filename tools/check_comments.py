"""Checks that comments below src/ name no machine, no laboratory note and no past event, and that
heads of files are short.

What was measured, where and when, is true of a day: figures live in bench/results/ and on the pages
made of them, notes in lab/. A comment says why, and what breaks otherwise. The comment that a file
begins with has at most 12 lines: an argument that needs more is a page of docs/internals/.
tools/long_heads.txt lists heads that are longer still, with their lines. They may only get shorter,
and what is short enough leaves the list.
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
MOST_HEAD_LINES = 12
LONG_HEADS = "tools/long_heads.txt"
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


def head_lines(text: str) -> int:
    """How many lines the comment has that the file begins with."""
    lines = text.splitlines()
    return next((i for i, line in enumerate(lines) if not line.startswith("//")), len(lines))


def head_fault(name: str, text: str, allowed: int | None) -> str:
    """What is wrong with the head of a file; "": nothing. allowed: as the list has it."""
    lines = head_lines(text)
    if allowed is not None and lines < allowed:
        cure = f"say {lines}" if lines > MOST_HEAD_LINES else "leave it out"
        return f"src/{name}: the head has {lines} lines, {LONG_HEADS} says {allowed}: {cure}"
    if lines <= (allowed or MOST_HEAD_LINES):
        return ""
    return (
        f"src/{name}: the head has {lines} lines, of at most {allowed or MOST_HEAD_LINES}: "
        "what needs more is a page of docs/internals/"
    )


def long_heads(text: str) -> dict[str, int]:
    """The list's files, relative to src/, with the lines that their heads may have."""
    words = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    return {name: int(lines) for lines, name in words}


def check(root: Path) -> list[str]:
    """The same of all files below a repository's src/."""
    source = root / "src"
    allowed = long_heads((root / LONG_HEADS).read_text())
    found = []
    for path in sorted(source.rglob("*")):
        if path.suffix in SUFFIXES:
            name, text = path.relative_to(source).as_posix(), path.read_text()
            found += faults(name, text)
            if fault := head_fault(name, text, allowed.pop(name, None)):
                found.append(fault)
    return [*found, *(f"{LONG_HEADS}: there is no src/{name}" for name in allowed)]


def main() -> None:
    found = check(ROOT)
    if found:
        raise Failure("comments have faults:\n" + "\n".join(found))


if __name__ == "__main__":
    main_wrapper(main)
