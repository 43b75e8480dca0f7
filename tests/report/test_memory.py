"""The memory of a check: no second copy of a large model stays in the memory of any process."""

import sys

import pytest
import torch
from torch import nn

from benchmarks.memory import measure, small
from ddpcheck.gather.state.tensor_file import LARGE
from ddpcheck.recipe.recipe import Recipe

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

PLAIN_DDP = 2 * 12
"""Bytes a float32 parameter on 2 ranks: itself, its gradient and its place in a bucket."""

ONE_COPY = 4


@pytest.mark.exhaustive
def test_a_check_needs_no_more_than_plain_ddp() -> None:
    def model() -> nn.Module:  # most of it one tensor, of which no part is let go of before the rest
        layers = (nn.Sequential(nn.Linear(2048, 2048), nn.Tanh(), nn.Dropout(0.1)) for _ in range(2))
        return nn.Sequential(nn.Embedding(32_000, 2048), *layers)

    def batch(step: int) -> torch.Tensor:
        return torch.randint(32_000, (4, 8), generator=torch.Generator().manual_seed(step))

    base = small()  # first, so that the fork servers are there
    figures = measure(Recipe(model=model, batch=batch, loss=lambda model, x: model(x).square().mean()))
    assert figures.parameters * 4 > LARGE
    private, _ = figures.per_parameter(base)
    assert PLAIN_DDP - ONE_COPY < private < PLAIN_DDP + ONE_COPY, figures.peaks
