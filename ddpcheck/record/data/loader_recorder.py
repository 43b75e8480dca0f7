"""Recorder of data loader passes: samples, their order, and random numbers."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
from array import array
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.utils import data
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.weak import WeakIdKeyDictionary

from ddpcheck.findings.evidence.script import LoaderPass
from ddpcheck.findings.replace import replace
from ddpcheck.findings.source_lines import user_location
from ddpcheck.gather.patching import Patch, Recorder, guarded, patched
from ddpcheck.gather.state.fingerprints import fingerprint
from ddpcheck.gather.steps.training_step import row_fingerprints
from ddpcheck.recipe.pytree import tree_tensors
from ddpcheck.record.data.constructions import construction_line, digest_before, restored_by, seed_line
from ddpcheck.record.data.datasets import (
    SampleRows,
    attribute_digests,
    copied_samples,
    digests_of,
    epoch_line,
    epoch_of,
    first_samples,
    has_changed_samples,
    length_before_slicing,
    length_of,
    persistent_workers_line,
    shuffles_by_epoch,
    uncollated,
)
from ddpcheck.record.data.sample_draws import HELD, SampleDraws
from ddpcheck.record.optimizers.schedule_recorder import ResumeRecorder
from ddpcheck.record.recording import Recording
from ddpcheck.record.replicas.tables import tables_of

_MOST_INDICES = 1 << 16  # max recorded indices of a pass
_MOST_PASSES = 3  # max passes with recorded samples
_MOST_ORDERS = 8  # max passes with recorded indices; of later passes only a digest
_MOST_KEPT = 64  # max batches copied until the next batch
_MOST_BATCHES = 3  # max batches per pass with recorded contents and random numbers
_MOST_ROWS = 16  # max recorded samples of a batch
_MOST_STEPS_OF_A_BATCH = 3  # max steps per batch in training, over all optimizers


@dataclass(slots=True)
class _Pass:
    entry: LoaderPass
    steps: int  # optimizer steps when the pass began
    map_style: bool
    order: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=8))
    batches: list[array[int]] = field(default_factory=list)
    num_indices: int = 0
    dataset: Any = None
    sampler: Any = None
    draws: SampleDraws | None = None  # first passes only
    rows: SampleRows = field(default_factory=SampleRows)
    steps_until: int = -1  # optimizer steps when a pass of another loader began after the last batch; -1 if none
    uses_before: int = -1  # optimizer steps plus forward passes when the pass began; -1 once a batch is used
    unused: list[ref[Any]] = field(default_factory=list)  # one tensor of each batch before the first use


class LoaderRecorder(Recorder, subjects=("data", "evaluation")):
    """Recorder of every `DataLoader` of this process."""

    def __init__(self, run: Recording, resumes: ResumeRecorder, on_pass: Callable[[LoaderPass, Any], object]) -> None:
        self._run = run
        self._on_pass = on_pass  # gets each pass and its dataset
        self._num_copied = 0
        self._resumes = resumes
        self._numbers: dict[tuple[Any, ...], list[int]] = {}  # [loader number, passes so far]
        self._passes: WeakKeyDictionary[Any, _Pass] = WeakKeyDictionary()
        self._orders: dict[int, list[int]] = {}  # digests of the orders of passes, by loader
        self._first_attributes: dict[int, dict[str, Any]] = {}  # dataset attributes at the first pass, by loader
        self._draws: WeakKeyDictionary[Any, SampleDraws | None] = WeakKeyDictionary()
        self._open: dict[int, _Pass] = {}  # by loader number
        self._datasets: Any = WeakIdKeyDictionary()  # keyed by id: a tensor dataset compares elementwise
        self._dataset_numbers = itertools.count()
        self._opening_pass: _Pass | None = None
        patched(data.DataLoader, "__iter__", self._record_iter)
        patched(_BaseDataLoaderIter, "_next_index", self._record_index)  # private to torch; if missing, no indices
        Patch(_BaseDataLoaderIter, "__next__", self._recording_next)

    def close(self) -> None:
        """End the open passes; called when the script ends."""
        for pass_ in list(self._open.values()):
            self._end_pass(pass_, exhausted=False)

    def _record_iter(self, loader: Any) -> Generator[None, Any, None]:
        outer = self._opening_pass
        self._opening_pass = pass_ = self._begin_pass(loader)
        draws = SampleDraws(loader, _MOST_BATCHES) if pass_.map_style and pass_.entry.number < _MOST_PASSES else None
        try:
            with contextlib.nullcontext() if draws is None else draws.recording(loader):
                iterator = yield
        finally:
            self._opening_pass = outer
        seed = getattr(iterator, "_base_seed", None)  # private to torch; if missing, worker seeds are not recorded
        if loader.num_workers and loader.worker_init_fn is None and isinstance(seed, int):
            pass_.entry = replace(pass_.entry, worker_seed=seed)
        with contextlib.suppress(TypeError):  # a subclass may return another iterator class
            pass_.draws = self._draws.setdefault(iterator, draws)  # persistent workers keep the iterator
            self._passes[iterator] = pass_

    def _record_index(self, iterator: Any) -> Generator[None, Any, None]:
        index = yield
        pass_ = self._opening_pass or self._passes.get(iterator)
        if pass_ is not None and pass_.map_style:
            _note_index(pass_, index)

    def _recording_next(self, original: Callable[..., Any]) -> Callable[..., Any]:
        note_taken, end = guarded(self._note_taken), guarded(self._end_pass)

        @functools.wraps(original)
        def __next__(iterator: Any) -> Any:
            pass_ = self._passes.get(iterator)
            if pass_ is None:
                return original(iterator)
            try:
                batch = original(iterator)
            except StopIteration:
                end(pass_, exhausted=True)
                raise
            note_taken(pass_, batch)
            return batch

        return __next__

    def _note_taken(self, pass_: _Pass, batch: Any) -> None:
        if pass_.entry.number < _MOST_PASSES:
            if pass_.entry.batches < _MOST_BATCHES:
                _note_batch(pass_, batch)
            pass_.rows.note(batch, len(next(iter(pass_.batches[pass_.entry.batches :]), ())))
        is_sampled = self._num_copied < _MOST_KEPT and any(watch.is_sampled for watch in self._run.watches)
        self._num_copied += is_sampled
        self._run.samples = copied_samples(batch) if is_sampled else []
        pass_.steps_until = -1
        if pass_.uses_before >= 0:
            self._follow_unused(pass_, batch)
        pass_.entry = replace(pass_.entry, batches=pass_.entry.batches + 1)
        self._run.position = pass_.entry.loader, pass_.entry.number, pass_.entry.batches
        self._run.batches[pass_.entry.loader] += 1
        self._run.log.count_batch(*self._run.position)
        self._run.taken = sum(open_pass.entry.batches for open_pass in self._open.values())

    def _follow_unused(self, pass_: _Pass, batch: Any) -> None:
        """Count skipped batches, which are freed before any forward pass or optimizer step.

        The batch before the first forward pass or step is not counted, since a copy of the batch may be in use.
        """

        def note_freed(_batch: object) -> None:
            if self._count_uses() == pass_.uses_before:
                pass_.entry = replace(pass_.entry, skipped=pass_.entry.skipped + 1)

        if self._count_uses() != pass_.uses_before:
            pass_.uses_before, pass_.unused = -1, []
            pass_.entry = replace(pass_.entry, skipped=min(pass_.entry.skipped, pass_.entry.batches - 1))
        elif (tensor := next(tree_tensors(batch), None)) is not None:
            pass_.unused.append(ref(tensor, guarded(note_freed)))

    def _count_uses(self) -> int:
        return self._run.steps + int(self._run.log.forwards)

    def _begin_pass(self, loader: Any) -> _Pass:
        location = user_location()
        map_style = not isinstance(loader.dataset, data.IterableDataset)
        size = length_of(loader.dataset) if map_style else -1
        base = _base_dataset(loader.dataset)[0]
        key = (location, construction_line(loader), type(loader.dataset), size)
        counts = self._numbers.setdefault(key, [len(self._numbers), 0])
        number, counts[1] = counts[1], counts[1] + 1
        self._interrupt_passes(counts[0])
        sampler = _innermost_sampler(loader)
        subset = loader.dataset.indices if type(loader.dataset) is data.Subset and not number else ()
        samples, has_samples = ({}, False) if number else first_samples(loader.dataset, size)
        state = attribute_digests(loader.dataset) if number < _MOST_PASSES else {}
        persistent = bool(getattr(loader, "persistent_workers", False))
        batch_sizes = (getattr(obj, "batch_size", None) for obj in (loader, getattr(loader, "batch_sampler", None)))
        entry = LoaderPass(
            loader=counts[0],
            number=number,
            location=location,
            dataset=type(base).__qualname__,
            size=size,
            digest=digests_of(base) if not number else {},
            expected=length_of(loader) if map_style else -1,
            batch_size=next((size for size in batch_sizes if isinstance(size, int) and size > 0), 1),
            sampler=type(sampler).__name__,
            shuffles=isinstance(sampler, data.RandomSampler) or bool(getattr(sampler, "shuffle", False)),
            replaces=bool(getattr(sampler, "replacement", isinstance(sampler, data.WeightedRandomSampler))),
            has_epoch=hasattr(sampler, "set_epoch"),
            draws_from_list=_selects_subset(sampler, size),
            wrappers=self._run.wrappers,
            data=self._number_of(loader.dataset),
            subset=tuple(map(int, subset[:_MOST_INDICES])) if len(subset) else (),
            built_at=construction_line(sampler) or construction_line(loader),
            subset_at=construction_line(loader.dataset) or construction_line(base),
            base_rows=length_before_slicing(base) if not number else 0,
            samples=samples,
            holds_samples=has_samples,
            earlier_draws=next(filter(None, map(digest_before, (base, loader.dataset, sampler, loader))), 0),
            replicas=sampler.num_replicas if isinstance(sampler, data.DistributedSampler) else 0,
            state=state,
            persistent=persistent,
            persistent_at=persistent_workers_line(line) if persistent and (line := construction_line(loader)) else None,
            outdated=persistent and map_style and self._is_outdated(loader.dataset, counts[0], state, size),
            epochs_at=epoch_line(),
            num_samples=length_of(sampler),
            total_size=dealt if type(dealt := getattr(sampler, "total_size", 0)) is int else 0,
            epoch=epoch_of(sampler),
            epoch_set_at=self._resumes.epoch_line(sampler),
            restored=self._resumes.restored,
            workers=int(getattr(loader, "num_workers", 0)),
        )
        if not number:
            for table in tables_of(base, location):
                self._run.add(table)
        self._open[counts[0]] = pass_ = _Pass(
            entry, self._run.steps, map_style, dataset=loader.dataset, sampler=sampler, uses_before=self._count_uses()
        )
        self._run.add(entry)
        self._on_pass(entry, loader.dataset)
        return pass_

    def _interrupt_passes(self, loader: int) -> None:
        """End a loader's previous pass, and mark open passes of other loaders as interrupted."""
        if (previous := self._open.pop(loader, None)) is not None:
            self._end_pass(previous, exhausted=False)
        for open_pass in self._open.values():
            open_pass.steps_until = self._run.steps if open_pass.steps_until < 0 else open_pass.steps_until

    def _is_outdated(self, dataset: Any, loader: int, state: Mapping[str, int], size: int) -> bool:
        """Return True if a dataset's samples have changed since its workers copied the dataset."""
        now = {name: vars(dataset)[name] for name in state}
        before = self._first_attributes.setdefault(loader, now)
        changed = {name: before[name] for name in before.keys() & now if before[name] != now[name]}
        return bool(changed) and has_changed_samples(dataset, size, changed)

    def _number_of(self, dataset: Any) -> int:
        with contextlib.suppress(TypeError):  # no weak references
            if dataset not in self._datasets:
                self._datasets[dataset] = next(self._dataset_numbers)
            return int(self._datasets[dataset])
        return -1

    def _end_pass(self, pass_: _Pass, *, exhausted: bool) -> None:
        if self._open.get(pass_.entry.loader) is pass_:
            del self._open[pass_.entry.loader]
        self._run.taken = sum(open_pass.entry.batches for open_pass in self._open.values())
        batches = pass_.batches[: pass_.entry.batches]
        indices = tuple(_base_index(pass_.dataset, index) for batch in batches for index in batch)
        order = int.from_bytes(pass_.order.digest(), "big") if pass_.map_style and exhausted else 0
        # a validation batch now and then, from an iterator that stays open, is not training
        steps = (self._run.steps if pass_.steps_until < 0 else pass_.steps_until) - pass_.steps
        trains = 0 < steps <= _MOST_STEPS_OF_A_BATCH * max(1, pass_.entry.batches)
        samples: dict[str, Any] = {n: tuple(getattr(pass_.rows, n)) for n in ("rows", "labels", "classes", "targets")}
        shuffles = pass_.entry.shuffles or (trains and self._would_shuffle(pass_, order))
        ended = replace(pass_.entry, exhausted=exhausted, trains=trains, order=order, indices=indices, steps=steps)
        ended = replace(ended, shuffles=shuffles, wrappers=self._run.wrappers, **samples)
        if trains:
            self._resumes.forget(ended.restored)
        self._run.add(ended)
        self._on_pass(ended, pass_.dataset)
        pass_.batches, pass_.dataset, pass_.sampler, self._run.samples = [], None, None, []

    def _would_shuffle(self, pass_: _Pass, order: int) -> bool:
        """Return True if the second pass repeats an order that `set_epoch` would change."""
        orders = self._orders.setdefault(pass_.entry.loader, [])
        orders.append(order)
        has_epoch = pass_.entry.has_epoch or pass_.entry.epoch >= 0
        if not order or not has_epoch or len(orders) != 2 or orders[0] != order:
            return False
        return shuffles_by_epoch(pass_.sampler, _base_dataset(pass_.dataset)[0])


