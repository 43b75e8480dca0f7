"""Modules and loops of training that the tests of `watch` and of the wrapper share."""

import contextlib
import linecache
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import ddpcheck
from ddpcheck import CheckedDistributedDataParallel

SPARE = ("spare.weight", "spare.bias")


class Net(nn.Module):
    """Takes a way through itself that the caller chooses."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.head = nn.Linear(8, 2)
        self.spare = nn.Linear(8, 2)

    def forward(self, x, way="whole"):
        h = torch.relu(self.body(x))
        if way == "short":
            return self.head(h)
        if way == "detached":
            return self.head(h) + self.spare(h).detach()
        if way == "both":
            return {"main": self.head(h), "spare": self.spare(h)}
        return self.head(h) + self.spare(h)


class Box:
    def __init__(self, value):
        self.value = value


class Boxed(Net):
    """Its output is in an object of the user's own."""

    def forward(self, x, way):
        return Box(super().forward(x, way))


class Keeping(Net):
    """Its loss does not come through what forward returns."""

    def forward(self, x, way):
        self.loss = super().forward(x, way).square().mean()


class Layers(nn.Module):
    """Linear layers of four features by name, and the function that is the forward pass."""

    def __init__(self, names, forward):
        super().__init__()
        for name in names.split():
            self.add_module(name, nn.Linear(4, 4))
        self.function = forward

    def forward(self, x, way="whole"):
        return self.function(self, x)


def towers():
    return Layers("left right", lambda self, x: (self.left(x), self.right(x)))


def batch(rows=3):
    return torch.randn(rows, 4)


def short(*, step=None, rank=None):
    """The short way in this step and on this rank, in all of them if not given."""
    return lambda current: "short" if step in (None, current) and rank in (None, dist.get_rank()) else "whole"


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def steps(model, count, optimizer=None):
    """Steps of training, whose backward passes the caller makes."""
    optimizer = optimizer or sgd(model)
    for step in range(count):
        optimizer.zero_grad()
        yield step
        optimizer.step()


def train(model, count, *, way="whole", loss=lambda out: out.square().mean(), optimizer=None, begin=0):
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in steps(model, count, optimizer):
        out = model(torch.randn(3, 4, generator=generator), way if isinstance(way, str) else way(begin + step))
        loss(out).backward()


def accumulate(model, windows, *, synchronises, micro=4, late=False, optimizer=None):
    """Accumulation with `require_backward_grad_sync` set by hand: before each forward, or (`late`) after it."""
    optimizer = optimizer or sgd(model)
    for index in range(windows * micro):
        if not late:
            model.require_backward_grad_sync = synchronises(index)
        loss = model(batch()).square().mean() / micro
        if late:
            model.require_backward_grad_sync = synchronises(index)
        loss.backward()
        if index % micro == micro - 1:
            optimizer.step()
            optimizer.zero_grad()


def checked(module=None, **options):
    """A wrapper, and the list that takes its findings."""
    findings = []
    return CheckedDistributedDataParallel(
        Net() if module is None else module, on_finding=findings.append, **options
    ), findings


def codes(findings):
    return [finding.code for finding in findings]


def facts(findings):
    return [(finding.code, finding.subjects, finding.ranks, finding.steps) for finding in findings]


def line_of(finding):
    """The text of the line that a finding names."""
    return linecache.getline(str(Path(__file__).parents[2] / finding.location.path), finding.location.line)


def assert_same_model(model):
    """Gradients and parameters are the same on both ranks."""
    for parameter in model.parameters():
        ddpcheck.assert_same_on_all_ranks(parameter)
        if parameter.grad is not None:
            ddpcheck.assert_same_on_all_ranks(parameter.grad)


@contextlib.contextmanager
def silent():
    """A function that wraps a module, all checks on; nothing may be found, and no warning shown."""
    models = []

    def wrap(module=None, **options):
        checks = {"check_consistency": 2, "check_parity_every": 2}
        models.append(CheckedDistributedDataParallel(Net() if module is None else module, **checks, **options))
        return models[-1]

    with warnings.catch_warnings():
        warnings.simplefilter("error", ddpcheck.FindingWarning)
        yield wrap
    for model in models:
        assert facts(model.findings) == []
        assert_same_model(model)
