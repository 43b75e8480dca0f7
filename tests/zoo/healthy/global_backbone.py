"""model() hands out a backbone that lives in a global."""

import torch
import torch.nn as nn


def batch(step):
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model, batch):
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


backbone = nn.Sequential(nn.Linear(8, 16), nn.Tanh())


def model():
    return nn.Sequential(backbone, nn.Linear(16, 1))
