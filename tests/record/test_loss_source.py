"""The lines of a loss: what makes it, and what multiplies or divides it by the world size."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddpcheck.findings.source_lines import user_frame
from ddpcheck.record.loss.loss_source import LossSource, loss_source

LINES = Path(__file__).read_text().splitlines()


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[LossSource]]:
    found: list[LossSource] = []
    original = torch.autograd.backward

    def backward(*arguments: Any, **named: Any) -> None:
        found.append(loss_source(user_frame(sys._getframe(1))))
        original(*arguments, **named)

    monkeypatch.setattr(torch.autograd, "backward", backward)

    def get_world_size(*_: Any) -> int:
        return 2

    monkeypatch.setattr(dist, "get_world_size", get_world_size)
    monkeypatch.setenv("WORLD_SIZE", "2")
    yield found


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.layer(x)
        loss = F.cross_entropy(logits, y)  # of the model
        return logits, loss


class Output:
    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


class Sum:
    def __call__(self, outputs: Tensor) -> tuple[Tensor, int]:
        boxes = torch.zeros(1, device=outputs.device)
        boxes += outputs.square().mean()  # of the object
        boxes *= 0.5
        return boxes * len(outputs), 0


def outer() -> tuple[int, int]:
    return 0, int(os.environ["WORLD_SIZE"])


def masked(errors: Tensor, keep: Tensor) -> Tensor:
    total = (errors * keep).sum()
    return total / keep.sum()  # masked


def step(loss: Tensor) -> None:
    if loss.isfinite():
        loss.backward()


def by_name(x: Tensor, model: nn.Module) -> None:
    errors = model(x).square()
    loss = errors.mean()  # made
    logged = loss.item()
    assert logged >= 0
    loss.backward()


def in_a_function(x: Tensor, model: nn.Module) -> None:
    loss = masked(model(x).square(), (x[:, :1] > 0).float())
    loss.backward()


def in_a_module(x: Tensor, model: nn.Module) -> None:
    both = nn.ModuleDict({"it": Classifier()})
    net = both["it"]
    _, loss = net(x, torch.zeros(len(x), dtype=torch.long))
    (loss / 4).backward()


def in_an_object(x: Tensor, model: nn.Module) -> None:
    criterion = Sum()
    loss, _ = criterion(model(x))
    loss.backward()


def handed_on(x: Tensor, model: nn.Module) -> None:
    criterion = nn.MSELoss()
    loss = criterion(model(x), torch.zeros(len(x), 1))  # made
    step(loss)


def of_parts(x: Tensor, model: nn.Module) -> None:
    outputs = Output(loss=model(x).square().mean())  # made
    total = outputs.loss
    total.backward()


def in_one_line(x: Tensor, model: nn.Module) -> None:
    F.mse_loss(model(x), torch.zeros(len(x), 1)).backward()  # made


def multiplied(x: Tensor, model: nn.Module) -> None:
    loss = model(x).square().mean()  # made
    loss = loss * dist.get_world_size()  # scaled
    loss.backward()


def divided(x: Tensor, model: nn.Module) -> None:
    _, ranks = outer()
    loss = model(x).square().mean()  # made
    loss /= ranks  # scaled
    loss.backward()


def in_few_lines(x: Tensor, model: nn.Module) -> None:
    ranks = dist.get_world_size(); loss = model(x).square().mean(); loss = loss / ranks  # fmt: skip # noqa: E702 # both
    model.zero_grad(); loss.backward(); assert ranks == 2  # fmt: skip # noqa: E702


def by_another_number(x: Tensor, model: nn.Module) -> None:
    _, ranks = outer()
    parts = 2
    loss = model(x).square().mean()  # made
    loss = loss / parts
    assert ranks == parts
    loss.backward()


def only_logged(x: Tensor, model: nn.Module) -> None:
    loss = model(x).square().mean()  # made
    average = loss.detach() / dist.get_world_size()
    assert average >= 0
    loss.backward()


ONLY_MADE = (by_name, handed_on, of_parts, in_one_line, by_another_number, only_logged)
WHERE: dict[Callable[..., None], tuple[str, str]] = dict.fromkeys(ONLY_MADE, ("made", "")) | {
    in_a_function: ("masked", ""),
    in_a_module: ("of the model", ""),
    in_an_object: ("of the object", ""),
    multiplied: ("made", "scaled"),
    divided: ("made", "scaled"),
    in_few_lines: ("both", "both"),
}


@pytest.mark.parametrize("function", WHERE, ids=lambda function: function.__name__)
def test_the_lines_of_a_loss(function: Callable[..., None], sources: list[LossSource]) -> None:
    function(torch.randn(5, 3), nn.Linear(3, 1))
    first = function.__code__.co_firstlineno
    expected = []
    for mark in WHERE[function]:
        anywhere = [number for number, line in enumerate(LINES, 1) if line.endswith(f"# {mark}")]
        expected.append(next((n for n in anywhere if n > first or len(anywhere) == 1), 0) if mark else 0)
    (found,) = sources
    assert [0 if where is None else where.line for where in (found.made, found.scaled)] == expected
