"""Recipes whose communication hook leaves something else than the average: what is compared, and what is told of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from ddpcheck.findings.report import Report
from ddpcheck.recipe.recipe import Recipe
from ddpcheck.report.checking.check import check


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return cast(Tensor, (model(batch)[:, 0] - batch.sum(1)).square().mean())


def hooked(state: Callable[[], Any], hook: Any) -> Callable[[nn.Module, torch.device], nn.Module]:
    def wrap(module: nn.Module, device: torch.device) -> nn.Module:
        wrapped = DistributedDataParallel(module)
        wrapped.register_comm_hook(state(), hook)
        return wrapped

    return wrap


local_sgd = hooked(lambda: PostLocalSGDState(None, dist.new_subgroups(group_size=1)[0], 2), post_localSGD_hook)
unreduced = hooked(lambda: None, noop_hook)


def averaged(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return PostLocalSGDOptimizer(torch.optim.SGD(parameters, lr=0.1, momentum=0.9), PeriodicModelAverager(2, 2))


class Averaging(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        super().step(closure)


def report_on(wrap: Any, optimizer: Any = None) -> Report:
    recipe = Recipe(model=model, batch=batch, loss=loss, wrap=wrap, optimizer=optimizer)
    return check(recipe, steps=5, timeout=20)


def line(report: Report, name: str) -> tuple[str, str]:
    return next((check.status, check.detail) for check in report.checks if check.name == name)


@pytest.mark.slow
def test_post_local_sgd_is_compared_until_it_begins_and_its_parameters_where_they_are_averaged() -> None:
    report = report_on(local_sgd, averaged)
    assert report.findings == ()
    assert line(report, "reducer") == (
        "skipped",
        "8 gradients in steps 0 and 1 equal the average of the ranks' own, and each other; not compared from step 2 "
        "on: post_localSGD_hook averages over fewer ranks, and the parameters are the same on every rank after steps "
        "2 and 4",
    )
    assert {entry.step for entry in report.parity if entry.reference == "local"} == {0, 1}


@pytest.mark.slow
def test_gradients_that_the_optimizer_averages_are_not_compared() -> None:
    report = report_on(unreduced, lambda parameters: Averaging(parameters, lr=0.1))
    assert report.findings == ()
    status, why = line(report, "reducer")
    assert status == "skipped" and why.startswith("not compared: noop_hook leaves each rank its own gradients")
    report = report_on(unreduced)
    assert ([finding.code for finding in report.findings], line(report, "reducer")[0]) == (["DDP301"], "failed")
