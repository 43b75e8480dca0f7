"""Which parameters have gradients that no step has zeroed, also where those of others are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ddpcheck.findings.evidence.loop import StaleGradients
from ddpcheck.record.optimizers.gradient_recorders import ZeroingRecorder
from ddpcheck.rules.gradients.ddp520_leftover_gradients import MIN_STALE_STEPS


@pytest.mark.parametrize(
    ("zeroed", "left"),
    [
        ((), [()]),
        (("head",), [("body.weight", "body.bias")]),
        (("body",), [("head.weight", "head.bias")]),
        (("body", "head"), []),
    ],
)
@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_are_left_are_told_by_name(
    zeroed: tuple[str, ...], left: list[tuple[str, ...]], to_none: bool
) -> None:
    model = nn.ModuleDict({"body": nn.Linear(4, 4), "head": nn.Linear(4, 2)})
    names = {id(p): name for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found: list[Any] = []
    recorder = ZeroingRecorder(found.append, lambda held: tuple(names[id(p)] for p in held))
    for step in range(6):
        for name in zeroed:
            model[name].zero_grad(set_to_none=to_none)
        loss = model["head"](model["body"](torch.ones(3, 4) + step)).square().sum()
        if recorder.follows:
            recorder.backward_begins(loss)
        loss.backward()
        if recorder.follows:
            recorder.backward_ended()
        recorder.note_step_begin(optimizer, 0)
        optimizer.step()
        recorder.note_step_end(optimizer, step)
    stale = [one for one in found if isinstance(one, StaleGradients)]
    assert [one.in_a_row for one in stale] == [*range(1, 1 + len(stale))]
    assert [one.names for one in stale if one.in_a_row == MIN_STALE_STEPS] == left
