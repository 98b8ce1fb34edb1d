"""Decoders like Llama, dense or with experts, from a plain state_dict with Hugging Face's names.

Weights are split over ranks: heads, inner columns, and the vocabulary of the head. Each layer sums
over ranks behind attention and behind its second part.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..._errors import InvalidArgument
from ..formats import Array, from_stored, to_stored
from ..graph import Graph, Value


@dataclass(frozen=True)
class DecoderConfig:
    """Shapes of a decoder, in Hugging Face's words.

    Attributes:
        vocab_size: tokens.
        hidden_size: columns of an activation.
        intermediate_size: inner columns of a layer's second part, or of each expert.
        layers: how many.
        heads: of queries.
        kv_heads: of keys and values.
        head_dim: None: hidden_size / heads.
        eps: of norms.
        rope_theta: base of the frequencies.
        experts: of each layer; 0: it is dense.
        experts_per_token: of them, each row takes so many.
        frequencies: of RoPE, head_dim / 2 of them, for models that scale them; None: by theta.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int | None = None
    eps: float = 1e-5
    rope_theta: float = 10000.0
    experts: int = 0
    experts_per_token: int = 2
    frequencies: tuple[float, ...] | None = None

    @property
    def dim(self) -> int:
        """Of a head."""
        return self.head_dim or self.hidden_size // self.heads


# Shapes of published models, without weights.
SHAPES: dict[str, DecoderConfig] = {
    "llama-3.2-1b": DecoderConfig(128256, 2048, 8192, 16, 32, 8, 64, rope_theta=500000.0),
    "llama-3.2-3b": DecoderConfig(128256, 3072, 8192, 28, 24, 8, 128, rope_theta=500000.0),
    "llama-3-8b": DecoderConfig(128256, 4096, 14336, 32, 32, 8, 128, rope_theta=500000.0),
    "moe-8x1b": DecoderConfig(
        32000, 2048, 5632, 16, 32, 8, 64, rope_theta=1e6, experts=8, experts_per_token=2
    ),
    "tiny": DecoderConfig(512, 64, 128, 2, 4, 2, 16),
    "tiny-moe": DecoderConfig(512, 64, 128, 2, 4, 2, 16, experts=4, experts_per_token=2),
}


@dataclass
class Model:
    """A graph with the weights of all ranks.

    Attributes:
        config: its shapes.
        graph: of one step.
        weights: of each rank, by the names of the graph's values, as memory has them: bf16 as
            uint16. None if the model was made without a state_dict.
    """

    config: DecoderConfig
    graph: Graph
    weights: list[dict[str, Array]] | None


@dataclass
class _Source:
    """Weights as the builder asks for them; without a state_dict, shapes alone."""

    graph: Graph
    given: Mapping[str, Any] | None
    parts: list[dict[str, Array]] = field(default_factory=list)
    used: set[str] = field(default_factory=set)

    def find(self, name: str, shape: tuple[int, ...]) -> Array:
        """One of the state_dict's, in f32."""
        assert self.given is not None
        if name not in self.given:
            raise InvalidArgument(f"the state_dict has no {name}")
        array = to_numpy(self.given[name], name)
        if array.shape != shape:
            raise InvalidArgument(f"{name} has shape {array.shape}, and the model has {shape}")
        self.used.add(name)
        return array

    def add(
        self,
        name: str,
        shape: tuple[int, ...],
        sources: Iterable[tuple[str, tuple[int, ...], int | None]],
        dtype: str | None = None,
    ) -> Value:
        """A weight: parts of arrays along an axis (None: all of them), one below the other."""
        value = self.graph.weight(name, shape, dtype)
        if self.given is None:
            return value
        found = [(self.find(source, full), axis) for source, full, axis in sources]
        for rank, part in enumerate(self.parts):
            rows = [a if axis is None else _part(a, axis, rank, len(self.parts))
                    for a, axis in found]  # fmt: skip
            whole = rows[0] if len(rows) == 1 else np.concatenate(rows)
            part[name] = to_stored(whole.reshape(shape), value.dtype)
        return value

    def experts(self, name: str, shape: tuple[int, ...], sources: list[str], axis: int) -> Value:
        """A weight of all experts: a part of each one's."""
        value = self.graph.weight(name, shape)
        if self.given is None:
            return value
        full = list(shape[1:])
        full[axis] *= len(self.parts)
        found = [self.find(source, tuple(full)) for source in sources]
        for rank, part in enumerate(self.parts):
            rows = np.stack([_part(a, axis, rank, len(self.parts)) for a in found])
            part[name] = to_stored(rows, value.dtype)
        return value


