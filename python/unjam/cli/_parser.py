"""The parser of arguments: what is wrong comes first, then where the help is."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Sequence
from typing import NoReturn

from ._streams import complain

_CHOICE = re.compile(r"invalid choice: '(.*)' \(choose from (.*)\)$")


class Parser(argparse.ArgumentParser):
    """argparse's, with short errors that name what was perhaps meant."""

    def error(self, message: str) -> NoReturn:
        """Ends the program with status 2."""
        _, _, command = self.prog.partition(" ")
        if (near := _near_choice(message)) and near not in message.partition("(choose")[0]:
            message += f"; did you mean {near}?"
        complain(f"{message}\nSee: {self.prog} --help", command)
        raise SystemExit(2)

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Ends the program because of arguments that nobody takes."""
        known = [name for action in self._actions for name in action.option_strings]
        word = unknown[0].partition("=")[0]
        near = difflib.get_close_matches(word, known, 1)
        meant = f"; did you mean {near[0]}?" if near else ""
        self.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")


def print_help(options: argparse.Namespace) -> int:
    """Of a command that was given nothing to do."""
    options.parser.print_help()
    return 0


def _near_choice(message: str) -> str:
    found = _CHOICE.search(message)
    if found is None:
        return ""
    choices = [choice.strip("' ") for choice in found[2].split(",")]
    near = difflib.get_close_matches(found[1], choices, 1)
    return near[0] if near else ""
