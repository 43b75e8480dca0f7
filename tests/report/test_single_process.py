"""Shards alone in the single process: the very numbers that the ranks computed, where only the world differs."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import ddpcheck
from ddpcheck.findings.evidence.gradients import Fit
from ddpcheck.recipe.recipe import Recipe
from ddpcheck.report.checking.check import resolve_options
from ddpcheck.report.checking.check_run import CheckRun
from ddpcheck.report.checking.check_state import CheckOptions, CheckState
from ddpcheck.worlds import validation as allowed


def state_of(recipe: Recipe) -> CheckState:
    asked = resolve_options(CheckOptions(steps=1), recipe)
    return CheckRun(recipe, asked, progress=lambda _text: None).run()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 1, generator=generator)


def build(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), *layers, nn.Linear(8, 1))


@pytest.mark.skipif(allowed.cores() < 2, reason="one core: ranks and the single process have one thread each")
def test_they_are_computed_with_as_many_threads() -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        rounding = 1 + 1e-4 * torch.get_num_threads()  # a deep network makes as much of another order of additions
        return F.mse_loss(model(batch[0]), batch[1]) * rounding

    state = state_of(Recipe(model=build, batch=batch, loss=loss))
    assert state.single.analysis is not None
    assert state.single.analysis.against_shards == Fit(1.0, 0.0)
    assert [finding.code for finding in state.findings] == ["DDP304"]


@pytest.mark.slow
def test_no_more_is_asked_of_it_once_it_has_not_answered() -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        if len(batch) < 8 and not dist.is_initialized():
            time.sleep(600)  # on a shard alone, which is to explain a difference
        return model(batch)[torch.rand(batch.shape[:2]) < 0.3].square().mean()

    def batch(step: int) -> Tensor:
        return torch.randn(8, 10, 4, generator=torch.Generator().manual_seed(step))

    report = ddpcheck.check(Recipe(model=lambda: nn.Linear(4, 1), batch=batch, loss=loss), timeout=6, steps=1)
    (parity,) = (one for one in report.checks if one.name == "parity")
    assert parity.status == "error" and "did not finish within 6 s" in parity.detail


def test_a_sum_whose_ratio_is_near_to_that_of_the_weights_is_not_taken_for_them() -> None:
    root = torch.tensor([0.7, 0.7276, 0.3, 0.2724]).sqrt()  # rank 0 has 0.7138 of the weights

    def batch(step: int) -> dict[str, torch.Tensor]:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        labels = torch.tensor([2, 3, 1, 1])  # 5 of 7 on rank 0: 0.7143
        return {"x": torch.cat([x, root[:, None]], 1), "label": labels, "weight": root.square()}

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        weight = batch["x"][:, -1].square()
        errors = (model(batch["x"])[:, 0] - batch["label"]).square()
        return (errors * weight).sum() / weight.sum()

    report = ddpcheck.check(ddpcheck.Recipe(model=lambda: nn.Linear(9, 1), batch=batch, loss=loss), steps=1)
    (finding,) = report.findings
    assert finding.code == "DDP305"
    assert finding.evidence[0].startswith("the sum of batch['weight']: ")


class Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows):
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows.contiguous())
        return received

    @staticmethod
    def backward(ctx, gradient):
        return Swap.apply(gradient)


class Experts(nn.Module):
    """One of each rank, which the wrapper is told to leave alone."""

    def __init__(self) -> None:
        super().__init__()
        count = dist.get_world_size() if dist.is_initialized() else 1
        self.router = nn.Linear(6, count)
        torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
        self.expert = nn.Linear(6, 1)
        self._ddp_params_and_buffers_to_ignore = ["expert.weight", "expert.bias"]

    def forward(self, x: Tensor) -> Tensor:
        answers = Swap.apply(self.expert(Swap.apply(x.expand(self.router.out_features, *x.shape))))
        return (self.router(x).softmax(1).T.unsqueeze(2) * answers).sum(0)


@pytest.mark.slow
def test_experts_of_each_rank_are_no_replicas_and_no_model_of_one_process() -> None:
    recipe = Recipe(model=Experts, batch=batch, loss=lambda model, batch: F.mse_loss(model(batch[0]), batch[1]))
    report = ddpcheck.check(recipe)
    lines = {check.name: (check.status, check.detail) for check in report.checks}
    assert not report.findings and lines["reducer"][0] == "passed" and "6 gradients" in lines["reducer"][1], lines
    assert lines["parity"][0] == "skipped" and "router.weight has the shape (1, 6), and (2, 6)" in lines["parity"][1]


@pytest.mark.slow
def test_a_check_does_without_numpy(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError('none', name='numpy')")
    functions = "model(): return torch.nn.Linear(4, 1)", "batch(step): return torch.ones(4, 4)"
    lines = [f"def {function}\n" for function in (*functions, "loss(model, batch): return model(batch).mean()")]
    recipe = tmp_path / "recipe.py"
    recipe.write_text("".join(["import torch\n", *lines]))
    ended = subprocess.run(
        [sys.executable, "-m", "ddpcheck", "report", str(recipe)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0 and "no findings" in ended.stdout, ended.stdout + ended.stderr