def to_numpy(tensor: Any, name: str = "tensor") -> Array:
    """A tensor of torch, or what NumPy takes, in f32."""
    if hasattr(tensor, "detach"):
        tensor = tensor.detach().cpu().float().numpy()
    try:
        return np.asarray(tensor, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{name} is no array of numbers: {error}") from error


def _part(array: Array, axis: int, rank: int, ranks: int) -> Array:
    size = array.shape[axis] // ranks
    return np.take(array, range(rank * size, (rank + 1) * size), axis=axis)


def check_config(config: DecoderConfig, ranks: int) -> None:
    """Refuses what does not divide, by name."""
    for name in ("vocab_size", "hidden_size", "intermediate_size", "layers", "heads", "kv_heads"):
        number = getattr(config, name)
        if type(number) is not int or number < 1:
            raise InvalidArgument(f"{name}={number!r}: give a whole number from 1 on")
    if config.head_dim is None and config.hidden_size % config.heads:
        raise InvalidArgument(
            f"hidden_size={config.hidden_size} does not divide by heads={config.heads}: give "
            "head_dim"
        )
    if config.dim < 2 or config.dim % 2:
        raise InvalidArgument(f"head_dim={config.dim} is odd: RoPE turns pairs")
    if config.heads % config.kv_heads:
        raise InvalidArgument(f"heads={config.heads} does not divide by kv_heads={config.kv_heads}")
    for name in ("kv_heads", "intermediate_size", "vocab_size"):
        if getattr(config, name) % ranks:
            raise InvalidArgument(
                f"{name}={getattr(config, name)} does not divide by ranks={ranks}"
            )
    if config.experts < 0 or (
        config.experts and not 1 <= config.experts_per_token <= config.experts
    ):
        raise InvalidArgument(
            f"experts_per_token={config.experts_per_token} of experts={config.experts}: give 1 to "
            f"{max(1, config.experts)}"
        )
    if config.frequencies is not None and len(config.frequencies) != config.dim // 2:
        raise InvalidArgument(
            f"frequencies has {len(config.frequencies)} numbers: give head_dim / 2 = "
            f"{config.dim // 2}"
        )


def build(
    config: DecoderConfig,
    state_dict: Mapping[str, Any] | None,
    *,
    ranks: int,
    batch: int,
    context: int,
    dtype: str,
    name: str,
    splits: int | None,
) -> Model:
    """The graph of one step, and each rank's weights."""
    graph = Graph(ranks=ranks, batch=batch, context=context, dtype=dtype, name=name)
    check_config(config, ranks)
    source = _Source(graph, state_dict, [{} for _ in range(ranks)])
    hidden, vocab, dim = config.hidden_size, config.vocab_size, config.dim
    embed = "model.embed_tokens.weight"
    table = source.add(embed, (vocab, hidden), [(embed, (vocab, hidden), None)])
    rope = graph.weight("rope", (context, dim), "f32")
    for part in source.parts:
        part["rope"] = rope_table(config, context)
    x = graph.embedding(table)
    for layer in range(config.layers):
        x = _attention(graph, source, config, layer, x, rope, splits)
        x = _second(graph, source, config, layer, x)
    norm = source.add("model.norm.weight", (hidden,), [("model.norm.weight", (hidden,), None)])
    tied = state_dict is not None and "lm_head.weight" not in state_dict
    head = source.add(
        "lm_head.weight",
        (vocab // ranks, hidden),
        [(embed if tied else "lm_head.weight", (vocab, hidden), 0)],
    )
    graph.head_argmax(x, head, norm=norm, eps=config.eps)
    if state_dict is not None and (unknown := sorted(set(state_dict) - source.used)):
        raise InvalidArgument(
            f"the state_dict has {len(unknown)} names that the model lacks: {unknown[0]}"
            + (" and others" if len(unknown) > 1 else "")
        )
    return Model(config, graph, None if state_dict is None else source.parts)


def _attention(
    graph: Graph,
    source: _Source,
    config: DecoderConfig,
    layer: int,
    x: Value,
    rope: Value,
    splits: int | None,
) -> Value:
    """The first part of a layer, with its residual."""
    at, hidden, dim = f"model.layers.{layer}", config.hidden_size, config.dim
    heads, kv_heads = config.heads // graph.ranks, config.kv_heads // graph.ranks
    norm = f"{at}.input_layernorm.weight"
    norm_weight = source.add(norm, (hidden,), [(norm, (hidden,), None)])
    qkv = source.add(
        f"{at}.self_attn.qkv_proj.weight",
        ((heads + 2 * kv_heads) * dim, hidden),
        [
            (f"{at}.self_attn.{n}_proj.weight", (count * dim, hidden), 0)
            for n, count in (("q", config.heads), ("k", config.kv_heads), ("v", config.kv_heads))
        ],
    )
    out_name = f"{at}.self_attn.o_proj.weight"
    out = source.add(out_name, (hidden, heads * dim), [(out_name, (hidden, config.heads * dim), 1)])
    keys = graph.cache(f"keys.{layer}", kv_heads, dim)
    values = graph.cache(f"values.{layer}", kv_heads, dim)
    y = graph.linear(x, qkv, norm=norm_weight, eps=config.eps, name=f"qkv.{layer}")
    q = graph.rope_append(y, rope, keys, values, name=f"rope.{layer}")
    y = graph.attention(q, keys, values, splits, name=f"attn.{layer}")
    return _with_residual(graph, f"o.{layer}", x, lambda residual, name: graph.linear(
        y, out, residual=residual, name=name))  # fmt: skip


def _second(graph: Graph, source: _Source, config: DecoderConfig, layer: int, x: Value) -> Value:
    """The second part of a layer, with its residual."""
    at, hidden = f"model.layers.{layer}", config.hidden_size
    inner, part = config.intermediate_size, config.intermediate_size // graph.ranks
    norm = f"{at}.post_attention_layernorm.weight"
    weight = source.add(norm, (hidden,), [(norm, (hidden,), None)])
    if config.experts:
        return _moe(graph, source, config, layer, x, weight)
    gate, up, down = (f"{at}.mlp.{n}_proj.weight" for n in ("gate", "up", "down"))
    gate_weight, up_weight = (
        source.add(n, (part, hidden), [(n, (inner, hidden), 0)]) for n in (gate, up)
    )
    down_weight = source.add(down, (hidden, part), [(down, (hidden, inner), 1)])
    y = graph.gated(x, gate_weight, up_weight, norm=weight, eps=config.eps, name=f"up.{layer}")
    return _with_residual(graph, f"down.{layer}", x, lambda residual, name: graph.linear(
        y, down_weight, residual=residual, name=name))  # fmt: skip


def _moe(
    graph: Graph, source: _Source, config: DecoderConfig, layer: int, x: Value, norm: Value
) -> Value:
    """Experts as the second part; each rank has columns of all experts."""
    at = f"model.layers.{layer}.block_sparse_moe"
    hidden, part = config.hidden_size, config.intermediate_size // graph.ranks
    experts = config.experts
    router_name = f"{at}.gate.weight"
    router = source.add(router_name, (experts, hidden), [(router_name, (experts, hidden), None)])
    shapes = {"w1": (part, hidden), "w3": (part, hidden), "w2": (hidden, part)}
    gate, up, down = (
        source.experts(
            f"{at}.{n}",
            (experts, *shape),
            [f"{at}.experts.{expert}.{n}.weight" for expert in range(experts)],
            1 if n == "w2" else 0,
        )
        for n, shape in shapes.items()
    )
    k, eps = config.experts_per_token, config.eps
    return _with_residual(graph, f"moe.{layer}", x, lambda residual, name: graph.moe(
        x, router, gate, up, down, k, norm=norm, eps=eps, residual=residual, name=name,
    ))  # fmt: skip


def _with_residual(graph: Graph, name: str, x: Value, make: Any) -> Value:
    """One rank adds the residual to its product; several to the sum."""
    if graph.ranks == 1:
        return make(x, name)
    return graph.all_reduce(make(None, name), residual=x, name=f"{name}.sum")


def rope_table(config: DecoderConfig, context: int) -> Array:
    """[context, head_dim]: cosines, then sines of position · frequency."""
    half = config.dim // 2
    frequencies = (
        np.asarray(config.frequencies, np.float32)
        if config.frequencies is not None
        else (1.0 / config.rope_theta ** (np.arange(half) / half)).astype(np.float32)
    )
    angles = np.arange(context, dtype=np.float32)[:, None] * frequencies
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def random_state_dict(config: DecoderConfig, seed: int, scale: float = 1.0) -> dict[str, Array]:
    """Weights that keep activations at about 1, for tests and benchmarks."""
    random = np.random.default_rng(seed)
    dim, hidden, inner = config.dim, config.hidden_size, config.intermediate_size

    def matrix(*shape: int) -> Array:
        numbers = random.standard_normal(shape, dtype=np.float32)
        return from_stored(to_stored(numbers * (scale / math.sqrt(shape[-1])), "bf16"), "bf16")

    def norm() -> Array:
        return from_stored(to_stored(1 + 0.1 * random.standard_normal(hidden), "bf16"), "bf16")

    found = {"model.embed_tokens.weight": matrix(config.vocab_size, hidden) * hidden**0.5}
    for layer in range(config.layers):
        at = f"model.layers.{layer}"
        found[f"{at}.input_layernorm.weight"] = norm()
        found[f"{at}.post_attention_layernorm.weight"] = norm()
        for n, heads in (("q", config.heads), ("k", config.kv_heads), ("v", config.kv_heads)):
            found[f"{at}.self_attn.{n}_proj.weight"] = matrix(heads * dim, hidden)
        found[f"{at}.self_attn.o_proj.weight"] = matrix(hidden, config.heads * dim)
        if config.experts:
            found[f"{at}.block_sparse_moe.gate.weight"] = matrix(config.experts, hidden)
            for expert in range(config.experts):
                of = f"{at}.block_sparse_moe.experts.{expert}"
                found[f"{of}.w1.weight"] = matrix(inner, hidden)
                found[f"{of}.w3.weight"] = matrix(inner, hidden)
                found[f"{of}.w2.weight"] = matrix(hidden, inner)
        else:
            found[f"{at}.mlp.gate_proj.weight"] = matrix(inner, hidden)
            found[f"{at}.mlp.up_proj.weight"] = matrix(inner, hidden)
            found[f"{at}.mlp.down_proj.weight"] = matrix(hidden, inner)
    found["model.norm.weight"] = norm()
    found["lm_head.weight"] = matrix(config.vocab_size, hidden)
    return found
