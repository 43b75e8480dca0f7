"""A layer that rank 1 does not use, in a forward that gathers objects."""

import torch
import torch.distributed as dist
import torch.nn as nn

EXPECT = {"code": "DDP104", "subjects": ["b.weight", "b.bias"], "ranks": [1], "severity": "error"}


def gen(step):
    return torch.Generator().manual_seed(step)


def batch(step):
    return torch.randn(12, 8, generator=gen(step))


def loss(model, batch):
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 1)
        self.b = nn.Linear(8, 1)

    def forward(self, x):
        if dist.is_initialized():
            o = [None] * dist.get_world_size()
            dist.all_gather_object(o, {"n": len(x)})
        y = self.a(x)
        if not dist.is_initialized() or dist.get_rank() == 0:
            y = y + self.b(x)
        return y


def model():
    return M()
