"""The command ``unjam``: one file a subcommand.

Exit status: 0 if all is well, 1 if a check failed or unjam reported an error, 2 for usage errors,
130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .._errors import UnjamError
from .._version import __version__
from ..programs import WrongResult
from . import (
    bench,
    config,
    demo,
    doctor,
    env,
    fig11,
    id,
    info,
    plan,
    simulate,
    stress,
    torch,
    version,
)

_COMMANDS = (
    demo,
    bench,
    simulate,
    doctor,
    info,
    env,
    plan,
    stress,
    fig11,
    config,
    torch,
    id,
    version,
)


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="unjam",
        description="Collectives that cannot deadlock each other. Start with: unjam demo",
    )
    parser.add_argument("--version", action="version", version=f"unjam {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        name = command.__name__.rpartition(".")[2]
        summary = (command.__doc__ or "").splitlines()[0].partition(": ")[2].rstrip(".")
        sub = commands.add_parser(name, help=summary, description=summary)
        command.add_arguments(sub)
        sub.set_defaults(run=command.run, parser=sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; gives the exit status.

    Args:
        argv: arguments without the program's name; None: those of the process.
    """
    options = make_parser().parse_args(argv)
    try:
        status: int = options.run(options)
    except (UnjamError, TimeoutError, WrongResult) as error:
        print(f"unjam: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("unjam: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    return status
