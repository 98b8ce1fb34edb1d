"""Finds, loads and checks libunjam.so, once; small helpers around calls into it.

Search order: the path in the environment variable ``UNJAM_LIBRARY``; ``lib/libunjam.so.0`` in this
package; the same file in the installed distribution (editable installs keep Python files and
library apart). Where the library has its plain name, ``libunjam.so``, it is found as well. Loading
happens at the first call, so ``import unjam`` and ``unjam --help`` work without it.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import _abi, _ucx
from ._errors import LibraryError, make_error

_HOW_TO_BUILD = (
    "Build and install it with `pip install .` in unjam's checkout (or `make demo`, which keeps "
    "its environment in .venv), or set UNJAM_LIBRARY to the path of a libunjam.so, such as the one "
    "that `cmake -S . -B build/dev && cmake --build build/dev` makes."
)

# Programs that were linked to the library ask for the first name; the second has no version.
_NAMES = ("libunjam.so.0", "libunjam.so")


def library_path() -> Path:
    """The file that :func:`library` loads.

    Raises:
        LibraryError: no file was found; the message names the places searched.
    """
    from_environment = os.environ.get("UNJAM_LIBRARY")
    if from_environment:
        path = Path(from_environment)
        if not path.is_file():
            raise LibraryError(
                f"UNJAM_LIBRARY is set to {from_environment!r}, where there is no file. "
                + _HOW_TO_BUILD
            )
        return _itself(path)
    folders = [Path(__file__).resolve().parent / "lib"]
    try:
        distribution = importlib.metadata.distribution("unjam")
        folders.append(Path(str(distribution.locate_file("unjam/lib"))))
    except importlib.metadata.PackageNotFoundError:
        pass
    for folder in folders:
        for name in _NAMES:
            if (folder / name).is_file():
                return _itself(folder / name)
    places = " and ".join(map(str, dict.fromkeys(folders)))
    raise LibraryError(
        f"{_NAMES[0]} was not found (searched {places}). {_HOW_TO_BUILD}",
    )


def _itself(path: Path) -> Path:
    """The library that `path` leads to: the package's libunjam.so is text for the linker, which
    names it, and no loader reads that."""
    with path.open("rb") as file:
        is_library = file.read(4) == b"\x7fELF"
    library = path.with_name(_NAMES[0])
    return library if not is_library and library.is_file() else path


@functools.lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """The loaded library, with prototypes set. Loads it at the first call.

    Raises:
        LibraryError: not found, not loadable, or of another major or minor version.
    """
    path = library_path()
    _ucx.name_wheel()
    try:
        cdll = ctypes.CDLL(str(path))
        _abi.declare(cdll)
    except OSError as error:
        raise LibraryError(f"{path} could not be loaded: {error}") from error
    except AttributeError as error:
        raise LibraryError(
            f"{path} is not the library that this package was made for: {error}. " + _HOW_TO_BUILD
        ) from error
    version = ctypes.c_int(0)
    cdll.unjamGetVersion(ctypes.byref(version))
    if version.value // 100 != _abi.VERSION // 100:
        raise LibraryError(
            f"{path} has version {format_version(version.value)}, this package needs "
            f"{_abi.VERSION_MAJOR}.{_abi.VERSION_MINOR}.x. " + _HOW_TO_BUILD
        )
    return cdll


def format_version(version: int) -> str:
    """``major * 10000 + minor * 100 + patch`` as text."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def library_version() -> str:
    """The version of the loaded library, such as "0.1.0"."""
    version = ctypes.c_int(0)
    library().unjamGetVersion(ctypes.byref(version))
    return format_version(version.value)


def last_error(code: int) -> str:
    """The calling thread's message for a call that has just returned `code`."""
    lib = library()
    text = lib.unjamGetLastError() or lib.unjamGetErrorString(code) or b""
    return text.decode("utf-8", "replace")


def check(code: int) -> None:
    """Raises the exception of `code` with the calling thread's last message, unless success."""
    if code:
        raise make_error(code, last_error(code))


def read_text(call: Callable[[Any, int, Any], int]) -> str:
    """The text of a C function that fills (buffer, bytes, needed), however long it grows meanwhile.

    Args:
        call: the function with its leading arguments bound.

    Raises:
        UnjamError: the function failed for another reason than a small buffer.
    """
    size = 16384
    while True:
        buffer = ctypes.create_string_buffer(size)
        needed = ctypes.c_size_t(0)
        code = call(buffer, size, ctypes.byref(needed))
        if code == _abi.ERROR_RESOURCES and needed.value > size:
            size = needed.value + needed.value // 4
            continue
        check(code)
        return buffer.value.decode("utf-8", "replace")


def read_json(call: Callable[[Any, int, Any], int]) -> Any:
    """As :func:`read_text`, parsed as JSON."""
    return json.loads(read_text(call))


def environment() -> list[dict[str, Any]]:
    """Every UNJAM_ variable, as ``unjamEnvironment`` gives them.

    Dicts with name and read_by; type, default, doc and value (as text) of those that the library
    reads.
    """
    variables: list[dict[str, Any]] = read_json(library().unjamEnvironment)
    return variables
