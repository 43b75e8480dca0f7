"""Which cross entropies over gathered rows are written down."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from ddpcheck.findings.evidence.steps import Call
from ddpcheck.record.loss.target_recorder import TargetRecorder
from ddpcheck.record.recording import Recording


@pytest.mark.parametrize(("of_all", "written"), [(False, [(8, (0, 1, 2, 3))]), (True, [])])
def test_targets_of_a_ranks_own_rows_alone_are_written(of_all: bool, written: list[tuple[int, Any]]) -> None:
    sink: list[Any] = []
    recorder = TargetRecorder(Recording(sink.append, 1))
    rows = torch.randn(12, 6, generator=torch.Generator().manual_seed(0), requires_grad=True)
    own = rows[8:]  # of the third of three ranks
    recorder.note_collective(Call("all_gather", "0", (0, 1, 2)), {"tensor": own})
    logits = (rows if of_all else own) @ rows.T
    recorder.note_backward(cross_entropy(logits, torch.arange(len(logits))))
    assert [(one.own, one.targets) for one in sink] == written
