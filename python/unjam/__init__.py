"""unjam: collectives that cannot deadlock each other, whatever the order of their calls.

A job has ranks: threads of one process, processes of one machine, or both. Every rank has a
:class:`Context`, makes :class:`Group` objects over sets of ranks, and calls collectives on them,
each under a key. The n-th use of a key on one rank meets the n-th use of it on the others; beyond
that, every rank may call in any order, from any thread, with any synchronisation between.

    import numpy as np, unjam

    def rank(context):
        group = context.group()
        x = np.full(1000, context.rank, dtype=np.float32)
        y = np.ones(10, dtype=np.float32)
        requests = [group.all_reduce(x, key="x"), group.all_reduce(y, key="y")]
        if context.rank % 2:          # the order does not matter, neither of calls nor of waits
            requests.reverse()
        unjam.wait_all(requests)
        return float(x[0]), float(y[0])

    print(unjam.launch(4, rank))      # [(6.0, 4.0), (6.0, 4.0), (6.0, 4.0), (6.0, 4.0)]
"""

from typing import TYPE_CHECKING, Any

from ._errors import (
    Aborted,
    Internal,
    InvalidArgument,
    InvalidType,
    InvalidUsage,
    LibraryError,
    Mismatch,
    Peer,
    Resources,
    System,
    Timeout,
    UnjamError,
)
from ._lib import environment, library_path, library_version
from ._paths import get_cmake_dir, get_include, get_library_dir, get_pkgconfig_dir
from ._types import DType, Kind, Op
from ._version import __version__
from .chrome_trace import write_chrome_trace
from .collective import Collective
from .context import Context, Contexts, explain, init, init_all, init_from_environment, unique_id
from .group import Group
from .memory import Memory
from .prometheus import write_prometheus
from .registration import Registration
from .request import Request, wait_all
from .stats import Stats
from .threads import launch, run_ranks
from .trace import EventType, TraceEvent

if TYPE_CHECKING:  # __getattr__ below gives them
    # isort: off
    from .torch import (
        all_gather as all_gather,
        all_gather_into_tensor as all_gather_into_tensor,
        all_reduce as all_reduce,
        all_to_all as all_to_all,
        all_to_all_single as all_to_all_single,
        barrier as barrier,
        broadcast as broadcast,
        check_order as check_order,
        gather as gather,
        key as key,
        keyed_group as keyed_group,
        reduce as reduce,
        reduce_scatter as reduce_scatter,
        reduce_scatter_tensor as reduce_scatter_tensor,
        scatter as scatter,
    )
    # isort: on

__all__ = [
    "Aborted",
    "Collective",
    "Context",
    "Contexts",
    "DType",
    "EventType",
    "Group",
    "Internal",
    "InvalidArgument",
    "InvalidType",
    "InvalidUsage",
    "Kind",
    "LibraryError",
    "Memory",
    "Mismatch",
    "Op",
    "Peer",
    "Registration",
    "Request",
    "Resources",
    "Stats",
    "System",
    "Timeout",
    "TraceEvent",
    "UnjamError",
    "__version__",
    "environment",
    "explain",
    "get_cmake_dir",
    "get_include",
    "get_library_dir",
    "get_pkgconfig_dir",
    "init",
    "init_all",
    "init_from_environment",
    "launch",
    "library_path",
    "library_version",
    "run_ranks",
    "unique_id",
    "wait_all",
    "write_chrome_trace",
    "write_prometheus",
]

# unjam.torch has these. It imports torch, so that waits until one of them is used.
_OF_TORCH = (
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "check_order",
    "gather",
    "key",
    "keyed_group",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
)


def __getattr__(name: str) -> Any:
    if name not in _OF_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import torch

    return getattr(torch, name)
