"""The JSON file of a benchmark: what was measured, of what, with what, and where."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import __version__, _lib
from .._errors import LibraryError
from ..cuda.gpus import describe
from .rows import Row


def make_report(rows: list[Row], device: str, command: Sequence[str]) -> dict[str, Any]:
    """The JSON file: rows, and what they were measured with.

    Args:
        rows: of a table.
        device: "cuda" describes the GPUs, too.
        command: words that measure the same again.
    """
    versions = {"unjam": __version__, "python": platform.python_version()}
    for name in ("torch", "numpy", "nvidia-nccl-cu13"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "command": shlex.join(command),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": {
            "cpu": _cpu_name(),
            "cores": len(os.sched_getaffinity(0)),
            "system": platform.platform(),
            "load": list(os.getloadavg()),
            **(describe() if device == "cuda" else {}),
        },
        "versions": versions,
        "rows": rows,
    }


def write_report(file: Path, report: dict[str, Any]) -> None:
    """As the files in bench/results are."""
    file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def commit() -> str | None:
    """What UNJAM_COMMIT says, or else of the checkout that the library lies in: "1a2b3c4", and
    "-dirty" if tracked files differ from it."""
    if said := os.environ.get("UNJAM_COMMIT"):
        return said
    with contextlib.suppress(LibraryError):
        for root in _lib.library_path().resolve().parents:
            # Not one that only has an environment with unjam in it.
            if (root / ".git").exists() and (root / "include/unjam/unjam.h").is_file():
                with contextlib.suppress(OSError, subprocess.SubprocessError):
                    return _described(root)
    return None


def _described(root: Path) -> str:
    # Without tags, and nothing is written there.
    words = ["describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    told = subprocess.run(
        ["git", "--no-optional-locks", "-C", str(root), *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    return told.stdout.strip()


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
