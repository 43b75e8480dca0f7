"""The epoch that a sampler is at, and whether it would give another order in another one: a copy of it is asked."""

from __future__ import annotations

import contextlib
import copy
import itertools
from typing import Any

from torch.utils.data import Dataset

from ddpcheck.gather.collectives.collective_log import unlogged
from ddpcheck.gather.collectives.fake_collectives import alone
from ddpcheck.gather.state.randomness import generators_kept

_MOST_INDICES = 1 << 16  # of an order


def epoch_of(sampler: Any) -> int:
    """The epoch that a sampler is at, by its `epoch`, as torch's have it; negative where it does not say."""
    value = getattr(sampler, "epoch", None)
    return value if type(value) is int else -1


def shuffles_by_epoch(sampler: Any, dataset: Any) -> bool:
    """Whether a sampler gives another order in another epoch; that is not said where a copy of it cannot be asked.

    Two copies go through their orders, which is the user's code: it is only done where something is wrong with the
    orders that were seen. They share the dataset with the sampler, and draw the same random numbers, which the program
    is given again; their collectives are answered as if all ranks said the same.
    """
    shared = [dataset, *(one for one in getattr(sampler, "__dict__", {}).values() if isinstance(one, Dataset))]
    orders = []
    for epoch in (0, 1):
        with contextlib.suppress(Exception), generators_kept(), unlogged(), alone():  # of the user's
            copied = copy.deepcopy(sampler, {id(one): one for one in shared})
            _set_epoch(copied, epoch)
            orders.append(list(itertools.islice(copied, _MOST_INDICES)))
    return len(orders) > 1 and orders[0] != orders[1]


def _set_epoch(sampler: Any, epoch: int) -> None:
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    else:
        sampler.epoch = epoch
