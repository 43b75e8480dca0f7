"""A summed loss in a model that takes another branch in float64, which spoils the yardstick for rounding."""

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
        self.a = nn.Linear(8, 16)
        self.h = nn.Linear(16, 1)

    def forward(self, x):
        h = self.a(x)
        if h.dtype == torch.float32:
            h = torch.relu(h)
        return self.h(h)


def model():
    return M()


def loss(model, batch):
    return (model(batch)[:, 0] - batch.sum(1)).square().sum()
