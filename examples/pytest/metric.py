"""A metric over all ranks, as a training loop of your own may have one: right, and in two ways wrong."""

import torch
import torch.distributed as dist


def mean_over_ranks(values):
    """The mean of the values of all ranks, however many each of them has."""
    sum_and_count = torch.tensor([values.sum(), len(values)])
    dist.all_reduce(sum_and_count)
    return (sum_and_count[0] / sum_and_count[1]).item()


def mean_of_means(values):
    """Wrong where ranks have different numbers of values."""
    mean = values.mean()
    dist.all_reduce(mean)
    return (mean / dist.get_world_size()).item()


def mean_where_there_is_something(values):
    """Hangs where a rank has nothing: the others wait for it in all_reduce."""
    return mean_over_ranks(values) if len(values) else float("nan")
