"""What the ranks of a pipeline compute, action by action: torch's words for it, and its files.

An action is written as torch.distributed.pipelining writes it: stage, kind, microbatch. ``2F5`` is
the forward of microbatch 5 on stage 2. An order has a row of actions for each rank; a file has a
line for each. ``_PipelineScheduleRuntime._load_csv(file, format="compute_only")`` reads such files.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from .._errors import InvalidArgument
from .._texts import printable

KINDS = {
    "F": "forward",
    "B": "backward",
    "I": "gradients of inputs",
    "W": "gradients of weights",
}
_ACTION = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})", re.ASCII)
_NO_COMPUTE = re.compile(
    r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)\d*", re.ASCII
)
_SHOWN = 40  # characters of what is no action


class Action(NamedTuple):
    """What one stage computes for one microbatch; ``kind`` is one of :data:`KINDS`."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def is_forward(self) -> bool:
        """Forward; all else is part of a backward."""
        return self.kind == "F"

    @property
    def gives_gradients(self) -> bool:
        """Whether the stages before it wait for what it computes."""
        return self.kind in ("B", "I")

    @classmethod
    def parse(cls, text: str) -> Action:
        """An action from torch's string.

        Raises:
            InvalidArgument: it is none, or one that computes nothing, such as a send.
        """
        words = text.strip()
        if found := _ACTION.fullmatch(words):
            return cls(int(found[1]), found[2], int(found[3]))
        shown = printable(words[:_SHOWN]) + ("…" if len(words) > _SHOWN else "")
        if _NO_COMPUTE.fullmatch(words):
            raise InvalidArgument(
                f"{shown} computes nothing: give an order without it, which torch calls "
                "compute_only"
            )
        if words.startswith("("):
            raise InvalidArgument(
                f"{shown} runs several actions at once: give them one after the other"
            )
        raise InvalidArgument(
            f"{shown!r} is no action: write stage, kind and microbatch, such as 0F1; the kinds are "
            "F, B, I and W"
        )


class _Fault(Exception):
    """What is wrong with an order, and in which row; None: in all of them."""

    def __init__(self, row: int | None, words: str) -> None:
        self.row = row
        super().__init__(words)


@dataclass(frozen=True)
class Order:
    """Which actions each rank runs, in which order.

    Every stage belongs to one rank, and runs for every microbatch a forward, and behind it either a
    full backward or its two parts, ``I`` before ``W``. Stages and microbatches count from 0.

    Attributes:
        rows: the actions of each rank.

    Raises:
        InvalidArgument: the rows are not that; the message names the action.
    """

    rows: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        try:
            rows = tuple(tuple(map(Action._make, row)) for row in self.rows)
        except TypeError as error:
            raise InvalidArgument(f"rows are no rows of actions: {error}") from None
        object.__setattr__(self, "rows", rows)
        try:
            _check(rows)
        except _Fault as fault:
            where = "" if fault.row is None else f"rank {fault.row}: "
            raise InvalidArgument(f"{where}{fault}") from None

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """The rank of each stage."""
        ranks = {action.stage: rank for rank, row in enumerate(self.rows) for action in row}
        return tuple(ranks[stage] for stage in range(len(ranks)))

    @property
    def stages(self) -> int:
        """How many there are."""
        return len(self.rank_of)

    @cached_property
    def microbatches(self) -> int:
        """How many there are."""
        return 1 + max(action.microbatch for action in self.rows[0])

    @cached_property
    def is_split(self) -> bool:
        """Whether some backward comes in two parts."""
        return any(action.kind == "W" for row in self.rows for action in row)


