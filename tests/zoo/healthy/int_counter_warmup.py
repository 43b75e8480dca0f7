"""A step counter kept as a plain attribute warms the output up."""

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
        self.h = nn.Linear(16, 1)
        self.step = 0

    def forward(self, x):
        self.step += 1
        return self.h(torch.tanh(self.a(x))) * min(1.0, self.step / 10)


def model():
    return M()
