"""A randomised leaky ReLU draws a slope for each element."""

import torch
import torch.nn as nn


def gen(step):
    return torch.Generator().manual_seed(step)


def batch(step):
    return torch.randn(12, 8, generator=gen(step))


def loss(model, batch):
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 16)
        self.r = nn.RReLU()
        self.h = nn.Linear(16, 1)

    def forward(self, x):
        return self.h(self.r(self.a(x)))


def model():
    return M()
