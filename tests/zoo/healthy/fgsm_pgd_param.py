"""The loss makes a fresh nn.Parameter as an adversarial perturbation in every step."""

import torch
import torch.nn as nn


def gen(step):
    return torch.Generator().manual_seed(step)


def batch(step):
    return torch.randn(12, 8, generator=gen(step))


def model():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def loss(model, b):
    delta = nn.Parameter(torch.zeros_like(b) + 0.01)
    return (model(b + delta)[:, 0] - b.sum(1)).square().mean()
