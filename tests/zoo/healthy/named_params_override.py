"""named_parameters is overridden without remove_duplicate."""

import torch
import torch.nn as nn


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

    def named_parameters(self, prefix="", recurse=True):
        yield from super().named_parameters(prefix, recurse)

    def forward(self, x):
        return self.a(x)


def model():
    return M()
