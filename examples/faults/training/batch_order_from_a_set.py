"""Class numbers come from the order of a set, and each rank labels its samples by its own.

Class 2 on one rank is class 0 on another. Shapes agree, so nothing is raised, and the model learns neither.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP516",
    "subjects": ["batch(0)"],
    "ranks": [1],
    "severity": "error",
    "cause": "hash seed",
}

SEEN = ["bird", "cat", "dog", "fish"]


def model() -> nn.Module:
    return nn.Linear(8, 4)


def batch(step: int, names: list[str]) -> tuple[Tensor, Tensor]:
    numbers = {name: number for number, name in enumerate(names)}
    samples = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
    return samples, torch.tensor([numbers[SEEN[i % 4]] for i in range(12)])


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    samples, labels = batch
    return nn.functional.cross_entropy(model(samples), labels)


broken = Recipe(model=model, batch=lambda step: batch(step, list(set(SEEN))), loss=loss)
fixed = Recipe(model=model, batch=lambda step: batch(step, sorted(set(SEEN))), loss=loss)
