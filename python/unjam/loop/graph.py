"""A model's step as a graph of operators, with shapes and types. One graph serves all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .._errors import InvalidArgument

ITEM_BYTES = {"f32": 4, "bf16": 2, "i32": 4}
MOST_RANKS, MOST_BATCH, MOST_CONTEXT = 72, 16, 1 << 20

Room = Literal["pages", "state", "mail", "weights"]


@dataclass(frozen=True, eq=False)
class Value:
    """What operators read and write.

    Attributes:
        number: its place among the graph's values.
        name: for messages.
        shape: on one rank. All but the last dimension are its rows, the last one its columns.
        dtype: f32, bf16 or i32.
        room: pages: activations, whose memory is used again; state: kept between steps; mail: what
            peers send; weights: only read.
    """

    number: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    room: Room

    @property
    def rows(self) -> int:
        """All dimensions but the last."""
        return math.prod(self.shape[:-1])

    @property
    def cols(self) -> int:
        """The last dimension."""
        return self.shape[-1]

    @property
    def bytes(self) -> int:
        """What it takes on one rank."""
        return self.rows * self.cols * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, eq=False)
class Operator:
    """One of the graph's operators, in an order in which they can run.

    Attributes:
        number: its place in that order.
        kind: names its rule in ``unjam.loop.ops``.
        name: for messages.
        inputs: by role, as the rule names them; weights, too.
        outputs: by role.
        settings: numbers that the rule takes.
    """

    number: int
    kind: str
    name: str
    inputs: Mapping[str, Value]
    outputs: Mapping[str, Value]
    settings: Mapping[str, Any] = field(default_factory=dict)


class Graph:
    """Operators of one step of decoding, the same on all ranks.

    Args:
        ranks: over which the model is split; weights have the shape of one rank's part.
        batch: rows of every activation: sequences that are decoded at once.
        context: positions for which caches have room.
        dtype: of weights and activations, bf16 or f32. Sums are in f32.
        name: for messages; a part of the program's number.

    Raises:
        InvalidArgument: a number out of its range, an unknown type. Of the operators: shapes that
            do not fit or do not divide.
    """

    def __init__(
        self,
        *,
        ranks: int = 1,
        batch: int = 1,
        context: int = 1024,
        dtype: str = "bf16",
        name: str = "graph",
    ) -> None:
        self.ranks = _whole("ranks", ranks, MOST_RANKS)
        self.batch = _whole("batch", batch, MOST_BATCH)
        self.context = _whole("context", context, MOST_CONTEXT)
        if dtype not in ("bf16", "f32"):
            raise InvalidArgument(f"dtype={dtype!r} is not supported: give bf16 or f32")
        self.dtype = dtype
        self.name = name
        self.values: list[Value] = []
        self.operators: list[Operator] = []
        self._names: set[str] = set()
        self.tokens = self._value("tokens", (batch, 1), "i32", "state")
        self.positions = self._value("positions", (batch, 1), "i32", "state")
        self.is_complete = False

    # ---- values ----

    def weight(self, name: str, shape: tuple[int, ...], dtype: str | None = None) -> Value:
        """A weight: the part that a rank has."""
        return self._value(name, shape, dtype or self.dtype, "weights")

    def cache(self, name: str, heads: int, head_dim: int) -> Value:
        """Keys or values of all positions: [batch, heads, context, head_dim]."""
        return self._value(name, (self.batch, heads, self.context, head_dim), self.dtype, "state")

    # ---- operators ----

    def embedding(self, table: Value, name: str = "embedding") -> Value:
        """The rows of ``table`` that the tokens name: [batch, hidden]."""
        return self._add(
            "embedding",
            name,
            {"tokens": self.tokens, "table": table},
            {"out": ((self.batch, table.cols), None)},
        )

    def rms_norm(self, x: Value, weight: Value, eps: float, name: str = "norm") -> Value:
        """x / sqrt(mean(x²) + eps) · weight, by rows."""
        self._same(name, "weight", weight, (x.cols,))
        return self._add(
            "norm", name, {"x": x, "norm": weight}, {"out": (x.shape, None)}, eps=float(eps)
        )

    def linear(
        self,
        x: Value,
        weight: Value,
        *,
        norm: Value | None = None,
        eps: float = 1e-5,
        residual: Value | None = None,
        name: str = "linear",
    ) -> Value:
        """x · weightᵀ (+ residual); with ``norm``, of x after rms_norm."""
        self._inputs_of(name, x, weight)
        inputs = {"x": x, "weight": weight} | self._normed(name, x, norm)
        if residual is not None:
            self._same(name, "residual", residual, (self.batch, weight.rows))
            inputs["residual"] = residual
        out = {"out": ((self.batch, weight.rows), None)}
        return self._add("linear", name, inputs, out, eps=float(eps))

    def gated(
        self,
        x: Value,
        gate: Value,
        up: Value,
        *,
        norm: Value | None = None,
        eps: float = 1e-5,
        name: str = "gated",
    ) -> Value:
        """silu(x · gateᵀ) · (x · upᵀ), of x after rms_norm with ``norm``."""
        self._inputs_of(name, x, gate)
        self._same(name, "up", up, gate.shape)
        inputs = {"x": x, "gate": gate, "up": up} | self._normed(name, x, norm)
        out = {"out": ((self.batch, gate.rows), None)}
        return self._add("gated", name, inputs, out, eps=float(eps))

    def rope_append(
        self,
        qkv: Value,
        table: Value,
        keys: Value,
        values: Value,
        name: str = "rope",
    ) -> Value:
        """Turns queries and keys by their position, and appends keys and values to the caches.

        Args:
            qkv: [batch, (heads + 2 · kv_heads) · head_dim]: queries, keys, values.
            table: [context, head_dim], f32: cosines, then sines.
            keys: a cache.
            values: a cache of the same shape.
            name: for messages.

        Returns:
            The queries: [batch, heads · head_dim].
        """
        _, kv_heads, _, dim = keys.shape
        self._same(name, "values", values, keys.shape)
        self._same(name, "table", table, (self.context, dim))
        cols = qkv.cols - 2 * kv_heads * dim
        if dim % 2 or cols <= 0 or cols % (kv_heads * dim):
            raise InvalidArgument(
                f"{name}: {qkv.cols} columns do not divide into queries for {kv_heads} heads of "
                f"keys and values, {dim} wide"
            )
        return self._add(
            "rope",
            name,
            {"qkv": qkv, "table": table, "positions": self.positions},
            {"q": ((self.batch, cols), None), "keys": keys, "values": values},
        )

    def attention(
        self, q: Value, keys: Value, values: Value, splits: int | None = None, name: str = "attn"
    ) -> Value:
        """Grouped-query attention over the positions so far: [batch, heads · head_dim].

        Args:
            q: what :meth:`rope_append` gives.
            keys: the cache, behind the append.
            values: the cache, behind the append.
            splits: parts of the positions, each a task; their results are merged. None: one for 64
                positions of the context, at most 16.
            name: for messages.
        """
        batch, kv_heads, _, dim = keys.shape
        splits = min(16, max(1, self.context // 64)) if splits is None else splits
        splits = _whole("splits", splits, self.context)
        if q.cols % (kv_heads * dim):
            raise InvalidArgument(
                f"{name}: queries of {q.cols} columns do not divide by {kv_heads} heads of {dim}"
            )
        group = q.cols // (kv_heads * dim)
        part = self._add(
            "attention",
            name,
            {"q": q, "positions": self.positions, "keys": keys, "values": values},
            {"out": ((batch, kv_heads, splits, group * (dim + 2)), "f32")},
        )
        return self._add(
            "merge", f"{name}.merge", {"parts": part}, {"out": (q.shape, None)}, head_dim=dim
        )

    def all_reduce(self, x: Value, residual: Value | None = None, name: str = "sum") -> Value:
        """The sum of x over all ranks (+ residual), added in the order of ranks on all of them."""
        inputs = {"x": x}
        if residual is not None:
            self._same(name, "residual", residual, x.shape)
            inputs["residual"] = residual
        if self.ranks > 1:
            inputs["mail"] = self._send(x, name)
        return self._add("sum", name, inputs, {"out": (x.shape, None)})

    def all_gather(self, x: Value, name: str = "gather") -> Value:
        """x of all ranks beside each other: [batch, ranks · columns]."""
        inputs = {"x": x}
        if self.ranks > 1:
            inputs["mail"] = self._send(x, name)
        out = {"out": ((x.rows, self.ranks * x.cols), x.dtype)}
        return self._add("gather", name, inputs, out)

    def head_argmax(
        self,
        x: Value,
        weight: Value,
        *,
        norm: Value | None = None,
        eps: float = 1e-5,
        name: str = "head",
    ) -> None:
        """The tokens with the largest logit, the first of them: they are the next step's.

        Args:
            x: [batch, hidden].
            weight: [vocabulary / ranks, hidden]: rank r has the r-th part.
            norm: as in :meth:`linear`.
            eps: its.
            name: for messages.
        """
        self._inputs_of(name, x, weight)
        inputs = {"x": x, "weight": weight} | self._normed(name, x, norm)
        tile = largest_divisor(weight.rows, 64 if self.batch <= 4 else 16)
        if weight.rows * self.ranks > 1 << 24:
            raise InvalidArgument(
                f"{name}: {weight.rows * self.ranks} tokens are too many: indices travel as f32, "
                f"give {1 << 24} at most"
            )
        out = {"out": ((self.batch, 2 * (weight.rows // tile)), "f32")}
        best = self._add("head", name, inputs, out, eps=float(eps), tile=tile)
        if self.ranks > 1:
            best = self._add("best", f"{name}.best", {"pairs": best}, {"out": ((x.rows, 2), "f32")})
            best = self.all_gather(best, f"{name}.gather")
        self._add("pick", f"{name}.pick", {"pairs": best}, {"tokens": self.tokens})
        self.is_complete = True

    def moe(
        self,
        x: Value,
        router: Value,
        gate: Value,
        up: Value,
        down: Value,
        k: int,
        *,
        norm: Value | None = None,
        eps: float = 1e-5,
        residual: Value | None = None,
        name: str = "moe",
    ) -> Value:
        """The k best experts of each row, weighted by their softmax over those k.

        Args:
            x: [batch, hidden].
            router: [experts, hidden].
            gate: [experts, part, hidden]: a rank has a part of each expert.
            up: of the same shape.
            down: [experts, hidden, part].
            k: experts a row.
            norm: as in :meth:`linear`.
            eps: its.
            residual: added to the result.
            name: for messages.
        """
        experts, part, hidden = gate.shape
        if not 1 <= k <= experts:
            raise InvalidArgument(f"{name}: k={k} experts of {experts}: give 1 to {experts}")
        self._same(name, "router", router, (experts, x.cols))
        self._same(name, "gate", gate, (experts, part, x.cols))
        self._same(name, "up", up, gate.shape)
        self._same(name, "down", down, (experts, hidden, part))
        normed = self._normed(name, x, norm)
        inputs = {"x": x, "router": router} | normed
        out = {"out": ((self.batch, 2 * k), "f32")}
        route = self._add("route", f"{name}.route", inputs, out, k=k, eps=float(eps))
        inner = self._add(
            "expert_up",
            f"{name}.up",
            {"x": x, "route": route, "gate": gate, "up": up} | normed,
            {"out": ((self.batch * k, part), None)},
            k=k,
            eps=float(eps),
        )
        inputs = {"x": inner, "route": route, "weight": down}
        if residual is not None:
            self._same(name, "residual", residual, (self.batch, hidden))
            inputs["residual"] = residual
        out = {"out": ((self.batch, hidden), None)}
        return self._add("expert_down", f"{name}.down", inputs, out, k=k)

    # ---- inner ----

    def _send(self, x: Value, name: str) -> Value:
        if x.cols * ITEM_BYTES[x.dtype] % 4:
            raise InvalidArgument(
                f"{name}: rows of {x.cols} columns in {x.dtype} are no whole words of 4 bytes, "
                "which packets carry: give an even number"
            )
        shape = (self.ranks, x.rows, x.cols)
        mail = self._value(f"{name}.mail", shape, x.dtype, "mail")
        self._add("send", f"{name}.send", {"x": x}, {"mail": mail})
        return mail

    def _value(self, name: str, shape: tuple[int, ...], dtype: str, room: Room) -> Value:
        if name in self._names:
            raise InvalidArgument(f"{name}: there is a value of this name already")
        if not shape or any(type(n) is not int or n < 1 for n in shape):
            raise InvalidArgument(f"{name}: {shape} is no shape: give whole numbers from 1 on")
        if dtype not in ITEM_BYTES:
            raise InvalidArgument(f"{name}: {dtype!r} is no type: give {', '.join(ITEM_BYTES)}")
        self._names.add(name)
        if len(shape) == 1:
            shape = (1, *shape)
        value = Value(len(self.values), name, shape, dtype, room)
        self.values.append(value)
        return value

    def _add(
        self, kind: str, name: str, inputs: dict[str, Value], out: dict[str, Any], **settings: Any
    ) -> Value:
        """An operator; the first output."""
        for role, value in inputs.items():
            if value.number >= len(self.values) or self.values[value.number] is not value:
                raise InvalidArgument(f"{name}: {role} is a value of another graph")
        outputs = {}
        for role, what in out.items():
            if not isinstance(what, Value):
                shape, dtype = what
                suffix = "" if role == "out" else f".{role}"
                what = self._value(f"{name}{suffix}", shape, dtype or self.dtype, "pages")
            outputs[role] = what
        self.operators.append(Operator(len(self.operators), kind, name, inputs, outputs, settings))
        return next(iter(outputs.values()))

    def _inputs_of(self, name: str, x: Value, weight: Value) -> None:
        if x.cols != weight.cols:
            raise InvalidArgument(
                f"{name}: x has {x.cols} columns, and {weight.name} takes {weight.cols}"
            )
        if x.cols * ITEM_BYTES[weight.dtype] % 16:
            raise InvalidArgument(
                f"{name}: rows of {weight.name} have {x.cols * ITEM_BYTES[weight.dtype]} bytes: "
                "they must be a multiple of 16"
            )

    def _normed(self, name: str, x: Value, norm: Value | None) -> dict[str, Value]:
        if norm is None:
            return {}
        self._same(name, "norm", norm, (x.cols,))
        return {"norm": norm}

    @staticmethod
    def _same(name: str, role: str, value: Value, shape: tuple[int, ...]) -> None:
        if value.shape != shape and value.shape != (1, *shape):
            raise InvalidArgument(f"{name}: {role} has shape {value.shape}, and not {shape}")


def largest_divisor(of: int, most: int) -> int:
    """The largest divisor that is not above `most`."""
    return next(n for n in range(min(of, most), 0, -1) if of % n == 0)


def _whole(name: str, number: object, most: int) -> int:
    if type(number) is not int or not 1 <= number <= most:
        raise InvalidArgument(f"{name}={number!r} is out of range: give a number from 1 to {most}")
    return number
