"""Finds, or builds once, the part in C++ that fits the torch that is imported.

torch's C++ interface differs between its versions, so the adapter comes as source (``csrc``) and is
compiled against the installed torch at the first process group: half a minute, once for each pair
of versions, into ``UNJAM_TORCH_BUILD`` or ``~/.cache/unjam``. It is linked to no CUDA library: one
build serves machines with and without GPUs.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
from pathlib import Path
from types import ModuleType

import torch

from .. import _lib
from .. import _torch_settings as _settings
from . import _futures

_SOURCES = Path(__file__).resolve().parent / "csrc"
_NAME = "_unjam_c10d"
_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-w")


class BuildError(RuntimeError):
    """The adapter could not be compiled; the message says why, and what to do."""


def extension() -> ModuleType:
    """The compiled module, loaded.

    Raises:
        BuildError: it has to be compiled, and cannot be.
        LibraryError: libunjam.so was not found.
    """
    # Without the lock, which a thread may hold that a fork() does not take along.
    loaded = sys.modules.get(_NAME)
    if loaded is not None:
        return loaded
    with _loading:
        return _load()


_loading = threading.Lock()


@functools.lru_cache(maxsize=1)
def _load() -> ModuleType:
    _lib.library()  # says what is wrong with it, if something is
    path = library_file()
    if not path.exists():
        _build_once(path)
    # The adapter finds unjam's functions among those of the process: of the library that is loaded.
    ctypes.CDLL(str(_lib.library_path()), mode=ctypes.RTLD_GLOBAL)
    spec = importlib.util.spec_from_file_location(_NAME, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    _futures.install(module)
    sys.modules[_NAME] = module
    return module


def library_file() -> Path:
    """Where the compiled adapter for this torch, Python and unjam is, or will be."""
    digest = hashlib.sha256()
    for source in [*sorted(_SOURCES.iterdir()), _header()]:
        digest.update(source.read_bytes())
    abi = (torch.__version__, torch.compiled_with_cxx11_abi(), sys.implementation.cache_tag)
    for part in (*abi, platform.machine(), os.environ.get("CXX"), _FLAGS):
        digest.update(str(part).encode())
    root = _settings.BUILD.get()
    if not root:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        root = str(Path(cache) / "unjam")
    version = torch.__version__.split("+")[0]
    return Path(root) / f"torch-{version}-{digest.hexdigest()[:16]}" / f"{_NAME}.so"


def _header() -> Path:
    """``unjam/unjam.h``, of the package or of the checkout."""
    for root in (Path(__file__).parents[1] / "include", Path(__file__).parents[3] / "include"):
        header = root.resolve() / "unjam" / "unjam.h"
        if header.exists():
            return header
    raise BuildError("unjam/unjam.h is missing from this installation: install unjam again")


def _build_once(path: Path) -> None:
    """By one process of those that start together; the others wait for it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = (path.parent / "lock").open("w")
    except OSError as error:
        raise BuildError(
            f"unjam's torch adapter cannot be kept in {path.parent}: {error}. Set "
            "UNJAM_TORCH_BUILD to a folder that can be written"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # goes with the process, however that ends
        if not path.exists():
            _build(path)


def _build(path: Path) -> None:
    """Compiles the sources, links, and puts the result in its place in one step.

    In two parts side by side: torch's headers, most of the time and of the memory, are read once a
    part, not once a source.
    """
    from torch.utils import cpp_extension

    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise BuildError(
            "unjam's torch adapter has to be compiled for this torch, and there is no C++ "
            "compiler: apt-get install g++ (12 or newer), or set CXX"
        )
    include = sysconfig.get_paths()["include"]
    includes = [
        _settings.PYTHON_INCLUDE.get() or include,
        str(_header().parents[1]),
        *cpp_extension.include_paths(),
    ]
    if not any((Path(i) / "Python.h").exists() for i in includes):
        raise BuildError(
            f"unjam's torch adapter has to be compiled for this torch, and Python.h is not in "
            f"{include}: apt-get install python3-dev, or set UNJAM_PYTHON_INCLUDE to its folder"
        )
    print(
        f"unjam: compiling the adapter for torch {torch.__version__} into {path.parent} "
        "(half a minute, once)",
        file=sys.stderr,
        flush=True,
    )
    flags = [*_FLAGS, f"-DTORCH_EXTENSION_NAME={_NAME}"]
    flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    flags += [word for i in includes for word in ("-isystem", i)]
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        sources = sorted(_SOURCES.glob("*.cc"))
        half = len(sources) // 2
        parts = [Path(folder) / "first.cc", Path(folder) / "second.cc"]
        for part, of_it in zip(parts, (sources[:half], sources[half:]), strict=True):
            part.write_text("".join(f'#include "{source}"\n' for source in of_it))
        objects = [part.with_suffix(".o") for part in parts]
        running = [
            subprocess.Popen(
                [compiler, *flags, "-c", str(source), "-o", str(target)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for source, target in zip(parts, objects, strict=True)
        ]
        outputs = [process.communicate()[0] for process in running]
        for process, output in zip(running, outputs, strict=True):
            _check(process.returncode, process.args, output)
        result = Path(folder) / path.name
        libraries = [f"-L{p}" for p in cpp_extension.library_paths()]
        command = [compiler, "-shared", *map(str, objects), "-o", str(result), *libraries]
        command += ["-lc10", "-ltorch_cpu", "-ltorch_python"]
        linked = subprocess.run(command, capture_output=True, text=True)
        _check(linked.returncode, command, linked.stdout + linked.stderr)
        os.replace(result, path)


def _check(code: int, command: object, output: str) -> None:
    if code != 0:
        words = command if isinstance(command, list) else [str(command)]
        raise BuildError(
            f"unjam's torch adapter does not compile against torch {torch.__version__}:\n"
            f"{' '.join(map(str, words))}\n{output[-4000:]}\n"
            "It is tried with torch 2.11 to 2.15; please report others that do not work."
        )
