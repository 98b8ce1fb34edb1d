"""Where the wheel of UCX is, for the library, which does not know of Python's packages."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

_VARIABLE = "UNJAM_NET_UCX"


def wheel() -> str | None:
    """The file of libucp in the package libucx (the extra ``net``), if that is here."""
    spec = importlib.util.find_spec("libucx")
    for folder in (spec and spec.submodule_search_locations) or ():
        file = Path(folder) / "lib" / "libucp.so.0"
        if file.is_file():
            return os.fspath(file)
    return None


def name_wheel() -> None:
    """Tells the library of the wheel, where a job is on several hosts and nobody has said else."""
    if os.environ.get("UNJAM_ROOT") and not os.environ.get(_VARIABLE) and (file := wheel()):
        os.environ[_VARIABLE] = file
