"""The loss runs a micro-batch of its own under no_sync, with a backward of its own."""

from contextlib import nullcontext

import torch
import torch.nn as nn


def gen(step):
    return torch.Generator().manual_seed(step)


def batch(step):
    return torch.randn(12, 8, generator=gen(step))


def model():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def loss(model, batch):
    a, b = batch.chunk(2)

    def f(x):
        return (model(x)[:, 0] - x.sum(1)).square().mean() / 2

    with model.no_sync() if hasattr(model, "no_sync") else nullcontext():
        f(a).backward()
    return f(b)
