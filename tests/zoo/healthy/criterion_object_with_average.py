"""A criterion that is no module keeps a moving average, in a tensor, of numbers that all ranks share."""

import torch
import torch.nn as nn


class Criterion:
    calls = 0

    def __init__(self):
        self.average = torch.ones(())
        self.history = {"weights": []}

    def __call__(self, model, batch):
        Criterion.calls += 1
        self.average.mul_(0.9).add_(0.1 * Criterion.calls)
        self.history["weights"].append(float(self.average))
        return (model(batch)[:, 0] - batch.sum(1)).square().mean() / self.average


def model():
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step):
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


loss = Criterion()
