"""A summed loss behind a BatchNorm that couples the samples."""

import torch
import torch.nn as nn

EXPECT = {"code": "DDP305", "subjects": ["loss"], "ranks": [], "severity": "error"}


def gen(step):
    return torch.Generator().manual_seed(step)


def batch(step):
    return torch.randn(12, 8, generator=gen(step))


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.n = nn.BatchNorm1d(8)
        self.h = nn.Linear(8, 1)

    def forward(self, x):
        return self.h(torch.relu(self.n(self.a(x))))


def model():
    return M()


def loss(model, b):
    return (model(b)[:, 0] - b.sum(1)).square().sum()
