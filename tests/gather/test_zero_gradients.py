"""Where a gradient becomes zero: the operation and its line, on a graph and in a whole check."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddpcheck.gather.phases.repeated_step import operation_of, perturb, zero_ends
from ddpcheck.gather.state.module_state import move_to_file

WEIGHT = torch.ones(3, requires_grad=True)
X = torch.full((3,), 2.0)


def two_ways() -> Any:
    made = WEIGHT.tanh()
    return (0 * made + made.detach() * made.round()).sum()


@pytest.mark.parametrize(
    ("forward", "reasons"),
    [
        (lambda: (X + 0 * WEIGHT).sum(), {"mul()"}),
        (lambda: (X * (WEIGHT * 2 - 100).relu()).sum(), {"relu()"}),
        (lambda: (X * (WEIGHT / 3).round()).sum(), {"round()"}),
        (lambda: torch.where(X > 0, X, WEIGHT.exp()).sum(), {"where()"}),
        (two_ways, {"mul()", "round()"}),
    ],
)
def test_the_operation_that_passes_on_zeros_is_named_with_its_line(
    forward: Callable[[], Any], reasons: set[str]
) -> None:
    end = zero_ends(forward, {"weight": WEIGHT})["weight"]
    last = inspect.getsourcelines(forward)[1] + len(inspect.getsource(forward).splitlines()) - 1
    assert end.cause == "zero" and end.reason in reasons and end.location is not None
    assert end.location.path.endswith("test_zero_gradients.py") and end.location.line == last
    assert not torch.is_anomaly_enabled()


def test_a_gradient_that_is_not_zero_or_never_was_anything_else_has_no_such_place() -> None:
    assert zero_ends(lambda: (WEIGHT * X).sum(), {"weight": WEIGHT}) == {}
    assert zero_ends(lambda: 0 * WEIGHT.sum(), {"weight": WEIGHT})["weight"].reason == "mul()"
    other = torch.ones(3, requires_grad=True)
    assert zero_ends(lambda: (X + 0 * WEIGHT).sum(), {"other": other}) == {}


def test_parameters_in_a_file_are_moved_as_those_in_memory_and_stay_in_one(tmp_path: Path) -> None:
    def net() -> Any:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100))

    there, mapped = net(), net()
    names = move_to_file(mapped, tmp_path / "built") - {"0.weight"}
    written_to = mapped[1].weight.data_ptr()
    perturb(there, 1, (), tmp_path / "moved")
    perturb(mapped, 1, names, tmp_path / "moved")
    assert all(torch.equal(*both) for both in zip(there.parameters(), mapped.parameters(), strict=True))
    assert not torch.equal(net()[0].weight, there[0].weight) and not list(tmp_path.iterdir())
    assert mapped[1].weight.data_ptr() != written_to


def test_operations_are_named_as_people_write_them() -> None:
    assert operation_of("MulBackward0") == "mul()"
    assert operation_of("NativeLayerNormBackward0") == "native_layer_norm()"
    assert operation_of("MyFunctionBackward") == "my_function()"
