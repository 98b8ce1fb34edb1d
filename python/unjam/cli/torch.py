"""torch: compiles torch's adapter ahead of the first process group, as for container images."""

from __future__ import annotations

import argparse
import importlib.util
import time
from pathlib import Path

from ._parser import print_help
from ._streams import complain


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    summary = "compile the adapter for the torch that is installed here, if there is none that fits"
    build = actions.add_parser("build", help=summary, description=summary)
    build.add_argument(
        "--into",
        type=Path,
        metavar="DIR",
        help="put it into this folder, of an image say; UNJAM_TORCH_BUILD=DIR then finds it",
    )
    build.add_argument("--force", action="store_true", help="compile also where one fits")
    build.set_defaults(parser=build)


def run(options: argparse.Namespace) -> int:
    """Says where the adapter is."""
    if options.action is None:
        return print_help(options)
    if importlib.util.find_spec("torch") is None:
        complain("PyTorch is not installed here: pip install torch")
        return 1
    from ..torch import _extension

    began = time.monotonic()
    try:
        there = None if options.force else _extension.found()
        if there is None or options.into is not None:
            path = _extension.build(options.into, anew=options.force)
        else:
            path = there
    except _extension.BuildError as error:
        complain(str(error))
        return 1
    wanted = _extension.target()
    what = f"adapter for torch {wanted.version} and {wanted.soabi}"
    took = f"made in {time.monotonic() - began:.0f} s" if there is None else "was there already"
    if there is not None and path != there:
        took = f"copied from {there}"
    print(f"{what}: {path} ({took})")
    if options.into is not None:
        print(f"Where it is to be used: UNJAM_TORCH_BUILD={options.into.absolute()}")
    return 0
