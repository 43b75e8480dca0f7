"""Random numbers that a dataset draws for its samples: measured where it does, in this process or in a worker."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ddpcheck.record.data.sample_draws import SampleDraws


class Jitter:
    def __init__(self, generator: Any, draw: Callable[[Any], object]) -> None:
        self.generator, self._draw = generator, draw

    def draw(self) -> None:
        self._draw(self.generator)


KINDS: dict[str, Callable[[], Jitter]] = {
    "RandomState": lambda: Jitter(numpy.random.RandomState(1), numpy.random.RandomState.rand),
    "default_rng": lambda: Jitter(numpy.random.default_rng(1), numpy.random.Generator.random),
    "Random": lambda: Jitter(random.Random(1), random.Random.random),
    "Generator": lambda: Jitter(torch.Generator().manual_seed(1), _torch_state),
}


def _torch_state(generator: torch.Generator) -> Tensor:
    return torch.rand(1, generator=generator)


class Samples(Dataset[torch.Tensor]):
    def __init__(self, kind: str = "") -> None:
        self.kind = kind
        self.transforms = [self, KINDS[kind]()] if kind in KINDS else []

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.kind == "torch":
            return torch.randn(2)
        if self.kind == "python":
            random.random()
        elif self.kind == "numpy":
            numpy.random.rand()
        elif self.kind in KINDS:
            self.transforms[1].draw()
        elif self.kind == "own":
            torch.randn(2, generator=torch.Generator())
        return torch.zeros(2)


def sized(samples: list[torch.Tensor]) -> torch.Tensor:
    """A size for the batch, which all ranks draw alike."""
    return torch.stack(samples) * torch.randint(4, ())


def drawn(dataset: Samples, **more: Any) -> list[Mapping[str, tuple[int, int]]]:
    loader = DataLoader(dataset, batch_size=2, **more)
    functions = loader.collate_fn, loader.worker_init_fn
    draws = SampleDraws(loader, 3)
    with draws.recording(loader):
        iterator = iter(loader)
    assert (loader.collate_fn, loader.worker_init_fn) == functions
    found = []
    for number in range(4):
        torch.rand(1)  # of the step
        draws.begin(number)
        next(iterator)
        found.append(draws.batch_states(number))
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 2])
def test_draws_from_a_generator_that_a_transform_holds(kind: str, workers: int) -> None:
    found = drawn(Samples(kind), num_workers=workers)
    assert [list(of_batch) for of_batch in found] == [["held"]] * 3 + [["held"] if workers else []]
    assert len({states for of_batch in found for states in of_batch.values()}) == (2 if workers else 3)


@pytest.mark.parametrize("kind", ["torch", "python", "numpy"])
@pytest.mark.parametrize("workers", [0, 2])
def test_draws_for_samples(kind: str, workers: int) -> None:
    found = drawn(Samples(kind), num_workers=workers)
    assert [list(of_batch) for of_batch in found] == [[kind]] * 3 + [[kind] if workers else []]
    assert len({states for of_batch in found for states in of_batch.values()}) == (4 if workers else 3)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("dataset", [Samples(), Samples("own")])
def test_what_is_drawn_for_a_batch_is_not_drawn_for_samples(dataset: Samples, workers: int) -> None:
    assert not any(drawn(dataset, num_workers=workers, collate_fn=sized))
