"""RoPE with the append to the caches, and attention over what they have."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..formats import Array
from ..graph import ITEM_BYTES, Value
from .base import Memory, Rect, Rule


class Rope(Rule):
    """A task a row and head of keys: its queries, its key, its value."""

    kind = "rope"

    def prepare(self) -> None:
        self.keys, self.values = self.op.outputs["keys"], self.op.outputs["values"]
        _, self.kv_heads, self.context, self.dim = self.keys.shape
        self.q = self.op.outputs["q"]
        self.group = self.q.cols // (self.kv_heads * self.dim)

    @property
    def tiles(self) -> int:
        return self.graph.batch * self.kv_heads

    def reads(self, tile: int) -> list[Rect]:
        row, head = divmod(tile, self.kv_heads)
        qkv, wide = self.op.inputs["qkv"], self.group * self.dim
        key = self.q.cols + head * self.dim
        value = key + self.kv_heads * self.dim
        return [
            self.row("positions", row),
            Rect(qkv, row, row + 1, head * wide, (head + 1) * wide),
            Rect(qkv, row, row + 1, key, key + self.dim),
            Rect(qkv, row, row + 1, value, value + self.dim),
        ]

    def writes(self, tile: int) -> list[Rect]:
        row, head = divmod(tile, self.kv_heads)
        wide, first = self.group * self.dim, tile * self.context
        return [
            Rect(self.q, row, row + 1, head * wide, (head + 1) * wide),
            Rect(self.keys, first, first + self.context, 0, self.dim),
            Rect(self.values, first, first + self.context, 0, self.dim),
        ]

    def run(self, tile: int, memory: Memory) -> list[tuple[Rect, Array]]:
        positions, q, key, value = [memory.read(rect) for rect in self.reads(tile)]
        position = int(positions[0, 0])
        table = memory.weight(self.op.inputs["table"])[position]
        q = turn(q.reshape(-1, self.dim), table).reshape(1, -1)
        place, *caches = self.writes(tile)
        at = [rect._replace(row0=rect.row0 + position, row1=rect.row0 + position + 1)
              for rect in caches]  # fmt: skip
        return [(place, q), (at[0], turn(key, table)), (at[1], value)]

    def template(self) -> tuple[str, dict[str, Any]]:
        return "rope", {
            "kv_heads": self.kv_heads,
            "group": self.group,
            "dim": self.dim,
            "context": self.context,
        }

    def operands(self, tile: int) -> dict[str, Any]:
        inputs = self.op.inputs
        return {
            "in0": inputs["qkv"],
            "in1": inputs["positions"],
            "out": self.q,
            "out2": self.keys,
            "in2": self.values,
            "aux": inputs["table"],
            "a": tile,
        }


class Attention(Rule):
    """A task a row, head of keys, and part of the positions so far: split KV.

    Of each query head it gives sum(exp(s - m) · v), m, and sum(exp(s - m)), where m is the largest
    score; without a position zeros, -inf, 0.
    """

    kind = "attention"

    def prepare(self) -> None:
        self.keys: Value = self.op.inputs["keys"]
        _, self.kv_heads, self.context, self.dim = self.keys.shape
        self.group = self.op.inputs["q"].cols // (self.kv_heads * self.dim)
        self.splits = self.out.shape[2]

    @property
    def tiles(self) -> int:
        return self.out.rows

    def reads(self, tile: int) -> list[Rect]:
        head, _ = divmod(tile, self.splits)
        row, kv = divmod(head, self.kv_heads)
        wide, first = self.group * self.dim, head * self.context
        return [
            self.row("positions", row),
            Rect(self.op.inputs["q"], row, row + 1, kv * wide, (kv + 1) * wide),
            Rect(self.keys, first, first + self.context, 0, self.dim),
            Rect(self.op.inputs["values"], first, first + self.context, 0, self.dim),
        ]

    def writes(self, tile: int) -> list[Rect]:
        return [Rect(self.out, tile, tile + 1, 0, self.out.cols)]

    def weight_bytes(self, tile: int) -> int:
        return 2 * self.keys.cols * math.ceil(self.context / self.splits) * (
            ITEM_BYTES[self.keys.dtype]
        )  # fmt: skip

    def run(self, tile: int, memory: Memory) -> list[tuple[Rect, Array]]:
        positions, q, keys, values = [memory.read(rect) for rect in self.reads(tile)]
        length = int(positions[0, 0]) + 1
        chunk = math.ceil(length / self.splits)
        split = tile % self.splits
        here = slice(min(length, split * chunk), min(length, (split + 1) * chunk))
        out = np.zeros((self.group, self.dim + 2), np.float32)
        out[:, self.dim] = -np.inf
        if here.start < here.stop:
            scores = q.reshape(self.group, self.dim) @ keys[here].T / math.sqrt(self.dim)
            most = scores.max(axis=1)
            weights = np.exp(scores - most[:, None])
            out[:, : self.dim] = weights @ values[here]
            out[:, self.dim] = most
            out[:, self.dim + 1] = weights.sum(axis=1)
        return [(self.writes(tile)[0], out.reshape(1, -1))]

    def staging_bytes(self) -> int:
        return 8 * self.group * (self.dim + 2) * 4  # of each computing warp its sums

    def template(self) -> tuple[str, dict[str, Any]]:
        return "attention", {
            "kv_heads": self.kv_heads,
            "group": self.group,
            "dim": self.dim,
            "context": self.context,
            "splits": self.splits,
        }

    def operands(self, tile: int) -> dict[str, Any]:
        inputs = self.op.inputs
        return {
            "in0": inputs["q"],
            "in1": inputs["positions"],
            "in2": inputs["values"],
            "out2": self.keys,
            "out": self.out,
            "a": tile,
        }


class Merge(Rule):
    """The parts of a row and head of keys together."""

    kind = "merge"

    def prepare(self) -> None:
        self.parts: Value = self.op.inputs["parts"]
        _, self.kv_heads, self.splits, cols = self.parts.shape
        self.dim: int = self.op.settings["head_dim"]
        self.group = cols // (self.dim + 2)

    @property
    def tiles(self) -> int:
        return self.graph.batch * self.kv_heads

    def reads(self, tile: int) -> list[Rect]:
        first = tile * self.splits
        return [Rect(self.parts, first, first + self.splits, 0, self.parts.cols)]

    def writes(self, tile: int) -> list[Rect]:
        row, head = divmod(tile, self.kv_heads)
        wide = self.group * self.dim
        return [Rect(self.out, row, row + 1, head * wide, (head + 1) * wide)]

    def run(self, tile: int, memory: Memory) -> list[tuple[Rect, Array]]:
        parts = memory.read(self.reads(tile)[0]).reshape(self.splits, self.group, self.dim + 2)
        most = parts[:, :, self.dim].max(axis=0)
        scale = np.exp(parts[:, :, self.dim] - most)[:, :, None]
        total = (parts[:, :, : self.dim] * scale).sum(axis=0)
        weight = (parts[:, :, self.dim + 1 :] * scale).sum(axis=0)
        return [(self.writes(tile)[0], (total / weight).reshape(1, -1))]

    def template(self) -> tuple[str, dict[str, Any]]:
        return "merge", {
            "kv_heads": self.kv_heads,
            "group": self.group,
            "dim": self.dim,
            "splits": self.splits,
        }

    def operands(self, tile: int) -> dict[str, Any]:
        return {"in0": self.parts, "out": self.out, "a": tile}


def turn(x: Array, table: Array) -> Array:
    """RoPE of rows: halves are the pairs; `table` has cosines, then sines."""
    half = x.shape[1] // 2
    cos, sin = table[:half], table[half:]
    first, second = x[:, :half], x[:, half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=1)
