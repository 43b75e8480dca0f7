"""A generator and a discriminator in one module with two losses; what is detached on one way contributes on another."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call


class Adversarial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Linear(4, 8)
        self.discriminator = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, real: Tensor, noise: Tensor) -> dict[str, Tensor]:
        fake = self.generator(noise)
        judge = self.discriminator
        fixed = {name: parameter.detach() for name, parameter in judge.named_parameters()}
        return {"real": judge(real), "fake": judge(fake.detach()), "fooled": functional_call(judge, fixed, (fake,))}


def model() -> nn.Module:
    return Adversarial()


def batch(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"real": torch.randn(12, 8, generator=generator), "noise": torch.randn(12, 4, generator=generator)}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    judged = model(**batch)
    return {
        "discriminator": F.softplus(-judged["real"]).mean() + F.softplus(judged["fake"]).mean(),
        "generator": F.softplus(-judged["fooled"]).mean(),
    }
