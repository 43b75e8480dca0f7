"""A summed loss in a model that insists on its batch size, so that shards cannot be run alone."""

import torch
import torch.distributed as dist
import torch.nn as nn

EXPECT = {"code": "DDP305", "subjects": ["loss"], "ranks": [], "severity": "error"}


def gen(step):
    return torch.Generator().manual_seed(step)


def batch(step):
    return torch.randn(12, 8, generator=gen(step))


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 1)

    def forward(self, x):
        return self.a(x)


def model():
    return M()


def loss(model, b):
    if not dist.is_initialized():
        assert len(b) == 12, "global batch expected without a process group"
    return (model(b)[:, 0] - b.sum(1)).square().sum()