def _check(rows: Sequence[Sequence[Action]]) -> None:
    if not rows:
        raise _Fault(None, "there is no rank: give at least one row of actions")
    rank_of: dict[int, int] = {}
    seen: set[Action] = set()
    for rank, row in enumerate(rows):
        if not row:
            raise _Fault(rank, "there are no actions: give each rank at least one stage")
        for action in row:
            _check_one(action, rank, rank_of, seen)
    stages = len(rank_of)
    for stage in range(stages):
        if stage not in rank_of:
            raise _Fault(None, f"stage {stage} has no actions, but stage {max(rank_of)} has")
    microbatches = 1 + max(action.microbatch for action in seen)
    for stage in range(stages):
        _check_stage(stage, rank_of[stage], microbatches, seen)


def _check_one(action: Action, rank: int, rank_of: dict[int, int], seen: set[Action]) -> None:
    """Against what stands before it."""
    stage, kind, microbatch = action
    if kind not in KINDS or not all(type(n) is int and n >= 0 for n in (stage, microbatch)):
        raise _Fault(rank, f"{tuple(action)} is no action: give stage, kind and microbatch")
    if rank_of.setdefault(stage, rank) != rank:
        raise _Fault(
            rank, f"{action} is of stage {stage}, which rank {rank_of[stage]} has: give it one rank"
        )
    if action in seen:
        raise _Fault(rank, f"{action} stands there twice: leave one")
    needs = {"F": "", "B": "F", "I": "F", "W": "I"}[kind]
    if needs and Action(stage, needs, microbatch) not in seen:
        raise _Fault(rank, f"{action} does not come after {stage}{needs}{microbatch}: add that")
    seen.add(action)


def _check_stage(stage: int, rank: int, microbatches: int, seen: set[Action]) -> None:
    """What it lacks, or has twice."""
    for microbatch in range(microbatches):
        has = {kind for kind in KINDS if Action(stage, kind, microbatch) in seen}
        if "F" not in has:
            raise _Fault(rank, f"{stage}F{microbatch} is missing")
        if "B" in has and has & {"I", "W"}:
            raise _Fault(
                rank,
                f"stage {stage} has a full backward of microbatch {microbatch} and a part of one: "
                f"leave either {stage}B{microbatch} or the others",
            )
        if "B" not in has and not has >= {"I", "W"}:
            lacking = f"{stage}W{microbatch}" if "I" in has else f"{stage}B{microbatch}"
            raise _Fault(rank, f"{lacking} is missing")


def read_csv(path: str | Path) -> Order:
    """An order from a file: a line for each rank, with commas between actions; gaps are skipped.

    Raises:
        InvalidArgument: the file holds no order; the message has file, line and cause.
        OSError: it cannot be read.
    """
    rows: list[list[Action]] = []
    lines: list[int] = []
    for line, cells in _lines(path):
        try:
            rows.append([Action.parse(cell) for cell in cells if cell.strip()])
        except InvalidArgument as error:
            raise InvalidArgument(f"{path}:{line}: {error}") from None
        lines.append(line)
    try:
        _check(rows)
    except _Fault as fault:
        where = f"{path}" if fault.row is None else f"{path}:{lines[fault.row]}"
        raise InvalidArgument(f"{where}: {fault}") from None
    return Order(tuple(map(tuple, rows)))


def _lines(path: str | Path) -> Iterator[tuple[int, list[str]]]:
    """The file's rows with their lines."""
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.reader(file, strict=True)
        while True:
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                raise InvalidArgument(
                    f"{path}:{reader.line_num}: this is no CSV: {error}"
                ) from None
            except UnicodeDecodeError:
                raise InvalidArgument(
                    f"{path}:{reader.line_num + 1}: this is no text in UTF-8"
                ) from None
            yield reader.line_num, cells


def write_csv(order: Order, path: str | Path) -> None:
    """Writes what :func:`read_csv` reads, and torch as a schedule of the format ``compute_only``.

    Raises:
        OSError: the file cannot be written.
    """
    Path(path).write_text("".join(f"{line}\n" for line in lines_of(order)), encoding="utf-8")


def lines_of(order: Order) -> Iterable[str]:
    """The lines of its file."""
    return (",".join(map(str, row)) for row in order.rows)
