"""A layer that nothing uses, in a forward with an asynchronous all-reduce."""

import torch
import torch.distributed as dist
import torch.nn as nn

EXPECT = {"code": "DDP101", "subjects": ["b.weight", "b.bias"], "ranks": [], "severity": "error"}


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
            t = torch.tensor(float(len(x)))
            w = dist.all_reduce(t, async_op=True)
            w.wait()
        return self.a(x)


def model():
    return M()
