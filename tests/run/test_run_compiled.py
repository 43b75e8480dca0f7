"""`ddpcheck run` on scripts with `torch.compile` and TorchScript: watched to their end, with the names of the code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.run.scripts import run_script
from tests.tiers import one_of

COMPILED = """
HOW, BACKEND = sys.argv[1:]


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
    net = torch.compile(DistributedDataParallel(Net()), backend=BACKEND)
elif HOW == "autograd":
    torch._dynamo.config.optimize_ddp = "python_reducer"
    torch._dynamo.config.compiled_autograd = True
    net = DistributedDataParallel(Net())
else:
    inner = Around() if HOW == "inside" else Net()
    net = DistributedDataParallel(torch.compile(inner, backend=BACKEND, fullgraph=True))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
torch.manual_seed(RANK)


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
"""

SCRIPTED = """
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


@torch.jit.script
class Schedule:
    def __init__(self, rate: float):
        self.rate = halved(rate)


written = (Unused if sys.argv[2] == "unused" else Net)()
scripted = torch.jit.script(written) if sys.argv[1] == "script" else torch.jit.trace(written, torch.randn(2, 4))
net = DistributedDataParallel(scripted)
optimizer = torch.optim.SGD(net.parameters(), Schedule(0.2).rate)
torch.manual_seed(RANK)
for _ in range(4):
    x = torch.randn(6, 4)
    optimizer.zero_grad()
    cross_entropy(net(x), x.argmax(1)).backward()
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "how", "kind", "ranks"),
    [
        pytest.param(COMPILED, "inside", "eager", "Around (8 steps)", marks=pytest.mark.exhaustive),
        (COMPILED, "around", "aot_eager", "Net (8 steps)"),
        pytest.param(COMPILED, "inside", "inductor", "Around (8 steps)", marks=pytest.mark.exhaustive),
        *((SCRIPTED, how, "used", "Net (4 steps)") for how in one_of(2, ["script", "trace"])),
    ],
)
def test_a_compiled_or_scripted_model_is_clean_and_watched_to_its_end(
    tmp_path: Path, script: str, how: str, kind: str, ranks: str
) -> None:
    run = run_script(tmp_path, script, how, kind)
    assert (run.code, run.findings) == (0, [])
    assert {status for status, _ in run.checks.values()} == {"passed"}
    assert run.checks["ranks"][1] == f"2 ranks (gloo), {ranks}"


@pytest.mark.slow
@pytest.mark.parametrize("backend", one_of(2, ["aot_eager", "inductor"]))
def test_a_detached_parameter_of_compiled_code_is_told_as_in_the_code(tmp_path: Path, backend: str) -> None:
    run = run_script(tmp_path, COMPILED, "detached", backend)
    (finding,) = run.findings
    assert (run.code, finding["code"], finding["subjects"]) == (1, "DDP103", ["body.weight", "body.bias"])
    assert "cut by detach()" in finding["message"]
    assert "_orig_mod" not in json.dumps(finding)


@pytest.mark.exhaustive
def test_steps_under_compiled_autograd_are_not_said_to_be_compared(tmp_path: Path) -> None:
    run = run_script(tmp_path, COMPILED, "autograd", "aot_eager")
    assert (run.code, run.findings) == (0, [])
    status, detail = run.checks["ranks"]
    assert status == "skipped" and "compiled autograd" in detail


@pytest.mark.slow
@pytest.mark.parametrize("how", one_of(2, ["script", "trace"]))
def test_a_parameter_that_a_scripted_model_does_not_use_is_named(tmp_path: Path, how: str) -> None:
    run = run_script(tmp_path, SCRIPTED, how, "unused")
    assert (run.code, run.codes[0], run.findings[0]["subjects"]) == (1, "DDP101", ["spare.weight", "spare.bias"])
