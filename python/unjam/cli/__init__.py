"""The command ``unjam``: one file a subcommand.

Without a command it prints the help. Exit status: 0 if all is well, 1 if a check failed or unjam
reported an error, 2 for usage errors, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
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
    loop,
    pipeline,
    plan,
    reshard,
    run,
    simulate,
    stress,
    torch,
    version,
)
from ._parser import Parser, print_help
from ._streams import any_encoding, complain, flushed, is_of_stdout

_COMMANDS = (
    demo,
    bench,
    simulate,
    doctor,
    info,
    env,
    plan,
    pipeline,
    reshard,
    loop,
    run,
    stress,
    fig11,
    config,
    torch,
    id,
    version,
)


def make_parser() -> Parser:
    """The parser of the whole command line."""
    parser = Parser(
        prog="unjam",
        description="Collectives that cannot deadlock each other. Start with: unjam demo",
    )
    parser.add_argument("--version", action="version", version=f"unjam {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    parser.set_defaults(run=print_help, parser=parser)
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
    with any_encoding():
        try:
            options, unknown = make_parser().parse_known_args(argv)
            if unknown:
                options.parser.refuse(unknown)
            status = _run(options)
        except SystemExit as end:  # argparse's, after help and usage errors; or rich's
            if isinstance(end.code, str):
                raise
            raise SystemExit(flushed(end.code or 0)) from None
        return flushed(status)


def _run(options: argparse.Namespace) -> int:
    try:
        status: int = options.run(options)
    except (UnjamError, TimeoutError, WrongResult) as error:
        complain(str(error))
        return 1
    except KeyboardInterrupt:
        complain("interrupted")
        return 130
    except MemoryError as error:
        complain(f"out of memory{': ' if str(error) else ''}{error}")
        return 1
    except BrokenPipeError:
        flushed(0)
        return 1
    except OSError as error:
        if not is_of_stdout(error):
            complain(str(error))
        elif flushed(0) == 0:  # it is not buffered, so that nothing is left to be told
            complain(f"standard output cannot be written: {error.strerror}")
        return 1
    return status
