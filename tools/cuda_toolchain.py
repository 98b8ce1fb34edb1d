"""Finds an nvcc 13, or installs one from PyPI into .venv; prints its path.

The five wheels are pinned together: newer ones of some do not fit older ones of others. They bring
`lib/` with versioned names only, where nvcc and CMake look for `lib64/libX.so`: links mend that.
No GPU and no driver is needed to compile.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from common import VENV, VENV_PYTHON, Failure, Stamp, environment, main_wrapper, say

WHEELS = [
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
]
MIN_VERSION = (13, 0)


def _release(nvcc: Path) -> tuple[int, int] | None:
    """The toolkit's version, or None if this is no nvcc that runs."""
    try:
        output = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    except OSError:
        return None
    match = re.search(r"release (\d+)\.(\d+)", output)
    return (int(match[1]), int(match[2])) if match else None


def _wheel_root() -> Path | None:
    """site-packages/nvidia/cu13 in .venv, once it is whole."""
    for root in VENV.glob("lib/python3*/site-packages/nvidia/cu13"):
        if (root / "bin" / "nvcc").is_file():
            return root
    return None


def find() -> Path | None:
    """An nvcc that is new enough: CUDACXX, CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda, .venv."""
    candidates = [os.environ.get("CUDACXX")]
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            candidates.append(os.path.join(os.environ[variable], "bin", "nvcc"))
    candidates += [shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"]
    root = _wheel_root()
    if root is not None and (root / "lib64").exists():
        candidates.append(str(root / "bin" / "nvcc"))
    for candidate in dict.fromkeys(word for word in candidates if word):
        release = _release(Path(candidate))
        if release is None:
            continue
        if release >= MIN_VERSION:
            return Path(candidate)
        say(f"{candidate} is CUDA {release[0]}.{release[1]}: too old, looking further")
    return None


def setting() -> str:
    """Of the CMake option UNJAM_CUDA, for who wants what can be compiled here, GPUs or none."""
    return "OFF" if find() is None else "ON"


def link(root: Path) -> None:
    """lib64 -> lib, and libX.so -> libX.so.N."""
    lib = root / "lib"
    if not (root / "lib64").exists():
        (root / "lib64").symlink_to("lib")
    for library in sorted(lib.glob("*.so.*")):
        plain = lib / (library.name.split(".so.")[0] + ".so")
        if not plain.exists():
            plain.symlink_to(library.name)


def install() -> Path:
    """Installs the pinned wheels into .venv and returns their nvcc."""
    say("no nvcc 13 on this machine: installing the compiler's five wheels into .venv (285 MB)")
    command = [VENV_PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # --no-deps: the five are all it takes, and torch's own wheels must stay what they are.
    command += ["--no-input", "--no-deps", *WHEELS]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True)
    if result.returncode != 0:
        raise Failure(
            "the CUDA compiler could not be installed from PyPI; install CUDA 13, set CUDA_HOME.\n"
            + (result.stdout + result.stderr).strip()[-800:]
        )
    root = _wheel_root()
    if root is None:
        raise Failure("the CUDA wheels were installed, but hold no nvidia/cu13/bin/nvcc.")
    link(root)
    return root / "bin" / "nvcc"


def ensure() -> Path:
    """An nvcc that works on this machine, installed if need be."""
    nvcc = find()
    stamp = Stamp("cuda-wheels", "\n".join(WHEELS))
    if nvcc is None or (VENV in nvcc.parents and not stamp.fresh()):
        nvcc = install()
        stamp.set()
    return nvcc


def main() -> int:
    if not VENV_PYTHON.exists() and find() is None:
        raise Failure("there is no .venv to install into: run `python3 tools/setup_env.py` first.")
    print(ensure())
    return 0


if __name__ == "__main__":
    main_wrapper(main)
