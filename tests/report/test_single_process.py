"""Shards alone in the single process: the very numbers that the ranks computed, where only the world differs."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpcheck.findings.evidence.single_process import Fit
from ddpcheck.recipe.recipe import Recipe
from ddpcheck.report.checking.check import resolve_options
from ddpcheck.report.checking.check_run import CheckRun
from ddpcheck.report.checking.check_state import CheckState
from ddpcheck.worlds import validation as allowed


def state_of(recipe: Recipe) -> CheckState:
    asked = resolve_options(recipe, world_size=2, backend=None, device="cpu", steps=1, timeout=30, seed=0, preload=())
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


def test_their_losses_are_compared_with_those_of_the_ranks_without_dropout() -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    state = state_of(Recipe(model=lambda: build(nn.Dropout(0.5)), batch=batch, loss=loss))
    assert state.single.analysis is not None
    assert state.single.analysis.shard_losses == tuple(item.loss for item in state.steps.local)
