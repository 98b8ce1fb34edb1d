"""config: what a C or C++ program needs to be compiled and linked with unjam."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable

from .. import _paths
from .._version import __version__


def _cflags() -> str:
    return "-I" + shlex.quote(_paths.get_include())


def _libs() -> str:
    # No loader looks into a Python package of its own accord: the program remembers the folder.
    folder = shlex.quote(_paths.get_library_dir())
    return f"-L{folder} -lunjam -Wl,-rpath,{folder}"


_ANSWERS: dict[str, tuple[Callable[[], str], str]] = {
    "version": (lambda: __version__, "the package's version"),
    "cflags": (_cflags, "options for the compiler"),
    "libs": (_libs, "options for the linker; the program finds the library where it lies now"),
    "includedir": (_paths.get_include, "the folder that holds unjam/unjam.h"),
    "libdir": (_paths.get_library_dir, "the folder of libunjam.so"),
    "cmakedir": (_paths.get_cmake_dir, "the folder of unjamConfig.cmake: -Dunjam_DIR=…"),
    "pkgconfigdir": (_paths.get_pkgconfig_dir, "the folder of unjam.pc: PKG_CONFIG_PATH=…"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    for name, (_, meaning) in _ANSWERS.items():
        parser.add_argument(
            f"--{name}", dest="asked", action="append_const", const=name, help=meaning
        )


def run(options: argparse.Namespace) -> int:
    """Prints what was asked for; --cflags and --libs on one line, as for a compiler that links."""
    if not options.asked:
        options.parser.error(f"ask for something: --{', --'.join(_ANSWERS)}")
    asked = dict.fromkeys(options.asked)
    answers = {name: _ANSWERS[name][0]() for name in asked}
    flags = [answers.pop(name) for name in ("cflags", "libs") if name in answers]
    for line in [*answers.values(), *([" ".join(flags)] if flags else [])]:
        print(line)
    return 0
