"""Several nodes of one job: the first has one report on all ranks; without their logs it says what is not compared."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ddpcheck.findings.evidence.modules import ModuleDescription, WrapperFacts
from ddpcheck.findings.evidence.steps import Call, DdpStepEvidence, LoopEvent, StepEvidence
from ddpcheck.findings.wording import Names, make_finding
from ddpcheck.rules.gradients import wrappers
from ddpcheck.run.ending import Ending
from ddpcheck.run.script_report import report_on_script
from ddpcheck.stream.entries import RankStarted, ReplicaCaptured, StepsReported, WrapperMade
from ddpcheck.stream.rank_log import RankTrace
from ddpcheck.stream.rank_report import RankReport, ReplicaState, WatchContext
from tests.launchers.slurm import free_ports

ROOT = Path(__file__).parents[2]
CONTEXT = WatchContext(Names({}), WrapperFacts(), world_size=4)


def rank_log(number: int, group: tuple[int, ...], *entries: Any) -> RankTrace:
    made = WrapperMade("Net", group, CONTEXT, None, by_library=False, classes={})
    described = ModuleDescription()
    captured = ReplicaCaptured(0, 0, ReplicaState(described, DdpStepEvidence(number, 0)))
    calls = [Call("barrier", "default", group)]
    return RankTrace(RankStarted(number, 4, "gloo"), [made, captured, *entries], [(3, 3)], calls=calls)


@pytest.mark.parametrize(
    ("group", "here", "found"),
    [
        ((0, 1, 2, 3), (2, 3), []),
        ((0, 1, 2, 3), (0, 1, 2, 3), ["DDP302"]),
        ((2, 3), (2, 3), ["DDP302"]),  # a group of this node alone
    ],
)
def test_what_needs_all_ranks_is_judged_where_all_are_here(
    group: tuple[int, ...], here: tuple[int, ...], found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = make_finding("DDP302", ["weight"], "it is not the average")
    monkeypatch.setattr(wrappers, "judge_captured", lambda *_, **__: [finding])
    ranks = [rank_log(number, group) for number in here]
    report = report_on_script("train.py", Ending(), ranks)
    assert [one.code for one in report.findings] == found
    missing = sorted({0, 1, 2, 3} - {*here})
    details = {check.name: check.detail for check in report.checks}
    assert ("left no log here" in details["ranks"]) == bool(missing)
    assert ("not compared with rank" in details["parameters"]) == (not found)
    assert found or all(check.status == "skipped" for check in report.checks)


def test_what_a_rank_has_found_by_itself_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = (LoopEvent("forward", synchronises=True), LoopEvent("backward"), LoopEvent("backward"))
    own = StepsReported(0, RankReport(StepEvidence(3, 0, {}), events=passes), is_conclusive=True)
    report = report_on_script("train.py", Ending(), [rank_log(3, (0, 1, 2, 3), own)])
    assert [one.code for one in report.findings] == ["DDP509"]


# Two agents of one job, on the loopback interface

SCRIPT = """
import os, signal, sys, time, torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
how = sys.argv[1]
dist.init_process_group("gloo")
rank = dist.get_rank()
node = rank // 2
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
samples = TensorDataset(torch.randn(96, 4, generator=torch.Generator().manual_seed(0)))
for step, (batch,) in enumerate(DataLoader(samples, 2, sampler=DistributedSampler(samples))):
    if how == "leaves" and node and step == 5:
        break
    if how == "works" and rank == 2 and step == 5:
        time.sleep(8)
    if how == "dies" and node and step == 5:
        if rank == 2:
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
print("pid", os.getpid())
"""
LOWERED = """
import sys
from ddpcheck.cli import main
from ddpcheck.run import node_link
node_link.WAIT = 6.0
sys.exit(main(sys.argv[1:]))
"""
STATIC = ("--master-addr=127.0.0.1", "--master-port={port}", "--node-rank={node}")
DYNAMIC = ("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=7")
ELSEWHERE = "node 1 of 2: the report on all ranks is that of node 0, on "


@dataclass(frozen=True)
class Ended:
    """The agent of a node, with what it has printed and the report that it has written."""

    code: int
    said: str
    report: Any

    @property
    def codes(self) -> list[str]:
        return [finding["code"] for finding in self.report["findings"]]

    @property
    def checks(self) -> dict[str, Any]:
        return {check["name"]: check for check in self.report["checks"]}


def run_nodes(folder: Path, how: str, *options: str, meeting: Sequence[str] = STATIC) -> tuple[Ended, Ended]:
    """Run the script on two nodes; the one with rank 0 comes first."""
    (folder / "train.py").write_text(SCRIPT)
    (folder / "lowered.py").write_text(LOWERED)
    (port,) = free_ports(1)
    agents = []
    for node in (0, 1):
        where = [one.format(port=port, node=node) for one in (*meeting, "--check-output=report{node}.json")]
        command = ["lowered.py", "run", "--nnodes=2", "--nproc-per-node=2", *where, *options, "train.py", how]
        agents.append(
            subprocess.Popen(
                [sys.executable, *command],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            )
        )
    ended = []
    for node, agent in enumerate(agents):
        said = agent.communicate(timeout=240)[0]
        report = folder / f"report{node}.json"  # empty where its agent was killed
        written = report.exists() and report.read_text()
        ended.append(Ended(agent.returncode, said, json.loads(written) if written else None))
    ended.sort(key=lambda one: ELSEWHERE in one.said)  # where the agents number the nodes themselves
    assert not processes_in(folder)
    return ended[0], ended[1]


def processes_in(folder: Path) -> list[str]:
    """The processes that work in a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cwd").resolve() == folder and "Z" not in (process / "stat").read_text().split(")")[1][:3]:
                found.append((process / "cmdline").read_text())
    return found


