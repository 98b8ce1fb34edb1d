"""Lint and format: lint.py [--fix] [--no-tidy].

Layers of #include, pages that are named and not there, links and lengths of pages, one version
everywhere, comments, lengths of functions, subjects of commits, clang-format, ruff (check and
format), the site where `make docs` has been run, clang-tidy. Versions of the tools are pinned in
pyproject.toml. --fix formats instead of complaining (make format).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import abi
import check_comments
import check_commits
import check_docs
import check_functions
import check_layers
import check_pages
import cuda_toolchain
import docs
import setup_env
from common import (
    ROOT,
    VENV,
    Failure,
    environment,
    fingerprint,
    jobs,
    main_wrapper,
    run,
    say,
    source_files,
)

CXX_FOLDERS = ["src", "include", "tests", "bench", "examples", "python"]
CXX_SUFFIXES = {".h", ".cc", ".cu", ".cuh", ".c"}
PYTHON_FOLDERS = ["python", "tests", "tools", "examples", "bench", "docs"]
# What was found good, named by all that clang-tidy looks at. The user's, not the checkout's: a
# fresh clone finds what another one has checked.
TIDY_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "unjam-clang-tidy"
TIDY_DAYS = 30
# What g++'s own headers use of deprecated functions is theirs: g++ does not complain, clang does.
TIDY_ARGUMENTS = [
    "--quiet",
    "--extra-arg=-Wno-unknown-warning-option",
    "--extra-arg=-Wno-deprecated-declarations",
]


def cxx_files() -> list[Path]:
    return [path for path in source_files(*CXX_FOLDERS) if path.suffix in CXX_SUFFIXES]


def check_versions() -> None:
    """unjam.h, the Python package and the changelog name the same version."""
    header = (ROOT / "include/unjam/unjam.h").read_text()
    parts = [
        re.search(rf"^#define UNJAM_VERSION_{part} (\d+)$", header, re.MULTILINE)
        for part in ("MAJOR", "MINOR", "PATCH")
    ]
    version = ".".join(match[1] for match in parts if match)
    python = re.search(r'__version__ = "(.*)"', (ROOT / "python/unjam/_version.py").read_text())
    if python is None or python[1] != version:
        raise Failure(f"unjam.h says version {version}, python/unjam/_version.py another")
    if f"## [{version}]" not in (ROOT / "CHANGELOG.md").read_text():
        raise Failure(f"CHANGELOG.md has no section [{version}]")


def clang_format(fix: bool) -> None:
    files = cxx_files()
    mode = ["-i"] if fix else ["--dry-run", "--Werror", "--ferror-limit=3"]
    run([VENV / "bin" / "clang-format", *mode, *files])


def ruff(fix: bool) -> None:
    folders = [name for name in PYTHON_FOLDERS if (ROOT / name).is_dir()]
    ruff_program = VENV / "bin" / "ruff"
    run([ruff_program, "check", "--quiet", *(["--fix"] if fix else []), *folders])
    run([ruff_program, "format", "--quiet", *([] if fix else ["--diff"]), *folders])


def clang_tidy() -> None:
    """clang-tidy over the .cc files below src/ whose text, flags or headers have changed."""
    commands = {
        str(Path(entry["file"]).resolve()): entry["command"]
        for entry in json.loads((ROOT / "build/release/compile_commands.json").read_text())
    }
    sources = [p for p in source_files("src") if p.suffix == ".cc" and str(p) in commands]
    if unknown := [
        p
        for p in source_files("src")
        if p.suffix == ".cc" and "cuda" not in p.parts and str(p) not in commands
    ]:
        raise Failure(f"build/release does not know {unknown[0]} yet: run `release` first")
    headers = [p for p in source_files("src", "include") if p.suffix == ".h"]
    shared = fingerprint(
        [*headers, ROOT / ".clang-tidy"], *TIDY_ARGUMENTS, *setup_env.requirements("lint")
    )
    TIDY_CACHE.mkdir(parents=True, exist_ok=True)
    for stamp in TIDY_CACHE.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another checkout's lint was faster
            if stamp.stat().st_mtime < time.time() - TIDY_DAYS * 86400:
                stamp.unlink()
    program = VENV / "bin" / "clang-tidy"

    def check(source: Path) -> str:
        flags = commands[str(source)].replace(str(ROOT), ".")
        stamp = TIDY_CACHE / fingerprint([source], shared, flags)
        if stamp.exists():
            stamp.touch()
            return ""
        result = subprocess.run(
            [program, "-p", ROOT / "build/release", *TIDY_ARGUMENTS, source],
            capture_output=True,
            text=True,
            env=environment(),
        )
        if result.returncode == 0:
            stamp.touch()
            return ""
        return result.stdout + result.stderr

    with ThreadPoolExecutor(jobs()) as pool:
        complaints = [text for text in pool.map(check, sources) if text]
    if complaints:
        print("\n".join(complaints), flush=True)
        raise Failure(f"clang-tidy complains about {len(complaints)} of {len(sources)} files")


def lint(fix: bool = False, tidy: bool = True) -> None:
    """Runs every check, and raises one Failure that names those which failed."""
    steps = [
        ("layers", check_layers.main),
        ("comments", check_comments.main),
        ("functions", check_functions.main),
        ("abi", abi.check),
        ("pages", check_pages.main),
        ("docs", check_docs.main),
        ("versions", check_versions),
        ("commits", check_commits.main),
        ("clang-format", lambda: clang_format(fix)),
        ("ruff", lambda: ruff(fix)),
    ]
    if not fix:
        steps.append(("site", docs.check))
    if tidy and not fix:
        # For compile_commands.json; also finds sources that have come or gone.
        cuda = f"-DUNJAM_CUDA={cuda_toolchain.setting()}"
        run(["cmake", "--preset", "release", cuda], stdout=subprocess.DEVNULL)
        steps.append(("clang-tidy", clang_tidy))
    failed: list[str] = []
    for name, step in steps:
        say(f"lint: {name}")
        try:
            step()
        except Failure as failure:
            print(failure, flush=True)
            failed.append(name)
    if failed:
        raise Failure(
            f"lint failed: {', '.join(failed)}"
            + (" (`make format` mends layout)" if {"clang-format", "ruff"} & set(failed) else "")
        )


def main() -> int:
    options = set(sys.argv[1:])
    if options - {"--fix", "--no-tidy"}:
        raise Failure("usage: lint.py [--fix] [--no-tidy]")
    setup_env.ensure("lint")
    lint(fix="--fix" in options, tidy="--no-tidy" not in options)
    return 0


if __name__ == "__main__":
    main_wrapper(main)
