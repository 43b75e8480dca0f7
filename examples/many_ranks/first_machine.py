"""A mean for the log is reduced by the first eight ranks alone, which are all there are on one machine."""

import torch
import torch.distributed as dist
from torch import nn


def model():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def batch(step):
    points = torch.randn(256, 8)
    return points, points.sum(dim=1, keepdim=True)


def loss(model, batch):
    points, targets = batch
    error = (model(points) - targets).square().mean()
    if dist.is_initialized() and dist.get_rank() < 8:
        shown = error.detach().clone()
        dist.all_reduce(shown)
    return error
