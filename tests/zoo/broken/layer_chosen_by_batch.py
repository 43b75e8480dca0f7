"""The sum of the batch chooses a layer: that of the global batch is another one than that of a shard."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EXPECT = {"code": "DDP304", "subjects": ["layers.1.bias", "layers.1.weight"], "ranks": [], "severity": "warning"}
ddp_kwargs = {"find_unused_parameters": True}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers[int(x.sum() > 0)](x))


def model() -> nn.Module:
    return Net()


def batch(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
    shift = torch.tensor([1.0] * 4 + [-2.0] * 4)  # the first shard has a sum above zero, the whole batch has not
    return x + shift[:, None], torch.arange(8) % 4


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])
