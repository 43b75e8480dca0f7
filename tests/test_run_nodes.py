"""Two agents of one job, each with a report of its own: what needs all ranks is not judged, and the reason is said."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ddpcheck.findings.evidence.modules import WrapperFacts
from ddpcheck.findings.evidence.parameters import StepEvidence
from ddpcheck.findings.evidence.steps import Call, LoopEvent
from ddpcheck.findings.wording import Names, make_finding
from ddpcheck.judge.loop import script_wrappers
from ddpcheck.run.ending import Ending
from ddpcheck.run.script_report import report_on_script
from ddpcheck.stream.entries import RankStarted, ReplicaCaptured, StepsReported, WrapperMade
from ddpcheck.stream.rank_report import RankReport, WatchContext
from ddpcheck.stream.watched_rank import WatchedRank

ROOT = Path(__file__).parents[1]
CONTEXT = WatchContext(Names({}), WrapperFacts(), world_size=4)


def rank_log(number: int, group: tuple[int, ...], *entries: Any) -> WatchedRank:
    made = WrapperMade("Net", group, CONTEXT, None, by_library=False, classes={})
    state: Any = type("State", (), {"values": type("Values", (), {"gradients": {}})})
    captured = ReplicaCaptured(0, 0, state)
    calls = [Call("barrier", "default", group)]
    return WatchedRank(RankStarted(number, 4, "gloo"), [made, captured, *entries], [(3, 3)], calls=calls)


@pytest.mark.parametrize(
    ("group", "here", "found"),
    [
        ((0, 1, 2, 3), (0, 1), []),
        ((0, 1, 2, 3), (2, 3), []),
        ((0, 1, 2, 3), (2,), []),
        ((0, 1, 2, 3), (0, 1, 2, 3), ["DDP302"]),
        ((2, 3), (2, 3), ["DDP302"]),  # a group of this node alone
    ],
)
def test_what_needs_all_ranks_is_judged_where_all_are_here(
    group: tuple[int, ...], here: tuple[int, ...], found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = make_finding("DDP302", ["weight"], "it is not the average")
    monkeypatch.setattr(script_wrappers, "_judge_replicas", lambda *_, **__: [finding])
    ranks = [rank_log(number, group) for number in here]
    report = report_on_script("train.py", Ending(), ranks, select=[], ignore=[])
    assert [one.code for one in report.findings] == found
    missing = sorted({0, 1, 2, 3} - {*here})
    details = {check.name: check.detail for check in report.checks}
    assert ("left no log here" in details["ranks"]) == bool(missing)
    assert ("not compared with rank" in details["parameters"]) == (not found)
    assert found or all(check.status == "skipped" for check in report.checks)


def test_what_a_rank_has_found_by_itself_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = (LoopEvent("forward", synchronises=True), LoopEvent("backward"), LoopEvent("backward"))
    own = StepsReported(0, RankReport(StepEvidence(3, 0, {}), events=passes), alone=True)
    report = report_on_script("train.py", Ending(), [rank_log(3, (0, 1, 2, 3), own)], select=[], ignore=[])
    assert [one.code for one in report.findings] == ["DDP509"]


HEALTHY = """
import os, torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
net = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(12):
    optimizer.zero_grad()
    net(torch.randn(3, 4)).square().mean().backward()
    optimizer.step()
    if rank == 3:
        torch.save(step, "step.pt")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_agents_on_one_machine_find_nothing_in_a_healthy_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HEALTHY)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--nnodes=2", "--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={port}"]
    agents = [
        subprocess.Popen(
            [sys.executable, "-m", "ddpcheck", "run", *options, f"--node-rank={node}", "train.py"],
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        for node in (0, 1)
    ]
    for agent, others in zip(agents, ("ranks 2 and 3", "ranks 0 and 1"), strict=True):
        said = " ".join(agent.communicate(timeout=240)[1].split())  # a report is broken at words
        assert agent.returncode == 0, said
        assert f"2 of 4 ranks: {others} left no log here, so the ranks were not compared" in said
        assert "no findings" in said
