"""`ddpcheck run` and `ddpcheck report` with facts that the user states in `[tool.ddpcheck]`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddpcheck import cli
from ddpcheck.findings import named_functions
from ddpcheck.trace.rank_params import RankParams
from tests.run.scripts import run_script

NET = """
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
IGNORED_AND_UNWRAPPED = f"""{NET}
ignored, unwrapped = Net(), Net()
names = ["adapter.weight", "adapter.bias", "head.weight"]
DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ignored, names)
ddp, body = DistributedDataParallel(ignored), DistributedDataParallel(unwrapped.body)
others = [*unwrapped.adapter.parameters(), *unwrapped.head.parameters()]
optimizers = [torch.optim.Adam(ddp.parameters()), torch.optim.Adam([*body.parameters(), *others])]
torch.manual_seed(RANK)
for _ in range(6):
    for optimizer in optimizers:
        optimizer.zero_grad()
        x, classes = torch.randn(4, 8), torch.randint(2, (4,))
        if optimizer is optimizers[0]:
            cross_entropy(ddp(x), classes).backward()
        else:
            hidden = body(x).relu()
            cross_entropy(unwrapped.head(hidden + unwrapped.adapter(hidden)), classes).backward()
        optimizer.step()
"""
LEFT_OUT = "; left out by rank-parameters: adapter.weight and adapter.bias"


def set_in(folder: Path, settings: str) -> None:
    (folder / "pyproject.toml").write_text(f"[tool.ddpcheck]\n{settings}\n")


def test_rank_parameters_are_not_compared_in_a_script_and_others_are(tmp_path: Path) -> None:
    set_in(tmp_path, 'rank-parameters = ["adapter.*", "adaptr.*"]')
    run = run_script(tmp_path, IGNORED_AND_UNWRAPPED)
    assert run.code == 1
    assert [(finding["code"], finding["subjects"]) for finding in run.findings] == [
        ("DDP111", ["head.weight"]),
        ("DDP501", ["Net.head.weight", "Net.head.bias"]),
    ]
    left_out = "; left out by rank-parameters: adapter.weight, adapter.bias and 2 more"
    names = [name for name, (_, detail) in run.checks.items() if detail.endswith(left_out)]
    assert names == ["ranks", "replicas", "reducer", "optimizers"]
    assert run.report["world"]["notes"] == ["rank-parameters: no parameter has a name like 'adaptr.*'"]


RECIPE = f"""{NET}
import torch


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


def test_rank_parameters_are_not_compared_in_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    set_in(tmp_path, 'rank-parameters = ["adapter.*"]')
    Path("recipe.py").write_text(RECIPE)
    assert cli.main(["report", "recipe.py", "-o", "report.json"]) == 0
    report = json.loads(Path("report.json").read_text())
    assert report["findings"] == []
    checks = {check["name"]: (check["status"], check["detail"]) for check in report["checks"]}
    assert checks["reducer"][0] == "passed" and checks["reducer"][1].endswith(LEFT_OUT)
    why = "the ranks' parameters differ, so no single process can represent all of them"
    detail = f"4 gradients in step 0 equal those of the global batch in a single process; {why}{LEFT_OUT}"
    assert checks["parity"] == ("skipped", detail)


def test_patterns_are_for_whole_names() -> None:
    params = RankParams(("adapter.*", "adapter.weight", "head.*"))
    assert (params.unmatched, params.left_out) == ([], "")  # nothing was compared
    assert not params.has("Net.adapter.weight") and not params.has("0/adapters.weight")
    assert params.has("0/adapter.weight: exp_avg") and params.has("optimizer adapter.weight exp_avg")
    assert params.left_out == "; left out by rank-parameters: adapter.weight"
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
"""
LOOP = """
from lab.tools import Trainer, reduce_mean

torch.manual_seed(RANK)
Trainer().fit(discards=HOW == "discards")
if RANK == 0:
    reduce_mean(torch.ones(1))  # caller
"""
FUNCTION, FILE = 'wrapper-functions = ["lab.tools.reduce_mean"]', 'wrapper-functions = ["lab/tools.py"]'
STEP = 'step-function = "lab.tools.Trainer.train_step"'


@pytest.mark.parametrize(
    ("settings", "how", "comments"),
    [
        pytest.param(f"{FUNCTION}\n{STEP}", "discards", {"DDP403": "caller", "DDP517": "updated"}, id="both"),
        pytest.param("", "discards", {"DDP403": "wrapper", "DDP517": "update"}, marks=pytest.mark.slow, id="neither"),
        pytest.param(FILE, "", {"DDP403": "caller"}, marks=pytest.mark.slow, id="file"),
    ],
)
def test_findings_name_the_line_that_calls_a_wrapper_or_is_in_the_step(
    tmp_path: Path, settings: str, how: str, comments: dict[str, str]
) -> None:
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "tools.py").write_text(TRAINER)
    set_in(tmp_path, settings)
    run = run_script(tmp_path, LOOP, how)
    places = {finding["code"]: finding["location"] for finding in run.findings}
    lines = {code: (tmp_path / at["path"]).read_text().splitlines()[at["line"] - 1] for code, at in places.items()}
    assert {code: line.partition("#")[2].strip() for code, line in lines.items()} == comments


def test_a_function_is_named_with_its_module_and_a_file_by_the_end_of_its_path(monkeypatch) -> None:
    monkeypatch.delenv("_DDPCHECK_FUNCTIONS", raising=False)
    tools, reduce = "/home/x/lab/tools.py", "/home/x/comm/reduce.py"
    in_wrapper = [(tools, "Comm.mean"), (tools, "Comm.mean.<locals>.<lambda>"), (tools, "mean"), (reduce, "anything")]
    outside = [(tools, "Comm.means"), ("/home/x/lab/tool.py", "Comm.mean"), (f"{reduce}/train.py", "main")]
    named_functions.set_named_functions(("lab.tools.Comm.mean", "comm/reduce.py"), "")
    try:
        assert [named_functions.is_wrapper(*frame) for frame in in_wrapper + outside] == [True] * 4 + [False] * 3
    finally:
        named_functions.set_named_functions((), "")
    assert not named_functions.is_wrapper(tools, "Comm.mean")
