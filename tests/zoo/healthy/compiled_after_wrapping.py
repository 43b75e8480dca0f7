"""wrap compiles the DDP module: layers as large as a bucket, where the graph is split, and a graph break in forward."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(3))
        self.head = nn.Linear(512, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        torch._dynamo.graph_break()
        return self.head(x)[:, 0]


def model() -> nn.Module:
    return Deep()


def batch(step: int) -> Tensor:
    return torch.randn(12, 512, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch.mean(1)).square().mean()


def wrap(module: nn.Module, device: torch.device) -> nn.Module:
    compiled: nn.Module = torch.compile(DistributedDataParallel(module, bucket_cap_mb=1), backend="aot_eager")
    return compiled
