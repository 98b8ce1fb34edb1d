"""Makes .venv and puts into it what a task needs: setup_env.py [demo] [lint] [check] [test].

Everything comes from PyPI and, for GoogleTest where the machine has none, from the distribution's
packages (unpacked into .venv/opt, without root). Each step says what it does, is skipped when it
was done before, and fails with what to do about it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import cuda_toolchain
from common import (
    ROOT,
    VENV,
    VENV_PYTHON,
    Failure,
    Stamp,
    environment,
    main_wrapper,
    run,
    say,
)

MIN_PYTHON = (3, 10)
MIN_CMAKE = (3, 25)
MIN_NINJA = (1, 10)
GTEST_PACKAGES = ["libgtest-dev", "libgmock-dev", "googletest"]


class NoPackages(Failure):
    """.venv cannot be made or filled. Who can do without catches this."""


class NoVenv(NoPackages):
    """`python3 -m venv` failed: most often what makes pip (ensurepip) is not installed."""


class NoIndex(NoPackages):
    """pip could not install: most often there is no package index to be reached."""


def ensure_venv() -> None:
    """Creates .venv with this Python, or again if the Python it was made with has gone."""
    if sys.version_info < MIN_PYTHON:
        raise Failure(f"unjam needs Python 3.10 or newer; python3 is {sys.version.split()[0]}.")
    if VENV_PYTHON.exists():
        probe = subprocess.run([VENV_PYTHON, "-m", "pip", "--version"], capture_output=True)
        if probe.returncode == 0:
            return
        say(".venv no longer works (its Python has gone?): making it anew")
        shutil.rmtree(VENV)
    say(f"creating .venv with Python {sys.version.split()[0]}")
    made = subprocess.run([sys.executable, "-m", "venv", str(VENV)], capture_output=True, text=True)
    if made.returncode != 0:
        shutil.rmtree(VENV, ignore_errors=True)
        raise NoVenv(
            f"`python3 -m venv` failed: {(made.stdout + made.stderr).strip()}\n"
            "On Debian and Ubuntu: apt-get install python3-venv"
        )


def requirements(*names: str, python: Path = VENV_PYTHON) -> list[str]:
    """The requirements of pyproject.toml's lists of these names: groups, extras or "runtime"."""
    program = (
        "import sys, json\n"
        "try: import tomllib\n"
        "except ImportError: from pip._vendor import tomli as tomllib\n"
        "project = tomllib.load(open(sys.argv[1], 'rb'))\n"
        "lists = {**project['dependency-groups'], **project['project']['optional-dependencies'],\n"
        "         'runtime': project['project']['dependencies']}\n"
        "print('\\n'.join(word for name in sys.argv[2:] for word in lists[name]))\n"
    )
    output = run(
        [python, "-c", program, ROOT / "pyproject.toml", *names], capture_output=True
    ).stdout
    return output.split("\n")[:-1]


def pip_install(words: Sequence[str], stamp_name: str, why: str) -> None:
    """Installs requirements into .venv unless the same ones were installed before."""
    stamp = Stamp(f"pip-{stamp_name}", "\n".join(words))
    if stamp.fresh():
        return
    say(f"installing {why}: {', '.join(words)}")
    command = [str(VENV_PYTHON), "-m", "pip", "install", "--quiet", "--retries", "2"]
    # Not compiled ahead: of torch and its like, few modules are ever imported, and those are
    # compiled then.
    command += ["--no-compile", "--disable-pip-version-check", "--no-input", *words]
    result = subprocess.run(command, env=environment(), text=True, capture_output=True)
    if result.returncode != 0:
        tail = "\n".join((result.stdout + result.stderr).strip().splitlines()[-6:])
        raise NoIndex(
            f"pip could not install {', '.join(words)}:\n{tail}\n"
            "If no package index can be reached: PIP_INDEX_URL names another, https_proxy a proxy"
        )
    stamp.set()


def version(program: str | None) -> tuple[int, ...]:
    """What `program --version` says, as numbers; () if it does not run."""
    if program is None:
        return ()
    try:
        output = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
    except OSError:
        return ()
    match = re.search(r"\d+(\.\d+)+", output)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def compiler() -> str | None:
    """The C++ compiler's path: that of CXX or c++; None if it is not installed."""
    return shutil.which(os.environ.get("CXX", "c++").split()[0])


