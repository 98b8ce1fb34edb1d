"""Checks the subjects of the commits that are new since a fixed one.

A subject is a room and what was done in it, ``engine: calls leave in order``, in at most 72
characters: git's own lists cut longer ones. Merges are not looked at. Where there is no git, or
less history than that, as in an unpacked archive, the check says so and passes.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from common import ROOT, Failure, main_wrapper, say

# Subjects up to this commit are what they are.
BASE = "c324e868134971335a10ea4ea5fd63be9cd042b7"
LONGEST = 72
ROOM = re.compile(r"[a-z][a-z0-9_]*([/.-][a-z0-9_]+)*: \S")


def fault(subject: str) -> str | None:
    """What is wrong with a subject; None if nothing is."""
    if len(subject) > LONGEST:
        return f"has {len(subject)} characters, of at most {LONGEST}"
    if not ROOM.match(subject):
        return 'does not begin with a room in lower case, as in "engine: "'
    return None


def _git(root: Path, *words: str) -> str | None:
    """What git prints; None if it fails or is not installed."""
    try:
        result = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True)
    except OSError:
        return None
    return result.stdout if result.returncode == 0 else None


def check(root: Path, base: str = BASE) -> list[str]:
    """One line for each commit since `base` whose subject has a fault.

    Raises:
        LookupError: the commits cannot be listed; the message says why.
    """
    top = _git(root, "rev-parse", "--show-toplevel")
    if top is None or Path(top.strip()).resolve() != root.resolve():
        raise LookupError("there is no git, or this is not a git repository")
    # An ancestor, or the list would be all of what this history has.
    if _git(root, "merge-base", "--is-ancestor", base, "HEAD") is None:
        raise LookupError(f"the history here does not reach back to {base[:7]}")
    log = _git(root, "log", "--no-merges", "--format=%h%x09%s", f"{base}..HEAD")
    if log is None:
        raise LookupError("git could not list the commits")
    faults = []
    for line in log.splitlines():
        commit, subject = line.split("\t", 1)
        said = fault(subject)
        if said:
            faults.append(f"commit {commit}: the subject {said}: {subject}")
    return faults


def main() -> int:
    try:
        faults = check(ROOT)
    except LookupError as error:
        say(f"subjects of commits are not checked: {error}")
        return 0
    if faults:
        raise Failure("\n".join(faults))
    return 0


if __name__ == "__main__":
    main_wrapper(main)
