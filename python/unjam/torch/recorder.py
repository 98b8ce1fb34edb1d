"""What this process has called, in the format of torch's flight recorder.

The last calls are kept, unless ``TORCH_FR_BUFFER_SIZE`` (or
``TORCH_NCCL_TRACE_BUFFER_SIZE``) is 0. Dumps are read by torch's analyser (``torchfrtrace``, or
``python -m torch.distributed.flight_recorder.fr_trace``) and by ``unjam simulate --trace``.

What is a process group there is whatever counts its calls on its own: a group, one key of it, or
one direction between two ranks. So calls that ranks may make in different orders are compared as
they meet.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .._version import __version__
from ._extension import extension

_PREFIXES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_ON_TIMEOUT = "TORCH_NCCL_DUMP_ON_TIMEOUT"
_SIZES = "TORCH_FR_BUFFER_SIZE or TORCH_NCCL_TRACE_BUFFER_SIZE"
_dumping = threading.Lock()
_dumped = False


def flight_record() -> dict[str, Any]:
    """What :func:`dump_flight_recorder` writes: numbers, texts, lists and dicts.

    Raises:
        RuntimeError: the recorder is off.
    """
    if extension().flight_recorder_size() == 0:
        raise RuntimeError(
            f"unjam: the flight recorder is off: set {_SIZES} to the number of calls to keep, or "
            "to none, for 2000"
        )
    record = dict(extension().flight_record())
    record["comm_lib_version"] = f"unjam {__version__}"
    return record


def dump_flight_recorder(prefix: str | os.PathLike[str] | None = None) -> Path:
    """Writes this rank's last calls to ``<prefix><rank>``, and returns that path.

    Waits for no other rank; may be called by any thread, while calls are pending.

    Args:
        prefix: such as "/tmp/trace_rank_". None: what ``TORCH_FR_DUMP_TEMP_FILE`` or
            ``TORCH_NCCL_DEBUG_INFO_TEMP_FILE`` says.

    Raises:
        ValueError: neither is given.
        RuntimeError: the recorder is off, or there is no process group to tell the rank.
        OSError: the file cannot be written.
    """
    wanted = _prefix() if prefix is None else os.fspath(prefix)
    if not wanted:
        raise ValueError(
            'unjam: no file is named for the dump: give a prefix such as "/tmp/trace_rank_", or '
            f"set {_PREFIXES[0]}"
        )
    path = Path(f"{wanted}{_rank()}")
    data = pickle.dumps(flight_record(), protocol=2)  # as torch's own
    # The file appears in one step: whoever waits for it finds all of it. The umask gives its mode,
    # for others collect it.
    partial = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return path


def _prefix() -> str:
    return next((os.environ[name] for name in _PREFIXES if os.environ.get(name)), "")


def _rank() -> int:
    if dist.is_initialized():
        return dist.get_rank()
    rank = os.environ.get("RANK", "")
    if not rank.isdecimal():
        raise RuntimeError(
            "unjam: there is no process group, and RANK is not set: dump the flight recorder "
            "before destroy_process_group()"
        )
    return int(rank)


def _dump_on_timeout() -> None:
    """Of the first call that is not complete in time: where the environment asks for it.

    torch's switch counts where it is set; else a prefix is reason enough.
    """
    global _dumped
    prefix = _prefix()
    switch = os.environ.get(_ON_TIMEOUT, "").strip().lower()
    if not prefix or switch in ("0", "n", "no", "false", "off"):
        return
    with _dumping:  # who comes meanwhile may end the process afterwards: it waits for the file
        if _dumped:
            return
        path = dump_flight_recorder(prefix)
        _dumped = True
    print(
        f"unjam: a call was not complete in time: what rank {_rank()} has called is in {path}",
        file=sys.stderr,
        flush=True,
    )
