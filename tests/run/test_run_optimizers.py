"""`ddpcheck run` on optimizers and hooks over ranks, sharded, local and compressing: what is compared, what is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run.test_run_compiled import reported

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.functional import cross_entropy

HOW = sys.argv[1]
dist.init_process_group("gloo")
RANK = dist.get_rank()
torch.manual_seed(0)
net = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)))
parameters = list(net.parameters())
optimizer = torch.optim.SGD(parameters[RANK::2] if "sharded" in HOW else parameters, 0.1, momentum=0.9)
if HOW == "zero":
    optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=0.01)
if "local" in HOW:
    own, _ = dist.new_subgroups(group_size=1)
    net.register_comm_hook(PostLocalSGDState(None, own, 4), post_localSGD_hook)
if HOW == "local":
    optimizer = PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(period=3, warmup_steps=4))
if "noop" in HOW:
    net.register_comm_hook(None, noop_hook)
if HOW == "powersgd":
    state = PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)
    net.register_comm_hook(state, powerSGD_hook)
torch.manual_seed(RANK)
for _ in range(12):
    x = torch.randn(6, 4)
    optimizer.zero_grad()
    cross_entropy(net(x), x.argmax(1)).backward()
    if HOW == "noop":
        for parameter in parameters:
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2
    optimizer.step()
    if HOW == "sharded":
        for number, parameter in enumerate(parameters):
            dist.broadcast(parameter.data, number % 2)
dist.destroy_process_group()
"""
OWN = "noop_hook leaves each rank its own gradients, and the script averages them"
COMPARED = "gradients against the average of the ranks' own, compared"


def checks_of(folder: Path, how: str) -> tuple[dict[str, tuple[str, str]], list[tuple[object, object]]]:
    """By check line its status and sentence; and the findings, each with its subjects."""
    _, checks, findings = reported(folder, how, "", SCRIPT)
    assert "error" not in {status for status, _ in checks.values()}, checks
    return checks, [(one["code"], one["subjects"]) for one in findings]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "reducer"),
    [
        ("zero", ("passed", f"{COMPARED} 6 times")),
        ("sharded", ("passed", f"{COMPARED} 6 times")),
        ("local", ("skipped", f"{COMPARED} 3 times; the communication hook lets ranks train apart for some steps")),
        (
            "powersgd",
            ("skipped", f"{COMPARED} 2 times; what powerSGD_hook leaves where it compresses is not compared"),
        ),
        (
            "noop",
            (
                "skipped",
                "no step was compared: noop_hook leaves each rank its own gradients, and the script averages them",
            ),
        ),
    ],
)
def test_a_healthy_optimizer_over_ranks(tmp_path: Path, how: str, reducer: tuple[str, str]) -> None:
    checks, findings = checks_of(tmp_path, how)
    assert findings == [] and checks["reducer"] == reducer
    assert {status for name, (status, _) in checks.items() if name not in ("reducer", "replicas")} == {"passed"}
    assert checks["replicas"][0] == ("skipped" if how == "local" else "passed")
    assert ("and gradients" in checks["replicas"][1]) is (how != "noop")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "finding", "reducer"),
    [
        ("sharded_and_kept", ("DDP223", ["its parameters"]), f"{COMPARED} 6 times"),
        ("local_and_never_averaged", ("DDP306", ["0.weight", "0.bias", "2.weight", "2.bias"]), COMPARED),
        (
            "noop_and_kept",
            ("DDP301", ["0.weight", "0.bias", "2.weight", "2.bias"]),
            "no step was compared: the gradients differ between ranks",
        ),
    ],
)
def test_a_broken_optimizer_over_ranks(tmp_path: Path, how: str, finding: tuple[str, list[str]], reducer: str) -> None:
    checks, findings = checks_of(tmp_path, how)
    assert findings == [finding]
    assert checks["reducer"][1].startswith(reducer)
