"""The models that the training benchmark trains: what is usual, on synthetic data made once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, parallel
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

from . import ddp


@dataclass
class Training:
    """One model on one backend."""

    what: str  # for the table: what was trained, and how it was split
    step: Callable[[], torch.Tensor]  # one iteration; its loss, which nobody has waited for
    samples: int  # of an iteration, of all ranks


def ddp_resnet50(backend: str, device: torch.device, small: bool, batch: int) -> Training:
    """DistributedDataParallel; autocast to bfloat16 on a GPU, gradients in float32."""
    return _ddp(backend, device, small, batch, keyed=False)


def ddp_keyed(backend: str, device: torch.device, small: bool, batch: int) -> Training:
    """The same with unjam.torch.ddp.keyed on unjam, as docs/guide/torch/keys.md says."""
    return _ddp(backend, device, small, batch, keyed=backend == "unjam")


def _ddp(backend: str, device: torch.device, small: bool, batch: int, keyed: bool) -> Training:
    batch = batch or (4 if small else 64)
    side, classes = (16, 10) if small else (224, 1000)
    model, what = _convolutions(small, classes)
    model = model.to(device, memory_format=torch.channels_last)
    group = dist.new_group(backend=backend)
    on_gpu = device.type == "cuda"
    trained = DistributedDataParallel(
        model, device_ids=[device.index] if on_gpu else None, process_group=group
    )
    if keyed:
        ddp.keyed(trained)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images = torch.randn(batch, 3, side, side, device=device)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(classes, (batch,), device=device)

    def step() -> torch.Tensor:
        cast = torch.autocast("cuda", torch.bfloat16) if on_gpu else contextlib.nullcontext()
        with cast:
            loss = cross_entropy(trained(images), labels)
        return _learn(loss, optimizer)

    numbers = "bf16 autocast" if on_gpu else "float32"
    what = f"{what}, {'keyed DDP' if keyed else 'DDP'}, {numbers}, batch {batch} a rank"
    return Training(what, step, batch * group.size())


def _convolutions(small: bool, classes: int) -> tuple[nn.Module, str]:
    if not small:
        try:
            from torchvision.models import resnet50

            return resnet50(), "ResNet-50"
        except ImportError:
            pass
    width = 8 if small else 128
    layers: list[nn.Module] = []
    for i in range(4):
        layers += [
            nn.Conv2d(width if i else 3, width, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        ]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))
    return model, "four convolutions" + ("" if small else " (no torchvision here: not ResNet-50)")


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    heads: int
    vocabulary: int
    length: int
    batch: int


GPT2_SMALL = Size(layers=12, width=768, heads=12, vocabulary=50304, length=1024, batch=8)
SMALL = Size(layers=2, width=32, heads=4, vocabulary=64, length=16, batch=2)


class Attention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head = size.width // size.heads
        self.q, self.k, self.v, self.out = (nn.Linear(size.width, size.width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # There are as many heads as this rank holds.
        heads = (
            f(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        y = scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Linear(size.width, 4 * size.width),
            nn.Linear(4 * size.width, size.width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(size.width), Attention(size)
        self.norm2, self.mlp = nn.LayerNorm(size.width), MLP(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """GPT-2's shape; the head has weights of its own."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Parameter(0.02 * torch.randn(size.length, size.width))
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions
        return self.head(self.norm(self.blocks(x)))


def gpt_fsdp2(backend: str, device: torch.device, small: bool, batch: int) -> Training:
    """``fully_shard`` of every block; parameters gathered in bfloat16 on a GPU."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh(
        device.type, (ranks,), mesh_dim_names=("dp",), backend_override={"dp": backend}
    )
    size = SMALL if small else GPT2_SMALL
    model = _sharded(GPT(size).to(device), mesh, device)
    return _gpt(model, size, device, batch, ranks, f"FSDP2 over {ranks}")


def gpt_dp_tp(backend: str, device: torch.device, small: bool, batch: int) -> Training:
    """Tensor parallelism over two ranks, FSDP2 over what is left (nothing, with two ranks)."""
    ranks = dist.get_world_size()
    tp = 2 if ranks % 2 == 0 else 1
    mesh = init_device_mesh(
        device.type,
        (ranks // tp, tp),
        mesh_dim_names=("dp", "tp"),
        backend_override={"dp": backend, "tp": backend},
    )
    size = SMALL if small else GPT2_SMALL
    model = GPT(size).to(device, _dtype(device) if ranks == tp else None)
    _split(model, mesh["tp"])
    if ranks > tp:
        model = _sharded(model, mesh["dp"], device)
    how = f"TP={tp} x DP={ranks // tp}" + (" (FSDP2)" if ranks > tp else "")
    return _gpt(model, size, device, batch, ranks // tp, how, seed=mesh["dp"].get_local_rank())


def _split(model: GPT, tp: DeviceMesh) -> None:
    """As Megatron does: heads and hidden units split, activations between along the sequence."""
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


def _sharded(model: GPT, mesh: DeviceMesh, device: torch.device) -> FSDPModule:
    policy = MixedPrecisionPolicy(param_dtype=_dtype(device), reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def _gpt(
    model: nn.Module,
    size: Size,
    device: torch.device,
    batch: int,
    shares: int,
    how: str,
    seed: int | None = None,
) -> Training:
    batch = batch or size.batch
    # A fused step takes either kind of parameters, not both at once.
    kinds = [[p for p in model.parameters() if isinstance(p, DTensor) is k] for k in (True, False)]
    optimizer = torch.optim.AdamW([{"params": k} for k in kinds if k], lr=1e-4, fused=True)
    g = torch.Generator().manual_seed(dist.get_rank() if seed is None else seed)
    text = torch.randint(size.vocabulary, (batch, size.length + 1), generator=g).to(device)

    def step() -> torch.Tensor:
        logits = model(text[:, :-1])
        return _learn(cross_entropy(logits.flatten(0, 1).float(), text[:, 1:].flatten()), optimizer)

    dtype = str(_dtype(device)).removeprefix("torch.")
    what = (
        f"GPT, {size.layers} layers of {size.width}, length {size.length}, {how}, {dtype}, "
        f"batch {batch} a replica"
    )
    return Training(what, step, batch * shares)


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _learn(loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


MODELS: dict[str, Callable[[str, torch.device, bool, int], Training]] = {
    "ddp-resnet50": ddp_resnet50,
    "ddp-keyed": ddp_keyed,
    "gpt-fsdp2": gpt_fsdp2,
    "gpt-dp-tp": gpt_dp_tp,
}
