"""Many point-to-point copies as one batch: hundreds of operations between two ranks are no matter.

All ranks tell each other their operations once, and find faults before anything moves. What one
rank sends to several, it sends once: the receivers hand it on. Small operations travel together.

A *piece* is what travels at once: bytes of one sender for one list of receivers, a broadcast in a
group of these. Each rank has a bounded number of pieces under way, in one order of all ranks. So
none waits in a circle: of the first piece that has not ended, all members have begun it.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..._errors import InvalidArgument, InvalidUsage, UnjamError
from ...group import Group
from ...request import Request
from .._context import group_of, limit_of
from .._reshard_specs import tell
from ..reshard import ProcessGroup

PIECE_BYTES = 8 << 20
WINDOW = 16  # pieces under way of a rank
_ALIGN = 16  # inside of a piece


class Operation(NamedTuple):
    """A send or a receive that waits for the batch.

    Attributes:
        tensor: what is sent, or written.
        peer: the other rank, in the group.
        task: of both ends the same number; None: they are matched in their order.
    """

    tensor: torch.Tensor
    peer: int
    task: int | None


@dataclass(frozen=True)
class Slice:
    """A part of one operation in a piece, in bytes.

    Attributes:
        numbers: the operation's place among those of the sender and each receiver of the piece.
        at: where in the piece.
        start: where in the tensor.
        size: how many.
    """

    numbers: tuple[int, ...]
    at: int
    start: int
    size: int


@dataclass
class Piece:
    """What travels at once: `size` bytes from one rank to others."""

    source: int
    targets: tuple[int, ...]
    size: int = 0
    slices: list[Slice] = field(default_factory=list)


class Copies:
    """Batches of sends and receives between the ranks of a group."""

    def __init__(
        self,
        group: ProcessGroup = None,
        *,
        key: str = "copies",
        piece_bytes: int = PIECE_BYTES,
        window: int = WINDOW,
    ) -> None:
        """Sends nothing.

        Args:
            group: a process group of unjam's (None: the default one) or a :class:`unjam.Group`;
                all its ranks call :meth:`run`.
            key: the ordering channel; another one for each of these in a group.
            piece_bytes: what travels at once at most; the same on all ranks.
            window: how many of these a rank has under way; with ``piece_bytes`` it bounds the
                memory that pieces are packed in. Tensors that are not contiguous are copied as a
                whole beside that, for as long as a run takes.

        Raises:
            InvalidArgument: a limit below 1.
        """
        for name, value in (("piece_bytes", piece_bytes), ("window", window)):
            if type(value) is not int or value < 1:
                raise InvalidArgument(f"{name}={value!r} is no limit: give a number from 1 on")
        self._group = group_of(group)
        self._limit = limit_of(group)
        self._key = key
        self._piece_bytes, self._window = piece_bytes, window
        self._sends: list[Operation] = []
        self._receives: list[Operation] = []
        self._groups: dict[tuple[int, ...], Group] = {}
        self._known: dict[bytes, list[Piece]] = {}
        self._broken = ""  # why it is out of use

    @property
    def group(self) -> Group:
        """The ranks, as unjam has them."""
        return self._group

    def send(self, tensor: torch.Tensor, to: int, task: int | None = None) -> None:
        """Adds a send to the next batch; the tensor stays untouched until that has run.

        Args:
            tensor: of any type and any strides.
            to: a rank of the group, perhaps this one.
            task: of both ends the same number; None: they are matched in their order.

        Raises:
            InvalidArgument: no such rank, or a tensor without memory of its own values; the
                message says what to give.
        """
        self._sends.append(self._operation(tensor, to, task, "send to"))

    def receive(self, tensor: torch.Tensor, source: int, task: int | None = None) -> None:
        """Adds a receive to the next batch; see :meth:`send`.

        Raises:
            InvalidArgument: as there, or elements of the tensor share memory.
        """
        operation = self._operation(tensor, source, task, "receive from")
        shared = zip(tensor.shape, tensor.stride(), strict=True)
        if any(size > 1 and stride == 0 for size, stride in shared):
            raise InvalidArgument(
                f"receive from rank {source}: elements of the tensor share memory, as expand() "
                "makes them: give one whose elements have their own"
            )
        self._receives.append(operation)

    def run(self) -> None:
        """Carries out all that was added, and waits for it. All ranks of the group call it.

        Raises:
            InvalidArgument: on all ranks, if sends and receives do not fit together; the message
                names both ranks and the first difference. Nothing was moved.
            dist.DistBackendError: a rank is gone, or late. What was to be received is undefined
                then.
            InvalidUsage: an earlier run has failed so: make another, under another key.
        """
        if self._broken:
            raise InvalidUsage(
                f"these copies are out of use, since {self._broken}. Cure: make others on all "
                "ranks, under another key"
            )
        sends, receives = self._sends, self._receives
        self._sends, self._receives = [], []
        # Ranks that fail differ in their uses of keys: later ones would get each other's bytes.
        self._broken = "a run was interrupted"
        try:
            self._run(_by_peer(sends), _by_peer(receives))
            self._broken = ""
        except _Unfit as error:
            self._broken = ""  # all ranks know it
            raise InvalidArgument(str(error)) from None
        except Exception as error:
            self._broken = f"a run has failed: {error}"
            if isinstance(error, UnjamError):
                raise dist.DistBackendError(f"unjam: {error}") from error
            raise

    def close(self) -> None:
        """Closes the groups that runs have made. May be repeated; then :meth:`run` is refused.

        Raises:
            InvalidUsage: after a run that failed something is pending; the message names it.
        """
        self._broken = self._broken or "they are closed"
        self._known.clear()
        for members, group in list(self._groups.items()):
            group.close()
            del self._groups[members]

    # ---- inside ----

    def _operation(self, tensor: torch.Tensor, peer: int, task: int | None, what: str) -> Operation:
        if not isinstance(tensor, torch.Tensor):
            raise InvalidArgument(f"{what} rank {peer}: {type(tensor).__name__} is no tensor")
        if type(peer) is not int or not 0 <= peer < self._group.size:
            raise InvalidArgument(
                f"{what} rank {peer!r}: the group has ranks 0 to {self._group.size - 1}"
            )
        where = f"{what} rank {peer}"
        if isinstance(tensor, DTensor):
            raise InvalidArgument(f"{where}: the tensor is a DTensor: give x.to_local()")
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise InvalidArgument(
                f"{where}: the tensor is sparse or quantized: give the dense ones in it"
            )
        if tensor.device.type == "meta":
            raise InvalidArgument(f"{where}: the tensor is on the device meta, without memory")
        if tensor.is_conj() or tensor.is_neg():
            raise InvalidArgument(
                f"{where}: the tensor is a lazy conjugation or negation: give "
                "x.resolve_conj().resolve_neg()"
            )
        if task is not None and type(task) is not int:
            raise InvalidArgument(f"{where}: task={task!r} is no number: give an int, or None")
        return Operation(tensor.detach(), peer, task)

    def _run(self, sends: dict[int, list[Operation]], receives: dict[int, list[Operation]]) -> None:
        """All that can fail on one rank alone does so before the others are told to begin."""
        wrong = ""
        sources: dict[int, list[_Flat]] = {}
        targets: dict[int, list[_Flat]] = {}
        try:
            for made, given, is_source in ((sources, sends, True), (targets, receives, False)):
                for peer, operations in given.items():
                    made[peer] = [_Flat(o.tensor, is_source) for o in operations]
        except Exception as failure:  # such as no memory for a copy
            wrong = str(failure) or type(failure).__name__
        pieces = self._agreed(sends, receives, wrong)
        mine = self._group.rank
        # What stays on this rank is no part of a piece.
        for one, other in zip(sources.pop(mine, []), targets.pop(mine, []), strict=True):
            other.bytes.copy_(one.bytes)
            other.finish()
        under_way: deque[tuple[Piece, torch.Tensor, Request]] = deque()
        error: UnjamError | None = None
        for number, piece in enumerate(pieces):
            if mine != piece.source and mine not in piece.targets:
                continue
            if len(under_way) == self._window:
                error = self._end(under_way.popleft(), targets) or error
            flats = sources[piece.targets[0]] if mine == piece.source else targets[piece.source]
            data = self._packed(piece, flats)
            members = (piece.source, *piece.targets)
            request = self._subgroup(members).broadcast(
                data, root=0, key=f"{self._key} {number % self._window}"
            )
            under_way.append((piece, data, request))
        while under_way:
            error = self._end(under_way.popleft(), targets) or error
        if error is not None:
            raise error  # or what has not come would be copied over what was there
        for of in targets.values():
            for flat in of:
                flat.finish()

    def _packed(self, piece: Piece, flats: Sequence[_Flat]) -> torch.Tensor:
        """The bytes of the piece: a view where they lie in one run, and staging elsewhere."""
        is_source = self._group.rank == piece.source
        place = 0 if is_source else piece.targets.index(self._group.rank)
        if len(piece.slices) == 1:
            only = piece.slices[0]
            view = flats[only.numbers[place]].bytes[only.start : only.start + only.size]
            if view.device.type == "cpu":
                return view
        data = torch.empty(piece.size, dtype=torch.uint8)
        for each in piece.slices if is_source else ():
            part = flats[each.numbers[place]].bytes[each.start : each.start + each.size]
            data[each.at : each.at + each.size].copy_(part)
        return data

    def _end(
        self,
        entry: tuple[Piece, torch.Tensor, Request],
        targets: Mapping[int, Sequence[_Flat]],
    ) -> UnjamError | None:
        piece, data, request = entry
        error = request.exception(self._limit)
        if error is not None or self._group.rank == piece.source:
            return error
        place = piece.targets.index(self._group.rank)
        for each in piece.slices:
            flat = targets[piece.source][each.numbers[place]]
            part = flat.bytes[each.start : each.start + each.size]
            if part.data_ptr() != data.data_ptr():
                part.copy_(data[each.at : each.at + each.size])
        return None

    def _subgroup(self, members: tuple[int, ...]) -> Group:
        found = self._groups.get(members)
        if found is None:
            ranks = [self._group.ranks[rank] for rank in members]
            found = self._group.context.group(ranks, f"{self._key} of {self._group.name}")
            self._groups[members] = found
        return found

    def _agreed(
        self,
        sends: Mapping[int, Sequence[Operation]],
        receives: Mapping[int, Sequence[Operation]],
        wrong: str,
    ) -> list[Piece]:
        """The pieces of all ranks, in one order; ranks tell each other only what is new.

        Args:
            sends: this rank's.
            receives: likewise.
            wrong: why this rank cannot take part; empty: it can.
        """
        mine = {
            "wrong": wrong,
            "sends": {peer: _told(of) for peer, of in sends.items()},
            "receives": {peer: _told(of) for peer, of in receives.items()},
            "same": _same_sources(sends),
            "limits": [self._piece_bytes, self._window],
        }
        text = json.dumps(mine, sort_keys=True).encode()
        digest = np.frombuffer(hashlib.sha256(text).digest(), np.uint8)
        all_digests = np.zeros((self._group.size, digest.size), np.uint8)
        self._group.all_gather(digest, all_digests, key=f"{self._key} digests").synchronize(
            self._limit
        )
        # All ranks look at the same digests, so all know them, or none does.
        known = all_digests.tobytes()
        if known not in self._known:
            told = tell(self._group, self._key, mine, self._limit)
            _check(told)
            self._known = {known: _pieces(told, self._piece_bytes)}
        return self._known[known]


class _Unfit(Exception):
    """Ranks' operations do not fit together; all ranks find it."""


