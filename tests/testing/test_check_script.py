"""`ddp_world.check_script`: a script under `ddpcheck run`, in a test."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpcheck import DDPCheckError, HangError, TargetError
from ddpcheck.run.checked_script import check_script
from tests import innerhere

pytest_plugins = ["pytester"]

SCRIPT = """
import sys, torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for _ in range(3):
    x = torch.randn(4, 4)
    weights = torch.rand(4, 1)
    weights = weights.softmax(0) if "--bug" in sys.argv else weights / 2
    optimizer.zero_grad()
    (weights * (model(x) - x.sum(1, keepdim=True)).square()).mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""
TEST = """
def test_healthy(ddp_world):
    assert ddp_world(world_size=2).check_script("train.py").status == "clean"

def test_broken(ddp_world):
    ddp_world(world_size=2).check_script("train.py", ["--bug"])
"""


@pytest.mark.slow
def test_a_test_fails_with_the_report_on_a_script(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(train=SCRIPT, test_train=TEST)
    printed = innerhere.run(pytester)
    assert "1 failed, 1 passed" in printed and "_ test_broken _" in printed, printed
    assert "DDP314 differs-from-single-process  error" in printed


def test_a_script_that_is_not_there_is_named() -> None:
    with pytest.raises(TargetError, match=r"There is no report on nowhere\.py: .*no such file: nowhere\.py"):
        check_script("nowhere.py", world_size=2, parity=True, timeout=60)


@pytest.mark.slow
def test_a_script_that_does_not_end_is_ended(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import time\ntime.sleep(600)\n")
    with pytest.raises(HangError, match=r"train\.py has not come to its end in 5 s") as raised:
        check_script(script, world_size=2, parity=True, timeout=5)
    assert isinstance(raised.value, DDPCheckError)