def _note_index(pass_: _Pass, index: Any) -> None:
    batch = index if isinstance(index, list | tuple) else [index]
    if not all(isinstance(item, int) or hasattr(item, "__index__") for item in batch):
        pass_.map_style = False  # keys of another type
        return
    if pass_.draws is not None:
        pass_.draws.begin(pass_.entry.batches)
    numbers = array("q", map(int, batch))
    pass_.order.update(numbers.tobytes())
    if pass_.num_indices < _MOST_INDICES and pass_.entry.number < _MOST_ORDERS:
        pass_.num_indices += len(numbers)
        pass_.batches.append(numbers)


def _note_batch(pass_: _Pass, batch: Any) -> None:
    """Record fingerprints of a batch's first samples, and random states that loading changed."""
    entry, source = pass_.entry, pass_.draws
    if source is not None and (drawn := source.batch_states(entry.batches)):
        name = next((name for name in drawn if name != HELD), "")
        line, by = (source.seeded, "") if source.seeded else (seed_line(name), restored_by(name))
        states = *entry.dataset_draws, *(drawn[name][0] for name in drawn if name == HELD)
        draws = {**entry.draws, **dict(drawn.values())}
        pass_.entry = replace(
            entry, draws=draws, seeded_at=line, restored_by=by, dataset_draws=states, generator_at=source.held_at
        )
    batch_number = pass_.entry.batches
    if batch_number >= len(pass_.batches):
        return
    indices = pass_.batches[batch_number]
    base_indices = [_base_index(pass_.dataset, index) for index in indices]
    contents: dict[str, dict[int, int]] = {key: {**known} for key, known in pass_.entry.contents.items()}
    for index, tensor in enumerate(tree_tensors(batch)):
        if tensor.dim() == 1 and tensor.tolist() == list(indices):
            continue  # the indices
        if tensor.dim() and len(tensor) == len(indices) and tensor.layout == torch.strided:
            rows = row_fingerprints(tensor[:_MOST_ROWS].detach().cpu()).tolist()
            contents.setdefault(str(index), {}).update(zip(base_indices, rows, strict=False))
    for number, samples in enumerate(uncollated(batch, len(indices))):
        for index, values in enumerate(zip(*samples, strict=False)):
            if any(isinstance(value, torch.Tensor) for value in values) or list(values) != list(indices):
                digests = (fingerprint(value.cpu()) if isinstance(value, torch.Tensor) else value for value in values)
                contents.setdefault(f"{number}, {index}", {}).update(zip(base_indices, digests, strict=False))
    pass_.entry = replace(pass_.entry, contents=contents)


def _innermost_sampler(loader: Any) -> Any:
    sampler = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    for _ in range(4):
        inner = getattr(sampler, "sampler", None) or getattr(sampler, "batch_sampler", None)
        if inner is None:
            break
        sampler = inner
    return sampler


def _selects_subset(sampler: Any, size: int) -> bool:
    indices = sampler if isinstance(sampler, list | tuple) else None
    for value in (indices, *getattr(sampler, "__dict__", {}).values()):
        if isinstance(value, list | tuple | array | torch.Tensor) and 1 < len(value) < size:
            first = value[0]
            if isinstance(first, int) or (isinstance(first, torch.Tensor) and not first.is_floating_point()):
                return True
    return False


def _base_dataset(dataset: Any) -> tuple[Any, list[Sequence[int]]]:
    """Return the dataset below nested `Subset`s, and the indices of each `Subset`."""
    subsets = []
    while type(dataset) is data.Subset:
        subsets.append(dataset.indices)
        dataset = dataset.dataset
    return dataset, subsets


def _base_index(dataset: Any, index: int) -> int:
    for indices in _base_dataset(dataset)[1]:
        index = int(indices[index])
    return index
