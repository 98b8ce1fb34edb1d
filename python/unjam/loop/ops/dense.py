"""Operators of a dense model outside of attention: embedding, norm, matrix products."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..formats import Array
from .base import Memory, Rect, Rule, Weights, most_rows, pack, tile_of


class Embedding(Rule):
    """A task a row."""

    kind = "embedding"

    @property
    def tiles(self) -> int:
        return self.graph.batch

    def reads(self, tile: int) -> list[Rect]:
        return [self.row("tokens", tile)]

    def writes(self, tile: int) -> list[Rect]:
        return [Rect(self.out, tile, tile + 1, 0, self.out.cols)]

    def run(self, tile: int, memory: Memory) -> list[tuple[Rect, Array]]:
        token = int(memory.read(self.reads(tile)[0])[0, 0])
        table = memory.weight(self.op.inputs["table"])
        return [(self.writes(tile)[0], table[token : token + 1])]

    def weight_bytes(self, tile: int) -> int:
        return self.out.bytes // self.out.rows

    def template(self) -> tuple[str, dict[str, Any]]:
        return "embedding", {"cols": self.out.cols}

    def operands(self, tile: int) -> dict[str, Any]:
        inputs = self.op.inputs
        return {"in0": inputs["tokens"], "out": self.out, "aux": inputs["table"], "a": tile}


class Norm(Rule):
    """A task a row."""

    kind = "norm"

    @property
    def tiles(self) -> int:
        return self.graph.batch

    def reads(self, tile: int) -> list[Rect]:
        return [self.row("x", tile)]

    def writes(self, tile: int) -> list[Rect]:
        return [Rect(self.out, tile, tile + 1, 0, self.out.cols)]

    def run(self, tile: int, memory: Memory) -> list[tuple[Rect, Array]]:
        x = memory.read(self.reads(tile)[0])
        return [(self.writes(tile)[0], self.normed(x, memory))]

    def staging_bytes(self) -> int:
        x = self.op.inputs["x"]
        return x.bytes // x.rows

    def template(self) -> tuple[str, dict[str, Any]]:
        return "norm", {"cols": self.out.cols, "eps": self.op.settings["eps"]}

    def operands(self, tile: int) -> dict[str, Any]:
        inputs = self.op.inputs
        return {"in0": inputs["x"], "out": self.out, "aux": inputs["norm"], "a": tile}


class Product(Rule):
    """What products of few rows with a weight share: tiles of the weight's rows, in pages."""

    role = "weight"

    def prepare(self) -> None:
        batch = self.op.inputs["x"].rows
        self.rows = self.op.settings.get("tile") or tile_of(
            self.op.inputs[self.role].rows, self.sms, most_rows(batch, len(self.matrices()))
        )
        self._packed = pack([self.op.inputs[role] for role in self.matrices()], self.rows)

    def matrices(self) -> tuple[str, ...]:
        """Roles of the weights that are read together."""
        return (self.role,)

    @property
    def tiles(self) -> int:
        return self._packed.tiles

    def weights(self) -> Weights | None:
        return self._packed

    def reads(self, tile: int) -> list[Rect]:
        found = [self.whole("x")]
        if (residual := self.op.inputs.get("residual")) is not None:
            found.append(Rect(residual, 0, residual.rows, *self.span(tile)))
        return found

    def writes(self, tile: int) -> list[Rect]:
        return [Rect(self.out, 0, self.out.rows, *self.span(tile))]

    def span(self, tile: int) -> tuple[int, int]:
        """Rows of the weight, which are columns of the result."""
        return tile * self.rows, (tile + 1) * self.rows

    def product(self, x: Array, role: str, tile: int, memory: Memory) -> Array:
        """x · (the tile of the weight)ᵀ."""
        first, last = self.span(tile)
        return x @ memory.weight(self.op.inputs[role])[first:last].T

    def staging_bytes(self) -> int:
        return self.op.inputs["x"].bytes

    def shape(self) -> dict[str, Any]:
        """The template's first arguments."""
        packed = self._packed
        return {
            "batch": self.op.inputs["x"].rows,
            "cols": self.op.inputs["x"].cols,
            "rows": packed.rows,
            "chunk": packed.chunk,
            "normed": "norm" in self.op.inputs,
            "eps": self.op.settings.get("eps", 0.0),
        }

    def operands(self, tile: int) -> dict[str, Any]:
        inputs = self.op.inputs
        found: dict[str, Any] = {"in0": inputs["x"], "out": self.out, "a": tile}
        if "residual" in inputs:
            found["in1"] = inputs["residual"]
        if "norm" in inputs:
            found["aux"] = inputs["norm"]
        return found


