"""`ddpcheck run` on optimizers and hooks over ranks, sharded and local: what is compared, what is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run.scripts import run_script

pytestmark = pytest.mark.slow
SCRIPT = """
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook

net = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)))
parameters = list(net.parameters())
optimizer = torch.optim.SGD(parameters[RANK::2] if "sharded" in HOW else parameters, 0.1, momentum=0.9)
if "local" in HOW:
    own, _ = dist.new_subgroups(group_size=1)
    net.register_comm_hook(PostLocalSGDState(None, own, 4), post_localSGD_hook)
if "noop" in HOW:
    net.register_comm_hook(None, noop_hook)
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
"""
COMPARED = "gradients equal the average of the ranks' own, compared 6 times"
AVERAGED = "no step was compared: noop_hook leaves each rank its own gradients, and the script averages them"


@pytest.mark.parametrize(("how", "status", "detail"), [("sharded", "passed", COMPARED), ("noop", "skipped", AVERAGED)])
def test_a_healthy_optimizer_over_ranks(tmp_path: Path, how: str, status: str, detail: str) -> None:
    run = run_script(tmp_path, SCRIPT, how)
    assert run.findings == [] and run.checks["reducer"] == (status, detail)
    assert {name for name, (status, _) in run.checks.items() if status != "passed"} <= {"reducer"}
    assert ("and gradients" in run.checks["replicas"][1]) is (how == "sharded")


@pytest.mark.parametrize(
    ("how", "code", "place"),
    [
        ("sharded, kept", "DDP223", "optimizer = "),
        ("local, never averaged", "DDP306", ""),
        ("noop, kept", "DDP301", "register_comm_hook(None, noop_hook)"),
    ],
)
def test_a_broken_optimizer_over_ranks(tmp_path: Path, how: str, code: str, place: str) -> None:
    run = run_script(tmp_path, SCRIPT, how)
    assert run.codes == [code] and place in run.places[0]
    assert "error" not in {status for status, _ in run.checks.values()}


BESIDE = """
first, second = (DistributedDataParallel(nn.Linear(4, 4)) for _ in range(2))
optimizer, waiting = (torch.optim.SGD(net.parameters(), 0.1) for net in (first, second))
torch.manual_seed(RANK)
for _ in range(32):
    x = torch.randn(6, 4)
    optimizer.zero_grad()
    waiting.zero_grad()
    (cross_entropy(first(x), x.argmax(1)) + second(x).square().mean()).backward()
    optimizer.step()
"""


def test_an_optimizer_that_has_not_stepped_holds_its_parameters(tmp_path: Path) -> None:
    assert run_script(tmp_path, BESIDE).findings == []
