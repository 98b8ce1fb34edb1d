"""Where libnccl.so.2 is that answers NCCL's calls, and how a program gets it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ._errors import LibraryError
from ._lib import library_path

_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


def nccl_library() -> Path:
    """The library that stands in for NCCL.

    Raises:
        LibraryError: it is not there.
    """
    path = library_path().absolute().parent / "nccl" / "libnccl.so.2"  # for any folder
    if not path.is_file():
        raise LibraryError(
            f"{path} is not there: install unjam again, or build the target unjam_nccl"
        )
    return path


def environment_with(library: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a program whose NCCL calls `library` answers.

    Raises:
        LibraryError: the loader could not be told the library's path.
    """
    if any(mark in str(library) for mark in " :"):
        raise LibraryError(
            f"LD_PRELOAD takes no path with spaces or colons, as {library} has: "
            "install unjam elsewhere"
        )
    others = environment.get("LD_PRELOAD", "").replace(":", " ").split()
    changed = dict(environment)
    changed["LD_PRELOAD"] = ":".join([str(library), *(o for o in others if o != str(library))])
    # Each communicator has a stream that waits: it is to have a hardware queue of its own.
    changed.setdefault(_CONNECTIONS, "32")
    return changed
