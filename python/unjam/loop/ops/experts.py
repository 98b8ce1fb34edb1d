"""A mixture of experts: routing, and products whose weights an expert's number names.

Slots are static: row and place among the row's k experts. Which weights a slot takes is read from
the routing, so these weights cannot be loaded ahead of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..formats import Array
from .base import Memory, Rect, Rule, Weights, pack, tile_of
from .dense import silu


class Route(Rule):
    """A row's k best experts, and the softmax over their scores: pairs, the best first."""

    kind = "route"

    @property
    def tiles(self) -> int:
        return self.graph.batch

    def reads(self, tile: int) -> list[Rect]:
        return [self.row("x", tile)]

    def writes(self, tile: int) -> list[Rect]:
        return [Rect(self.out, tile, tile + 1, 0, self.out.cols)]

    def weight_bytes(self, tile: int) -> int:
        return self.op.inputs["router"].bytes

    def run(self, tile: int, memory: Memory) -> list[tuple[Rect, Array]]:
        x = self.normed(memory.read(self.row("x", tile)), memory)
        scores = (x @ memory.weight(self.op.inputs["router"]).T)[0]
        best = np.argsort(-scores, kind="stable")[: self.op.settings["k"]]
        weights = np.exp(scores[best] - scores[best[0]])
        pairs = np.stack([best.astype(np.float32), weights / weights.sum()], axis=1)
        return [(self.writes(tile)[0], pairs.reshape(1, -1))]

    def staging_bytes(self) -> int:
        x = self.op.inputs["x"]
        return x.bytes // x.rows

    def template(self) -> tuple[str, dict[str, Any]]:
        return "route", {
            "cols": self.op.inputs["x"].cols,
            "experts": self.op.inputs["router"].rows,
            "k": self.op.settings["k"],
            "normed": "norm" in self.op.inputs,
            "eps": self.op.settings["eps"],
        }

    def operands(self, tile: int) -> dict[str, Any]:
        inputs = self.op.inputs
        found = {"in0": inputs["x"], "out": self.out, "aux": inputs["router"], "a": tile}
        if "norm" in inputs:
            found["aux2"] = inputs["norm"]
        return found


class _Expert(Rule):
    """What both products have: the routing, and tiles of an expert's rows."""

    matrices: tuple[str, ...]

    def prepare(self) -> None:
        values = [self.op.inputs[role] for role in self.matrices]
        self.experts, height, self.width = values[0].shape
        self.k: int = self.op.settings["k"]
        self.rows = tile_of(height, max(1, self.sms // self.rounds()))
        self._packed = pack(values, self.rows, experts=self.experts)

    def rounds(self) -> int:
        """Tasks with the same tile."""
        raise NotImplementedError

    @property
    def tiles(self) -> int:
        return self.rounds() * self._packed.tiles

    def weights(self) -> Weights | None:
        return self._packed

    def staging_bytes(self) -> int:
        x = self.op.inputs["x"]
        return x.bytes // self.graph.batch

    def expert(self, slot: int, memory: Memory) -> tuple[int, float]:
        """Of a slot: number and weight."""
        row, place = divmod(slot, self.k)
        pair = memory.read(self.row("route", row))[0, 2 * place : 2 * place + 2]
        return int(pair[0]), pair[1]


class ExpertUp(_Expert):
    """silu(x · gateᵀ) · (x · upᵀ) of a slot."""

    kind = "expert_up"
    matrices = ("gate", "up")

    def rounds(self) -> int:
        return self.graph.batch * self.op.settings["k"]

    def reads(self, tile: int) -> list[Rect]:
        row = tile // self._packed.tiles // self.k
        return [self.row("route", row), self.row("x", row)]

    def writes(self, tile: int) -> list[Rect]:
        slot, part = divmod(tile, self._packed.tiles)
        return [Rect(self.out, slot, slot + 1, part * self.rows, (part + 1) * self.rows)]

    def run(self, tile: int, memory: Memory) -> list[tuple[Rect, Array]]:
        slot, part = divmod(tile, self._packed.tiles)
        expert, _ = self.expert(slot, memory)
        x = self.normed(memory.read(self.row("x", slot // self.k)), memory)
        here = slice(part * self.rows, (part + 1) * self.rows)
        gate, up = (x @ memory.weight(self.op.inputs[r])[expert, here].T for r in self.matrices)
        return [(self.writes(tile)[0], silu(gate) * up)]

    def template(self) -> tuple[str, dict[str, Any]]:
        return "expert_up", {
            "cols": self.width,
            "rows": self.rows,
            "chunk": self._packed.chunk,
            "normed": "norm" in self.op.inputs,
            "eps": self.op.settings["eps"],
            "k": self.k,
            "out_cols": self.out.cols,
            "tiles": self._packed.tiles,
        }

    def operands(self, tile: int) -> dict[str, Any]:
        inputs = self.op.inputs
        slot, part = divmod(tile, self._packed.tiles)
        found = {"in0": inputs["x"], "in1": inputs["route"], "out": self.out, "a": part, "b": slot}
        if "norm" in inputs:
            found["aux"] = inputs["norm"]
        return found


class ExpertDown(_Expert):
    """The weighted sum of a row's k slots (+ residual), some columns a task."""

    kind = "expert_down"
    matrices = ("weight",)

    def rounds(self) -> int:
        return self.graph.batch

    def reads(self, tile: int) -> list[Rect]:
        row, part = divmod(tile, self._packed.tiles)
        x = self.op.inputs["x"]
        found = [self.row("route", row), Rect(x, row * self.k, (row + 1) * self.k, 0, x.cols)]
        if (residual := self.op.inputs.get("residual")) is not None:
            found.append(Rect(residual, row, row + 1, *self._span(part)))
        return found

    def writes(self, tile: int) -> list[Rect]:
        row, part = divmod(tile, self._packed.tiles)
        return [Rect(self.out, row, row + 1, *self._span(part))]

    def _span(self, part: int) -> tuple[int, int]:
        return part * self.rows, (part + 1) * self.rows

    def weight_bytes(self, tile: int) -> int:
        return self.k * self._packed.tile_bytes

    def run(self, tile: int, memory: Memory) -> list[tuple[Rect, Array]]:
        row, part = divmod(tile, self._packed.tiles)
        route, x, *residual = [memory.read(rect) for rect in self.reads(tile)]
        here = slice(*self._span(part))
        weight = memory.weight(self.op.inputs["weight"])
        total = np.zeros(self.rows, np.float32)
        for place, (expert, share) in enumerate(route.reshape(self.k, 2)):
            total += share * (weight[int(expert), here] @ x[place])
        return [(self.writes(tile)[0], total[None] + (residual[0] if residual else 0))]

    def template(self) -> tuple[str, dict[str, Any]]:
        return "expert_down", {
            "cols": self.width,
            "rows": self.rows,
            "chunk": self._packed.chunk,
            "k": self.k,
            "out_cols": self.out.cols,
            "tiles": self._packed.tiles,
            "residual": "residual" in self.op.inputs,
        }

    def operands(self, tile: int) -> dict[str, Any]:
        inputs = self.op.inputs
        row, part = divmod(tile, self._packed.tiles)
        found = {"in0": inputs["x"], "in1": inputs["route"], "out": self.out, "a": part, "b": row}
        if "residual" in inputs:
            found["in2"] = inputs["residual"]
        return found