def ensure_build_tools() -> None:
    """A C++ compiler, cmake, ninja and scikit-build-core."""
    if compiler() is None:
        raise Failure(
            f"no C++ compiler: `{os.environ.get('CXX', 'c++')}` was not found. "
            "On Debian and Ubuntu: apt-get install g++ (12 or newer)"
        )
    pip_install(requirements("build"), "build", "the build backend")
    for tool, minimum in (("cmake", MIN_CMAKE), ("ninja", MIN_NINJA)):
        if version(shutil.which(tool)) < minimum:
            pip_install(requirements(tool), tool, f"{tool} (the machine has none new enough)")


def _gtest_installed() -> bool:
    prefixes = [VENV / "opt" / "usr", Path("/usr"), Path("/usr/local")]
    prefixes += [Path(p) for p in os.environ.get("CMAKE_PREFIX_PATH", "").split(os.pathsep) if p]
    return any(
        next(prefix.glob(pattern), None)
        for prefix in prefixes
        for pattern in ("lib/cmake/GTest", "lib64/cmake/GTest", "lib/*/cmake/GTest")
    )


def ensure_gtest() -> None:
    """GoogleTest: the machine's, or the distribution's packages unpacked into .venv/opt."""
    if _gtest_installed():
        return
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise Failure(
            "GoogleTest was not found, and there is no apt-get to fetch it with. Install it "
            "(Fedora: dnf install gtest-devel gmock-devel; Arch: pacman -S gtest)."
        )
    say(f"GoogleTest is not installed: unpacking {', '.join(GTEST_PACKAGES)} into .venv/opt")
    state = VENV / "apt"
    debs = state / "debs"
    debs.mkdir(parents=True, exist_ok=True)
    download = ["apt-get", "download", "-q", *GTEST_PACKAGES]
    first = subprocess.run(download, cwd=debs, capture_output=True, text=True)
    if first.returncode != 0:
        say("the machine's package lists do not serve: fetching them into .venv/apt")
        (state / "lists" / "partial").mkdir(parents=True, exist_ok=True)
        (state / "cache" / "archives" / "partial").mkdir(parents=True, exist_ok=True)
        own = ["-o", f"Dir::State::lists={state / 'lists'}", "-o", f"Dir::Cache={state / 'cache'}"]
        if os.geteuid() == 0:  # apt's own user may not write below a root-owned checkout
            own += ["-o", "APT::Sandbox::User=root"]
        for command in (["apt-get", *own, "update", "-q"], ["apt-get", *own, *download[1:]]):
            result = subprocess.run(command, cwd=debs, capture_output=True, text=True)
            if result.returncode != 0:
                raise Failure(
                    "GoogleTest could not be fetched. Install it yourself: "
                    f"apt-get install {' '.join(GTEST_PACKAGES[:2])}\n"
                    + (result.stdout + result.stderr).strip()[-800:]
                )
    for deb in debs.glob("*.deb"):
        run(["dpkg", "-x", deb, VENV / "opt"])
    shutil.rmtree(state)
    if not _gtest_installed():
        raise Failure(f"{', '.join(GTEST_PACKAGES)} hold no CMake package GTest.")


def ensure(task: str) -> None:
    """Everything that one task needs.

    Args:
        task: "build", "check", "demo", "lint", "test" or "wheels".
    """
    ensure_venv()
    ensure_build_tools()
    if task == "demo":
        pip_install(requirements("runtime", "demo"), "demo", "what the demo uses")
    if task in ("lint", "check", "test"):
        pip_install(requirements("lint"), "lint", "the linters")
        ensure_gtest()  # for the compile commands of a build with tests
    if task in ("test", "wheels"):
        pip_install(requirements("wheels"), "wheels", "what makes wheels")
    if task == "check":
        words = requirements("runtime", "demo", "test")
        words = [word for word in words if not word.startswith("torch")]
        pip_install(words, "check", "what the tests without torch use")
    if task == "test":
        words = requirements("runtime", "demo", "test")
        pip_install(words, "test", "what the tests use (torch is large: some minutes)")
        cuda_toolchain.ensure()


def main() -> int:
    known = ["build", "check", "demo", "lint", "test", "wheels"]
    for task in sys.argv[1:] or ["build"]:
        if task not in known:
            raise Failure(f"unknown task {task!r}; there are: {', '.join(known)}")
        ensure(task)
    return 0


if __name__ == "__main__":
    main_wrapper(main)
