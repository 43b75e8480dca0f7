"""A temperature kept as a plain attribute is annealed in every forward."""

import torch
import torch.nn as nn
import torch.nn.functional as F


def gen(step):
    return torch.Generator().manual_seed(step)


def batch(step):
    return torch.randn(12, 8, generator=gen(step))


def loss(model, batch):
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 4)
        self.h = nn.Linear(4, 1)
        self.tau = 1.0

    def forward(self, x):
        p = F.softmax(self.a(x) / self.tau, -1)
        self.tau = max(0.1, self.tau * 0.8)
        return self.h(p)


def model():
    return M()
