"""Standard output and error as they may be: not UTF-8, full, closed, or with nobody who reads."""

from __future__ import annotations

import codecs
import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

# What the commands print themselves; anything else becomes an escape such as \u4e2d.
_IN_ASCII = {
    "…": "...",
    "µ": "u",
    "×": "x",
    "±": "+-",
    "²": "2",
    "³": "3",
    "·": "-",
    "→": "->",
    "–": "-",
    "−": "-",
    "✓": "ok",
    "✗": "no",
    "█": "#",
}
_HANDLER = "unjam.in_ascii"


def _in_ascii(error: UnicodeError) -> tuple[str | bytes, int]:
    """An error handler: what the encoding lacks in ASCII, which all of them have."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    texts = []
    for character in error.object[error.start : error.end]:
        escaped = character.encode("ascii", "backslashreplace").decode()
        texts.append(_IN_ASCII.get(character, escaped))
    return "".join(texts), error.end


codecs.register_error(_HANDLER, _in_ascii)


@contextmanager
def any_encoding() -> Iterator[None]:
    """While it lasts, nothing that is printed is beyond what the streams can encode."""
    before = []
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            with suppress(OSError, ValueError):
                before.append((reconfigure, stream.errors))
                reconfigure(errors=_HANDLER)
    try:
        yield
    finally:
        for reconfigure, errors in before:
            with suppress(OSError, ValueError):
                reconfigure(errors=errors)


def complain(message: str, command: str = "") -> None:
    """One line on standard error, if there is one."""
    if sys.stderr is None:  # print() would take standard output in its place
        return
    with suppress(OSError, ValueError):
        print(f"unjam{' ' + command if command else ''}: {message}", file=sys.stderr, flush=True)


def flushed(status: int) -> int:
    """`status`, or 1 where it was 0 and what was printed has not reached standard output."""
    if sys.stdout is None:
        complain("standard output is closed: what was to be printed is lost")
        return status or 1
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # nobody reads any more, such as head: no reason for a word
        _silence(sys.stdout)
        return status or 1
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        complain(f"standard output cannot be written: {reason}")
        _silence(sys.stdout)
        return status or 1
    return status


def is_of_stdout(error: OSError) -> bool:
    """Whether it seems to come from printing: it names no file."""
    printing = (errno.ENOSPC, errno.EIO, errno.EBADF, errno.EFBIG, errno.EDQUOT)
    return error.filename is None and error.errno in printing


def _silence(stream: TextIO) -> None:
    """What is left in its buffer goes nowhere, or the interpreter would complain at its end."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
