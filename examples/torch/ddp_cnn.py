"""Data parallelism: a small convolutional network on synthetic images, under DDP.

    python examples/torch/ddp_cnn.py --backend unjam --ranks 2
    torchrun --nproc-per-node 4 examples/torch/ddp_cnn.py --backend unjam --device cuda

Only the name of the backend tells it from any other DDP script.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from harness import main, mean_over_ranks

CLASSES, SIZE, BATCH = 4, 16, 16


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, CLASSES),
    )


def images(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise, in which a class has a bright quarter."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (BATCH,), generator=g)
    x = torch.randn(BATCH, 3, SIZE, SIZE, generator=g)
    half = SIZE // 2
    for image, label in zip(x, labels.tolist(), strict=True):
        row, column = divmod(label, 2)
        image[:, row * half :, column * half :][:, :half, :half] += 1.0
    return x, labels


def train(args: argparse.Namespace) -> list[float]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = network().to(args.device)
    model = DistributedDataParallel(model, bucket_cap_mb=0.002)  # several buckets, small as it is
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(args.steps):
        x, labels = images(seed=step * ranks + rank)
        loss = cross_entropy(model(x.to(args.device)), labels.to(args.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(mean_over_ranks(loss))
    return losses


if __name__ == "__main__":
    main(train, ranks=2, steps=20)
