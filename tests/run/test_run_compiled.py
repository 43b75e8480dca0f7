"""`ddpcheck run` on scripts with `torch.compile` and TorchScript: watched to their end, with the names of the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run.scripts import run_script

pytestmark = pytest.mark.slow
COMPILED = """
HOW, BACKEND = sys.argv[1:]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.drop, self.head = nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 4)

    def forward(self, x):
        hidden = self.body(x).relu()
        return self.head(self.drop(hidden.detach() if HOW == "detached" else hidden))


@torch.compile(backend=BACKEND, fullgraph=True)
def loss_of(scores, classes):
    total = cross_entropy(scores, classes, reduction="sum")
    count = torch.tensor(float(len(classes)))
    dist.all_reduce(count)
    return total / count * dist.get_world_size()


if HOW == "around":
    net = torch.compile(DistributedDataParallel(Net()), backend=BACKEND)
else:
    net = DistributedDataParallel(torch.compile(Net(), backend=BACKEND, fullgraph=True))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
torch.manual_seed(RANK)
for step in range(8):
    x = torch.randn((6, 4)[step > 0], 4)  # which is compiled again, for any size
    optimizer.zero_grad()
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


net = DistributedDataParallel(torch.jit.script(Unused() if HOW == "unused" else Net()))
optimizer = torch.optim.SGD(net.parameters(), Schedule(0.2).rate)
torch.manual_seed(RANK)
for _ in range(4):
    x = torch.randn(6, 4)
    optimizer.zero_grad()
    cross_entropy(net(x), x.argmax(1)).backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("script", "hows", "ranks"),
    [(COMPILED, ["around", "aot_eager"], "Net (8 steps)"), (SCRIPTED, ["used"], "Net (4 steps)")],
)
def test_a_compiled_or_scripted_model_is_clean_and_watched_to_its_end(
    tmp_path: Path, script: str, hows: list[str], ranks: str
) -> None:
    run = run_script(tmp_path, script, *hows)
    assert (run.code, run.findings) == (0, [])
    assert {status for status, _ in run.checks.values()} == {"passed"}
    assert run.checks["ranks"][1] == f"2 ranks (gloo), {ranks}"


@pytest.mark.parametrize(
    ("script", "hows", "code", "names"),
    [
        (COMPILED, ["detached", "aot_eager"], "DDP103", ["body.weight", "body.bias"]),
        (SCRIPTED, ["unused"], "DDP101", ["spare.weight", "spare.bias"]),
    ],
)
def test_a_parameter_without_a_gradient_has_the_name_of_the_code(
    tmp_path: Path, script: str, hows: list[str], code: str, names: list[str]
) -> None:
    run = run_script(tmp_path, script, *hows)
    assert (run.code, run.codes[0], run.findings[0]["subjects"]) == (1, code, names)
    assert ("cut by detach()" in run.findings[0]["message"]) == (code == "DDP103")
    assert "_orig_mod" not in str(run.findings)
