"""The optimizer is a wrapper of the user's with a plain zero_grad."""

import torch
import torch.nn as nn


def gen(step):
    return torch.Generator().manual_seed(step)


def batch(step):
    return torch.randn(12, 8, generator=gen(step))


def loss(model, batch):
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


def model():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


class Clipped:
    def __init__(self, opt):
        self.opt = opt
        self.param_groups = opt.param_groups

    def step(self):
        torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 1.0)
        self.opt.step()

    def zero_grad(self):
        self.opt.zero_grad()


def optimizer(ps):
    return Clipped(torch.optim.AdamW(ps))
