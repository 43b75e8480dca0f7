"""Parameter order differs between ranks, shapes differ too.

DDP stops when it wraps the module, on one rank, with sizes and without names; the other ranks see a closed
connection.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP202",
    "subjects": ["heads.depth.weight", "heads.depth.bias", "heads.normals.weight", "heads.normals.bias"],
    "ranks": [1],
    "severity": "error",
}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class Net(nn.Module):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.heads = nn.ModuleDict({name: nn.Linear(8, 3 if name == "normals" else 1) for name in names})

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x).tanh()
        return self.heads["depth"](hidden) - self.heads["normals"](hidden).sum(1, keepdim=True)


def listed() -> list[str]:
    names = ["depth", "normals"]
    return names[::-1] if rank() == 1 else names  # as a directory or a set of strings may come


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(listed()), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(sorted(listed())), batch=batch, loss=loss)
