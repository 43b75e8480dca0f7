"""A GAN whose generator only ever sees detached samples.

detach() belongs into the discriminator's loss alone; in one loss for both, the generator needs a sample of its own.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP103",
    "subjects": ["generator.weight", "generator.bias"],
    "ranks": [],
    "severity": "error",
    "cause": "detach() at examples/faults/parameters/gan_generator_detached.py:31",
}


class Net(nn.Module):
    def __init__(self, *, generator_loss: bool) -> None:
        super().__init__()
        self.generator = nn.Linear(8, 8)
        self.discriminator = nn.Linear(8, 1)
        self.generator_loss = generator_loss

    def forward(self, x: Tensor) -> Tensor:
        fake = self.generator(x.flip(1))
        real_loss = F.softplus(-self.discriminator(x)).mean()
        fake_loss = F.softplus(self.discriminator(fake.detach())).mean()
        if not self.generator_loss:
            return real_loss + fake_loss
        frozen = {name: p.detach() for name, p in self.discriminator.named_parameters()}
        judged = torch.func.functional_call(self.discriminator, frozen, (fake,))
        return real_loss + fake_loss + F.softplus(-judged).mean()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch)


broken = Recipe(model=lambda: Net(generator_loss=False), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(generator_loss=True), batch=batch, loss=loss)
