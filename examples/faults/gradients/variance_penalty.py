"""A penalty on the standard deviation of features over the local batch.

The deviation over a shard is another function of the weights than that over the batch, as in VICReg.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather

from ddpcheck import Recipe

EXPECT = {"code": "DDP304", "subjects": ["loss"], "ranks": [], "severity": "warning", "cause": "the loss itself"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 4), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        code = self.encoder(x).tanh()
        return code, self.decoder(code)


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(gather):
    def spread(model: nn.Module, batch: Tensor) -> Tensor:
        code, decoded = model(batch)
        return (decoded - batch).square().mean() + (1 - gather(code).std(0)).relu().mean()

    return spread


def everywhere(code: Tensor) -> Tensor:
    return torch.cat(all_gather(code)) if dist.is_initialized() else code


broken = Recipe(model=Net, batch=batch, loss=loss(lambda code: code))
fixed = Recipe(model=Net, batch=batch, loss=loss(everywhere))
