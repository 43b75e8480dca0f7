"""The parts of a module, found in one walk: the same as torch's own methods find in one walk each."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ddpcheck.gather.autograd.autograd_graph import all_names
from ddpcheck.gather.state.module_description import parts_of, structure_of


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
