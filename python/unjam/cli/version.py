"""version: versions of package and library, and where the library lies."""

from __future__ import annotations

import argparse

from .. import _lib
from .._version import __version__


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """This command takes none."""


def run(options: argparse.Namespace) -> int:
    """Prints three lines."""
    print(f"unjam {__version__}")
    print(f"libunjam {_lib.library_version()}")
    print(_lib.library_path())
    return 0
