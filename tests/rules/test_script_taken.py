"""DDP501 of gradients that `torch.autograd.grad` gives: what is known to have averaged them, and what is not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ddpcheck.findings.evidence.loop import AutogradGradCalled
from ddpcheck.findings.report import Location
from ddpcheck.findings.wording import make_finding
from ddpcheck.record.loss.loss_recorder import LossRecorder
from ddpcheck.record.optimizers.gradient_recorders import AutogradGradRecorder
from ddpcheck.record.recording import Recording
from ddpcheck.rules.causes import find_causes
from ddpcheck.rules.gradients.ddp501_forward_bypassed import judge_autograd_calls

LINE = Location("train.py", 8)


def _taken(values: list[int], *, gradient: float = 0.0, **named: Any) -> list[AutogradGradCalled]:
    """Of one rank: the fingerprints of a parameter at each look."""
    return [
        AutogradGradCalled(
            0, count, LINE, gradients={"weight": [1.0 + gradient]}, parameters={"weight": value}, **named
        )
        for count, value in enumerate(values)
    ]


def test_each_rank_moves_the_parameters_by_its_own() -> None:
    (finding,) = judge_autograd_calls([_taken([1, 2, 3]), _taken([1, 12, 13], gradient=1.0)])
    assert (finding.code, finding.location, finding.subjects) == ("DDP501", LINE, ("torch.autograd.grad",))


def test_what_is_averaged_in_one_way_or_another() -> None:
    mine, theirs = [1, 2, 3], [1, 12, 13]
    assert not judge_autograd_calls([_taken(mine), _taken(mine, gradient=1.0)])  # by hand
    assert not judge_autograd_calls([_taken([1, 2, 3, 4, 5]), _taken([1, 12, 13, 4, 15], gradient=1.0)])  # now and then
    assert not judge_autograd_calls(
        [_taken(mine, reductions=1), _taken(theirs, gradient=1.0, reductions=1)]
    )  # a penalty
    assert not judge_autograd_calls([_taken(mine, is_unreduced=True), _taken(theirs, gradient=1.0, is_unreduced=True)])
    assert not judge_autograd_calls([_taken([1, 2, 3]), _taken([11, 12, 13], gradient=1.0)])  # they began apart
    assert not judge_autograd_calls([_taken(mine), _taken(theirs)])  # of the same gradients: another cause
    assert not judge_autograd_calls([_taken([1, 2]), _taken([1, 12], gradient=1.0)])  # too few
    assert not judge_autograd_calls([_taken(mine), []])


def test_marks_between_the_looks_tell_that_parameters_are_averaged() -> None:
    mine, theirs = [_taken([1, 2, 3], marks=(4, 5)), _taken([1, 12, 13], gradient=1.0, marks=(14, 5))]
    assert not judge_autograd_calls([mine, theirs])


@pytest.mark.parametrize("imported_by_name", [False, True])
def test_what_is_taken_for_the_parameters_of_a_wrapper(monkeypatch: pytest.MonkeyPatch, imported_by_name: bool) -> None:
    from torch.autograd import grad

    module: Any = torch.autograd
    monkeypatch.setattr(module, "_engine_run_backward", module._engine_run_backward)
    layer, other = nn.Linear(3, 1), nn.Linear(3, 1)

    class Watch(SimpleNamespace):
        __hash__ = object.__hash__

    watch: Any = Watch(
        number=0, parameters=dict(layer.named_parameters()), step=0, has_unreduced=False, called_in=(None, None)
    )
    found: list[AutogradGradCalled] = []
    run: Any = Recording(found.append)
    run.watches.add(watch)
    recorder = AutogradGradRecorder(run)
    optimizers: Any = SimpleNamespace(**dict.fromkeys(("before_backward", "after_backward"), lambda *_: None))
    optimizers.have_hooks, optimizers.reductions, optimizers.unaveraged_wrappers = bool, dict, set
    LossRecorder(run, optimizers, (), recorder)
    take = grad if imported_by_name else torch.autograd.grad
    x = torch.ones(2, 3, requires_grad=True)
    take(layer(x).sum(), x)  # a penalty on inputs
    take(other(x).sum(), list(other.parameters()))
    layer(x).sum().backward()
    assert not any(isinstance(one, AutogradGradCalled) for one in found)
    found.clear()
    for _ in range(4):
        take(layer(x).sum(), [layer.weight, layer.bias])
    recorder.close()
    assert [one.count for one in found] == [0, 1, 2, 4]
    assert set(found[0].gradients) == {"weight", "bias"} and not found[-1].gradients
    assert found[0].location is not None and len(found[-1].marks) == 1


def test_a_rank_under_no_sync_skips_no_step() -> None:
    found = [make_finding(code, (subject,), "") for code, subject in (("DDP502", "no_sync"), ("DDP508", "step"))]
    assert [one.code for one in find_causes(found).findings] == ["DDP502"]
    skipped = make_finding("DDP508", ("backward",), "")
    assert len(find_causes([found[0], skipped]).findings) == 2
