"""A helper object counts the steps and weighs a term of the loss."""

import torch
import torch.nn as nn


def batch(step):
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


class Annealer:
    def __init__(self):
        self.t = 0

    def __call__(self):
        self.t += 1
        return min(1.0, self.t / 10)


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Linear(8, 8)
        self.d = nn.Linear(4, 8)
        self.ann = Annealer()

    def forward(self, x):
        mu, lv = self.e(x).chunk(2, 1)
        z = mu + torch.randn_like(mu) * (lv / 2).exp()
        kl = -0.5 * (1 + lv - mu**2 - lv.exp()).sum(1).mean()
        return (self.d(z) - x).square().mean() + self.ann() * kl


def model():
    return M()


def loss(model, b):
    return model(b)
