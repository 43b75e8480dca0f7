"""Scripts that start their own ranks run under `ddpcheck run` as they are, and how these end is known."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ddpcheck.record.rank import started_processes
from ddpcheck.record.rank.started_processes import leave_agent_store, mark_first_process

ROOT = Path(__file__).parents[2]
USES_AGENT = "TORCHELASTIC_USE_AGENT_STORE"


@pytest.fixture(autouse=True)
def below_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "a:b", "MASTER_PORT": "29400", USES_AGENT: "True"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("_DDPCHECK_STARTED", "::")
    mark_first_process()


AT_PORT_7 = {"init_method": "tcp://10.0.0.1:7"}


@pytest.mark.parametrize(
    ("starts", "variables", "arguments", "keeps"),
    [
        (True, {}, {}, True),  # they meet at the agent's store
        (True, {"MASTER_PORT": "29500"}, {"backend": "gloo"}, False),
        (True, {"MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "inner"}, {}, True),  # of an agent of the script
        (True, {}, {"init_method": "tcp://localhost:29400"}, True),
        (True, {}, AT_PORT_7, False),
        (False, {}, AT_PORT_7, True),  # a process of torchrun's, in which it fails without ddpcheck too
    ],
)
def test_ranks_of_the_script_that_meet_elsewhere_do_not_look_for_the_agents_store(
    starts: bool, variables: dict[str, str], arguments: dict[str, Any], keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if starts:
        monkeypatch.setattr(os, "getpid", lambda: -2)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    leave_agent_store((), arguments)
    mark_first_process()  # as the interpreter of a rank does
    leave_agent_store(tuple(arguments.values()) if "backend" in arguments else ("gloo", *arguments.values()), {})
    assert (USES_AGENT in os.environ) is keeps


def exits(how: str) -> None:
    if how == "returns":
        return
    try:
        raise ValueError(how)
    except ValueError:
        if how == "exits":  # as torch.multiprocessing does
            sys.exit(1)
        if how == "is content":
            sys.exit(0)
        raise


@pytest.mark.parametrize(
    ("how", "told"), [("returns", None), ("raises", "raises"), ("exits", "exits"), ("is content", "0")]
)
def test_the_end_of_a_process_is_told(how: str, told: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    process = multiprocessing.Process(target=exits, args=(how,))
    ends: list[BaseException | None] = []
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "run", multiprocessing.process.BaseProcess.run)
    monkeypatch.setattr(started_processes, "on_end", [ends.append])
    started_processes.follow_ends()
    try:
        process.run()
    except (ValueError, SystemExit):
        assert how != "returns"
    assert [end and str(end) for end in ends] == [told]


SCRIPT = """
import os, socket, sys, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn

def work(rank, how, port):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(rank)
    net = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(12):
        optimizer.zero_grad()
        net(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
        if step == 5 and rank == 1 and how == "raises":
            raise ValueError("of the script")
    dist.destroy_process_group()

if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(work, (sys.argv[1], port), nprocs=2)
"""
TWICE = "--standalone --nproc-per-node=2 train.py plain"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "printed"),
    [
        ("train.py plain", 0, "clean: 2 ranks (gloo), Linear (12 steps)"),
        ("train.py raises", 1, "Rank 1 raised ValueError: of the script."),
        (TWICE, 0, "torchrun has started the script 2 times"),  # and the advice is to leave --nproc-per-node out
    ],
)
def test_a_script_that_starts_its_own_ranks_runs_as_it_is(
    words: str, code: int, printed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "MASTER_PORT", USES_AGENT, "_DDPCHECK_STARTED"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "train.py").write_text(SCRIPT)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "ddpcheck", "run", *words.split()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path, env=environ, check=False)
    assert ended.returncode == code and printed in ended.stderr, ended.stderr