class _Flat:
    """A tensor as bytes in a row; a copy of it where it is not contiguous."""

    def __init__(self, tensor: torch.Tensor, is_source: bool) -> None:
        self._target = None if is_source or tensor.is_contiguous() else tensor
        own = (
            tensor.contiguous()
            if self._target is None
            else torch.empty_like(tensor, memory_format=torch.contiguous_format)
        )
        self._own = own
        # A tensor of one element is contiguous with any strides, and view() takes 1 alone.
        self.bytes = own.as_strided((own.numel(),), (1,)).view(torch.uint8)

    def finish(self) -> None:
        if self._target is not None:
            self._target.copy_(self._own)


def _by_peer(operations: Sequence[Operation]) -> dict[int, list[Operation]]:
    """Those of each peer, by their tasks if all have one, and else as they were added."""
    found: dict[int, list[Operation]] = {}
    for operation in operations:
        found.setdefault(operation.peer, []).append(operation)
    for of in found.values():
        if all(operation.task is not None for operation in of):
            of.sort(key=lambda operation: operation.task or 0)
    return found


def _told(operations: Sequence[Operation]) -> list[list[Any]]:
    """What others must know: task, bytes, type."""
    return [
        [o.task, o.tensor.numel() * o.tensor.element_size(), str(o.tensor.dtype)]
        for o in operations
    ]


