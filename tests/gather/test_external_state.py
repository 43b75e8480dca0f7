"""State outside of modules comes back, whatever holds it; what belongs to the step stays."""

import functools
import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ddpcheck.gather.state.module_state import ExternalState

COUNT = 0
SEEN: list[int] = []


def count() -> int:
    global COUNT
    COUNT += 1
    SEEN.append(COUNT)
    return COUNT + len(SEEN)


def closure() -> Any:
    held = {"n": 0, "deque": deque([1], maxlen=3), "average": torch.zeros(2)}
    total = 0

    def step() -> tuple[Any, ...]:
        nonlocal total
        total += 1
        held["n"] += 1
        held["deque"].append(total)
        held["average"] += 1
        return total, held["n"], list(held["deque"]), held["average"].tolist()

    return step


ARRAY = np.zeros(2)


def array() -> list[float]:
    global ARRAY
    ARRAY += 1
    first = ARRAY.tolist()
    ARRAY = ARRAY * 2
    return first + ARRAY.tolist()


class Criterion:
    calls = 0

    def __init__(self) -> None:
        self.best: float | None = None
        self.buffer = nn.BatchNorm1d(2, affine=False)

    def __call__(self) -> tuple[Any, ...]:
        Criterion.calls += 1
        self.best = (self.best or 0.0) + 1.0
        self.buffer(torch.randn(4, 2))
        return Criterion.calls, self.best, int(self.buffer.num_batches_tracked)


def generators() -> Any:
    torch_one, python_one, numpy_one = torch.Generator(), random.Random(1), np.random.default_rng(1)
    return lambda: (torch.rand(2, generator=torch_one).tolist(), python_one.random(), numpy_one.random())


def default_argument(seen: list[int] = []) -> int:  # noqa: B006 (as a cache that lasts from call to call)
    seen.append(1)
    return len(seen)


def attribute() -> int:
    attribute.calls = getattr(attribute, "calls", 0) + 1  # type: ignore[attr-defined]
    return attribute.calls  # type: ignore[attr-defined,no-any-return]


class Lazy:
    def __call__(self) -> int:
        self.calls = getattr(self, "calls", 0) + 1
        return self.calls


def new_global() -> int:
    globals()["LATER"] = globals().get("LATER", 0) + 1
    later: int = globals()["LATER"]
    return later


FUNCTIONS = {
    "globals": count,
    "an array": array,
    "a closure": closure(),
    "an object": Criterion(),
    "a partial": functools.partial(lambda step: step(), closure()),
    "generators": generators(),
    "a default argument": default_argument,
    "a new attribute of a function": attribute,
    "a new attribute of an object": Lazy(),
    "a new global": new_global,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_gives_the_same_again_and_again(name: str) -> None:
    function = FUNCTIONS[name]
    restore = ExternalState([function], nn.Module(), ()).capture()
    first = function()
    second = function()
    assert first != second
    for _ in range(2):
        restore()
        assert (function(), function()) == (first, second)


def test_parameters_and_what_is_ignored_stay() -> None:
    weight, kept = nn.Parameter(torch.zeros(2)), torch.zeros(2)

    def step() -> None:
        weight.data += 1
        kept.add_(1)

    restore = ExternalState([step], nn.Module(), [id(kept)]).capture()
    step()
    restore()
    assert weight.tolist() == kept.tolist() == [1.0, 1.0]


def test_the_methods_of_a_module_count_too() -> None:
    class Net(nn.Module):
        steps = 0

        def forward(self) -> int:
            Net.steps += 1
            return count() + Net.steps

    net = Net()
    restore = ExternalState([None], net, ()).capture()
    first = net()
    restore()
    assert net() == first


def test_a_mapping_that_gives_something_else_than_it_holds_stays_as_it_is() -> None:
    class Making(dict[str, type]):
        def __getitem__(self, key: str) -> Any:
            return super().__getitem__(key)()

    table = Making(gelu=nn.GELU)

    def function() -> Any:
        return table["gelu"]

    ExternalState([function], nn.Module(), ()).capture()()
    assert isinstance(function(), nn.GELU)
