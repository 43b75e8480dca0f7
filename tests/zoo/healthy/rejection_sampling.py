"""Noise is drawn until it is small enough: with the numbers silenced this would go on for ever."""

import torch
import torch.nn as nn


def model():
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step):
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model, batch):
    while True:
        noise = torch.randn(8)
        if noise.norm() < 1.2:
            break
    return (model(batch + 0.01 * noise)[:, 0] - batch.sum(1)).square().mean()