@pytest.mark.slow
def test_the_first_node_has_the_report_on_all_ranks_of_which_one_works_while_the_others_wait(tmp_path: Path) -> None:
    first, second = run_nodes(tmp_path, "works", "--check-timeout=4")
    assert (first.code, second.code) == (0, 0), first.said + second.said
    assert first.codes == [] and {check["status"] for check in first.checks.values()} == {"passed"}
    assert first.checks["ranks"]["detail"] == "4 ranks (gloo), Sequential (12 steps)"
    assert second.report is None
    assert [line for line in second.said.splitlines() if "ddpcheck" in line] == [
        f"ddpcheck: {ELSEWHERE}{socket.gethostname()}"
    ]


@pytest.mark.slow
def test_ranks_that_wait_for_those_of_another_node_are_ended(tmp_path: Path) -> None:
    first, second = run_nodes(tmp_path, "leaves", "--check-timeout=8", meeting=DYNAMIC)
    assert (first.code, second.code) == (4, 4), first.said + second.said
    assert first.codes == ["DDP405"] and "without progress for 8 s" in first.checks["script"]["detail"]
    evidence = "; ".join(first.report["findings"][0]["evidence"])
    assert "rank 0: waits in backward" in evidence and "rank 2: waits in barrier" in evidence, evidence
    assert [rank["rank"] for rank in first.report["timelines"][0]["ranks"]] == [0, 1, 2, 3]


@pytest.mark.slow
def test_the_ranks_of_a_node_that_dies_are_named(tmp_path: Path) -> None:
    first, second = run_nodes(tmp_path, "dies")
    assert second.code == -signal.SIGKILL and second.report is None
    assert first.code == 1 and first.codes == []
    details = {name: check["detail"] for name, check in first.checks.items()}
    assert details["ranks"] == "2 of 4 ranks: ranks 2 and 3 left no log here, so the ranks were not compared"
    assert details["replicas"] == "not compared with ranks 2 and 3, which left no log here"
    assert "the logs of node 1 were not accepted: they have not come within 6 s" in first.said
