"""What is never used, by all steps, and not only by those with a probe."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import nn

from ddpcheck.findings.evidence.modules import WrapperFacts
from ddpcheck.record.parameters.parameter_history import ParameterHistory

NONE: frozenset[str] = frozenset()
BOTH = frozenset({"weight", "bias"})


def never_used(engine: list[frozenset[str]], probed: dict[int, frozenset[str]]) -> tuple[str, ...]:
    layer = nn.Linear(2, 2)
    history = ParameterHistory(0, layer, dict(layer.named_parameters()), WrapperFacts(find_unused_parameters=True))
    for step, unused in enumerate(engine):
        probe: Any = SimpleNamespace(unused=probed[step]) if step in probed else None
        history.step_ended(step, probe, unused, NONE, NONE)
    return history.report(len(engine), settled=False).never_used


def test_a_layer_that_runs_between_the_probes() -> None:
    probed = {0: BOTH, 1: BOTH, 2: BOTH, 4: BOTH}
    assert never_used([BOTH] * 6, probed) == ("weight", "bias")
    assert never_used([BOTH, BOTH, BOTH, NONE, BOTH, BOTH], probed) == ()
    # the engine reaches what hangs on an output that is not in the loss, in each step
    assert never_used([NONE] * 6, probed) == ("weight", "bias")
