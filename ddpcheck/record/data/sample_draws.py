"""The random numbers that a dataset draws for its samples, where it draws them: in this process, or in a worker.

The states of the global generators, and of those that the dataset holds, are noted before the samples of a batch are
made, and when they are put together: what `collate_fn` draws after that may be for the batch, and alike on all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.sharedctypes import RawArray
from typing import Any

from torch.utils.data import get_worker_info

from ddpcheck.findings.source_lines import defined_at
from ddpcheck.findings.tracebacks import passes_on
from ddpcheck.record.data.generator_history import generators_there, held_generators, state_of, state_of_held
from ddpcheck.record.source.source_scope import assignment_in_program

HELD = "held"
GENERATORS = (HELD, "torch", "python", "numpy")

_NUMBERS = 2 * len(GENERATORS)  # of a batch: the states before, and after


class SampleDraws:
    """What is drawn for the first batches of an iterator over a loader; of each of its workers, where it has some.

    It travels to the workers, forked or spawned, with the two functions of the loader that they call. What they note is
    in memory that they share with this process, and is there before the batch is.

    Attributes:
        seeded: The function that may seed the workers, where they have one.
        held_at: The line that assigns the first of the generators that the dataset holds.
    """

    def __init__(self, loader: Any, batches: int) -> None:
        """Begin; of each process that makes batches, so many are looked at."""
        self.seeded = None if loader.worker_init_fn is None else defined_at(loader.worker_init_fn)
        held = held_generators(loader.dataset)
        self.held_at = assignment_in_program(held[0][0]) if held else None
        self._workers = int(loader.num_workers)
        self._held = [] if self._workers else [one for _, one in held]
        self._most = batches
        self._collate, self._init_worker = loader.collate_fn, loader.worker_init_fn
        count = max(1, self._workers) * batches * _NUMBERS
        self._noted: Any = RawArray("q", count) if self._workers else [0] * count
        self._places: list[int] = []  # of the batches that this process is about to make
        self._before: Sequence[int] = ()

    @contextlib.contextmanager
    def followed(self, loader: Any) -> Iterator[None]:
        """An iterator that the loader makes in the block calls ours in the place of its functions."""
        loader.collate_fn, loader.worker_init_fn = self._put_together, self._begin_worker
        try:
            yield
        finally:
            loader.collate_fn, loader.worker_init_fn = self._collate, self._init_worker

    def begin(self, number: int) -> None:
        """A batch is about to be taken, of which this number were before; without workers, this process makes it."""
        if not self._workers and number < self._most:
            self._begin([number])

    def of(self, number: int) -> Mapping[str, tuple[int, int]]:
        """Of such a batch, which is there: by generator that was drawn from, its states before and after."""
        worker, place = (number % self._workers, number // self._workers) if self._workers else (0, number)
        begin = (worker * self._most + place) * _NUMBERS
        noted = self._noted[begin : begin + _NUMBERS] if place < self._most else []
        pairs = zip(GENERATORS, noted[::2], noted[1::2], strict=False)
        return {name: (before, after) for name, before, after in pairs if before != after}

    def _begin(self, places: list[int]) -> None:
        self._places = places
        self._before = self._states() if places else ()

    def _states(self) -> list[int]:
        """Digests of the generators from which augmentations draw."""
        return [state_of_held(self._held), *(state_of(name)[0] for name in generators_there())]

    @passes_on
    def _begin_worker(self, worker: int) -> None:
        if self._init_worker is not None:
            self._init_worker(worker)
        with contextlib.suppress(Exception):  # of ours, which nobody could be told in a worker
            self._held = [one for _, one in held_generators(getattr(get_worker_info(), "dataset", None))]
            self._begin(list(range(worker * self._most, (worker + 1) * self._most)))

    @passes_on
    def _put_together(self, samples: Any) -> Any:
        with contextlib.suppress(Exception):
            self._note()
        batch = self._collate(samples)
        with contextlib.suppress(Exception):
            self._begin(self._places[1:])
        return batch

    def _note(self) -> None:
        if self._before:
            begin = self._places[0] * _NUMBERS
            states = [state for pair in zip(self._before, self._states(), strict=False) for state in pair]
            self._noted[begin : begin + len(states)] = states
