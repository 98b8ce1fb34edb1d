"""Where C programs find unjam: the header, the library, and what tells build systems of both."""

from __future__ import annotations

from pathlib import Path

from ._errors import LibraryError
from ._lib import library_path

_PACKAGE = Path(__file__).resolve().parent


def get_include() -> str:
    """The folder to give a compiler with ``-I``; it holds ``unjam/unjam.h``.

    Raises:
        LibraryError: the header is missing.
    """
    # The package's own; the one beside the library, as an editable install has it; the checkout's.
    folders = [_PACKAGE / "include", _PACKAGE.parents[1] / "include"]
    try:
        folders.insert(1, library_path().parents[1] / "include")
    except LibraryError:
        pass
    for folder in folders:
        if (folder / "unjam" / "unjam.h").is_file():
            return str(folder)
    places = " and ".join(map(str, folders))
    raise LibraryError(f"unjam/unjam.h was not found (searched {places}): install unjam again")


def get_library_dir() -> str:
    """The folder of ``libunjam.so``, to give a linker with ``-L``, and with ``-Wl,-rpath,``.

    Raises:
        LibraryError: the library was not found.
    """
    return str(library_path().parent)


def get_cmake_dir() -> str:
    """The folder of ``unjamConfig.cmake``: the value of CMake's variable ``unjam_DIR``.

    Raises:
        LibraryError: it is not there, as with a library that was built and not installed.
    """
    return _beside_library("cmake/unjam", "unjamConfig.cmake")


def get_pkgconfig_dir() -> str:
    """The folder of ``unjam.pc``, for ``PKG_CONFIG_PATH``.

    Raises:
        LibraryError: it is not there, as with a library that was built and not installed.
    """
    return _beside_library("pkgconfig", "unjam.pc")


def _beside_library(folder: str, file: str) -> str:
    path = Path(get_library_dir()) / folder
    if not (path / file).is_file():
        raise LibraryError(
            f"{file} is not in {path}: the library there was built, and not installed. Install it "
            "with `pip install .` in unjam's checkout, or with `cmake --install BUILD --prefix P`"
        )
    return str(path)
