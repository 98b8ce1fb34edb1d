"""torch.distributed's collectives with a ``key``; all other arguments are torch's.

``unjam.all_reduce(x, group=g, async_op=True, key="x")`` is ``with unjam.key("x"):
dist.all_reduce(x, group=g, async_op=True)``. For type checkers: ``collectives.pyi``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from .keys import key as under_key

F = TypeVar("F", bound=Callable[..., Any])


def _with_key(function: F) -> F:
    @functools.wraps(function)
    def call(*args: Any, key: str = "", **words: Any) -> Any:
        if not key:
            return function(*args, **words)
        with under_key(key):
            return function(*args, **words)

    signature = inspect.signature(function)
    under = inspect.Parameter("key", inspect.Parameter.KEYWORD_ONLY, default="", annotation=str)
    parameters = [*signature.parameters.values(), under]
    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    call.__doc__ = (
        f"``torch.distributed.{function.__name__}`` under a key.\n\n    Args:\n        key: see "
        ":func:`unjam.torch.key`; empty: the one that is in force.\n    "
    )
    return call  # type: ignore[return-value]


all_gather = _with_key(dist.all_gather)
all_gather_into_tensor = _with_key(dist.all_gather_into_tensor)
all_reduce = _with_key(dist.all_reduce)
all_to_all = _with_key(dist.all_to_all)
all_to_all_single = _with_key(dist.all_to_all_single)
barrier = _with_key(dist.barrier)
broadcast = _with_key(dist.broadcast)
gather = _with_key(dist.gather)
reduce = _with_key(dist.reduce)
reduce_scatter = _with_key(dist.reduce_scatter)
reduce_scatter_tensor = _with_key(dist.reduce_scatter_tensor)
scatter = _with_key(dist.scatter)
