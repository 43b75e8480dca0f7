"""An unused layer under a compiled DDP wrapper."""

import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

EXPECT = {"code": "DDP101", "subjects": ["unused.weight", "unused.bias"], "ranks": [], "severity": "error"}


def gen(step):
    return torch.Generator().manual_seed(step)


def batch(step):
    return torch.randn(12, 8, generator=gen(step))


def loss(model, batch):
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 1)
        self.unused = nn.Linear(8, 1)

    def forward(self, x):
        return self.a(x)


def model():
    return M()


def wrap(m, device):
    return torch.compile(DDP(m), backend="eager")
