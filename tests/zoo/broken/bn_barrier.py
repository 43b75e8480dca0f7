"""A BatchNorm couples the samples; the barrier in forward has no part in it."""

import torch
import torch.distributed as dist
import torch.nn as nn

EXPECT = {"code": "DDP304", "subjects": [], "ranks": [], "severity": "warning", "also": ["DDP215"]}


def gen(step):
    return torch.Generator().manual_seed(step)


def batch(step):
    return torch.randn(12, 8, generator=gen(step))


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 16)
        self.bn = nn.BatchNorm1d(16)
        self.h = nn.Linear(16, 1)

    def forward(self, x):
        return self.h(torch.relu(self.bn(self.a(x))))


def model():
    return M()


def loss(model, batch):
    if dist.is_initialized():
        dist.barrier()
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()
