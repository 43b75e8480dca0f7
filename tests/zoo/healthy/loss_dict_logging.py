"""A detached metric that is not a number stands beside the loss."""

import torch
import torch.nn as nn


def gen(step):
    return torch.Generator().manual_seed(step)


def batch(step):
    return torch.randn(12, 8, generator=gen(step))


def model():
    return nn.Linear(8, 1)


def loss(model, b):
    value = (model(b)[:, 0] - b.sum(1)).square().mean()
    return {"loss": value, "acc": (model(b) > 0).float().mean().detach(), "auc": torch.tensor(float("nan")), "lr": 0.1}
