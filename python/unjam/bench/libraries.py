"""unjam and its peers behind one interface: a library prepares a case and gives what to call."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from typing import Any, Protocol

import unjam

from .cases import ROOT, Case
from .data import Array

PEERS = ("gloo", "nccl", "none")

Call = Callable[[], object]

_MAPPED_S = 20.0  # the longest until peers have found what was registered


class Library(Protocol):
    """A collective communication library, as one rank of a job sees it."""

    def prepare(self, case: Case, source: Array, target: Array | None) -> Call | None:
        """What runs the case once and returns when it is complete; None: it has no such thing."""

    def close(self) -> None:
        """Ends the rank."""


def missing(peer: str, device: str = "host") -> str:
    """What this Python lacks for a peer, and the cure; empty if nothing."""
    if peer == "nccl" and device != "cuda":
        return "nccl works on GPUs: measure with --device cuda, or beside --peer gloo"
    if peer == "gloo" and device != "host":
        return "gloo works in host memory here: measure beside --peer nccl, or without --device"
    if peer == "gloo" and importlib.util.find_spec("torch") is None:
        return (
            "PyTorch is not installed here: pip install torch, or measure unjam alone with "
            "--peer none"
        )
    return ""


def register_for_all(context: unjam.Context, block: Any) -> None:
    """Registers a block; every rank does.

    Raises:
        RuntimeError: a peer's memory cannot be mapped here, or was not in time.
    """
    context.register_memory(block)
    deadline = time.monotonic() + _MAPPED_S
    while (windows := context.info()["windows"])["peers_mapped"] != context.size - 1:
        if windows["peers_unreachable"] or time.monotonic() > deadline:
            raise RuntimeError(
                "the registered memory of other ranks cannot be mapped: "
                + (windows["peers_unreachable_because"] or "it was not announced in time")
            )
        time.sleep(0.001)


class Unjam:
    """unjam, through its Python interface."""

    def __init__(
        self, rank: int, ranks: int, unique_id: bytes, limit_s: float, heap_bytes: int | None = None
    ) -> None:
        """Joins the job; returns when all ranks have."""
        self._context = unjam.init(ranks, rank, unique_id, heap_bytes=heap_bytes)
        self._group = self._context.group(name="bench")
        self._limit_s = limit_s

    def alloc(self, nbytes: int) -> unjam.Memory:
        """Memory of the heap."""
        return self._context.alloc(nbytes)

    def register(self, block: Any) -> None:
        """Lets the others store there, from when they have it mapped: that is waited for."""
        register_for_all(self._context, block)

    def prepare(self, case: Case, source: Array, target: Array | None) -> Call:
        """See :class:`Library`."""
        limit_s = self._limit_s
        arguments = (source,) if target is None else (source, target)
        options: dict[str, Any] = {"key": case.collective}
        if case.dtype == "bfloat16":  # which NumPy does not know
            options["dtype"] = case.element_type
        if case.collective in ("broadcast", "reduce"):
            options["root"] = ROOT
        collective = getattr(self._group, case.collective)
        return lambda: collective(*arguments, **options).wait(limit_s)

    def close(self) -> None:
        """See :class:`Library`."""
        self._context.close()

    def abort(self) -> None:
        """Lets the other ranks know that this one will not come."""
        self._context.abort()


class Gloo:
    """PyTorch's gloo backend: its process group, called directly, without torch.distributed's
    Python layer around it.
    """

    def __init__(self, rank: int, ranks: int, store: str, limit_s: float) -> None:
        """Joins the job; returns when all ranks have.

        Args:
            rank: this one.
            ranks: how many.
            store: path of a file that does not exist yet, through which the ranks meet.
            limit_s: the longest a call may take.
        """
        import datetime

        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self._torch = torch
        self._group = dist.ProcessGroupGloo(  # type: ignore[attr-defined]
            dist.FileStore(store, ranks), rank, ranks, datetime.timedelta(seconds=limit_s)
        )

    def prepare(self, case: Case, source: Array, target: Array | None) -> Call | None:
        """See :class:`Library`."""
        group = self._group
        x = self._tensor(case, source)
        out = x if target is None else self._tensor(case, target)
        if case.collective == "all_reduce":
            return lambda: group.allreduce(x).wait()
        if case.collective == "all_gather":
            return lambda: group._allgather_base(out, x).wait()
        if case.collective == "broadcast":
            return lambda: group.broadcast(x, ROOT).wait()
        if case.collective == "reduce":
            return lambda: group.reduce(x, ROOT).wait()
        return self._reduce_scatter(out, x)

    def close(self) -> None:
        """See :class:`Library`."""
        del self._group

    def _reduce_scatter(self, out: Any, x: Any) -> Call | None:
        """None where this version of gloo has none (all ranks find the same, locally)."""
        try:
            self._group._reduce_scatter_base(out, x).wait()
        except RuntimeError as error:
            if "support" in str(error):
                return None
            raise
        return lambda: self._group._reduce_scatter_base(out, x).wait()

    def _tensor(self, case: Case, array: Array) -> Any:
        tensor = self._torch.from_numpy(array)
        return tensor.view(self._torch.bfloat16) if case.dtype == "bfloat16" else tensor
