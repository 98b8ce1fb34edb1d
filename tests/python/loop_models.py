"""Small models for the tests of unjam.loop, and what torch says of them."""

import numpy as np

from unjam.loop import (
    DecoderConfig,
    Graph,
    Machine,
    Model,
    compile_graph,
    llama,
    moe,
    random_state_dict,
)
from unjam.loop.formats import to_stored

DENSE = DecoderConfig(96, 32, 64, 2, 8, 4, 8)
EXPERTS = DecoderConfig(96, 32, 64, 2, 8, 4, 8, experts=4, experts_per_token=2)
CONFIGS = {"dense": DENSE, "moe": EXPERTS}
PROMPT = [[1, 2, 3], [40, 5, 60]]
COUNT = 4


def make_model(config, ranks=1, batch=2, context=16, dtype="f32", splits=2, seed=1, state=True):
    """A model with random weights."""
    build = moe if config.experts else llama
    weights = random_state_dict(config, seed) if state else None
    return build(
        config, weights, ranks=ranks, batch=batch, context=context, dtype=dtype, splits=splits
    )


def make_plan(config, sms=5, sync="counters", **how):
    """A model and its plan."""
    model = make_model(config, **how)
    return model, compile_graph(model.graph, Machine(sms=sms), sync)


def torch_tokens(config, prompt=PROMPT, count=COUNT, seed=1):
    """Greedy tokens by torch in f32, the whole sequence anew for each."""
    import torch

    weights = {
        name: torch.from_numpy(array) for name, array in random_state_dict(config, seed).items()
    }
    tokens = torch.tensor(prompt)
    for _ in range(count):
        logits = _forward(torch, config, weights, tokens)
        tokens = torch.cat([tokens, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    return tokens[:, len(prompt[0]) :].tolist()


def _forward(torch, config, weights, tokens):
    def norm(x, name):
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.eps)
        return weights[name] * (x * scale)

    batch, length = tokens.shape
    dim, half = config.dim, config.dim // 2
    frequencies = 1.0 / config.rope_theta ** (torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(length)[:, None] * frequencies.float()
    cos, sin = (torch.cat([f(angles)] * 2, dim=-1) for f in (torch.cos, torch.sin))

    def turned(x):
        rotated = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
        return x * cos + rotated * sin

    x = weights["model.embed_tokens.weight"][tokens]
    for layer in range(config.layers):
        at = f"model.layers.{layer}"
        y = norm(x, f"{at}.input_layernorm.weight")
        q, k, v = (
            (y @ weights[f"{at}.self_attn.{n}_proj.weight"].T)
            .view(batch, length, -1, dim)
            .transpose(1, 2)
            for n in "qkv"
        )
        y = torch.nn.functional.scaled_dot_product_attention(
            turned(q), turned(k), v, is_causal=True, enable_gqa=True
        )
        y = y.transpose(1, 2).reshape(batch, length, -1)
        x = x + y @ weights[f"{at}.self_attn.o_proj.weight"].T
        y = norm(x, f"{at}.post_attention_layernorm.weight")
        x = x + (_experts if config.experts else _mlp)(torch, config, weights, at, y)
    return norm(x, "model.norm.weight") @ weights["lm_head.weight"].T


def _mlp(torch, config, weights, at, y):
    gate, up, down = (weights[f"{at}.mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
    return (torch.nn.functional.silu(y @ gate.T) * (y @ up.T)) @ down.T


def _experts(torch, config, weights, at, y):
    """As Mixtral: softmax over all, the best k, weights that sum to one."""
    shares = torch.softmax(y @ weights[f"{at}.block_sparse_moe.gate.weight"].T, dim=-1)
    best, which = shares.topk(config.experts_per_token, dim=-1)
    best = best / best.sum(-1, keepdim=True)
    out = torch.zeros_like(y)
    for expert in range(config.experts):
        of = f"{at}.block_sparse_moe.experts.{expert}"
        w1, w2, w3 = (weights[f"{of}.w{n}.weight"] for n in (1, 2, 3))
        share = (best * (which == expert)).sum(-1, keepdim=True)
        out = out + share * ((torch.nn.functional.silu(y @ w1.T) * (y @ w3.T)) @ w2.T)
    return out


def make_everything(ranks=2, batch=2, context=16, dtype="f32", seed=3):
    """A graph with every operator, and random weights; no model that anybody has."""
    graph = Graph(ranks=ranks, batch=batch, context=context, dtype=dtype, name="everything")
    random = np.random.default_rng(seed)
    parts = [{} for _ in range(ranks)]

    def weight(name, *shape, alike=False, dtype=None, scale=0.2):
        value = graph.weight(name, shape, dtype)
        same = random.standard_normal(shape)
        for part in parts:
            array = same if alike else random.standard_normal(shape)
            part[name] = to_stored((array * scale).astype(np.float32), value.dtype)
        return value

    hidden, dim, inner, experts = 32, 8, 16, 3
    x = graph.embedding(weight("table", 48, hidden, alike=True, scale=1))
    norm = weight("norm.weight", hidden, alike=True, scale=1)
    y = graph.rms_norm(x, norm, 1e-5)
    keys, values = graph.cache("keys", 2, dim), graph.cache("values", 2, dim)
    qkv = graph.linear(y, weight("qkv.weight", 8 * dim, hidden), name="qkv")
    table = weight("table.rope", context, dim, alike=True, dtype="f32", scale=1)
    q = graph.rope_append(qkv, table, keys, values)
    y = graph.attention(q, keys, values, splits=3)
    y = graph.linear(y, weight("o.weight", hidden, 4 * dim), residual=x, name="o")
    x = graph.all_reduce(y, residual=x, name="sum.0")
    gate, up = (weight(n, inner, hidden) for n in ("gate.weight", "up.weight"))
    y = graph.gated(x, gate, up, norm=norm)
    y = graph.linear(y, weight("down.weight", hidden, inner), name="down")
    x = graph.all_reduce(y, name="sum.1")
    y = graph.moe(
        x,
        weight("router", experts, hidden, alike=True),
        weight("w1", experts, inner, hidden),
        weight("w3", experts, inner, hidden),
        weight("w2", experts, hidden, inner),
        2,
        norm=norm,
        residual=x,
    )
    x = graph.all_reduce(y, name="sum.2")
    x = graph.all_gather(x, name="side") if ranks > 1 else x
    graph.head_argmax(x, weight("head.weight", 48 // ranks, x.cols))
    return Model(None, graph, parts)
