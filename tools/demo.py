"""make demo: builds unjam into .venv and runs `unjam demo` with the arguments given.

Light on purpose: no torch, no CUDA compiler. Which GPUs' kernels are compiled, CMake decides
(cmake/UnjamCudaChoice.cmake); UNJAM_CUDA=ON or OFF in the environment says otherwise.
Where no package index can be reached, or `python3 -m venv` does not work, it builds with the
machine's own cmake and runs with the machine's own python3; .venv/bin/unjam is then a script that
does so.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import setup_env
from common import (
    ROOT,
    VENV,
    VENV_PYTHON,
    Failure,
    Stamp,
    environment,
    fingerprint,
    jobs,
    main_wrapper,
    run,
    say,
    source_files,
)

PROGRAM = VENV / "bin" / "unjam"
INPUTS = ["include", "src", "python", "cmake", "CMakeLists.txt", "pyproject.toml", "README.md"]


def wish() -> str:
    """What the user wants of the CUDA part: the value for the CMake option UNJAM_CUDA."""
    return os.environ.get("UNJAM_CUDA") or "AUTO"


def gpu_architectures(env: dict[str, str]) -> str:
    """For which GPUs a build will compile kernels, as CMake names them; empty for none.

    Args:
        env: the environment of the build; its cmake is asked, which is where the rule stands.
    """
    rule = ROOT / "cmake" / "UnjamCudaChoice.cmake"
    return run(
        ["cmake", f"-DUNJAM_CUDA={wish()}", "-P", rule], env=env, capture_output=True
    ).stdout.strip()


def install_package(build_dir: str, cuda: str, architectures: str = "", unity: str = "ON") -> None:
    """pip-installs the checkout into .venv, unless nothing has changed since the last time.

    Args:
        build_dir: the CMake build folder to use, kept between calls so that little is rebuilt.
        cuda: the value of the CMake option UNJAM_CUDA. A package with all of the CUDA part serves
            where less of it, or none, is asked for, not the other way round.
        architectures: for which GPUs kernels will be compiled, where `cuda` does not tell.
        unity: of the CMake option UNJAM_UNITY: OFF for a folder in which files were compiled alone.
    """
    inputs = fingerprint(source_files(*INPUTS))
    settings = [f"UNJAM_CUDA={cuda}", *([architectures] if architectures else [])]
    whole, own = (
        Stamp("package", f"{inputs} {' '.join(s)}") for s in (["UNJAM_CUDA=ON"], settings)
    )
    if whole.fresh() or own.fresh():
        return
    own.clear()
    kernels = cuda == "ON" or architectures
    took = "some minutes, with the kernels," if kernels else "a minute"
    say(f"building libunjam and installing the package into .venv ({took} the first time)")
    command: list[str | Path] = [VENV_PYTHON, "-m", "pip", "install", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--disable-pip-version-check", "--no-input"]
    command += [f"--config-settings=build-dir={build_dir}"]
    command += [f"--config-settings=cmake.define.UNJAM_CUDA={cuda}"]
    command += [f"--config-settings=cmake.define.UNJAM_UNITY={unity}"]
    command.append(".")
    run(command, env=environment(CMAKE_BUILD_PARALLEL_LEVEL=str(jobs())))
    own.set()


def check_offline(cause: setup_env.NoPackages) -> None:
    """Raises Failure with everything that build_offline() lacks, and `cause`: to mend either does.

    Args:
        cause: why it is not done with .venv's packages.
    """
    modules = [name for name in ("numpy", "rich") if importlib.util.find_spec(name) is None]
    lacks, packages = list(modules), [f"python3-{name}" for name in modules]
    if setup_env.version(shutil.which("cmake")) < setup_env.MIN_CMAKE:
        minimum = ".".join(map(str, setup_env.MIN_CMAKE))
        lacks.append(f"cmake {minimum} or newer")
        packages.append(f"cmake ({minimum} or newer)")
    if setup_env.compiler() is None:
        lacks.append("a C++ compiler")
        packages.append("g++ (12 or newer)")
    if not lacks:
        return
    text = (
        f"{cause}\n"
        f"Nor can it be done with the machine's own tools, which lack: {', '.join(lacks)}\n"
        f"On Debian and Ubuntu: apt-get install {' '.join(packages)}"
    )
    if modules:
        text += f"\n({sys.executable} is asked; make demo PYTHON=… takes another)"
    raise Failure(text) from cause


def build_offline() -> None:
    """The same without pip: cmake and python3 of the machine, and a script as .venv/bin/unjam."""
    build = ROOT / "build" / "offline"
    # PYTHONPATH and the like stay: this is the machine's own Python's build.
    command: list[str | Path] = ["cmake", "-S", ROOT, "-B", build, f"-DUNJAM_CUDA={wish()}"]
    if not (build / "CMakeCache.txt").exists() and shutil.which("ninja"):
        command += ["-G", "Ninja"]
    own = dict(os.environ)
    run(command, env=own, stdout=subprocess.DEVNULL)
    if gpu_architectures(own):
        say("building libunjam: some minutes, with the kernels, the first time")
    run(["cmake", "--build", build, "--target", "unjam_package", "-j", str(jobs())], env=own)
    PROGRAM.parent.mkdir(parents=True, exist_ok=True)
    python = shlex.quote(sys.executable)
    PROGRAM.write_text(
        "#!/bin/sh\n"
        "# Written by tools/demo.py, which could install no packages into .venv.\n"
        f"export UNJAM_LIBRARY={shlex.quote(str(build / 'libunjam.so'))}\n"
        f"export PYTHONPATH={shlex.quote(str(ROOT / 'python'))}${{PYTHONPATH:+:$PYTHONPATH}}\n"
        f'exec {python} -c "import sys; from unjam.cli import main; sys.exit(main())" "$@"\n'
    )
    PROGRAM.chmod(0o755)


def main() -> int:
    try:
        setup_env.ensure("demo")
        install_package("build/wheel", wish(), gpu_architectures(environment()))
    except setup_env.NoPackages as failure:
        check_offline(failure)
        say(str(failure))
        say("going on without .venv's packages: the machine's own cmake and python3 do the work")
        build_offline()
    command = [str(PROGRAM), "demo", *sys.argv[1:]]
    say("running: " + shlex.join([os.path.relpath(PROGRAM, ROOT), *command[1:]]))
    return subprocess.run(command, cwd=ROOT).returncode


if __name__ == "__main__":
    main_wrapper(main)
