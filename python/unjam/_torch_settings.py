"""The environment variables of the torch backend, all in one place; ``unjam env`` lists them."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Variable:
    """One of them."""

    name: str
    values: str
    default: str
    doc: str

    def get(self) -> str:
        """Its value; the default where it is not set."""
        return os.environ.get(self.name, self.default)

    def is_on(self) -> bool:
        """Of one that is 0 or 1."""
        return self.get() not in ("", "0")


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
ALL = (DEFAULT, REPLACE, CUDA, BUILD, PYTHON_INCLUDE)
