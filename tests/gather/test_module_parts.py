"""The parts of a module, found in one walk: the same as torch's own methods find in one walk each."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ddpcheck.gather.autograd.autograd_graph import all_names
from ddpcheck.gather.state.module_description import KnownParts, parts_of, structure_of


def tied() -> nn.Module:
    """A parameter, a buffer and a layer under two names each, and names without a tensor."""
    shared, norm = nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2, affine=False)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared, norm), "c": nn.Linear(2, 2), "d": norm})
    model["c"].weight = shared.weight
    model["c"].register_buffer("mean", norm.running_mean, persistent=False)
    return model


class Renamed(nn.Module):
    """Names its parameters by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(2, 2)

    def named_parameters(self, *arguments: Any, **named: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name.removeprefix("inside."), p) for name, p in super().named_parameters(*arguments, **named))


@pytest.mark.parametrize("model", [tied(), Renamed(), nn.Linear(3, 3), torch.jit.script(nn.BatchNorm1d(2))])
def test_one_walk_finds_what_torch_finds(model: nn.Module) -> None:
    found = parts_of(model)
    for ours, theirs in (
        (found.modules, model.named_modules()),
        (found.parameters, model.named_parameters()),
        (found.buffers, model.named_buffers()),
    ):
        assert [(name, id(one)) for name, one in ours.items()] == [(name, id(one)) for name, one in theirs]
    assert [*map(tuple, found.names)] == [*all_names(model).values()]


def test_parameters_under_several_names_are_ties() -> None:
    assert structure_of(tied()).ties == (("a.weight", "b.0.weight", "c.weight"),)
    assert structure_of(nn.Linear(3, 3)).ties == ()


def _moved(model: nn.ModuleDict) -> None:
    weight = model["c"].weight
    del model["c"].weight
    model["d"].register_parameter("weight", weight)


CHANGES: dict[str, Callable[[Any], object]] = {
    "a parameter in the place of another": lambda model: setattr(model["c"], "bias", nn.Parameter(torch.zeros(2))),
    "a parameter that was there for a while": lambda model: setattr(model["c"], "bias", None),
    "a parameter under another module": _moved,
    "a parameter that is tied no more": lambda model: setattr(model["c"], "weight", nn.Parameter(torch.zeros(2, 2))),
    "a layer in the place of another": lambda model: model["b"].__setitem__(1, nn.ReLU()),
    "a layer more": lambda model: model["b"].append(nn.Linear(2, 2)),
    "a buffer in the place of another": lambda model: setattr(model["d"], "running_mean", torch.ones(2)),
}


SHOWN: dict[str, Callable[[nn.Module], object]] = {
    "evaluation": lambda model: model.eval(),
    "a frozen parameter": lambda model: model.get_submodule("c").requires_grad_(False),
    "another dtype in the same parameter": lambda model: model.get_submodule("c").double(),
    "a stride": lambda model: setattr(model.get_parameter("c.weight"), "data", torch.zeros(2, 2).t()),
    "an option": lambda model: setattr(model.get_submodule("d"), "eps", 0.5),
}


@pytest.mark.parametrize("name", [*CHANGES, *SHOWN])
def test_parts_and_structure_that_are_known_are_found_again_after_a_change(name: str) -> None:
    model = tied()
    known = KnownParts(model)
    before = known.now()
    structure = known.structure(before)
    assert known.now() is before and known.structure(before) is structure == structure_of(model)
    (CHANGES | SHOWN)[name](model)
    now, found = known.now(), parts_of(model)
    for ours, theirs in zip(now[:3], found[:3], strict=True):
        assert [(part_name, id(part)) for part_name, part in ours.items()] == [
            (part_name, id(part)) for part_name, part in theirs.items()
        ]
    assert now.names == found.names and known.structure(now) == structure_of(model)
    assert now is not before if name in CHANGES else known.structure(now) != structure
