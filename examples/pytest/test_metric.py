"""Tests on real ranks, in both ways: `pytest examples/pytest/test_metric.py`."""

import pytest
import torch
from metric import mean_over_ranks

import ddpcheck


@pytest.fixture
def everything():  # set up once, in the process that pytest runs in, and sent to every rank
    return torch.arange(10.0)


@pytest.fixture
def mine(everything, rank, world_size):  # uses the rank, so every rank sets it up for itself
    return everything[rank::world_size]


@pytest.mark.ddp(world_size=[1, 2, 3])
def test_the_mean_is_that_of_all_values(mine, everything):  # the body runs on every rank
    mean = mean_over_ranks(mine)
    assert mean == everything.mean().item()
    ddpcheck.assert_same_on_all_ranks(mean)


def test_a_rank_may_have_no_value(ddp_world):  # the body runs here, and a function on every rank
    def mean_of_rank_0(values):
        return mean_over_ranks(values if torch.distributed.get_rank() == 0 else values[:0])

    assert ddp_world.run(mean_of_rank_0, torch.arange(4.0)) == [1.5, 1.5]


def test_the_model_is_right_under_ddp(ddp_world):
    def batch(step):
        return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))

    ddp_world.check(
        ddpcheck.Recipe(
            model=lambda: torch.nn.Linear(4, 2), batch=batch, loss=lambda model, batch: model(batch).square().mean()
        )
    )
