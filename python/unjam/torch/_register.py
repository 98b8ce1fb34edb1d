"""Makes the backend known to torch, and takes others' places where the environment asks for it.

``UNJAM_TORCH_DEFAULT=1``
    ``init_process_group()`` without a backend takes unjam for CPU and CUDA tensors.
``UNJAM_TORCH_REPLACE=nccl`` (or ``gloo``, or ``nccl,gloo``)
    Process groups that ask for these by name get unjam; ``get_backend()`` goes on saying what was
    asked for. For programs that hard-code the name (Megatron-LM). Said once on standard error.

With either of them CUDA is asked for 32 hardware queues, all that it has, unless something else is
set (``CUDA_DEVICE_MAX_CONNECTIONS``): it reads that once, when it starts, and most programs have it
start (``torch.cuda.set_device``) before they make a process group.
"""

from __future__ import annotations

import functools
import os
import warnings
from typing import Any

import torch.distributed as dist

from .. import _torch_settings as _settings
from .._log import logger
from . import _internals

NAME = "unjam"


def register() -> None:
    """Idempotent. Loads no library: the first process group does.

    Raises:
        ValueError: a variable that takes others' places is not valid. The backend is known all the
            same, and takes nobody's place.
    """
    if not dist.is_available() or _internals.is_registered(NAME):
        return
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    default = _settings.DEFAULT.is_on()
    names = _settings.REPLACE.names("nccl", "gloo")
    if default:
        for device in ("cpu", "cuda"):
            dist.Backend.default_device_backend_map[device] = NAME
        _name_the_default()
    if names:
        _replace(names)
    if names or default:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    for sentence in _settings.unknown():
        warnings.warn(f"unjam: {sentence}", stacklevel=2)


def _create(options: Any, backend_options: Any) -> Any:
    from ._world import create

    return create(options, backend_options)


def _name_the_default() -> None:
    """Has torch make a process group that asks for no backend as one that asks for unjam.

    Left to itself it looks up unjam in its map of devices, but goes on to call the group's backend
    "undefined" and to look for it under gloo's type, which DistributedDataParallel then misses.
    """

    def wrap(make: _internals.Maker) -> _internals.Maker:
        @functools.wraps(make)
        def make_named(
            size: int, rank: int, members: Any, backend: Any, *args: Any, **words: Any
        ) -> Any:
            if str(backend) == dist.Backend.UNDEFINED:
                backend = dist.Backend(NAME)
            return make(size, rank, members, backend, *args, **words)

        return make_named

    _internals.wrap_maker_of_groups(wrap)


def _replace(names: list[str]) -> None:
    """Groups that ask for one of these backends get unjam."""
    told = False

    def say(asked: str) -> None:
        nonlocal told
        if not told:
            told = True
            logger.warning(
                "process groups that ask for %r get unjam (UNJAM_TORCH_REPLACE=%s)",
                asked,
                ",".join(names),
            )

    def wrap(make: _internals.Maker) -> _internals.Maker:
        @functools.wraps(make)
        def make_with_unjam(
            size: int, rank: int, members: Any, backend: Any, store: Any, *args: Any, **words: Any
        ) -> Any:
            asked = str(backend)
            chosen = _renamed(asked, names)
            if chosen == asked:
                return make(size, rank, members, backend, store, *args, **words)
            say(asked)
            # Options of the backend that was asked for mean nothing to this one.
            if "backend_options" in words:
                words["backend_options"] = None
            elif len(args) > 1:
                args = (args[0], None, *args[2:])
            made = make(size, rank, members, dist.Backend(chosen), store, *args, **words)
            _internals.set_asked_backend(made[0], backend, chosen)
            return made

        return make_with_unjam

    _internals.wrap_maker_of_groups(wrap)


def _renamed(backend: str, names: list[str]) -> str:
    """``"nccl"`` as ``"unjam"``, also in ``"cpu:gloo,cuda:nccl"``.

    A group that has unjam for one device has it for both: torch cannot tell two of its kind apart,
    and one serves both.
    """
    entries = [entry.rpartition(":") for entry in backend.lower().split(",")]
    if not any(name in names for _, _, name in entries):
        return backend
    devices = {device for device, _, _ in entries}
    if len(entries) == 1 and "" in devices:
        return NAME
    others = [e for e in entries if e[2] not in names]
    if not others:
        return NAME
    return ",".join(f"{d}:{n if n not in names else NAME}" for d, _, n in entries)
