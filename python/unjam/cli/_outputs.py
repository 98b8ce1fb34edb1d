"""Files that commands write: what is wrong with one is told before the run where it can be."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ..picture.files import amiss
from ._streams import complain


def check_picture(parser: argparse.ArgumentParser, path: Path) -> None:
    """Ends the command if `--picture` names no picture, or nothing draws it here."""
    if problem := amiss(path):
        parser.error(f"--picture: {problem}")


def lacking(path: Path) -> str:
    """Why `path` cannot be written, as far as that shows now; "" if it seems it can.

    Opens it for that, as permissions alone do not tell (root, read-only systems, /sys), and leaves
    nothing behind.
    """
    try:
        real = Path(os.path.realpath(path))  # where a link leads is what would be made
        if not real.parent.is_dir():
            return f"there is no folder {path.parent}"
        if real.is_dir():
            return f"{path} is a folder: give the name of a file"
        if real.exists() and not real.is_file():  # a pipe would wait for its reader
            return "" if os.access(real, os.W_OK) else f"{path} cannot be written"
        existed = real.exists()
        os.close(os.open(real, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666))
        if not existed:
            with suppress(OSError):
                real.unlink()
    except (OSError, ValueError) as error:
        return _cannot(path, error)
    return ""


def file_to_write(text: str) -> Path:
    """argparse type: a file that can be written."""
    path = Path(text)
    if problem := lacking(path):
        raise argparse.ArgumentTypeError(problem)
    return path


def write(option: str, path: Path, writing: Callable[[], object], command: str = "") -> bool:
    """Whether `writing` could write `path`; otherwise says why not, and names the option."""
    try:
        writing()
    except OSError as error:
        complain(f"argument {option}: {_cannot(path, error)}", command)
        return False
    return True


def _cannot(path: Path, error: OSError | ValueError) -> str:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    return f"{path} cannot be written: {reason}"
