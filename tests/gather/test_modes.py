"""The mode in which a model is checked: training mode, as a loop puts it there."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpcheck.findings.report import Report
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


def partly_evaluating() -> nn.Module:
    model = Net()
    model.body.eval()
    return model


def frozen() -> nn.Module:
    return Frozen()


def frozen_evaluating() -> nn.Module:
    return Frozen().eval()


def told(report: Report) -> tuple[list[str], bool]:
    assert report.error is None, report.error
    assert {item.status for item in report.checks} <= {"passed", "warned"}
    return [finding.code for finding in report.findings], BUILT_IN_EVAL_MODE in report.world["notes"]


@pytest.mark.slow
def test_a_model_that_arrives_in_eval_mode_is_checked_in_training_mode_which_is_said() -> None:
    assert told(check(Recipe(model=lambda: Net().eval(), batch=batch, loss=loss))) == (["DDP304"], True)
    assert told(check(Recipe(model=Net, batch=batch, loss=loss))) == (["DDP304"], False)


@pytest.mark.slow
def test_what_train_keeps_in_eval_mode_is_checked_in_it() -> None:
    assert told(check(Recipe(model=frozen, batch=batch, loss=loss))) == ([], False)
    assert told(check(Recipe(model=frozen_evaluating, batch=batch, loss=loss))) == ([], True)


@pytest.mark.slow
def test_what_model_or_loss_puts_into_eval_mode_stays_in_it() -> None:
    assert told(check(Recipe(model=partly_evaluating, batch=batch, loss=loss))) == ([], False)
    assert told(check(Recipe(model=Net, batch=batch, loss=loss_in_eval_mode))) == ([], False)


def test_a_train_that_trains_is_not_called() -> None:
    model = Trained()
    assert not into_training(model) and model.body[1].training
    nn.Module.eval(nn.Sequential(model.body, model.head))
    model.training = False
    assert into_training(model) and model.training and model.body[1].training


def test_parts_in_eval_mode_stay_so_beside_a_train_of_the_users() -> None:
    model = Frozen()
    model.head.eval()
    assert not into_training(model)
    assert [model.training, model.body[0].training, model.body[1].training, model.head.training] == [
        True,
        True,
        False,
        False,
    ]
