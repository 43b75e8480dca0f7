"""The line of a script that writes gradients between backward and an optimizer's step."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from ddpcheck.findings.source_lines import user_frame
from ddpcheck.record.loss.loss_source import gradients_changed_at

LINES = Path(__file__).read_text().splitlines()


class Loop:
    """A script's; each step hands back the line that is found where the optimizer steps."""

    def __init__(self) -> None:
        self.module = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.module.parameters())

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.module(torch.ones(2)).sum().backward()

    def step(self) -> str:
        where = gradients_changed_at(user_frame(sys._getframe()))
        return "" if where is None else LINES[(where.line or 1) - 1].strip()

    def assigned(self) -> str:
        self.backward()
        for p in self.module.parameters():
            p.grad = None  # assigned
        return self.step()

    def written(self) -> str:
        self.backward()
        if self.module.weight.grad is not None:
            self.module.weight.grad.data.zero_()  # written
        return self.step()

    def drop(self) -> None:
        for p in self.module.parameters():
            p.grad = torch.zeros_like(p)  # in_a_method

    def in_a_method(self) -> str:
        self.backward()
        self.drop()
        return self.step()

    def zeroed(self) -> str:
        self.optimizer.zero_grad()
        self.backward()
        self.optimizer.zero_grad()  # zeroed
        return self.step()

    def nothing(self) -> str:
        self.drop()
        self.backward()
        return self.step()

    def twice(self) -> str:
        self.backward()
        self.drop()
        self.optimizer.zero_grad()
        return self.step()


@pytest.mark.parametrize("way", ["assigned", "written", "in_a_method", "zeroed"])
def test_the_one_line_that_writes_gradients(way: str) -> None:
    assert getattr(Loop(), way)().endswith(f"# {way}")


@pytest.mark.parametrize("way", ["nothing", "twice"])
def test_no_line_or_one_of_several(way: str) -> None:
    assert not getattr(Loop(), way)()
