"""Gradients are below the smallest normal number."""

import torch
import torch.nn as nn


def batch(step):
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def model():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def loss(model, b):
    return 1e-40 * (model(b)[:, 0] - b.sum(1)).square().mean()