class Linear(Product):
    """x · weightᵀ (+ residual)."""

    kind = "linear"

    def run(self, tile: int, memory: Memory) -> list[tuple[Rect, Array]]:
        x, *residual = [memory.read(rect) for rect in self.reads(tile)]
        y = self.product(self.normed(x, memory), "weight", tile, memory)
        return [(self.writes(tile)[0], y + residual[0] if residual else y)]

    def template(self) -> tuple[str, dict[str, Any]]:
        return "linear", {
            **self.shape(),
            "out_cols": self.out.cols,
            "residual": "residual" in self.op.inputs,
        }


class Gated(Product):
    """silu(x · gateᵀ) · (x · upᵀ): a page has rows of both."""

    kind = "gated"
    role = "gate"

    def matrices(self) -> tuple[str, ...]:
        return ("gate", "up")

    def run(self, tile: int, memory: Memory) -> list[tuple[Rect, Array]]:
        x = self.normed(memory.read(self.whole("x")), memory)
        gate, up = (self.product(x, role, tile, memory) for role in ("gate", "up"))
        return [(self.writes(tile)[0], silu(gate) * up)]

    def template(self) -> tuple[str, dict[str, Any]]:
        return "gated", {**self.shape(), "out_cols": self.out.cols}


class Head(Product):
    """Of each tile of logits the largest with its token."""

    kind = "head"

    def writes(self, tile: int) -> list[Rect]:
        return [Rect(self.out, 0, self.out.rows, 2 * tile, 2 * tile + 2)]

    def staging_bytes(self) -> int:
        return max(self.op.inputs["x"].bytes, 4 * self.op.inputs["x"].rows * self.rows)

    def run(self, tile: int, memory: Memory) -> list[tuple[Rect, Array]]:
        x = self.normed(memory.read(self.whole("x")), memory)
        logits = self.product(x, "weight", tile, memory)
        first = memory.rank * self.op.inputs["weight"].rows + tile * self.rows
        place = logits.argmax(axis=1)
        pairs = [logits[np.arange(len(place)), place], (first + place).astype(np.float32)]
        return [(self.writes(tile)[0], np.stack(pairs, axis=1))]

    def template(self) -> tuple[str, dict[str, Any]]:
        return "head", {
            **self.shape(),
            "out_cols": self.out.cols,
            "vocabulary": self.op.inputs["weight"].rows,
        }


class Best(Rule):
    """Of a row's pairs the largest; the smallest token of equals."""

    kind = "best"

    @property
    def tiles(self) -> int:
        return self.graph.batch

    def reads(self, tile: int) -> list[Rect]:
        return [self.row("pairs", tile)]

    def writes(self, tile: int) -> list[Rect]:
        return [Rect(self.out, tile, tile + 1, 0, self.out.cols)]

    def run(self, tile: int, memory: Memory) -> list[tuple[Rect, Array]]:
        pairs = memory.read(self.reads(tile)[0]).reshape(-1, 2)
        largest = pairs[pairs[:, 0] == pairs[:, 0].max()]
        return [(self.writes(tile)[0], self.result(largest[largest[:, 1].argmin()]))]

    def result(self, pair: Array) -> Array:
        return pair[None]

    def template(self) -> tuple[str, dict[str, Any]]:
        pairs = self.op.inputs["pairs"].cols // 2
        return "best", {"pairs": pairs, "token": self.kind == "pick"}

    def operands(self, tile: int) -> dict[str, Any]:
        return {"in0": self.op.inputs["pairs"], "out": self.out, "a": tile}


class Pick(Best):
    """The token alone: the next step's."""

    kind = "pick"

    def result(self, pair: Array) -> Array:
        return pair[1:][None]


def silu(x: Array) -> Array:
    """x / (1 + exp(-x)), which does not overflow."""
    return x * (0.5 * (1 + np.tanh(0.5 * x)))
