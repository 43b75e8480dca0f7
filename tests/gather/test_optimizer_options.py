"""The options of an optimizer in words: the same ones wherever they are the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ddpcheck.gather.ddp.ddp_wrapper import optimizer_options


@pytest.mark.parametrize(
    ("mine", "theirs", "alike"),
    [
        (lambda: [torch.empty(6), torch.empty(6)], lambda: [torch.ones(6), torch.zeros(6)], True),  # buffers to fill
        (lambda: {"of": lambda: 1}, lambda: {"of": lambda: 2}, True),  # functions, which are somewhere
        (lambda: torch.tensor(0.1), lambda: torch.tensor(0.2), False),
        (lambda: (0.9, 0.99), lambda: (0.9, 0.999), False),
        (lambda: {"momentum": 0.9}, lambda: {"momentum": 0.8}, False),
    ],
)
def test_what_a_group_holds(mine: Any, theirs: Any, alike: bool) -> None:
    def spelled(value: Any) -> dict[str, str]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
        optimizer.param_groups[0]["more"] = value
        return optimizer_options(optimizer, {})

    assert (spelled(mine()) == spelled(theirs())) == alike
