"""FSDP2 and tensor parallelism: a small GPT on a 2 x 2 mesh.

    python examples/torch/fsdp_tp_gpt.py --backend unjam
    torchrun --nproc-per-node 4 examples/torch/fsdp_tp_gpt.py --backend unjam --device cuda

Parameters are sharded over one dimension of the mesh, and heads and hidden units split over the
other; activations between the blocks are split along the sequence.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, parallel
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from harness import main, mean_over_ranks

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS, BATCH = 64, 16, 32, 4, 2, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # As many heads as this rank holds.
        heads = [f(x).unflatten(-1, (-1, WIDTH // HEADS)) for f in (self.q, self.k, self.v)]
        q, k, v = (h.transpose(1, 2) for h in heads)
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions
        return self.head(self.norm(self.blocks(x)))


def parallelize(model: GPT, mesh: DeviceMesh) -> GPT:
    tp, dp = mesh["tp"], mesh["dp"]
    columns, norm = parallel.ColwiseParallel, parallel.SequenceParallel
    whole = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    plan = {
        "norm1": norm(),
        "attention": parallel.PrepareModuleInput(**whole),
        **{f"attention.{name}": columns() for name in "qkv"},
        "attention.out": parallel.RowwiseParallel(output_layouts=Shard(1)),
        "norm2": norm(),
        "mlp": parallel.PrepareModuleInput(**whole),
        "mlp.up": columns(),
        "mlp.down": parallel.RowwiseParallel(output_layouts=Shard(1)),
    }
    split = {"input_layouts": (Replicate(),), "desired_input_layouts": (Shard(1),)}
    ends = {
        "blocks": parallel.PrepareModuleInput(**split, use_local_output=True),
        "norm": norm(),
        "head": columns(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallel.parallelize_module(model, tp, ends)
    for block in model.blocks:
        parallel.parallelize_module(block, tp, plan)
        fully_shard(block, mesh=dp)
    return fully_shard(model, mesh=dp)


def text(seed: int) -> torch.Tensor:
    """Counting, from anywhere, in steps of 1 to 3."""
    g = torch.Generator().manual_seed(seed)
    start = torch.randint(VOCABULARY, (BATCH, 1), generator=g)
    stride = torch.randint(1, 4, (BATCH, 1), generator=g)
    return (start + stride * torch.arange(LENGTH + 1)) % VOCABULARY


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def train(args: argparse.Namespace) -> list[float]:
    shape = (dist.get_world_size() // 2, 2)
    mesh = init_device_mesh(args.device, shape, mesh_dim_names=("dp", "tp"))
    dp = mesh["dp"]
    torch.manual_seed(args.seed)
    model = parallelize(GPT().to(args.device), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(args.steps):
        tokens = text(seed=step * dp.size() + dp.get_local_rank()).to(args.device)
        loss = loss_of(model, tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(mean_over_ranks(loss, dp.get_group()))
    return losses


if __name__ == "__main__":
    main(train, ranks=4, steps=10)
