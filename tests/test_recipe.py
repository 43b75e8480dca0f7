"""A recipe says at once what is wrong with it, and every call of the user's code becomes one sentence."""

from typing import Any

import pytest

import ddpcheck
from ddpcheck.errors import TargetError, UsageError
from ddpcheck.recipe import Recipe

torch = pytest.importorskip("torch")
nn = torch.nn


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
    assert ddpcheck.Recipe is Recipe


def test_a_recipe_cannot_be_changed_and_takes_keywords_only() -> None:
    with pytest.raises(AttributeError):
        recipe().model = None  # type: ignore[misc]
    with pytest.raises(TypeError):
        Recipe(nn.Linear)  # type: ignore[call-arg,misc]


@pytest.mark.parametrize("name", ["model", "batch", "loss", "shard", "optimizer", "wrap"])
def test_what_must_be_a_function_is_told_when_it_is_none(name: str) -> None:
    with pytest.raises(UsageError, match=f"recipe: {name} must be a function, not a value of type int"):
        recipe(**{name: 3})


def test_ddp_kwargs_must_be_a_dict() -> None:
    with pytest.raises(UsageError, match="ddp_kwargs must be a dict, not a value of type list"):
        recipe(ddp_kwargs=["static_graph"])


def test_a_shard_function_is_asked_for_every_rank() -> None:
    own = recipe(shard=lambda batch, rank, world_size: batch[rank::world_size])
    assert own.local_batch(torch.arange(5), 1, 2).tolist() == [1, 3]


def test_an_own_wrapper_is_given_the_module_and_the_device() -> None:
    seen: list[Any] = []

    def wrap(module: nn.Module, device: torch.device) -> nn.Module:
        seen.extend([module, device])
        return nn.Sequential(module)

    module = nn.Linear(1, 1)
    assert type(recipe(wrap=wrap).wrap_module(module, torch.device("cpu"))) is nn.Sequential
    assert seen == [module, torch.device("cpu")]


def fail(*_: Any) -> Any:
    raise LookupError("first line\nsecond line")


CALLS = {
    "model()": lambda: recipe(model=fail).build_model(),
    "batch(2)": lambda: recipe(batch=fail).global_batch(2),
    "shard(batch, rank=1, world_size=2)": lambda: recipe(shard=fail).local_batch(torch.ones(2), 1, 2),
    "optimizer(parameters)": lambda: recipe(optimizer=fail).build_optimizer([]),
    "wrap(module, device)": lambda: recipe(wrap=fail).wrap_module(nn.Linear(1, 1), torch.device("cpu")),
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


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda: recipe(model=lambda: None).build_model(), "model() returned None"),
        (lambda: recipe(batch=lambda step: {"a": [1]}).global_batch(0), "batch(0) returned a value of type dict"),
        (lambda: recipe(optimizer=lambda p: "adam").build_optimizer([]), "returned a value of type str"),
        (lambda: recipe(wrap=lambda m, d: m.forward).wrap_module(nn.Linear(1, 1), torch.device("cpu")), "type method"),
    ],
    ids=["model", "batch", "optimizer", "wrap"],
)
def test_what_the_user_returns_is_looked_at(ask: Any, words: str) -> None:
    with pytest.raises(TargetError) as caught:
        ask()
    assert words in str(caught.value)
