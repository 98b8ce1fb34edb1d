"""Which GPUs this machine has for unjam."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from contextlib import suppress
from typing import Any

from .._errors import LibraryError
from .._lib import library_path


def cuda_part() -> bool:
    """Whether libunjam_cuda.so lies beside libunjam.so."""
    try:
        return library_path().with_name("libunjam_cuda.so").is_file()
    except LibraryError:
        return False


def gpu_count() -> int:
    """GPUs that torch sees; 0 without torch."""
    if importlib.util.find_spec("torch") is None:
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def visible_as_one(rank: int) -> str:
    """CUDA_VISIBLE_DEVICES for a process that is to see one GPU: that of a rank, modulo n of n."""
    named = [word for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word]
    if not named:
        return str(rank % max(gpu_count(), 1))
    return named[rank % len(named)]


def lacking(ranks: int, shared: bool = False) -> str:
    """What is missing for `ranks` GPUs, and the cure; empty if nothing.

    Args:
        ranks: ranks of a job.
        shared: they may share GPUs.
    """
    if importlib.util.find_spec("torch") is None:
        return "PyTorch with CUDA is not installed here: pip install torch"
    count = gpu_count()
    if shared and count == 0:
        return "torch sees no GPU on this machine"
    if count < ranks and not shared:
        return f"{ranks} ranks need a GPU each, and torch sees {count} on this machine"
    if not cuda_part():
        return (
            "libunjam_cuda.so is not beside libunjam.so: build with UNJAM_CUDA=ON, or set "
            "UNJAM_LIBRARY to a libunjam.so that has it"
        )
    return ""


def describe() -> dict[str, Any]:
    """What a report says of the GPUs, where torch sees some."""
    import torch

    found: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(0),
        "gpus": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
    }
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    with suppress(OSError, subprocess.SubprocessError):
        told = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        found["driver"] = told.stdout.strip()
    return found
