"""Finds, or builds once, the part in C++ that fits the torch that is imported.

torch's C++ interface differs between its versions. A wheel of unjam holds the adapter for some of
them (``prebuilt``). For others it comes as source (``csrc``) and is compiled against the installed
torch: by ``unjam torch build``, or at the first process group, once for each pair of versions, into
``UNJAM_TORCH_BUILD`` or ``~/.cache/unjam``. It is linked to no CUDA library: one build serves
machines with and without GPUs.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import importlib.util
import os
import shutil
import stat
import sys
import sysconfig
import tempfile
import threading
from pathlib import Path
from types import ModuleType

import torch

from .. import _lib
from .. import _torch_settings as _settings
from .._log import logger
from . import _adapter, _futures
from ._adapter import NAME, BuildError

__all__ = ["BuildError", "build", "extension", "found", "library_file"]

_CURE = "Set UNJAM_TORCH_BUILD to a folder that can be written"


def extension() -> ModuleType:
    """The compiled module, loaded.

    Raises:
        BuildError: it has to be compiled, and cannot be.
        LibraryError: libunjam.so was not found.
    """
    # This needs no lock, which a thread may hold that a fork() does not take along.
    loaded = sys.modules.get(NAME)
    if loaded is not None:
        return loaded
    with _loading:
        return _load()


_loading = threading.Lock()


@functools.lru_cache(maxsize=1)
def _load() -> ModuleType:
    _lib.library()  # says what is wrong with it, if something is
    # The adapter finds unjam's functions among those of the process: of the library that is loaded.
    ctypes.CDLL(str(_lib.library_path()), mode=ctypes.RTLD_GLOBAL)
    path = found()
    module = None
    if path is not None and path.is_relative_to(_adapter.PREBUILT):
        try:
            module = _loaded(path)
        except ImportError as error:  # it takes a newer libstdc++ than this machine has, say
            logger.warning("%s does not load here (%s)", path, error)
            path = None
    if module is None:
        path = build() if path is None else path
        try:
            module = _loaded(path)
        except ImportError as error:
            raise BuildError(
                f"unjam's torch adapter does not load: {error}. {_CURE}, and from which programs "
                f"can be run, or remove {path.parent}"
            ) from error
    module.record_stacks(_settings.STACKS.is_on())
    _futures.install(module)
    sys.modules[NAME] = module
    return module


def _loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def target() -> _adapter.Target:
    """The torch and the Python that run."""
    return _adapter.Target(
        version=torch.__version__,
        soabi=sysconfig.get_config_var("SOABI"),
        cxx11_abi=torch.compiled_with_cxx11_abi(),
        torch=Path(torch.__file__).resolve().parent,
        python_include=_settings.PYTHON_INCLUDE.get() or sysconfig.get_paths()["include"],
    )


def library_file() -> Path:
    """Where the adapter for this torch, Python and unjam is, or will be."""
    return found() or _places()[0] / target().folder() / f"{NAME}.so"


def found() -> Path | None:
    """The adapter for this torch, Python and unjam; None if it has to be compiled.

    One that was compiled here comes first: who did that had a reason.
    """
    wanted = target()
    for place in _places():
        # What another user may have put into the temporary folder is not even looked at. A folder
        # that is found to be ours there cannot be replaced by anybody else.
        if place != _temporary() or _is_private(place):
            path = place / wanted.folder() / f"{NAME}.so"
            if os.path.isfile(path):  # Path.is_file() raises where a folder may not be read
                return path
    return _adapter.prebuilt(wanted)


# ---- where it is kept ----


def _places() -> list[Path]:
    """Folders to look for it in, and to keep it in: the first that can be used.

    The last is in the temporary folder: a container's user may have no home, or none to write to.
    """
    asked = _settings.BUILD.get()
    if asked:
        return [Path(asked).absolute()]
    places = []
    # The XDG standard has programs ignore a relative one.
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(cache):
        places.append(Path(cache) / "unjam")
    try:
        home = Path.home()
    except RuntimeError:  # neither HOME nor a line in /etc/passwd
        pass
    else:
        # Users whose HOME is empty, and containers' users without a home, have "/".
        if home.is_absolute() and os.path.isdir(home) and home != Path("/"):
            places.append(home / ".cache" / "unjam")
    temporary = _temporary()
    if temporary is not None:
        places.append(temporary)
    return places


def _temporary() -> Path | None:
    """A folder of this user's in the temporary folder; others can guess its name."""
    try:
        return Path(tempfile.gettempdir()).absolute() / f"unjam-{os.geteuid()}"
    except OSError:  # there is none that can be written to
        return None


def _is_private(folder: Path) -> bool:
    """Whether it is there, is this user's, and no other user can write to it or put links there."""
    try:
        told = os.lstat(folder)
    except OSError:
        return False
    mine = told.st_uid == os.geteuid() and stat.S_IMODE(told.st_mode) & 0o077 == 0
    return stat.S_ISDIR(told.st_mode) and mine


# ---- compiling ----


def build(into: Path | None = None, anew: bool = False) -> Path:
    """Compiles the adapter, unless that was done; gives its place.

    One process of those that start together does it; the others wait for it.

    Args:
        into: a folder for UNJAM_TORCH_BUILD, instead of the place where it is looked for anyway. An
            adapter that is found elsewhere is copied there.
        anew: also where there is one.

    Raises:
        BuildError: it cannot be compiled, or kept anywhere; the message says why.
    """
    wanted = target()
    refused: list[str] = []
    for place in _places() if into is None else [into.absolute()]:
        path = place / wanted.folder() / f"{NAME}.so"
        try:
            if place == _temporary():
                place.mkdir(mode=0o700, exist_ok=True)
                if not _is_private(place):
                    raise PermissionError(f"others can write to {place}, or it is not yours")
            path.parent.mkdir(parents=True, exist_ok=True)
            with (path.parent / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # goes with the process, however that ends
                _sweep(place, path.parent)
                if anew or not os.path.isfile(path):
                    _make(wanted, path, None if into is None or anew else found())
            return path
        except OSError as error:
            refused.append(f"{path.parent} ({error})")
    where = ", nor in ".join(refused) or "a temporary folder: there is none"
    raise BuildError(f"unjam's torch adapter cannot be kept in {where}. {_CURE}")


def _make(wanted: _adapter.Target, path: Path, source: Path | None) -> None:
    """The adapter at `path`: a copy of `source`, or compiled."""
    if source is not None:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=_adapter.BUILDING) as folder:
            os.replace(shutil.copy(source, folder), path)
        return
    logger.warning(
        "compiling the adapter for torch %s into %s: once, about 40 seconds of two idle cores "
        "(`unjam torch build` does it beforehand)",
        wanted.version,
        path.parent,
    )
    _adapter.compile_adapter(wanted, path)


def _sweep(place: Path, locked: Path) -> None:
    """Removes what builds that were killed have left behind, here and for other versions."""
    for leftover in place.glob(f"torch-*/{_adapter.BUILDING}*"):
        folder = leftover.parent
        try:
            with (folder / "lock").open("w") as lock:
                if folder != locked:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(leftover, ignore_errors=True)
        except OSError:  # being compiled just now
            pass
