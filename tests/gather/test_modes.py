"""The mode in which a model is checked: training mode, as a loop puts it there."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpcheck.gather.state.training_mode import BUILT_IN_EVAL_MODE, into_training
from ddpcheck.recipe.recipe import Recipe
from ddpcheck.report.checking.check import check


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())


class Frozen(Net):
    def train(self, mode: bool = True) -> "Frozen":
        super().train(mode)
        self.body[1].eval()
        return self


class Trained(Net):
    def train(self, data: Tensor) -> None:  # type: ignore[override]
        raise AssertionError("nobody asked for that")


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 1, generator=generator)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def loss_in_eval_mode(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    model.eval()
    return loss(model, batch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "loss", "codes", "noted"),
    [
        (lambda: Net().eval(), loss, ["DDP304"], True),  # arrives in eval mode: checked in training mode, and noted
        (lambda: Frozen().eval(), loss, [], True),  # what `train` keeps in eval mode is checked in it
        (Net, loss_in_eval_mode, [], False),
    ],
    ids=["built evaluating", "frozen evaluating", "evaluating in loss"],
)
def test_the_mode_of_a_check(model: Any, loss: Any, codes: list[str], noted: bool) -> None:
    report = check(Recipe(model=model, batch=batch, loss=loss))
    assert report.error is None, report.error
    assert {item.status for item in report.checks} <= {"passed", "warned"}
    assert [finding.code for finding in report.findings] == codes
    assert (BUILT_IN_EVAL_MODE in report.world["notes"]) is noted


def test_a_train_that_trains_is_not_called() -> None:
    model = Trained()
    assert not into_training(model) and model.body[1].training
    nn.Module.eval(nn.Sequential(model.body, model.head))
    model.training = False
    assert into_training(model) and model.training and model.body[1].training


def test_parts_in_eval_mode_stay_so_beside_a_train_of_the_users() -> None:
    model = Frozen()
    model.head.eval()
    assert not into_training(model) and model.training
    assert [part.training for part in (model.body[0], model.body[1], model.head)] == [True, False, False]
