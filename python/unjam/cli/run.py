"""run: runs a program whose NCCL calls unjam answers, as `unjam run -- torchrun train.py`.

The program is not changed: libnccl.so.2 of unjam is loaded before NVIDIA's. What it serves is in
docs/nccl.md. The exit status is the program's.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys

from .._nccl_library import environment_with, nccl_library
from ._parser import print_help
from ._streams import complain


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument(
        "words",
        nargs=argparse.REMAINDER,
        metavar="-- PROGRAM [ARGUMENT...]",
        help="the program, with its arguments",
    )


def run(options: argparse.Namespace) -> int:
    """Becomes the program."""
    words: list[str] = options.words
    if words[:1] == ["--"]:
        words = words[1:]
    if not words:
        return print_help(options)
    library = nccl_library()
    environment = environment_with(library, os.environ)
    if shutil.which(words[0]) is None:
        complain(f"{words[0]}: no such program", "run")
        return 127
    print(f"unjam run: {library} is loaded in front of NCCL", file=sys.stderr, flush=True)
    os.execvpe(words[0], words, environment)
