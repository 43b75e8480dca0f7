"""`ddpcheck run` and `ddpcheck report` with facts that the user states in `[tool.ddpcheck]`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddpcheck import cli
from ddpcheck.findings import named_functions
from ddpcheck.trace.rank_params import RankParams
from tests.forked_run import run_forked

NET = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.adapter, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x):
        hidden = self.body(x).relu()
        return self.head(hidden + self.adapter(hidden))
"""
IGNORED = f"""{NET}
import sys

dist.init_process_group("gloo")
torch.manual_seed(0)
net = Net()
ignored = ["adapter.weight", "adapter.bias", *sys.argv[1:]]
DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ignored)
ddp = DistributedDataParallel(net)
optimizer = torch.optim.Adam(ddp.parameters())
torch.manual_seed(dist.get_rank())
for _ in range(6):
    optimizer.zero_grad()
    nn.functional.cross_entropy(ddp(torch.randn(4, 8)), torch.randint(2, (4,))).backward()
    optimizer.step()
"""
UNWRAPPED = f"""{NET}
dist.init_process_group("gloo")
torch.manual_seed(0)
net = Net()
body = DistributedDataParallel(net.body)
optimizer = torch.optim.Adam([*body.parameters(), *net.adapter.parameters(), *net.head.parameters()])
torch.manual_seed(dist.get_rank())
for _ in range(6):
    optimizer.zero_grad()
    hidden = body(torch.randn(4, 8)).relu()
    nn.functional.cross_entropy(net.head(hidden + net.adapter(hidden)), torch.randint(2, (4,))).backward()
    optimizer.step()
"""
OWN = 'rank-parameters = ["adapter.*"]'
LEFT_OUT = "; left out by rank-parameters: adapter.weight and adapter.bias"


def run(folder: Path, script: str, settings: str, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Return the exit code and the report of a script, with these settings."""
    (folder / "train.py").write_text(script)
    (folder / "pyproject.toml").write_text(f"[tool.ddpcheck]\n{settings}\n")
    done = run_forked("--check-output=report.json", "--check-timeout=10", "train.py", *arguments, cwd=folder)
    return done.returncode, json.loads((folder / "report.json").read_text())


def test_rank_parameters_are_not_compared_in_a_script_and_others_are(tmp_path: Path) -> None:
    code, report = run(tmp_path, IGNORED, 'rank-parameters = ["adapter.*", "adaptr.*"]')
    assert (code, report["findings"]) == (0, [])
    without = [check["name"] for check in report["checks"] if check["detail"].endswith(LEFT_OUT)]
    assert without == ["ranks", "replicas", "reducer", "optimizers"]
    assert report["world"]["notes"] == ["rank-parameters: no parameter has a name like 'adaptr.*'"]
    code, report = run(tmp_path, IGNORED, OWN, "head.weight")
    assert code == 1
    assert [(f["code"], f["subjects"]) for f in report["findings"]] == [("DDP111", ["head.weight"])]


def test_rank_parameters_may_be_in_no_wrapper(tmp_path: Path) -> None:
    code, report = run(tmp_path, UNWRAPPED, OWN)
    assert code == 1
    assert [(f["code"], f["subjects"]) for f in report["findings"]] == [
        ("DDP501", ["Net.head.weight", "Net.head.bias"])
    ]
    code, report = run(tmp_path, UNWRAPPED, 'rank-parameters = ["adapter.*", "head.*"]')
    assert (code, report["findings"]) == (0, [])


RECIPE = f"""{NET}
import ddpcheck


def wrap(model, device):
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, IGNORED)
    return DistributedDataParallel(model)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 8, generator=generator), torch.randint(2, (8,), generator=generator)


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


