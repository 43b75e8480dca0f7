"""Recorder of random draws of a dataset, in this process or in workers.

The states of the global generators, and of the dataset's own, are recorded before the samples of a batch are made and
before collation: draws in `collate_fn` may be for the whole batch, and equal on all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.sharedctypes import RawArray
from typing import Any

from torch.utils.data import get_worker_info

from ddpcheck.findings.source_lines import defined_at
from ddpcheck.findings.tracebacks import forwards_calls
from ddpcheck.record.data.constructions import (
    available_generators,
    digest_of_generators,
    generator_attributes,
    generator_state,
)
from ddpcheck.record.source.source_scope import assignment_in_program

HELD = "held"
GENERATORS = (HELD, "torch", "python", "numpy")

_NUMBERS = 2 * len(GENERATORS)  # per batch: states before and after


class SampleDraws:
    """Random draws in the first batches of a data loader iterator, per worker.

    Its methods replace the loader's `collate_fn` and `worker_init_fn`, so that workers get the object. Workers write to
    memory that is shared with this process, before they return the batch.
    """

    def __init__(self, loader: Any, batches: int) -> None:
        # line that defines `worker_init_fn`, which may seed the workers; or None
        self.seeded = None if loader.worker_init_fn is None else defined_at(loader.worker_init_fn)
        generators = generator_attributes(loader.dataset)
        # line that assigns the dataset's first own generator
        self.held_at = assignment_in_program(generators[0][0]) if generators else None
        self._workers = int(loader.num_workers)
        self._generators = [] if self._workers else [generator for _, generator in generators]
        self._most_batches = batches  # number of batches recorded per process
        self._collate, self._init_worker = loader.collate_fn, loader.worker_init_fn
        count = max(1, self._workers) * batches * _NUMBERS
        self._recorded_states: Any = RawArray("q", count) if self._workers else [0] * count
        self._batch_indices: list[int] = []  # indices in `_recorded_states` of the next batches of this process
        self._states_before: Sequence[int] = ()

    @contextlib.contextmanager
    def recording(self, loader: Any) -> Iterator[None]:
        """Replace `collate_fn` and `worker_init_fn` of `loader` while the `with` block creates an iterator."""
        loader.collate_fn, loader.worker_init_fn = self._recording_collate, self._begin_worker
        try:
            yield
        finally:
            loader.collate_fn, loader.worker_init_fn = self._collate, self._init_worker

    def begin(self, number: int) -> None:
        """Record the generator states before batch `number`, unless workers make the batches."""
        if not self._workers and number < self._most_batches:
            self._begin_batches([number])

    def batch_states(self, number: int) -> Mapping[str, tuple[int, int]]:
        """Return (state before, state after) batch `number` for each generator that the batch used."""
        worker, index = (number % self._workers, number // self._workers) if self._workers else (0, number)
        begin = (worker * self._most_batches + index) * _NUMBERS
        recorded = self._recorded_states[begin : begin + _NUMBERS] if index < self._most_batches else []
        pairs = zip(GENERATORS, recorded[::2], recorded[1::2], strict=False)
        return {name: (before, after) for name, before, after in pairs if before != after}

    def _begin_batches(self, indices: list[int]) -> None:
        self._batch_indices = indices
        self._states_before = self._states() if indices else ()

    def _states(self) -> list[int]:
        return [digest_of_generators(self._generators), *(generator_state(name)[0] for name in available_generators())]

    @forwards_calls
    def _begin_worker(self, worker: int) -> None:
        if self._init_worker is not None:
            self._init_worker(worker)
        with contextlib.suppress(Exception):  # an error in ddpcheck, which a worker cannot report
            self._generators = [g for _, g in generator_attributes(getattr(get_worker_info(), "dataset", None))]
            self._begin_batches(list(range(worker * self._most_batches, (worker + 1) * self._most_batches)))

    @forwards_calls
    def _recording_collate(self, samples: Any) -> Any:
        with contextlib.suppress(Exception):
            self._record_states()
        batch = self._collate(samples)
        with contextlib.suppress(Exception):
            self._begin_batches(self._batch_indices[1:])
        return batch

    def _record_states(self) -> None:
        if self._states_before:
            begin = self._batch_indices[0] * _NUMBERS
            states = [state for pair in zip(self._states_before, self._states(), strict=False) for state in pair]
            self._recorded_states[begin : begin + len(states)] = states
