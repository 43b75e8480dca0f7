"""`ddpcheck run` on the faults of tests/sharded_faults.py, each at its line, and on the same loops without them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch.distributed import fsdp

from tests.forked_run import run_forked
from tests.tiers import one_of

if not hasattr(fsdp, "fully_shard"):
    pytest.skip("this torch has no fully_shard", allow_module_level=True)

from tests.faultsuite.scripts_page import TIMEOUT
from tests.faultsuite.shards_page import SCRIPT, line_of
from tests.sharded_faults import FAULTS

pytestmark = pytest.mark.slow


def found(folder: Path, ranks: int, *arguments: str) -> tuple[int, dict[str, object]]:
    """The exit code and the report of `ddpcheck run` on some loops."""
    file = folder / "report.json"
    done = run_forked(f"--check-timeout={TIMEOUT}", f"--check-output={file}", SCRIPT, *arguments, ranks=ranks)
    return done.returncode, json.loads(file.read_text())


@pytest.mark.parametrize("name", one_of(4, FAULTS))
def test_a_fault_of_shards_is_told_at_its_line(name: str, tmp_path: Path) -> None:
    expected = FAULTS[name]
    code, report = found(tmp_path, expected.ranks, name)
    severity, _, _ = line_of(expected, report)
    assert bool(code) == (severity == "error")


@pytest.mark.parametrize("ranks", one_of(2, [4, 2]))
def test_loops_of_shards_without_a_fault_have_no_finding(ranks: int, tmp_path: Path) -> None:
    names = [name for name, one in FAULTS.items() if one.ranks == ranks]
    code, report = found(tmp_path, ranks, *names, "--fixed")
    assert (code, report["findings"]) == (0, [])


def test_layers_that_are_frozen_and_unfrozen_later_are_no_fault() -> None:
    done = run_forked("tests/healthy_shards.py", "unfrozen_later")
    assert done.returncode == 0, done.stderr
    assert "no findings, but 1 of 9 checks was not made: optimizers" in done.stderr


FSDP1 = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

dist.init_process_group("gloo")
for options in ({}, {"use_orig_params": True}, {"sharding_strategy": ShardingStrategy.NO_SHARD}):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 17), nn.ReLU(), nn.Linear(17, 4))
    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    average = [p.detach().clone() for p in model.parameters()]
    torch.manual_seed(dist.get_rank())
    for _ in range(5):
        x = torch.randn(8, 8)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
        model.clip_grad_norm_(0.1)
        optimizer.step()
        for one, p in zip(average, model.parameters()):
            one.lerp_(p.detach(), 0.1)
dist.destroy_process_group()
"""


def test_what_is_in_fsdp1_is_not_compared_and_has_no_finding(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FSDP1)
    done = run_forked("train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stderr.split())  # lines are broken where COLUMNS says so
    assert said.count("parameters in a FullyShardedDataParallel (FSDP1) are not compared") == 2, done.stderr
    assert "no findings, but 2 of 4 checks were not made: ranks, optimizers" in said
