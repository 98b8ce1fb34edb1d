"""The environment variables of the torch backend, all in one place; ``unjam env`` lists them."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass

# The words of the library's own switches (src/runtime/settings.cc).
_WORDS = {
    **dict.fromkeys(("1", "on", "yes", "true"), True),
    **dict.fromkeys(("0", "off", "no", "false"), False),
}


@dataclass(frozen=True)
class Variable:
    """One of them."""

    name: str
    values: str
    default: str
    doc: str

    def get(self) -> str:
        """Its value; the default where it is not set, or empty."""
        return os.environ.get(self.name, "").strip() or self.default

    def is_on(self) -> bool:
        """Of a switch.

        Raises:
            ValueError: the value is none of a switch's.
        """
        on = _WORDS.get(self.get().lower())
        if on is None:
            raise self._error(f"{self.values} (or on, off, yes, no, true, false)")
        return on

    def names(self, *known: str) -> list[str]:
        """Of a list of names.

        Raises:
            ValueError: one of them is none of the known ones.
        """
        names = [n for n in (name.strip() for name in self.get().lower().split(",")) if n]
        if any(n not in known for n in names):
            raise self._error(self.values)
        return names

    def _error(self, cure: str) -> ValueError:
        """In the library's words."""
        return ValueError(f"{self.name}={self.get()} is not valid: give {cure}")


DEFAULT = Variable(
    "UNJAM_TORCH_DEFAULT",
    "0 or 1",
    "0",
    "torch: init_process_group() without a backend takes unjam, for CPU and CUDA tensors.",
)
REPLACE = Variable(
    "UNJAM_TORCH_REPLACE",
    "nccl, gloo, or both",
    "",
    "torch: process groups that ask for these backends by name get unjam, which is said once on "
    "stderr; get_backend() goes on answering what was asked for.",
)
CUDA = Variable(
    "UNJAM_TORCH_CUDA",
    "0 or 1",
    "1",
    "torch: whether a process group also joins with this rank's GPU, where there is one; the same "
    "on all ranks.",
)
BUILD = Variable(
    "UNJAM_TORCH_BUILD",
    "path",
    "",
    "torch: where the adapter that is compiled once against the installed torch is kept; empty: "
    "~/.cache/unjam, or a private folder in the temporary folder where that cannot be written.",
)
PYTHON_INCLUDE = Variable(
    "UNJAM_PYTHON_INCLUDE",
    "path",
    "",
    "torch: the folder of Python.h, where it is not where Python says.",
)
STACKS = Variable(
    "UNJAM_TORCH_STACKS",
    "0 or 1",
    "0",
    "torch: whether the flight recorder also keeps where in the program a call was made, which "
    "takes some microseconds a call.",
)
ALL = (DEFAULT, REPLACE, CUDA, BUILD, PYTHON_INCLUDE, STACKS)


def unknown() -> list[str]:
    """Variables that are named like these and that nobody reads, each as a sentence.

    The library names those, too, but only in programs that come to use it: with a mistyped
    UNJAM_TORCH_DEFAULT they do not.
    """
    known = [variable.name for variable in ALL]
    found = []
    for name in sorted(os.environ):
        if not name.startswith("UNJAM_TORCH_") or name in known:
            continue
        near = difflib.get_close_matches(name, known, 1)
        meant = f": did you mean {near[0]}?" if near else ""
        found.append(f"{name} is set, but unjam has no such variable{meant}")
    return found
