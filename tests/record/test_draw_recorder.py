"""Which draws of an interval between optimizer steps are written down."""

from __future__ import annotations

import pytest
import torch

from ddpcheck.findings.evidence.loop import StepDraw
from ddpcheck.record.data import draw_recorder
from ddpcheck.record.data.draw_recorder import DrawRecorder
from ddpcheck.record.recording import Recording


@pytest.mark.parametrize("most", [1 << 18, 200])
@pytest.mark.parametrize("after_backward", [False, True])
def test_draws_before_the_backward_pass_are_written_down_however_long_the_interval_is(
    most: int, after_backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draw_recorder, "follow_steps", lambda follower: None)
    monkeypatch.setattr(draw_recorder, "_MOST_CALLS", most)
    written: list[StepDraw] = []
    recorder = DrawRecorder(Recording(written.append))
    weight = torch.zeros(3, requires_grad=True)
    recorder.begin()
    torch.randint(9, (4,))
    if after_backward:
        weight.sum().backward()
        torch.randint(9, (5,))
    for _ in range(300):
        len("")
    if not after_backward:
        weight.sum().backward()
    recorder.before_step()
    assert [one.count for one in written if one.kind == "choice"] == [4]
