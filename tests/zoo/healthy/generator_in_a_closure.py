"""A generator that lives in the closure of the loss gives the weight of a term; a counter lives there too."""

import torch
import torch.nn as nn


def model():
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step):
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def make_loss():
    generator, seen = torch.Generator().manual_seed(5), []

    def loss(model, batch):
        seen.append(len(seen))
        weight = 0.5 + torch.rand((), generator=generator).item() + 0.1 * len(seen)
        return weight * (model(batch)[:, 0] - batch.sum(1)).square().mean()

    return loss


loss = make_loss()
