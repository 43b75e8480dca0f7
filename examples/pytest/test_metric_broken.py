"""What failing tests look like: `pytest examples/pytest/test_metric_broken.py`."""

import pytest
import torch
from metric import mean_of_means, mean_where_there_is_something

import ddpcheck


@pytest.mark.ddp
def test_a_mean_of_means(rank):
    values = torch.arange(3.0) if rank == 0 else torch.tensor([9.0])
    assert mean_of_means(values) == 3.0


@pytest.mark.ddp
def test_a_rank_that_stays_away(rank):
    mean_where_there_is_something(torch.arange(3.0) if rank == 0 else torch.tensor([]))


@pytest.mark.ddp
def test_a_rank_that_fails_alone(rank):
    samples = {"train": 60, "test": 10 - rank}
    assert samples == {"train": 60, "test": 10}
    torch.distributed.barrier()


@pytest.mark.ddp(world_size=3)
def test_gradients_that_one_rank_clips(rank):
    gradients = [torch.full((4, 4), 0.5), torch.tensor([0.25, 2.0]), torch.tensor([0.0, 4.0])]
    if rank == 1:
        gradients = [gradient.clamp(max=1.0) for gradient in gradients]
    ddpcheck.assert_same_on_all_ranks(gradients, name="gradients")
