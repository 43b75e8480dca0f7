"""A recipe says at once what is wrong with it, and every call of the user's code becomes one sentence."""

import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ddpcheck
from ddpcheck.findings.errors import TargetError, UsageError
from ddpcheck.recipe.recipe import Recipe
from ddpcheck.report.checking.check_run import CheckRun

CPU = torch.device("cpu")


def recipe(**more: Any) -> Recipe:
    parts: dict[str, Any] = {
        "model": lambda: nn.Linear(2, 1),
        "batch": lambda step: torch.full((5, 2), float(step)),
        "loss": lambda model, batch: model(batch).mean(),
    }
    return Recipe(**{**parts, **more})


def test_a_whole_recipe_builds_what_it_says() -> None:
    whole = recipe(optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.5))
    module = whole.build_model()
    assert isinstance(module, nn.Linear)
    assert whole.global_batch(3)[0, 0] == 3.0
    assert [len(whole.local_batch(whole.global_batch(0), rank, 2)) for rank in (0, 1)] == [3, 2]
    assert type(whole.build_optimizer(module.parameters())) is torch.optim.Adam
    assert type(recipe().build_optimizer(module.parameters())) is torch.optim.SGD
    assert whole.loss(module, whole.global_batch(0)).requires_grad
    own = recipe(
        shard=lambda batch, rank, world_size: batch[rank::world_size],
        wrap=lambda wrapped, device: nn.Sequential(wrapped.to(device)),
    )
    assert own.local_batch(torch.arange(5), 1, 2).tolist() == [1, 3]
    assert own.wrap_module(module, CPU)[0] is module


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"wrap": 3}, "wrap must be a function, not a value of type int"),
        ({"model": nn.Linear(2, 1)}, "model must be a function that builds the module, not a value of type Linear"),
        ({"ddp_kwargs": ["static_graph"]}, "ddp_kwargs must be a dict, not a value of type list"),
    ],
    ids=str,
)
def test_a_part_of_a_wrong_type_is_a_type_error_and_a_usage_error(part: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=f"recipe: {words}") as caught:
        recipe(**part)
    assert isinstance(caught.value, UsageError) and caught.value.exit_code == 2


WRONG_TARGETS = {
    "class": (nn.Linear, ["not the class Linear", "ddpcheck.Recipe(model=Linear, batch=..., loss=...)"]),
    "module": (nn.Linear(1, 1), ["not a value of type Linear", "ddpcheck.Recipe(model=Linear,"]),
    "function": (recipe, ["not the function recipe", "call it"]),
    "path": (Path("a.py"), ["name it in a string"]),
    "python module": (sys, ["not the module sys", "name it in a string: 'sys'"]),
    "nothing": (None, ["not None"]),
}


@pytest.mark.parametrize("checking", [ddpcheck.check, ddpcheck.check_matrix, ddpcheck.assert_parity])
@pytest.mark.parametrize("name", WRONG_TARGETS)
def test_what_is_no_recipe_is_a_type_error_at_once(name: str, checking: Any, monkeypatch) -> None:
    monkeypatch.setattr(CheckRun, "run", lambda self: pytest.fail("work has begun"))
    target, words = WRONG_TARGETS[name]
    with pytest.raises(TypeError, match=r"target must be a ddpcheck\.Recipe or a string that names one") as caught:
        checking(target)
    assert not [word for word in words if word not in str(caught.value)], caught.value


@pytest.mark.parametrize(
    ("option", "error", "words"),
    [
        ({"world_size": "2"}, TypeError, "world_size must be a whole number from 1 to 1024, got '2'"),
        ({"steps": 10**9}, UsageError, "steps must be a whole number from 1 to 10000"),
        ({"seed": None}, TypeError, "seed must be a whole number"),
        ({"timeout": "30"}, TypeError, "timeout must be a number of seconds above 0, got '30'"),
        ({"backend": "mpi"}, ValueError, "backend must be 'gloo' or 'nccl'"),
        ({"preload": "numpy"}, TypeError, "preload must be a list of names of modules"),
        ({"select": 3}, TypeError, "select: expected codes, prefixes or names of rules, got 3"),
        ({"ignore": ["batch-copled"]}, UsageError, "ignore: no rule matches 'batch-copled'; did you mean DDP304"),
    ],
    ids=str,
)
def test_a_wrong_argument_of_check_is_told_at_once(option: dict[str, Any], error: type, words: str) -> None:
    with pytest.raises(error, match=re.escape(words)) as caught:
        ddpcheck.check(recipe(), **option)
    assert isinstance(caught.value, UsageError)


def test_a_part_of_a_recipe_that_cannot_travel_is_named() -> None:
    lock = threading.Lock()
    with pytest.raises(UsageError, match=r"loss of the Recipe cannot be sent to the ranks .*lock"):
        ddpcheck.check(recipe(loss=lambda model, batch: lock))


def fail(*_: Any) -> Any:
    raise LookupError("first line\nsecond line")


CALLS = {
    "model()": lambda: recipe(model=fail).build_model(),
    "shard(batch, rank=1, world_size=2)": lambda: recipe(shard=fail).local_batch(torch.ones(2), 1, 2),
    "wrap(module, device)": lambda: recipe(wrap=fail).wrap_module(nn.Linear(1, 1), CPU),
}


@pytest.mark.parametrize("what", CALLS)
def test_what_the_user_raises_is_one_sentence_with_the_line(what: str) -> None:
    with pytest.raises(TargetError) as caught:
        CALLS[what]()
    assert str(caught.value).startswith(f"{what} raised LookupError: first line (at ")
    assert "second line" in caught.value.detail and caught.value.exit_code == 3


def test_exit_is_an_error_of_the_target_and_an_interrupt_is_not() -> None:
    def leave() -> Any:
        raise SystemExit(0)

    def interrupt() -> Any:
        raise KeyboardInterrupt

    with pytest.raises(TargetError, match=r"model\(\) called exit\(0\)"):
        recipe(model=leave).build_model()
    with pytest.raises(KeyboardInterrupt):
        recipe(model=interrupt).build_model()


RETURNED = {
    "model": (lambda: recipe(model=lambda: None).build_model(), "model() returned None"),
    "batch": (lambda: recipe(batch=lambda step: {"a": [1]}).global_batch(0), "batch(0) returned a value of type dict"),
    "shard": (
        lambda: recipe(shard=lambda *_: None).local_batch(torch.ones(4), 1, 2),
        "shard(batch, rank=1, world_size=2) returned None",
    ),
    "optimizer": (lambda: recipe(optimizer=lambda p: "adam").build_optimizer([]), "returned a value of type str"),
    "closure": (
        lambda: recipe(optimizer=torch.optim.LBFGS).build_optimizer([torch.ones(1)]),
        "of type LBFGS, whose step() needs a closure",
    ),
    "wrap": (lambda: recipe(wrap=lambda m, d: m.forward).wrap_module(nn.Linear(1, 1), CPU), "type method"),
}


@pytest.mark.parametrize("name", RETURNED)
def test_what_the_user_returns_is_looked_at(name: str) -> None:
    ask, words = RETURNED[name]
    with pytest.raises(TargetError) as caught:
        ask()
    assert words in str(caught.value)
