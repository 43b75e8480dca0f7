"""The mode in which a model is checked: training mode, as a loop puts it there."""

from torch import Tensor, nn

from ddpcheck.gather.state.training_mode import into_training


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
