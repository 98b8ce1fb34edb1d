"""Tensors between stages: each message under a key of its own, so that none waits for another."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ...pipeline import Message
from ..keys import key
from .meshes import Routes
from .stages import Edge, Spec

_LEAST = timedelta(milliseconds=1)


class Mail:
    """The messages of one step on one rank."""

    def __init__(
        self,
        name: str,
        group: dist.ProcessGroup,
        routes: Routes,
        device: torch.device,
        is_signal: bool,
    ) -> None:
        """Sends nothing.

        Args:
            name: of the pipeline, in front of its keys.
            group: a process group of unjam's.
            routes: of the edges between meshes.
            device: where tensors lie.
            is_signal: one byte goes for each message, and zeros arrive.
        """
        self._name = name
        self._group = group
        self._routes = routes
        self._device = device
        self._is_signal = is_signal
        self._under_way: dict[Message, tuple[list[Any], list[torch.Tensor], list[Spec]]] = {}
        self._end: float | None = None

    def send(
        self, edge: Edge, message: Message, to: int, specs: list[Spec], given: list[torch.Tensor]
    ) -> None:
        """Posts the tensors; they stay untouched until wait()."""
        if self._is_signal:
            given = [torch.zeros(1, dtype=torch.uint8, device=self._device)] if given else []
        elif not self._routes.has(edge):
            given = [x.contiguous() for x in given]
        self._post(dist.isend, edge, message, to, specs, given)

    def receive(self, edge: Edge, message: Message, source: int, specs: list[Spec]) -> None:
        """Posts the buffers."""
        if self._is_signal:
            boxes = [torch.empty(1, dtype=torch.uint8, device=self._device)] if specs else []
        else:
            boxes = [torch.empty(s.shape, dtype=s.dtype, device=self._device) for s in specs]
        self._post(dist.irecv, edge, message, source, specs, boxes)

    def refuse(
        self, edge: Edge, message: Message, other: int, specs: list[Spec], sends: bool
    ) -> None:
        """In place of either: the other side's call ends with an error.

        That is, if it comes: the size is that of no message, and unjam compares sizes. Between
        meshes the plan is that of no message, and unjam compares plans.
        """
        if self._routes.has(edge):
            box = [torch.zeros(1, dtype=torch.uint8)] if specs else []
            call = dist.isend if sends else dist.irecv
            self._post(call, edge, message, other, specs, box, byte="refused")
            return
        most = 1 if self._is_signal else len(specs)
        boxes = []
        for spec in specs[:most]:
            right = (
                (1, torch.uint8)
                if self._is_signal
                else (torch.Size(spec.shape).numel(), spec.dtype)
            )
            count = 3 if right == (2, torch.uint8) else 2
            boxes.append(torch.zeros(count, dtype=torch.uint8, device=self._device))
        self._post(dist.isend if sends else dist.irecv, edge, message, other, specs, boxes)

    def wait(self, message: Message) -> list[torch.Tensor]:
        """What has arrived, or was sent.

        Raises:
            RuntimeError: unjam's error.
        """
        works, boxes, specs = self._under_way[message]
        while works:
            self._wait(works[0])
            works.pop(0)
        del self._under_way[message]
        if self._is_signal:
            return [torch.zeros(s.shape, dtype=s.dtype, device=self._device) for s in specs]
        return boxes

    def is_posted(self, message: Message) -> bool:
        """Whether something of it is under way."""
        return bool(self._under_way.get(message, ([], [], []))[0])

    def hurry(self, limit: timedelta) -> None:
        """From now on, all waits together take no longer than that."""
        self._end = time.monotonic() + limit.total_seconds()

    def settle(self) -> None:
        """Waits for all that is under way, however it ends: what nobody saw fail ends its group."""
        for works, _, _ in self._under_way.values():
            for work in works:
                with contextlib.suppress(RuntimeError):
                    self._wait(work)
        self._under_way.clear()

    def _wait(self, work: Any) -> None:
        if self._end is None:
            work.wait()
        else:
            work.wait(max(_LEAST, timedelta(seconds=self._end - time.monotonic())))

    def _post(
        self,
        call: Any,
        edge: Edge,
        message: Message,
        other: int,
        specs: Sequence[Spec],
        tensors: list[torch.Tensor],
        byte: str = "",
    ) -> None:
        way = "b" if message.is_gradient else "f"
        works: list[Any] = []
        self._under_way[message] = (works, tensors, list(specs))
        name = f"{self._name}/{edge}/{way}/{message.microbatch}"
        if self._routes.has(edge):
            byte = byte or ("signal" if self._is_signal else "")
            sends = call is dist.isend
            if tensors:
                works += self._routes.post(edge, name, message.is_gradient, sends, tensors, byte)
            return
        with key(name):
            for x in tensors:
                where = {"group_dst" if call is dist.isend else "group_src": other}
                works.append(call(x, group=self._group, **where))