def _same_sources(sends: Mapping[int, Sequence[Operation]]) -> dict[int, list[int]]:
    """Of each send a number; those that send the same memory have the same."""
    numbers: dict[Any, int] = {}
    found = {}
    for peer, of in sends.items():
        found[peer] = [
            numbers.setdefault(
                (o.tensor.data_ptr(), o.tensor.dtype, o.tensor.shape, o.tensor.stride())
                if o.tensor.numel()
                else (peer, n),
                len(numbers),
            )
            for n, o in enumerate(of)
        ]
    return found


def _check(told: Sequence[Mapping[str, Any]]) -> None:
    """Whether all sends have their receives."""
    for rank, each in enumerate(told):
        if each["wrong"]:
            raise _Unfit(f"rank {rank} cannot take part: {each['wrong']}. Nothing was moved")
        if each["limits"] != told[0]["limits"]:
            raise _Unfit(
                f"piece_bytes and window are {each['limits']} on rank {rank} and "
                f"{told[0]['limits']} on rank 0: give all ranks the same"
            )
    for source in range(len(told)):
        for target in range(len(told)):
            sent = told[source]["sends"].get(str(target), [])
            wanted = told[target]["receives"].get(str(source), [])
            if sent == wanted:
                continue
            for number in range(max(len(sent), len(wanted))):
                pair = [of[number] if number < len(of) else None for of in (sent, wanted)]
                if pair[0] != pair[1]:
                    shown = ["nothing" if x is None else _shown(x) for x in pair]
                    raise _Unfit(
                        f"rank {source} sends {len(sent)} tensors to rank {target}, which expects "
                        f"{len(wanted)}; at number {number} it sends {shown[0]}, and expected is "
                        f"{shown[1]}. Nothing was moved. Cure: submit the same on both ranks, with "
                        "equal task numbers, or in the same order without"
                    )


