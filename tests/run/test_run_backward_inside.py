"""Backward passes inside of the wrapper's forward, as frameworks call them that let the script optimize by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddpcheck.findings.evidence.modules import WrapperFacts
from ddpcheck.findings.evidence.steps import LoopEvent, StepEvidence
from ddpcheck.findings.wording import Names
from ddpcheck.rules.parameters.step_reports import judge_reports
from ddpcheck.stream.rank_report import RankReport, WatchContext
from tests.forked_run import run_forked

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)


class Manual(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        for size in (1.0, 2.0):
            loss = self.head(self.body(size * x)).square().mean()
            optimizer.zero_grad()
            if "prepares" in sys.argv:
                net.reducer._rebuild_buckets()
                net.reducer.prepare_for_backward([])
            loss.backward()
            optimizer.step()
        net.require_backward_grad_sync = False  # after this pass there is no other backward


net = nn.parallel.DistributedDataParallel(Manual())
optimizer = torch.optim.SGD(net.parameters(), 0.1)
torch.manual_seed(dist.get_rank())
for _ in range(8):
    net.require_backward_grad_sync = True
    net(torch.randn(8, 4))
dist.destroy_process_group()
"""
BACKWARD = 1 + SCRIPT.splitlines().index("            loss.backward()")


BY_FLAG = """
import sys
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
torch.manual_seed(dist.get_rank())
for micro in range(12):
    net.require_backward_grad_sync = micro % 3 == (0 if "first" in sys.argv else 2)
    net(torch.randn(8, 4)).square().mean().div(3).backward()
    if micro % 3 == 2:
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
"""
FLAG = 1 + next(n for n, line in enumerate(BY_FLAG.splitlines()) if "grad_sync =" in line)


AROUND = """
import sys
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
torch.manual_seed(dist.get_rank())
for _ in range(8):
    optimizer.zero_grad()
    for module in (net, net.module) if "late" in sys.argv else (net.module, net):
        module(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def reported(folder: Path, *arguments: str, source: str = SCRIPT) -> dict[str, Any]:
    """The report on the script."""
    script, output = folder / "manual.py", folder / "report.json"
    script.write_text(source)
    ended = run_forked("--check-format", "json", "--check-output", str(output), str(script), *arguments)
    assert output.exists(), ended.stderr
    return dict(json.loads(output.read_text()))


@pytest.mark.slow
def test_each_one_that_is_prepared_is_a_step(tmp_path: Path) -> None:
    report = reported(tmp_path, "prepares")
    assert (report["status"], report["world"]["steps"]) == ("clean", 16)
    assert all(check["status"] == "passed" for check in report["checks"])


@pytest.mark.slow
def test_of_one_that_is_not_nothing_is_averaged(tmp_path: Path) -> None:
    report = reported(tmp_path)
    (finding,) = report["findings"]
    assert (finding["code"], finding["location"]["line"]) == ("DDP501", BACKWARD)
    assert "inside of the wrapper's forward" in finding["message"]


@pytest.mark.slow
@pytest.mark.parametrize(("when", "codes"), [("early", []), ("late", ["DDP301", "DDP501"])])
def test_a_pass_around_the_wrapper_counts_where_no_later_one_averages_it(
    when: str, codes: list[str], tmp_path: Path
) -> None:
    report = reported(tmp_path, when, source=AROUND)
    assert sorted(finding["code"] for finding in report["findings"]) == codes


@pytest.mark.slow
@pytest.mark.parametrize("when", ["first", "last"])
def test_the_flag_that_averages_another_micro_batch_is_told_at_its_line(when: str, tmp_path: Path) -> None:
    report = reported(tmp_path, when, source=BY_FLAG)
    found = [(finding["code"], finding["location"]["line"]) for finding in report["findings"]]
    assert found == ([("DDP502", FLAG)] if when == "first" else [])


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
