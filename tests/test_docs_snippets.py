"""Snippets of the documentation that are of no example run as they stand, with a small model for the user's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddpcheck import cli
from tests.readme import DOCS, README, ROOT
from tests.test_docs import snippets

# Names that a snippet takes from the program around it.
AROUND = """
import sys
sys.path.insert(0, "examples/pytest")
import pytest, torch, ddpcheck
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from ddpcheck import CheckedDistributedDataParallel
from metric import mean_over_ranks

class Net(nn.Linear):
    def __init__(self):
        super().__init__(4, 2)
        self.frozen_head = nn.Linear(4, 2).requires_grad_(False)

MyModel = Net
def make_batch(step):
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
def compute_loss(model, x):
    return model(x).square().mean()
def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        compute_loss(model, make_batch(step)).backward()
        optimizer.step()
recipe = ddpcheck.Recipe(model=Net, batch=make_batch, loss=compute_loss)
"""
ON_RANKS = """
torch.manual_seed(0)
model = DistributedDataParallel(Net())
compute_loss(model, make_batch(0)).backward()
loss = compute_loss(model, make_batch(1))
"""


PROJECT = """
import torch
def Net():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3))
def load_samples(step, count):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(count, 3, 4, generator=generator), torch.randint(3, (count,), generator=generator)
"""


def run(code: str, prepare: str = "") -> dict[str, Any]:
    """The names that a snippet leaves behind; a CPU has no devices to name."""
    names: dict[str, Any] = {"__name__": "snippet"}
    exec(AROUND + prepare + code.replace(", device_ids=[local_rank]", ""), names)
    return names


def run_on_a_rank(code: str) -> None:
    run(code, ON_RANKS)  # whose names cannot be sent


def of(page: str, words: str) -> str:
    """The snippet of a page that has these words."""
    (code,) = (code for code, origin in snippets(DOCS / page, "python") if words in code and not origin)
    return code


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


IN_A_PROCESS = [
    ("report.md", "raise_for_findings"),
    ("assertions.md", "assert_parity"),
    ("testing.md", "ddpcheck.World("),
]


@pytest.mark.parametrize(
    ("page", "words"), [*IN_A_PROCESS, pytest.param("matrix.md", "check_matrix", marks=pytest.mark.slow)]
)
def test_a_snippet_runs_in_a_process(page: str, words: str) -> None:
    run(of(page, words), "function, argument = (lambda x: x), 1\n")


ON_RANKS_OF = (
    ("assertions.md", "assert_no_anomalous_params"),
    ("troubleshooting.md", "assert_same_on_all_ranks"),
    ("launchers.md", "init_dist()"),
    ("launchers.md", "master_only"),
    ("wrapper.md", "from ddpcheck import Checked"),
    ("wrapper.md", "watch.compare"),
    ("wrapper.md", "find_unused_parameters=True"),
)


def test_snippets_run_on_ranks(ddp_world: Any) -> None:
    codes = [of(page, words) for page, words in ON_RANKS_OF]
    codes += [code for code, _ in snippets(README, "python") if "CheckedDistributedDataParallel" in code][:1]
    assert len(codes) == len(ON_RANKS_OF) + 1
    for code in codes:
        ddp_world.run(run_on_a_rank, code)


def test_the_first_recipe_and_the_first_test_pass(ddp_world: Any, tmp_path: Path, capsys) -> None:
    (tmp_path / "my_project.py").write_text(PROJECT)
    (tmp_path / "check_my_model.py").write_text(of("start.md", "# check_my_model.py"))
    assert cli.main(["report", str(tmp_path / "check_my_model.py")]) == 0
    assert "clean: 6 checks passed" in capsys.readouterr().out
    code = of("start.md", "def test_the_").replace("from check_my_model import batch, loss, model\n", "")
    names = run(code, "model, batch, loss = Net, make_batch, compute_loss\n")
    names["test_the_model_is_right_under_ddp"](ddp_world)


def test_the_test_in_the_readme_passes(ddp_world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = next(code for code, _ in snippets(Path(README), "python") if "def test_" in code)
    test = run(code)["test_my_model_is_right_under_ddp"]
    around = AROUND.replace("from metric import mean_over_ranks", "")
    (tmp_path / "check_net.py").write_text(f"{around}\nmodel, batch, loss = Net, make_batch, compute_loss\n")
    monkeypatch.chdir(tmp_path)
    test(ddp_world)
