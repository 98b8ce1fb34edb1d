"""How the adapter, the part in C++ against torch, is named and compiled.

It imports neither torch nor the rest of unjam: ``_extension.py`` compiles for the torch that is
imported, ``tools/wheels.py`` for other versions and other Pythons, which it cannot import.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

NAME = "_unjam_c10d"
SOURCES = Path(__file__).resolve().parent / "csrc"
PREBUILT = Path(__file__).resolve().parent / "prebuilt"  # of a wheel; a checkout has none
BUILDING = "build-"  # what folders are called in which an adapter is being compiled
# It comes before what the compiler adds at the end, for the first that is found is taken.
_SHARED_CXX = "-l:libstdc++.so.6"
_FLAGS = (
    "-std=c++20",
    "-O2",
    "-fPIC",
    "-fvisibility=hidden",
    "-w",
    f"-DTORCH_EXTENSION_NAME={NAME}",
)


class BuildError(RuntimeError):
    """The adapter could not be compiled; the message says why, and what to do."""


@dataclass(frozen=True)
class Target:
    """What an adapter is compiled against.

    Attributes:
        version: torch.__version__.
        soabi: the Python's name for its C interface and platform: cpython-311-x86_64-linux-gnu.
        cxx11_abi: which of libstdc++'s two string types torch was compiled with.
        torch: the folder of the package torch, with ``include`` and ``lib``.
        python_include: the folder of Python.h.
    """

    version: str
    soabi: str
    cxx11_abi: bool
    torch: Path
    python_include: str

    @property
    def flags(self) -> tuple[str, ...]:
        return (*_FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(self.cxx11_abi)}")

    @property
    def includes(self) -> list[Path]:
        """torch's part is what torch.utils.cpp_extension.include_paths() gives."""
        return [
            Path(self.python_include),
            header().parents[1],
            self.torch / "include",
            self.torch / "include" / "torch" / "csrc" / "api" / "include",
            *nvtx_include(self.torch),
        ]

    def folder(self, version: str | None = None) -> str:
        """The name of the folder that holds the adapter of these sources, options and versions.

        Args:
            version: as torch's, if not its own.
        """
        digest = hashlib.sha256()
        for source in [*sorted(SOURCES.iterdir()), header()]:
            digest.update(source.read_bytes())
        for flag in (*self.flags, _SHARED_CXX):
            digest.update(flag.encode())
        return f"torch-{version or self.version}-{self.soabi}-{digest.hexdigest()[:16]}"


def release(version: str) -> str | None:
    """``2.12.1`` of ``2.12.1+cu130``: a release has one C++ interface, for whichever GPUs it is.

    None for what is no release (nightly builds, builds from a checkout): no two need be alike.
    Patch releases are told apart: nobody promises that 2.12.1 has the headers of 2.12.0 (it has).
    """
    match = re.fullmatch(r"(\d+\.\d+\.\d+)(\+(cpu|cu\d+|rocm[\d.]+|xpu))?", version)
    return match[1] if match else None


def prebuilt(target: Target) -> Path | None:
    """The adapter in this package for such a torch and Python, if there is one."""
    version = release(target.version)
    if version is None:
        return None
    path = PREBUILT / target.folder(version) / f"{NAME}.so"
    return path if path.is_file() else None


def nvtx_include(torch: Path) -> list[Path]:
    """The folder with NVTX's headers, where there is one; an adapter without them has no ranges.

    They come with torch for CUDA (the package nvidia-nvtx), and with the CUDA toolkit.
    """
    packages = [torch.parent, *(Path(folder) for folder in sys.path if folder)]
    places = [place for folder in packages for place in sorted(folder.glob("nvidia/*/include"))]
    places += [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"]
    return [place for place in places if (place / "nvtx3" / "nvToolsExt.h").is_file()][:1]


def header() -> Path:
    """``unjam/unjam.h``, of the package or of the checkout."""
    for root in (Path(__file__).parents[1] / "include", Path(__file__).parents[3] / "include"):
        found = root.resolve() / "unjam" / "unjam.h"
        if found.exists():
            return found
    raise BuildError("unjam/unjam.h is missing from this installation: install unjam again")


def compiler() -> str:
    """The C++ compiler's path.

    Raises:
        BuildError: there is none.
    """
    found = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if not found:
        raise BuildError(
            "unjam's torch adapter has to be compiled for this torch, and there is no C++ "
            "compiler: apt-get install g++ (12 or newer), or set CXX; or take along what "
            "`unjam torch build --into FOLDER` made on a machine that has one"
        )
    return found


def compile_adapter(target: Target, path: Path) -> None:
    """Compiles the sources, links, and puts the result in its place in one step.

    In two parts side by side: torch's headers, most of the time and of the memory, are read once a
    part, not once a source.

    Raises:
        BuildError: something that it takes is missing, or the compiler refuses.
        OSError: the files could not be written.
    """
    program = compiler()
    if not any((folder / "Python.h").exists() for folder in target.includes):
        raise BuildError(
            f"unjam's torch adapter has to be compiled for this torch, and Python.h is not in "
            f"{target.python_include}: apt-get install python3-dev, or set UNJAM_PYTHON_INCLUDE "
            "to its folder"
        )
    flags = [*target.flags]
    flags += [word for folder in target.includes for word in ("-isystem", str(folder))]
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=BUILDING) as name:
        folder = Path(name)
        sources = sorted(SOURCES.glob("*.cc"))
        half = len(sources) // 2
        parts = [folder / "first.cc", folder / "second.cc"]
        for part, of_it in zip(parts, (sources[:half], sources[half:]), strict=True):
            part.write_text("".join(f'#include "{source}"\n' for source in of_it))
        objects = [part.with_suffix(".o") for part in parts]
        running = [
            subprocess.Popen(
                [program, *flags, "-c", str(source), "-o", str(made)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for source, made in zip(parts, objects, strict=True)
        ]
        outputs = [process.communicate()[0] for process in running]
        for process, output in zip(running, outputs, strict=True):
            _check(target, process.returncode, process.args, output)
        result = folder / path.name
        libraries = [f"-L{target.torch / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python"]
        linked = link(program, [*map(str, objects), *libraries], result)
        _check(target, linked.returncode, linked.args, linked.stdout + linked.stderr)
        os.replace(result, path)


def link(program: str, inputs: Sequence[str], result: Path) -> subprocess.CompletedProcess[str]:
    """Links a shared library, which takes the C++ library from the process that loads it.

    A compiler may be set up to link its own copy instead. Beside torch's that crashes at the first
    stream that is written to: half of a stream's parts are then one copy's, half the other's.

    Args:
        program: the compiler.
        inputs: objects and libraries.
        result: the file.
    """
    command = [program, "-shared", "-s", *inputs, "-o", str(result)]
    shared = subprocess.run([*command, _SHARED_CXX], capture_output=True, text=True)
    if shared.returncode == 0:
        return shared
    # It is not where this compiler looks: a cross compiler's, or another C++ library.
    return subprocess.run(command, capture_output=True, text=True)


def _check(target: Target, code: int, command: object, output: str) -> None:
    if code != 0:
        words = command if isinstance(command, list) else [str(command)]
        raise BuildError(
            f"unjam's torch adapter does not compile against torch {target.version}:\n"
            f"{' '.join(map(str, words))}\n{output[-4000:]}\n"
            "It is tried with torch 2.11 to 2.15; please report others that do not work."
        )