model = Net
IGNORED = ["adapter.weight", "adapter.bias"]
"""


def test_rank_parameters_are_not_compared_in_a_recipe_and_others_are(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pyproject.toml").write_text(f"[tool.ddpcheck]\n{OWN}\n")
    Path("healthy.py").write_text(RECIPE)
    Path("broken.py").write_text(f'{RECIPE}IGNORED.append("head.weight")\n')
    assert cli.main(["report", "healthy.py", "-o", "report.json"]) == 0
    report = json.loads(Path("report.json").read_text())
    checks = {check["name"]: (check["status"], check["detail"]) for check in report["checks"]}
    assert report["findings"] == [] and checks["reducer"][0] == "passed" and checks["reducer"][1].endswith(LEFT_OUT)
    why = "the ranks' parameters differ, so no single process can represent all of them"
    assert checks["parity"] == (
        "skipped",
        f"4 gradients in step 0 equal those of the global batch in a single process; {why}{LEFT_OUT}",
    )
    assert cli.main(["report", "broken.py", "-o", "report.json"]) == 1
    report = json.loads(Path("report.json").read_text())
    assert [(f["code"], f["subjects"]) for f in report["findings"]] == [("DDP111", ["head.weight"])]


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("0/adapter.weight", True),
        ("0/adapter.weight: exp_avg", True),
        ("optimizer adapter.weight exp_avg", True),
        ("adapter.weight", True),
        ("Net.adapter.weight", False),
        ("0/adapters.weight", False),
        ("0/head.weight", False),
    ],
)
def test_patterns_are_for_whole_names(key: str, names: bool) -> None:
    params = RankParams(("adapter.*",))
    assert params.has(key) is names
    assert params.left_out == ("; left out by rank-parameters: adapter.weight" if names else "")


def test_a_note_names_patterns_without_a_parameter() -> None:
    params = RankParams(("adapter.*", "adapter.weight", "head.*"))
    assert params.unmatched == []  # nothing was compared
    assert params.has("0/adapter.weight")
    assert params.unmatched == ["rank-parameters: no parameter has a name like 'head.*'"]


TRAINER = """
import torch
import torch.distributed as dist
from torch import nn


class Trainer:
    def __init__(self):
        self.ddp = nn.parallel.DistributedDataParallel(nn.Linear(8, 2))
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), 0.1)

    def fit(self, discards):
        for _ in range(6):
            self.train_step(discards)

    def train_step(self, discards):
        nn.functional.cross_entropy(self.ddp(torch.randn(4, 8)), torch.randint(2, (4,))).backward()
        if discards:
            self.optimizer.zero_grad()
        self.update()  # updated
        self.optimizer.zero_grad()

    def update(self):
        self.optimizer.step()  # update


def reduce_mean(tensor):
    dist.all_reduce(tensor)  # wrapper
    return tensor / dist.get_world_size()


def other_mean(tensor):
    dist.all_reduce(tensor)  # other
    return tensor / dist.get_world_size()
"""
LOOP = """
import sys
from lab.tools import Trainer, dist, other_mean, reduce_mean, torch

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
Trainer().fit(discards="discards" in sys.argv)
if dist.get_rank() == 0 and "reduces" in sys.argv:
    reduce_mean(torch.ones(1))  # caller
if dist.get_rank() == 0 and "other" in sys.argv:
    other_mean(torch.ones(1))  # caller of the other
"""
FUNCTION, FILE = 'wrapper-functions = ["lab.tools.reduce_mean"]', 'wrapper-functions = ["lab/tools.py"]'
STEP = 'step-function = "lab.tools.Trainer.train_step"'


@pytest.mark.parametrize(
    ("settings", "argument", "code", "comment"),
    [
        ("", "reduces", "DDP403", "wrapper"),
        (FUNCTION, "reduces", "DDP403", "caller"),
        (FUNCTION, "other", "DDP403", "other"),
        pytest.param(FILE, "other", "DDP403", "caller of the other", marks=pytest.mark.slow),
        pytest.param("", "discards", "DDP517", "update", marks=pytest.mark.slow),
        (STEP, "discards", "DDP517", "updated"),
    ],
)
def test_findings_name_the_line_that_calls_a_wrapper_or_is_in_the_step(
    tmp_path: Path, settings: str, argument: str, code: str, comment: str
) -> None:
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "tools.py").write_text(TRAINER)
    _, report = run(tmp_path, LOOP, settings, argument)
    (finding,) = report["findings"]
    line = (tmp_path / finding["location"]["path"]).read_text().splitlines()[finding["location"]["line"] - 1]
    assert (finding["code"], line.partition("#")[2].strip()) == (code, comment)


def test_a_function_is_named_with_its_module_and_a_file_by_the_end_of_its_path(monkeypatch) -> None:
    monkeypatch.delenv("_DDPCHECK_FUNCTIONS", raising=False)
    named_functions.set_named_functions(("lab.tools.Comm.mean", "comm/reduce.py"), "")
    try:
        frames = [
            ("/home/x/lab/tools.py", "Comm.mean"),
            ("/home/x/lab/tools.py", "Comm.mean.<locals>.<lambda>"),
            ("/home/x/lab/tools.py", "mean"),  # in a stack as text
            ("/home/x/comm/reduce.py", "anything"),
        ]
        assert all(named_functions.is_wrapper(*frame) for frame in frames)
        assert not named_functions.is_wrapper("/home/x/lab/tools.py", "Comm.means")
        assert not named_functions.is_wrapper("/home/x/lab/tool.py", "Comm.mean")
        assert not named_functions.is_wrapper("/home/x/comm/reduce.py/train.py", "main")
    finally:
        named_functions.set_named_functions((), "")
    assert not named_functions.is_wrapper("/home/x/lab/tools.py", "Comm.mean")
