"""`ddpcheck run` on scripts with `torch.compile` and TorchScript: watched to their end, with the names of the code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.forked_run import run_forked
from tests.tiers import one_of

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

HOW, BACKEND = sys.argv[1:]
dist.init_process_group("gloo")
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.drop, self.head = nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 4)

    def forward(self, x):
        hidden = self.body(x).relu()
        return self.head(self.drop(hidden.detach() if HOW == "detached" else hidden))


class Around(nn.Module):  # the calls of what holds all parameters are listened to from the first step on
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x):
        return self.net(x)


@torch.compile(backend=BACKEND, fullgraph=True)
def loss_of(scores, classes):
    total = cross_entropy(scores, classes, reduction="sum")
    count = torch.tensor(float(len(classes)))
    dist.all_reduce(count)
    return total / count * dist.get_world_size()


if HOW == "around":
    net = torch.compile(nn.parallel.DistributedDataParallel(Net()), backend=BACKEND)
elif HOW == "autograd":
    torch._dynamo.config.optimize_ddp = "python_reducer"
    torch._dynamo.config.compiled_autograd = True
    net = nn.parallel.DistributedDataParallel(Net())
else:
    inner = Around() if HOW == "inside" else Net()
    net = nn.parallel.DistributedDataParallel(torch.compile(inner, backend=BACKEND, fullgraph=True))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
torch.manual_seed(dist.get_rank())


@torch.compile(backend=BACKEND)
def backward_inside(x, classes):
    cross_entropy(net(x), classes).backward()


for step in range(8):
    x = torch.randn((6, 4)[step > 0], 4)  # which is compiled again, for any size
    optimizer.zero_grad()
    if HOW == "autograd":
        backward_inside(x, x.argmax(1))
    else:
        loss_of(net(x), x.argmax(1)).backward()
    optimizer.step()
dist.destroy_process_group()
"""

SCRIPTED = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head, self.spare = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x):
        hidden = self.body(x).relu()
        return self.head(hidden) + self.spare(hidden)


class Unused(Net):
    def forward(self, x):
        return self.head(self.body(x).relu())


def halved(x: float) -> float:
    return x / 2


dist.init_process_group("gloo")
torch.manual_seed(0)


@torch.jit.script
class Schedule:
    def __init__(self, rate: float):
        self.rate = halved(rate)


written = (Unused if sys.argv[2] == "unused" else Net)()
scripted = torch.jit.script(written) if sys.argv[1] == "script" else torch.jit.trace(written, torch.randn(2, 4))
net = nn.parallel.DistributedDataParallel(scripted)
optimizer = torch.optim.SGD(net.parameters(), Schedule(0.2).rate)
torch.manual_seed(dist.get_rank())
for _ in range(4):
    x = torch.randn(6, 4)
    optimizer.zero_grad()
    cross_entropy(net(x), x.argmax(1)).backward()
    optimizer.step()
dist.destroy_process_group()
"""


def reported(
    tmp_path: Path, how: str, backend: str, script: str = SCRIPT
) -> tuple[int, dict[str, tuple[str, str]], list[dict[str, object]]]:
    """The exit code, by check line its status and sentence, and the findings."""
    (tmp_path / "train.py").write_text(script)
    saved = tmp_path / "report.json"
    options = ("--check-format=json", f"--check-output={saved}")
    done = run_forked(*options, str(tmp_path / "train.py"), how, backend)
    report = json.loads(saved.read_text())
    return done.returncode, {c["name"]: (c["status"], c["detail"]) for c in report["checks"]}, report["findings"]


@pytest.mark.parametrize(
    ("how", "backend"),
    [
        pytest.param("inside", "eager", marks=pytest.mark.exhaustive),
        pytest.param("around", "aot_eager", marks=pytest.mark.slow),
        pytest.param("inside", "inductor", marks=pytest.mark.exhaustive),
    ],
)
def test_a_compiled_script_is_clean_watched_to_its_end_and_compiled_as_it_is_without(
    tmp_path: Path, how: str, backend: str
) -> None:
    code, checks, findings = reported(tmp_path, how, backend)
    assert (code, findings) == (0, [])
    assert {status for status, _ in checks.values()} == {"passed"}
    assert checks["ranks"][1] == f"2 ranks (gloo), {'Around' if how == 'inside' else 'Net'} (8 steps)"


@pytest.mark.slow
@pytest.mark.parametrize("backend", one_of(2, ["aot_eager", "inductor"]))
def test_a_detached_parameter_of_compiled_code_is_told_as_in_the_code(tmp_path: Path, backend: str) -> None:
    code, _, (finding,) = reported(tmp_path, "detached", backend)
    assert (code, finding["code"], finding["subjects"]) == (1, "DDP103", ["body.weight", "body.bias"])
    assert "cut by detach()" in str(finding["message"])
    assert "_orig_mod" not in json.dumps(finding)


@pytest.mark.exhaustive
def test_steps_under_compiled_autograd_are_not_said_to_be_compared(tmp_path: Path) -> None:
    code, checks, findings = reported(tmp_path, "autograd", "aot_eager")
    assert (code, findings) == (0, [])
    assert checks["ranks"][0] == "skipped"
    assert "compiled autograd" in checks["ranks"][1]


@pytest.mark.slow
@pytest.mark.parametrize("how", one_of(2, ["script", "trace"]))
def test_a_scripted_model_is_clean_and_watched_to_its_end(tmp_path: Path, how: str) -> None:
    code, checks, findings = reported(tmp_path, how, "used", SCRIPTED)
    assert (code, findings) == (0, [])
    assert {status for status, _ in checks.values()} == {"passed"}
    assert checks["ranks"][1] == "2 ranks (gloo), Net (4 steps)"


@pytest.mark.slow
@pytest.mark.parametrize("how", one_of(2, ["script", "trace"]))
def test_a_parameter_that_a_scripted_model_does_not_use_is_named(tmp_path: Path, how: str) -> None:
    code, _, findings = reported(tmp_path, how, "unused", SCRIPTED)
    assert (code, findings[0]["code"], findings[0]["subjects"]) == (1, "DDP101", ["spare.weight", "spare.bias"])
