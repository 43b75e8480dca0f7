"""Backward passes inside of the wrapper's forward, as frameworks call them that let the script optimize by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpcheck.findings.evidence.modules import WrapperFacts
from ddpcheck.findings.evidence.steps import LoopEvent, StepEvidence
from ddpcheck.findings.wording import Names
from ddpcheck.rules.parameters.step_reports import judge_reports
from ddpcheck.stream.rank_report import RankReport, WatchContext
from tests.run.scripts import run_script

MANUAL = """
class Manual(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        for size in (1.0, 2.0):
            loss = self.head(self.body(size * x)).square().mean()
            optimizer.zero_grad()
            if HOW == "prepares":
                net.reducer._rebuild_buckets()
                net.reducer.prepare_for_backward([])
            loss.backward()  # here
            optimizer.step()
        net.require_backward_grad_sync = False  # after this pass there is no other backward


net = DistributedDataParallel(Manual())
optimizer = torch.optim.SGD(net.parameters(), 0.1)
torch.manual_seed(RANK)
for _ in range(8):
    net.require_backward_grad_sync = True
    net(torch.randn(8, 4))
"""


@pytest.mark.slow
def test_backward_passes_that_a_forward_makes_are_steps_if_it_prepares_them(tmp_path: Path) -> None:
    run = run_script(tmp_path, MANUAL, "prepares")
    assert (run.findings, run.report["status"], run.report["world"]["steps"]) == ([], "clean", 16)
    assert {status for status, _ in run.checks.values()} == {"passed"}
    run = run_script(tmp_path, MANUAL)  # nothing is averaged
    assert run.codes == ["DDP501"] and run.places[0].endswith("# here")
    assert "inside of the wrapper's forward" in run.findings[0]["message"]


@pytest.mark.parametrize(
    ("kind", "words"), [("backward inside", "Backward runs inside"), ("forward inside", "calls the wrapped module")]
)
def test_how_a_wrapper_is_bypassed_is_said(kind: str, words: str) -> None:
    events = LoopEvent(kind, location="train.py:4"), LoopEvent("step", location="train.py:9")
    report = RankReport(StepEvidence(0, 3, {}), events=events)
    (finding,) = judge_reports([report], WatchContext(Names({}), WrapperFacts(), 2), settled=False)
    assert (finding.code, str(finding.location)) == ("DDP501", "train.py:4")
    assert words in finding.message
    assert [*map(str, finding.related)] == ["optimizer steps at train.py:9"]
