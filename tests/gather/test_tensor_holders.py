"""A tensor is named by the variable that holds it, wherever the loss or a module can reach it."""

import functools

import torch
from torch import nn

from ddpcheck.gather.autograd.unregistered_leaves import function_tensors

SCALE = torch.ones(1, requires_grad=True)
TABLE = {"a": torch.ones(1), "b": [torch.ones(2)]}


class Net(nn.Linear):
    TEMPERATURE = torch.ones(3)

    def forward(self, x):
        return super().forward(x) * SCALE


class Criterion:
    def __init__(self):
        self.inner = nn.Linear(1, 1)

    def __call__(self, model, batch):
        return self.inner(model(batch)).sum()


def helper(x):
    return x * TABLE["b"][0]


def names(loss, module=None) -> dict[str, str]:
    return {name: kind for name, kind, _ in function_tensors(loss, module or nn.Linear(1, 1))}


def test_globals_are_found_through_the_functions_that_the_loss_calls_and_in_containers() -> None:
    found = names(lambda m, b: helper(m(b)))
    assert found == {"TABLE['a']": "global variable", "TABLE['b'][0]": "global variable"}


def test_what_the_methods_of_a_module_reach_and_its_class_holds() -> None:
    found = names(lambda m, b: m(b), Net(1, 1))
    assert found == {"SCALE": "global variable", "Net.TEMPERATURE": "class attribute"}


def test_closures_defaults_bound_arguments_and_objects_that_are_called() -> None:
    margin = torch.ones(1)

    def loss(m, b, weight=TABLE["a"]):
        return m(b) * margin * weight

    assert names(loss) == {"margin": "closure variable", "weight": "default argument"}
    assert names(functools.partial(lambda m, b, t: m(b) * t, t=margin)) == {"t": "bound argument"}
    assert set(names(Criterion())) == {"loss.inner.weight", "loss.inner.bias"}


def test_the_module_itself_and_endless_nests_are_left_out() -> None:
    endless: list = []
    endless.append(endless)
    module = nn.Linear(1, 1)
    assert names(lambda m, b: (module, endless), module) == {}
