"""Whether a sampler gives another order in another epoch: a copy of it is asked."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import Dataset, DistributedSampler, Sampler

from ddpcheck.findings.evidence.script import LoaderPass
from ddpcheck.findings.report import Location
from ddpcheck.record.data.datasets import epoch_of, shuffles_by_epoch
from ddpcheck.rules.data.loaders import judge_loaders


class Own(Sampler[int]):
    def __init__(self, *, mixes: bool = True) -> None:
        self.mixes, self.epoch = mixes, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if not self.mixes:
            return iter(range(8))
        return iter(torch.randperm(8, generator=torch.Generator().manual_seed(self.epoch)).tolist())


class ByMethod(Sampler[int]):
    def __init__(self, switch: object = True) -> None:
        self.switch, self._turn = switch, 3

    def set_epoch(self, epoch: int) -> None:
        self._turn = epoch

    def _order(self) -> list[int]:
        order = list(range(8))
        if self.switch:
            random.Random(7 + self._turn).shuffle(order)
        return order

    def __iter__(self) -> Iterator[int]:
        yield from self._order()


class Global(Sampler[int]):
    """Of torch's own random numbers, and without set_epoch; it holds what cannot be copied."""

    def __init__(self) -> None:
        self.epoch = 0
        self.dataset = Uncopied()

    def __iter__(self) -> Iterator[int]:
        torch.manual_seed(self.epoch)
        yield from torch.randperm(8).tolist()


class Uncopied(Dataset[int]):
    def __deepcopy__(self, memo: object) -> Uncopied:
        raise RuntimeError


class Fixed(Sampler[int]):
    """One order for the whole run, whatever the epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(0).sample(range(8), 8))


class ByLength(Sampler[int]):
    """No draws; it only says where it is."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        print(f"epoch {self.epoch}")
        return iter(sorted(range(8), key=lambda n: n % 3))


@pytest.mark.parametrize(
    ("sampler", "shuffles"),
    [
        (Own(), True),
        (Own(mixes=False), False),
        (ByMethod(), True),
        (ByMethod(False), False),
        (ByMethod([1]), True),
        (Fixed(), False),
        (ByLength(), False),
        (DistributedSampler(range(8), 2, 0), True),  # type: ignore[arg-type]
        (DistributedSampler(range(8), 2, 0, shuffle=False), False),  # type: ignore[arg-type]
        (Global(), True),
        ([3, 1, 2], False),
    ],
)
def test_what_gives_another_order_in_another_epoch(sampler: object, shuffles: bool) -> None:
    epoch, states = epoch_of(sampler), (torch.get_rng_state(), random.getstate())
    assert shuffles_by_epoch(sampler, ()) == shuffles
    assert epoch_of(sampler) == epoch
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]


def test_the_epoch_of_a_sampler() -> None:
    assert [epoch_of(one) for one in (Own(), ByMethod(), [1], DistributedSampler(range(8), 2, 0))] == [0, -1, -1, 0]  # type: ignore[arg-type]


def test_an_own_sampler_that_is_told_of_no_epoch() -> None:
    def ranks(*epochs: int, has_epoch: bool = True) -> list[list[LoaderPass]]:
        return [
            [
                LoaderPass(
                    *(0, n, Location("train.py", 30), "Photos", 8, {"x": 7}, 4, 1, type(Own()).__name__, True, False),
                    has_epoch=has_epoch,
                    batches=4,
                    exhausted=True,
                    trains=True,
                    order=rank + 1,
                    indices=part,
                    epoch=number,
                )
                for n, number in enumerate(epochs)
            ]
            for rank, part in enumerate([(4, 0, 6, 2), (7, 3, 1, 5)])
        ]

    (finding,) = judge_loaders(ranks(0, 0, 0))
    assert finding.code == "DDP506" and not finding.fix
    (finding,) = judge_loaders(ranks(0, 0, has_epoch=False))
    assert finding.fix.startswith("Set the epoch of the sampler")
    assert not judge_loaders(ranks(0, 1, 2))  # told, and it has few orders
