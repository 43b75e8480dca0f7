"""A recorder of `ddpcheck run` that fails ends itself: each is made to raise, and all others find their faults."""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

import ddpcheck.record
from ddpcheck.gather.patching import Recorder
from tests.forked_run import run_forked
from tests.tiers import share

BREAK = """
import importlib
import os

from ddpcheck.gather.patching import _guard_method

for place in os.environ["BROKEN"].split():
    module, kind, name, inner = place.split(":")
    kind = getattr(importlib.import_module(module), kind)

    def broken(*_arguments, **_named):
        raise ZeroDivisionError("made to fail")

    broken.__annotations__ = {"return": kind.__dict__[name].__annotations__.get("return", "")}
    setattr(kind, name, broken if inner else _guard_method(broken))
"""
FAULTS = """
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(5)
net = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))
optimizer = torch.optim.SGD(net.parameters(), 0.1 * (1 + rank))
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
samples = TensorDataset(torch.randn(32, 4), torch.arange(32) % 3)
loader = DataLoader(samples, batch_size=8)
for epoch in range(2):
    net.train()
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 100.0)
        optimizer.step()
    schedule.step()
    net.eval()
    right = 0
    with torch.no_grad():
        for x, y in DataLoader(samples, batch_size=8, sampler=range(rank, 32, 2)):
            right += int((net.module(x).argmax(1) == y).sum())
    print("accuracy", right / 16)
    torch.save(net.state_dict(), "model.pt")
total = torch.ones(3)
dist.all_reduce(total, async_op=True)
dist.barrier()
dist.destroy_process_group()
"""
WITH_FAULTS = ("replicas", "optimizers", "data", "files", "collectives")  # the check lines


def recorders() -> dict[str, Any]:
    for module in pkgutil.walk_packages(ddpcheck.record.__path__, "ddpcheck.record."):
        if "on_path" not in module.name:
            importlib.import_module(module.name)
    importlib.import_module("ddpcheck.gather.steps.compilations")
    found, pending = {}, [Recorder]
    for kind in pending:
        pending += kind.__subclasses__()
        if kind.__module__.startswith(("ddpcheck.record.", "ddpcheck.gather.")) and "_rank_" not in kind.__name__:
            found[f"{kind.__module__}:{kind.__name__}"] = kind
    found.pop("ddpcheck.gather.patching:Recorder")
    return found


def entries_of(kind: Any) -> Iterator[str]:
    """The methods, as BROKEN has them."""
    for name, function in vars(kind).items():
        if isinstance(function, FunctionType) and not name.startswith("__"):
            yield f"{kind.__module__}:{kind.__name__}:{name}:{'' if hasattr(function, '__wrapped__') else 'inner'}"


def status_of(folder: Path, *broken: str) -> dict[str, tuple[str, str]]:
    script, report = folder / "train.py", folder / "report.json"
    script.write_text(BREAK + FAULTS, encoding="utf-8")
    options = ["--check-format", "json", "--check-output", str(report), "--debug"]
    ended = run_forked(*options, str(script), cwd=folder, BROKEN=" ".join(broken))
    assert ended.returncode == 1, ended.stderr
    assert ended.stdout.count("accuracy") == 4
    said = ended.stderr.replace("ddpcheck: debug: Traceback", "")
    assert "Traceback" not in said or "During handling" in said, ended.stderr
    return {check["name"]: (check["status"], check["detail"]) for check in json.loads(report.read_text())["checks"]}


STEPS = ("parameters", "replicas", "reducer", "loop", "loss", "optimizers")
INPUTS = ("data", "files", "evaluation")
COLLECTIVES = ("collectives",)


@pytest.mark.parametrize("subjects", share([STEPS, INPUTS, COLLECTIVES], [COLLECTIVES]), ids=" ".join)
def test_recorders_of_some_subjects_fail_and_all_others_find_their_faults(
    tmp_path: Path, subjects: tuple[str, ...]
) -> None:
    broken = [kind for kind in recorders().values() if set(subjects).issuperset(kind.subjects)]
    checks = status_of(tmp_path, *(place for kind in broken for place in entries_of(kind)))
    statuses = {name: checks[name][0] for name in WITH_FAULTS}
    assert statuses == {name: "error" if name in subjects else "failed" for name in WITH_FAULTS}, checks
    for name, (status, detail) in checks.items():
        if "not watched" in detail:
            assert status == "error" and "made to fail" in detail and name in (*subjects, "ranks"), checks


def test_what_is_called_a_recorder_is_one() -> None:
    known = {kind.__name__ for kind in recorders().values()}
    source = "".join(path.read_text() for path in Path(ddpcheck.record.__path__[0]).rglob("*.py"))
    named = set(re.findall(r"^class (\w+Recorder)\b", source, re.MULTILINE))
    assert len(named) > 25 and named - known == {"StepRecorder", "_RankRecorder"}  # they hold others