def _shown(operation: Sequence[Any]) -> str:
    task, size, dtype = operation
    name = "" if task is None else f"task {task}, "
    return f"{name}{size} bytes of {str(dtype).removeprefix('torch.')}"


def _pieces(told: Sequence[Mapping[str, Any]], most: int) -> list[Piece]:
    """All ranks' pieces, in one order: the k-th of each route, then the next of each."""
    routes: dict[tuple[int, tuple[int, ...]], list[tuple[tuple[int, ...], int]]] = {}
    for source, each in enumerate(told):
        # Who wants each memory, sent to it for the n-th time.
        wants: dict[tuple[int, int], dict[int, tuple[int, int]]] = {}
        for peer, numbers in sorted((int(p), n) for p, n in each["same"].items()):
            seen: dict[int, int] = {}
            for place, number in enumerate(numbers):
                turn = seen[number] = seen.get(number, -1) + 1
                size = each["sends"][str(peer)][place][1]
                if peer != source and size:
                    wants.setdefault((number, turn), {})[peer] = (place, size)
        for of in wants.values():
            targets = tuple(sorted(of))
            sizes = {size for _, size in of.values()}
            assert len(sizes) == 1
            places = tuple(of[target][0] for target in targets)
            routes.setdefault((source, targets), []).append((places, sizes.pop()))
    queues = [_cut(source, targets, of, most) for (source, targets), of in sorted(routes.items())]
    longest = max(map(len, queues), default=0)
    return [queue[k] for k in range(longest) for queue in queues if k < len(queue)]


def _cut(
    source: int, targets: tuple[int, ...], of: Sequence[tuple[tuple[int, ...], int]], most: int
) -> list[Piece]:
    """One route's operations in pieces of at most so many bytes."""
    found = [Piece(source, targets)]
    for places, size in of:
        start = 0
        while start < size:
            at = -(-found[-1].size // _ALIGN) * _ALIGN
            if found[-1].slices and (at >= most or (size > most and start == 0)):
                found.append(Piece(source, targets))  # a large one begins a piece: no staging
                at = 0
            part = min(size - start, most - at)
            found[-1].slices.append(Slice(places, at, start, part))
            found[-1].size = at + part
            start += part
    return found
