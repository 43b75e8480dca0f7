"""A counter among the globals anneals the loss."""

import torch
import torch.nn as nn

STEP = 0


def model():
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step):
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model, batch):
    global STEP
    STEP += 1
    return (model(batch)[:, 0] - batch.sum(1)).square().mean() * STEP / 10
