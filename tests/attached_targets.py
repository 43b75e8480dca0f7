"""Recipes for `test_attached_report`: healthy, broken, and such that a rank is lost on the way."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ddpcheck


def recipe(happens: Callable[[], Any] = lambda: None, **options: Any) -> ddpcheck.Recipe:
    """A small model; something happens in its loss, in the step through the wrapper too."""

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        happens()
        return model(batch).square().mean()

    parts: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)),
        "batch": lambda step: torch.randn(8, 4),
        "loss": loss,
    }
    return ddpcheck.Recipe(**{**parts, **options})


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else -1


def healthy() -> ddpcheck.Recipe:
    return recipe()


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(4, 2)
        self.left_over = nn.Linear(4, 2)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.used(values)


def unused() -> ddpcheck.Recipe:
    return recipe(model=Unused)


def raises_on_1() -> ddpcheck.Recipe:
    def happens() -> None:
        if rank() == 1:
            raise ValueError("no sample of class 3 on this rank")

    return recipe(happens)


def out_of_step() -> ddpcheck.Recipe:
    def happens() -> None:
        if rank() == 0:
            dist.all_reduce(torch.ones(1))

    return recipe(happens)


def killed_on_1() -> ddpcheck.Recipe:
    return recipe(lambda: os.kill(os.getpid(), signal.SIGKILL) if rank() == 1 else None)


def exits_on_0() -> ddpcheck.Recipe:
    return recipe(lambda: os._exit(7) if rank() == 0 else None)


def hangs_on_1() -> ddpcheck.Recipe:
    return recipe(lambda: time.sleep(600) if rank() == 1 else None)


def prints() -> ddpcheck.Recipe:
    return recipe(lambda: print("printed by the target", os.environ["RANK"], flush=True))


def no_recipe() -> ddpcheck.Recipe:
    raise RuntimeError("the data set is not there")
