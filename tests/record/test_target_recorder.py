"""Which cross entropies over gathered rows are written down."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch.nn.functional import cosine_similarity, cross_entropy, linear

from ddpcheck.findings.evidence.steps import Call
from ddpcheck.record.loss.gather_recorder import TargetRecorder
from ddpcheck.record.recording import Recording


@pytest.mark.parametrize(("spans_world", "written"), [(False, [(8, (0, 1, 2, 3))]), (True, [])])
def test_targets_of_a_ranks_own_rows_alone_are_written(spans_world: bool, written: list[tuple[int, Any]]) -> None:
    sink: list[Any] = []
    recorder = TargetRecorder(Recording(sink.append, 1))
    rows = torch.randn(12, 6, generator=torch.Generator().manual_seed(0), requires_grad=True)
    own = rows[8:]  # of the third of three ranks
    recorder.note_collective(Call("all_gather", "0", (0, 1, 2)), {"tensor": own})
    logits = (rows if spans_world else own) @ rows.T
    recorder.note_backward(cross_entropy(logits, torch.arange(len(logits))))
    assert [(one.own, one.targets) for one in sink] == written


@pytest.mark.parametrize(
    ("logits", "written"),
    [
        (lambda own, rows: (rows @ own.T).T / 0.1, [8]),
        (lambda own, rows: cosine_similarity(own[:, None], rows[None], dim=-1).exp(), [8]),
        (lambda own, rows: -(torch.cdist(own, rows) ** 2), [8]),
        (lambda own, rows: linear(own, rows), [8]),
        (lambda own, rows: torch.cat([(own * own).sum(1, keepdim=True), own @ rows.T], 1), []),  # other columns
    ],
    ids=["turned", "cosine similarity", "distance", "linear", "the positive first"],
)
def test_rows_are_found_among_the_classes_however_these_are_computed(logits: Any, written: list[int]) -> None:
    sink: list[Any] = []
    recorder = TargetRecorder(Recording(sink.append, 1))
    rows = torch.randn(12, 6, generator=torch.Generator().manual_seed(0), requires_grad=True)
    criterion = torch.nn.CrossEntropyLoss()
    recorder.note_collective(Call("all_gather", "0", (0, 1, 2)), {"tensor": rows[8:]})
    loss, line = criterion(logits(rows[8:] + 0.01, rows), torch.arange(4)), sys._getframe().f_lineno
    recorder.note_backward(loss)
    assert [one.own for one in sink] == written
    assert [one.loss and one.loss.line for one in sink] == [line] * len(written)
