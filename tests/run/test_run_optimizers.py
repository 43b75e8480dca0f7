"""`ddpcheck run` on optimizers and hooks over ranks, sharded, local and compressing: what is compared, what is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run.scripts import run_script

pytestmark = pytest.mark.slow
SCRIPT = """
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

net = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)))
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
"""
COMPARED = "gradients equal the average of the ranks' own, compared"
ALL = ["0.weight", "0.bias", "2.weight", "2.bias"]


@pytest.mark.parametrize(
    ("how", "status", "detail"),
    [
        ("zero", "passed", f"{COMPARED} 6 times"),
        ("sharded", "passed", f"{COMPARED} 6 times"),
        ("local", "skipped", f"{COMPARED} 3 times; the communication hook lets ranks train apart for some steps"),
        ("powersgd", "skipped", f"{COMPARED} 2 times; gradients that powerSGD_hook compresses are not compared"),
        (
            "noop",
            "skipped",
            "no step was compared: noop_hook leaves each rank its own gradients, and the script averages them",
        ),
    ],
)
def test_a_healthy_optimizer_over_ranks(tmp_path: Path, how: str, status: str, detail: str) -> None:
    run = run_script(tmp_path, SCRIPT, how)
    assert run.findings == [] and run.checks["reducer"] == (status, detail)
    others = {name: check for name, check in run.checks.items() if name not in ("reducer", "replicas")}
    assert {status for status, _ in others.values()} == {"passed"}, others
    assert run.checks["replicas"][0] == ("skipped" if how == "local" else "passed")
    assert ("and gradients" in run.checks["replicas"][1]) is (how != "noop")


@pytest.mark.parametrize(
    ("how", "code", "subjects", "reducer", "place"),
    [
        ("sharded_and_kept", "DDP223", ["its parameters"], f"{COMPARED} 6 times", "optimizer = "),
        ("local_and_never_averaged", "DDP306", ALL, COMPARED, ""),
        (
            "noop_and_kept",
            "DDP301",
            ALL,
            "no step was compared: the gradients differ between ranks",
            "register_comm_hook(None, noop_hook)",
        ),
    ],
)
def test_a_broken_optimizer_over_ranks(
    tmp_path: Path, how: str, code: str, subjects: list[str], reducer: str, place: str
) -> None:
    run = run_script(tmp_path, SCRIPT, how)
    assert [(finding["code"], finding["subjects"]) for finding in run.findings] == [(code, subjects)]
    assert run.checks["reducer"][1].startswith(reducer) and place in run.places[0]
    assert "error" not in {status for status, _ in run.checks.values()}


HOOKED = """
def in_place(parameter):
    parameter.grad *= 0.3 / parameter.grad.norm() if HOW == "own norm, in place" else 0.3


hooks = {
    "own norm": lambda g: g / g.norm(),
    "limit": lambda g: g.clamp(-0.01, 0.01),
    "centre": lambda g: g - g.mean(-1, keepdim=True),
    "weights": lambda g: g * share,
    "far limit": lambda g: g.clamp(-100, 100),
}
for HOW in sys.argv[1:]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    share = 1.0
    for parameter in net.parameters():
        if "in place" in HOW:
            parameter.register_post_accumulate_grad_hook(in_place)
        else:
            parameter.register_hook(hooks[HOW])
    net = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    torch.manual_seed(RANK)
    for _ in range(8):
        count = int(torch.randint(2, 9, ()))
        total = torch.tensor(float(count))
        dist.all_reduce(total)
        if HOW == "weights":
            share = count * WORLD / float(total)
        x = torch.randn(count, 4)
        optimizer.zero_grad()
        (net(x) - x.cos()).square().mean().backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("how", "severities"),
    [
        ("own norm", ["error"]),
        ("own norm, in place", ["error"]),
        ("limit", ["warning"]),
        *((how, []) for how in ("in place", "centre", "weights", "far limit")),
    ],
)
def test_hooks_that_change_each_ranks_own_gradients(tmp_path: Path, how: str, severities: list[str]) -> None:
    findings = run_script(tmp_path, HOOKED, how).findings
    assert [(finding["code"], finding["severity"]) for finding in findings] == [("DDP310", s) for s in severities]


BESIDE = """
first, second = nn.Linear(4, 4), nn.Linear(4, 4)
if HOW == "waiting":
    first, second = (DistributedDataParallel(one) for one in (first, second))
optimizer, waiting = (torch.optim.SGD(one.parameters(), 0.1) for one in (first, second))
torch.manual_seed(RANK)
for step in range(32):
    x = torch.randn(6, 4)
    optimizer.zero_grad()
    waiting.zero_grad()
    loss = cross_entropy(first(x), x.argmax(1))
    if HOW == "waiting":
        loss = loss + second(x).square().mean()
    loss.backward()
    if HOW == "summed":
        flat = torch.cat([parameter.grad.flatten() for parameter in first.parameters()])
        dist.all_reduce(flat)
        for parameter, part in zip(first.parameters(), flat.split([16, 4])):
            parameter.grad.copy_(part.view_as(parameter))
    optimizer.step()
    if step % 5 == 4:
        dist.all_reduce(torch.ones(1))
"""


@pytest.mark.parametrize(("how", "codes"), [("waiting", []), ("summed", ["DDP303"])])
def test_an_optimizer_that_has_not_stepped_holds_its_parameters_and_other_sums_hide_none(
    how: str, codes: list[str], tmp_path: Path
) -> None:
    assert run_script(tmp_path, BESIDE, how).codes == codes
