"""What goes between ranks: sends of packets, and what receives them.

A send and its receive are tasks of their own, so no SM waits for a peer before it has sent.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..formats import Array
from ..graph import ITEM_BYTES, Value, largest_divisor
from .base import Memory, Rect, Rule

_MOST_WORDS = 256  # of a task and row


def largest_tile(x: Value) -> int:
    """Columns of a task: whole words of 4 bytes, which packets carry."""
    per_word = 4 // ITEM_BYTES[x.dtype]
    return per_word * largest_divisor(x.cols // per_word, _MOST_WORDS)


class Send(Rule):
    """Some columns to the mail of all peers, where each sender has rows of its own."""

    kind = "send"

    def prepare(self) -> None:
        self.cols = largest_tile(self.op.inputs["x"])

    @property
    def tiles(self) -> int:
        return self.op.inputs["x"].cols // self.cols

    def reads(self, tile: int) -> list[Rect]:
        x = self.op.inputs["x"]
        return [Rect(x, 0, x.rows, tile * self.cols, (tile + 1) * self.cols)]

    def writes(self, tile: int) -> list[Rect]:
        """At each peer the sender's rows; all senders together write all."""
        mail = self.out
        return [Rect(mail, 0, mail.rows, tile * self.cols, (tile + 1) * self.cols)]

    def run(self, tile: int, memory: Memory) -> list[tuple[Rect, Array]]:
        x, place = memory.read(self.reads(tile)[0]), self.writes(tile)[0]
        first = memory.rank * len(x)
        return [(place._replace(row0=first, row1=first + len(x)), x)]

    def template(self) -> tuple[str, dict[str, Any]]:
        x = self.op.inputs["x"]
        return "send", {"dtype": x.dtype, "batch": x.rows, "cols": x.cols, "tile": self.cols}

    def operands(self, tile: int) -> dict[str, Any]:
        return {"in0": self.op.inputs["x"], "out": self.out, "a": tile}


class Sum(Rule):
    """Own columns and those of the mail, added in the order of ranks; then the residual."""

    kind = "sum"

    def prepare(self) -> None:
        self.cols = largest_tile(self.op.inputs["x"])

    @property
    def tiles(self) -> int:
        return self.op.inputs["x"].cols // self.cols

    def reads(self, tile: int) -> list[Rect]:
        span = (tile * self.cols, (tile + 1) * self.cols)
        roles = [role for role in ("x", "mail", "residual") if role in self.op.inputs]
        return [Rect(self.op.inputs[r], 0, self.op.inputs[r].rows, *span) for r in roles]

    def writes(self, tile: int) -> list[Rect]:
        return [Rect(self.out, 0, self.out.rows, tile * self.cols, (tile + 1) * self.cols)]

    def run(self, tile: int, memory: Memory) -> list[tuple[Rect, Array]]:
        found = {rect.value: memory.read(rect) for rect in self.reads(tile)}
        x = found[self.op.inputs["x"]]
        if "mail" in self.op.inputs:
            parts = found[self.op.inputs["mail"]].reshape(self.graph.ranks, *x.shape)
            parts[memory.rank] = x
            total = parts[0]
            for part in parts[1:]:
                total = total + part
        else:
            total = x
        if "residual" in self.op.inputs:
            total = total + found[self.op.inputs["residual"]]
        return [(self.writes(tile)[0], total)]

    def template(self) -> tuple[str, dict[str, Any]]:
        x = self.op.inputs["x"]
        return "sum", {
            "dtype": x.dtype,
            "batch": x.rows,
            "cols": x.cols,
            "tile": self.cols,
            "ranks": self.graph.ranks,
            "residual": "residual" in self.op.inputs,
        }

    def operands(self, tile: int) -> dict[str, Any]:
        inputs = self.op.inputs
        found: dict[str, Any] = {"in0": inputs["x"], "out": self.out, "a": tile}
        if "mail" in inputs:
            found["out2"] = inputs["mail"]
        if "residual" in inputs:
            found["in1"] = inputs["residual"]
        return found


class Gather(Rule):
    """A task a tile of the sends': the columns of all ranks."""

    kind = "gather"

    def prepare(self) -> None:
        self.cols = largest_tile(self.op.inputs["x"])

    @property
    def tiles(self) -> int:
        return self.op.inputs["x"].cols // self.cols

    def reads(self, tile: int) -> list[Rect]:
        span = (tile * self.cols, (tile + 1) * self.cols)
        roles = [role for role in ("x", "mail") if role in self.op.inputs]
        return [Rect(self.op.inputs[r], 0, self.op.inputs[r].rows, *span) for r in roles]

    def writes(self, tile: int) -> list[Rect]:
        cols = self.op.inputs["x"].cols
        return [
            Rect(self.out, 0, self.out.rows, first, first + self.cols)
            for rank in range(self.graph.ranks)
            for first in [rank * cols + tile * self.cols]
        ]

    def run(self, tile: int, memory: Memory) -> list[tuple[Rect, Array]]:
        x, *mail = [memory.read(rect) for rect in self.reads(tile)]
        parts = np.stack([x])
        if mail:
            parts = mail[0].reshape(self.graph.ranks, *x.shape)
            parts[memory.rank] = x
        return list(zip(self.writes(tile), parts, strict=True))

    def template(self) -> tuple[str, dict[str, Any]]:
        x = self.op.inputs["x"]
        return "gather", {
            "dtype": x.dtype,
            "batch": x.rows,
            "cols": x.cols,
            "tile": self.cols,
            "ranks": self.graph.ranks,
        }

    def operands(self, tile: int) -> dict[str, Any]:
        inputs = self.op.inputs
        found: dict[str, Any] = {"in0": inputs["x"], "out": self.out, "a": tile}
        if "mail" in inputs:
            found["out2"] = inputs["mail"]
        return found
