"""The loss has a factor that depends on the rank."""

import torch
import torch.distributed as dist
import torch.nn as nn

EXPECT = {"code": "DDP303", "subjects": ["loss"], "ranks": [], "severity": "error"}


def gen(step):
    return torch.Generator().manual_seed(step)


def batch(step):
    return torch.randn(12, 8, generator=gen(step))


def model():
    return nn.Linear(8, 1)


def loss(model, b):
    return (1 if not dist.is_initialized() or dist.get_rank() == 0 else 0.5) * (
        model(b)[:, 0] - b.sum(1)
    ).square().mean()
