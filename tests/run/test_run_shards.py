"""`ddpcheck run` on the faults of tests/sharded_faults.py, each at its line, and on the same loops without them."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed import fsdp

from tests.run.scripts import ScriptRun, run_script
from tests.tiers import one_of

if not hasattr(fsdp, "fully_shard"):
    pytest.skip("this torch has no fully_shard", allow_module_level=True)

from tests.faultsuite.scripts_page import ROOT
from tests.faultsuite.shards_page import SCRIPT, line_of
from tests.sharded_faults import FAULTS

pytestmark = pytest.mark.slow


def run_loops(folder: Path, ranks: int, *arguments: str) -> ScriptRun:
    return run_script(folder, ROOT / SCRIPT, *arguments, options=("--check-timeout=4",), ranks=ranks)


@pytest.mark.parametrize("name", one_of(4, FAULTS))
def test_a_fault_of_shards_is_told_at_its_line(name: str, tmp_path: Path) -> None:
    run = run_loops(tmp_path, FAULTS[name].ranks, name)
    severity, _, _ = line_of(FAULTS[name], run.report)
    assert bool(run.code) == (severity == "error")


@pytest.mark.parametrize("ranks", one_of(2, [4, 2]))
def test_loops_of_shards_without_a_fault_have_no_finding(ranks: int, tmp_path: Path) -> None:
    run = run_loops(tmp_path, ranks, *(name for name, fault in FAULTS.items() if fault.ranks == ranks), "--fixed")
    assert (run.code, run.findings) == (0, [])


def not_passed(run: ScriptRun) -> dict[str, str]:
    """The sentences of the check lines that have not passed, by name, of a run without a finding."""
    assert (run.code, run.findings) == (0, [])
    return {name: detail for name, (status, detail) in run.checks.items() if status != "passed"}


def test_layers_that_are_frozen_and_unfrozen_later_are_no_fault(tmp_path: Path) -> None:
    run = run_script(tmp_path, ROOT / "tests" / "healthy_shards.py", "unfrozen_later")
    assert not_passed(run).keys() == {"optimizers"}


FSDP1 = """
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

for options in ({}, {"use_orig_params": True}, {"sharding_strategy": ShardingStrategy.NO_SHARD}):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 17), nn.ReLU(), nn.Linear(17, 4))
    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    average = [p.detach().clone() for p in model.parameters()]
    torch.manual_seed(RANK)
    for _ in range(5):
        x = torch.randn(8, 8)
        optimizer.zero_grad()
        cross_entropy(model(x), x[:, :4].argmax(1)).backward()
        model.clip_grad_norm_(0.1)
        optimizer.step()
        for mean, p in zip(average, model.parameters()):
            mean.lerp_(p.detach(), 0.1)
"""


def test_what_is_in_fsdp1_is_not_compared_and_has_no_finding(tmp_path: Path) -> None:
    lines = not_passed(run_script(tmp_path, FSDP1))
    assert lines.keys() == {"ranks", "optimizers"}
    words = "parameters in a FullyShardedDataParallel (FSDP1) are not compared"
    assert all(words in detail for detail in lines.values()), lines
