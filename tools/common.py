"""What the scripts in tools/ share: paths, saying what they do, running commands."""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
STAMPS = VENV / "stamps"


class Failure(Exception):
    """Something the user should read in one message, without a traceback."""


def say(text: str) -> None:
    """One line about what happens now, in order with what commands print."""
    print(f"[unjam] {text}", flush=True)


def jobs() -> int:
    """How many compilers to run at once: UNJAM_JOBS, or as many as this process may use cores."""
    return int(os.environ.get("UNJAM_JOBS") or len(os.sched_getaffinity(0)))


def environment(**extra: str) -> dict[str, str]:
    """The environment of everything that runs inside .venv."""
    result = dict(os.environ)
    result["PATH"] = f"{VENV / 'bin'}{os.pathsep}{result.get('PATH', '')}"
    result["VIRTUAL_ENV"] = str(VENV)
    result.pop("PYTHONHOME", None)
    result.pop("PYTHONPATH", None)
    # Every rank of a test is a Python of its own, and would compile what it imports again: half of
    # the time that numpy or torch takes.
    result.pop("PYTHONDONTWRITEBYTECODE", None)
    result.update(extra)
    return result


def run(command: Sequence[str | Path], **options: object) -> subprocess.CompletedProcess[str]:
    """Runs a command in the repository and raises Failure if it fails.

    Args:
        command: the words of the command.
        options: as for subprocess.run; `env` is that of .venv unless given.
    """
    words = [str(word) for word in command]
    settings: dict[str, object] = {"cwd": ROOT, "env": environment(), "text": True, **options}
    try:
        result = subprocess.run(words, check=False, **settings)  # type: ignore[call-overload]
    except FileNotFoundError as error:
        raise Failure(f"`{words[0]}` is not installed ({error}).") from error
    if result.returncode != 0:
        for output in (result.stdout, result.stderr):
            if output:
                sys.stdout.write(output)
        raise Failure(f"exit code {result.returncode} from: {shlex.join(words)}")
    return result


def source_files(*folders: str) -> list[Path]:
    """Every file below the folders (or the files themselves), sorted, without caches."""
    found: list[Path] = []
    for name in folders:
        path = ROOT / name
        if path.is_file():
            found.append(path)
        elif path.is_dir():
            found += [p for p in path.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    return sorted(found)


def fingerprint(files: Iterable[Path], *words: str) -> str:
    """A hash of the words, and of the files' names, as seen from the repository, and contents."""
    digest = hashlib.sha256()
    for word in words:
        digest.update(word.encode() + b"\0")
    for path in files:
        name = os.path.relpath(path, ROOT)
        digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


class Stamp:
    """Remembers in .venv that a step was done for a given fingerprint."""

    def __init__(self, name: str, value: str) -> None:
        self._path = STAMPS / name
        self._value = value

    def fresh(self) -> bool:
        return self._path.is_file() and self._path.read_text() == self._value

    def set(self) -> None:
        STAMPS.mkdir(parents=True, exist_ok=True)
        self._path.write_text(self._value)

    def clear(self) -> None:
        self._path.unlink(missing_ok=True)


def main_wrapper(main: object) -> None:
    """Runs a script's main() and turns Failure and Ctrl-C into a line and an exit code."""
    try:
        sys.exit(main())  # type: ignore[operator]
    except Failure as failure:
        print(f"[unjam] error: {failure}", file=sys.stderr, flush=True)
        sys.exit(1)
    except KeyboardInterrupt:
        print("[unjam] interrupted", file=sys.stderr, flush=True)
        sys.exit(130)
