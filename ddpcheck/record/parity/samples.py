"""Recording of loader batches on each rank, and replay in a single process.

A batch is identified by the line that constructs its loader, the pass over the loader and its index in the pass. At the
same index, a single process gets the batches of all ranks, concatenated along the batch dimension.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import cat
from torch.utils import data
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.weak import WeakIdKeyDictionary

from ddpcheck.findings.evidence.parity import NotReplayed, ParityPass
from ddpcheck.findings.source_lines import frames_from, is_of_program, location_of, variables_of
from ddpcheck.gather.patching import Patch, Recorder, guarded, patched
from ddpcheck.record.parity.sample_store import (
    ConcatenationError,
    SampleReader,
    SampleWriter,
    is_padded,
    is_same,
    join_ranks,
    row_count,
    scale_batch_size,
)
from ddpcheck.record.rank.environment import ParityOptions

_MOST_EARLY = 4096  # max values recorded before the process has a rank
_BATCH_SIZE_INDEX = {data.DataLoader: 1, data.BatchSampler: 2}  # of the constructors' batch_size, without `self`
_MOST_WITHOUT_BACKWARD = 64  # max batches recorded of a pass without a backward pass


@dataclass(slots=True)
class _Pass:
    key: str  # of the loader and the pass
    began: int  # number of backward passes before this pass
    batches: int = 0
    rows: int = 0
    is_over: bool = False
    is_replayed: bool | None = None  # None if not decided yet
    process_rows: int = -1  # samples per pass in this process, -1 if unknown
    length: int = -1  # batches per pass, -1 if unknown


class Samples(Recorder, subjects=("parity",), inner=("replayed",)):
    """Recorder of batches on a rank; with `reader`, the single process replays the batches."""

    def __init__(self, sink: Callable[[Any], object], reader: SampleReader | None, options: ParityOptions) -> None:
        self._sink = sink
        self._reader = reader
        self._order = options.order
        self._turns = len(options.order) if options.in_turn else 1
        self._writer: SampleWriter | None = None
        self._early_values: list[tuple[str, Any]] = []
        self._process = os.getpid()
        self._instance_counts = Counter[str]()
        self._keys: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        self._pass_counts = Counter[str]()
        self._passes_by_iterator: WeakKeyDictionary[Any, _Pass] = WeakKeyDictionary()
        self.parts: Any = WeakIdKeyDictionary()  # the tensors of each rank, by concatenated tensor
        # rows per rank of a concatenated batch, by their sum, the latest last (a loader may prefetch); empty if unknown
        self.rows: dict[int, tuple[int, ...]] = {}
        self._owners: dict[int, torch.Tensor] = {}
        self.draws = False  # True if random draws of the script are recorded: from the first wrapper or optimizer on
        self.splits_statistics = False  # True if batch statistics were computed per rank
        self.is_smaller = False  # True if a loader's batch size was reduced
        self.is_padded = False  # True if sequences were padded to the longest of all ranks
        self.scaled = set[str]()  # script variables whose value was scaled to the global batch size
        self._largest_size = options.batch
        self.loads = False  # True while a loader makes a batch, whose draws are not recorded
        self.backwards = 0  # number of backward passes begun
        self.on_pass: Callable[[], object] = lambda: None  # called before each pass over a loader
        self._backwards_at_evaluation = -1  # number of backward passes at the end of the last evaluation
        self._refused = set[str]()
        for kind in _BATCH_SIZE_INDEX:
            Patch(kind, "__init__", functools.partial(self._patched_init, kind=kind))
        patched(data.DataLoader, "__iter__", self._record_pass)
        Patch(_BaseDataLoaderIter, "__next__", self._patched_next)
        self.seed("torch", torch.initial_seed, torch.manual_seed)
        self.seed("python", random.getstate, random.setstate)

    def seed(self, name: str, get: Callable[[], Any], put: Callable[[Any], object]) -> None:
        """Record a generator's initial state; in the single process, restore rank 0's state."""
        if self._reader is None:
            self.keep(f"seed {name}", get())
        elif states := self._reader.get(f"seed {name}"):
            put(states[0])

    # The store

    def begin(self, folder: Path, rank: int) -> None:
        """Write values recorded so far, and later values, to the file of this rank."""
        if self._reader is None:
            self._writer = SampleWriter(folder, rank)
            waiting, self._early_values = self._early_values, []
            for key, value in waiting:
                self._writer.add(key, value)

    @property
    def why_full(self) -> str:
        """Return the reason why recording has stopped; "" if it has not."""
        return "" if self._writer is None else self._writer.why_full

    @property
    def replays(self) -> bool:
        """Return True in the single process, which replays the ranks' batches."""
        return self._reader is not None

    def rank_values(self, key: str, number: int) -> list[Any]:
        """Return the ranks' values under `key` and index `number`, in concatenation order.

        If the single process takes the ranks' batches in turn, return only the value of the rank whose turn it is.
        """
        if self._reader is None:
            return []
        turns = self._turns if self._reader.count(f"{key}#0") == len(self._order) else 1  # recorded by all ranks
        values = self._reader.get(f"{key}#{number // turns}")
        if len(values) != len(self._order):
            return values
        ranks = self._order if turns == 1 else [self._order[number % turns]]
        return [values[rank] for rank in ranks]

    def keep(self, key: str, value: Any) -> None:
        if os.getpid() != self._process:
            return
        if self._writer is None:
            self._early_values += [(key, value)] * (len(self._early_values) < _MOST_EARLY)
        else:
            self._writer.add(key, value)

    def replayed(self, key: str, number: int, rows_here: int = 0) -> Any:
        """Return the concatenated values of all ranks; `rows_here`: row count of this process's value.

        Raises:
            ConcatenationError: No rank has a value, or the values cannot be concatenated.
        """
        values = self.rank_values(key, number)
        if not values:
            raise ConcatenationError("no rank has recorded it")
        if (dim := self._batch_dim(values)) and not is_same(values[0], values[-1]):
            return cat(values, dim)
        rows = tuple(map(row_count, values))
        value = join_ranks(values, is_whole=rows_here == sum(rows))
        self.is_padded |= any(is_padded(value, part) for part in values)
        count = row_count(value)
        is_whole, owners = count == sum(rows), self.owners(count)
        if not is_whole or count in self.rows or owners is None or owners.bincount().tolist() != [*rows]:
            self.note_rows(rows if is_whole else ())  # not for draws with a row count derived from a batch
        if self.rows and isinstance(value, torch.Tensor):
            self.parts[value] = values
            return self.in_script_order(value)
        return value

    def note_rows(self, rows: tuple[int, ...]) -> None:
        """Record how many rows of a concatenated value each rank has; () forgets all."""
        if rows:
            self.rows.pop(sum(rows), None)
            self.rows[sum(rows)] = rows
            self._owners.pop(sum(rows), None)
        else:
            self.rows.clear()
            self._owners.clear()

    def owners(self, count: int) -> torch.Tensor | None:
        """Return the rank from which each of `count` concatenated rows comes; None if unknown."""
        if count in self._owners:
            return self._owners[count]
        known = {count: (count,)} if self._turns > 1 else self.rows  # one rank
        total = count if count in known else next((total for total in reversed(known) if not count % total), 0)
        if not total or not count:
            return None
        sizes = torch.tensor(known[total]) * (count // total)
        return torch.arange(len(sizes)).repeat_interleave(sizes)

    def in_script_order(self, value: torch.Tensor) -> torch.Tensor:
        """Reorder rows that are sorted by rank as in the script's own tensor."""
        owners = self.owners(len(value))
        if owners is None or bool((owners.diff() >= 0).all()):
            return value
        return value[owners.argsort(stable=True).argsort().to(value.device)]

    def note_cat(self, made: torch.Tensor, tensors: Sequence[torch.Tensor], dim: int) -> None:
        """Record which rank owns each row of `made = torch.cat(tensors)`, e.g. of two crops."""
        owners = [self.owners(len(tensor)) for tensor in tensors if len(tensor)] if self.rows and not dim else [None]
        if known := [owner for owner in owners if owner is not None]:
            if len(known) == len(owners) > 1:
                self._owners[len(made)] = cat(known)

    def _batch_dim(self, values: Sequence[Any]) -> int:
        """Return the dimension in which random draws have the ranks' row counts, or 0."""
        last = [*self.rows.values()][-1] if self.rows else ()
        if not last or len(values) != len(last) or not all(isinstance(v, torch.Tensor) for v in values):
            return 0
        sizes = [tuple(value.shape) for value in values]
        if any(size[0] == rows for size, rows in zip(sizes, last, strict=True)):
            return 0
        dims = (dim for dim in range(1, len(sizes[0])) if tuple(size[dim] for size in sizes) == last)
        return next(dims, 0) if len({size[:1] for size in sizes}) == 1 else 0

    def refuse(self, key: str, why: str) -> None:
        line = key.partition("#")[0]
        if line not in self._refused:
            self._refused.add(line)
            self._sink(NotReplayed(line.split()[1], why))

    # Loaders

    def _patched_init(self, construct: Callable[..., None], kind: type) -> Callable[..., None]:
        index = _BATCH_SIZE_INDEX[kind]
        size_of = guarded(self._batch_size_of)

        @functools.wraps(construct)
        def __init__(loader: Any, *arguments: Any, **named: Any) -> None:
            if (size := size_of(sys._getframe(1), kind, loader, arguments, named)) is not None:
                if len(arguments) > index:
                    arguments = (*arguments[:index], size, *arguments[index + 1 :])
                else:
                    named = {**named, "batch_size": size}
            construct(loader, *arguments, **named)

        return __init__

    def _batch_size_of(
        self, frame: FrameType, kind: type, loader: Any, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> int | None:
        """Return a new loader's batch size, or None to keep the script's size.

        In the single process, this size is the sum of the ranks' batch sizes; on a rank, the largest size allowed.
        """
        if os.getpid() != self._process or not (line := _line_of(frame, loader)):
            return None
        name = kind.__name__
        key = f"{name} {line}#{self._instance_counts[name + line]}"
        self._instance_counts[name + line] += 1
        if kind is data.DataLoader:
            self._keys[loader] = key
        index = _BATCH_SIZE_INDEX[kind]
        size = arguments[index] if len(arguments) > index else named.get("batch_size", 1)
        if type(size) is not int or named.get("batch_sampler") is not None:
            return None
        if self._reader is None:
            smaller = self._largest_size if 0 < self._largest_size < size else None
            self.keep(key, smaller or size)
            self.is_smaller |= smaller is not None
            return smaller
        sizes: list[int] = self._reader.get(key)
        keeps_size = kind is data.DataLoader and self._evaluates_all_samples(
            key, named.get("dataset", next(iter(arguments), ()))
        )
        if not sizes or self._turns > 1 or keeps_size:
            return sizes[0] if sizes else None
        if 1 < size == sizes[0]:
            self.scaled.update(scale_batch_size(size, sum(sizes)))
        return sum(sizes)

    def _evaluates_all_samples(self, key: str, dataset: Any) -> bool:
        """Return True if each rank, or only one rank, evaluates all samples."""
        assert self._reader is not None
        ended = self._reader.get(f"{key} pass 0 ended")
        if not ended or self._reader.count(f"{key} pass 0 trains"):
            return False
        with contextlib.suppress(Exception):  # an iterable dataset has no length
            return len(ended) < self._reader.world_size or all(rows == len(dataset) for _, rows in ended)
        return False

    def _record_pass(self, loader: Any) -> Any:
        if os.getpid() != self._process:
            return
        key = self._keys.get(loader) or f"DataLoader {_line_of(sys._getframe(1), loader)}#0"
        pass_ = _Pass(f"{key} pass {self._pass_counts[key]}", self.backwards)
        self._pass_counts[key] += 1
        with contextlib.suppress(Exception):  # a sampler without a length
            pass_.length = len(loader)
            pass_.process_rows = len(loader.sampler) if loader.batch_sampler is None or loader.batch_size else -1
        self.on_pass()
        iterator = yield
        self._passes_by_iterator[iterator] = pass_

    def _patched_next(self, original: Callable[..., Any]) -> Callable[..., Any]:
        record = guarded(self._record_batch)

        @functools.wraps(original)
        def __next__(iterator: Any) -> Any:
            pass_ = self._passes_by_iterator.get(iterator)
            if pass_ is None or os.getpid() != self._process:
                return original(iterator)
            outer, self.loads = self.loads, True
            try:
                batch = original(iterator)
            except StopIteration:
                if (replayed := self._replayed_batch(pass_, None)) is None:
                    self._end_pass(pass_)
                    raise
                return replayed[0]
            finally:
                self.loads = outer
            replayed = self._replayed_batch(pass_, batch)
            if replayed is None and self._has_ended(pass_):
                self._end_pass(pass_)
                raise StopIteration
            record(pass_, batch)
            if 1 < pass_.batches == pass_.length and not is_of_program(sys._getframe(1).f_code.co_filename):
                self._end_pass(pass_)  # a package that counts batches does not request another
            return batch if replayed is None else replayed[0]

        return __next__

    def _record_batch(self, pass_: _Pass, batch: Any) -> None:
        if self._reader is None:
            if pass_.batches < _MOST_WITHOUT_BACKWARD or pass_.began < self.backwards:
                self.keep(f"{pass_.key} batch#{pass_.batches}", batch)
        pass_.batches += 1
        pass_.rows += row_count(batch)

    def _end_pass(self, pass_: _Pass) -> None:
        if pass_.is_over:
            return
        pass_.is_over = True
        if pass_.began == self.backwards:
            self.note_evaluation()
        self.keep(f"{pass_.key} ended", (pass_.batches, pass_.rows))
        trains = pass_.began < self.backwards
        self._sink(ParityPass(pass_.key, pass_.rows, pass_.process_rows, trains, pass_.batches))

    def note_evaluation(self) -> None:
        """Record that the script evaluates until the next backward pass."""
        self._backwards_at_evaluation = self.backwards

    @property
    def evaluates(self) -> bool:
        """Return True between an evaluation (or `eval()`) and the next backward pass."""
        return self._backwards_at_evaluation == self.backwards

    @property
    def is_under_way(self) -> bool:
        """Return True if a loader is being iterated, and backward has not begun since."""
        return any(
            pass_.began == self.backwards and pass_.batches and not pass_.is_over
            for pass_ in self._passes_by_iterator.values()
        )

    def _is_replayed(self, pass_: _Pass) -> bool:
        """Return True if a pass replays ranks' batches: in training, or in split evaluation."""
        if pass_.is_replayed is None:
            assert self._reader is not None
            ended = self._reader.get(f"{pass_.key} ended")
            rows = sum(rank_rows for _, rank_rows in ended)
            takes_fewer_rows = 0 <= pass_.process_rows < rows - self._reader.world_size
            takes_part = takes_fewer_rows and rows % max(1, pass_.process_rows) > 0
            is_short = all(batches <= _MOST_WITHOUT_BACKWARD for batches, _ in ended)
            pass_.is_replayed = self._reader.count(f"{pass_.key} trains") > 0 or (takes_part and is_short)
        return pass_.is_replayed

    def _has_ended(self, pass_: _Pass) -> bool:
        """Return True if the ranks have no more batches for a replayed pass."""
        if self._reader is None or not self._is_replayed(pass_):
            return False
        ended = self._reader.get(f"{pass_.key} ended")
        return bool(ended) and max(batches for batches, _ in ended) * self._turns <= pass_.batches

    def _replayed_batch(self, pass_: _Pass, batch: Any) -> tuple[Any] | None:
        """Return (concatenated batch of all ranks,), or None to keep this process's batch."""
        if self._reader is None:
            return None
        key = f"{pass_.key} batch"
        if not self._is_replayed(pass_):
            self.rows.clear()
            return None
        if not self._reader.count(f"{key}#{pass_.batches // self._turns}"):
            return None
        try:
            value = self.replayed(key, pass_.batches)
        except Exception as error:
            self.refuse(key, str(error))
            return None
        if batch is None:
            pass_.batches += 1
        return (value,)

    def note_backward(self) -> None:
        """Record that backward begins, and that all open passes over loaders belong to training."""
        self.backwards += 1
        if self._reader is None:
            for pass_ in [*self._passes_by_iterator.values()]:
                if pass_.batches and pass_.key not in self._refused:
                    self._refused.add(pass_.key)
                    self.keep(f"{pass_.key} trains", True)


def _line_of(frame: FrameType, instance: object) -> str:
    for current in frames_from(frame):
        if is_of_program(current.f_code.co_filename):
            if current.f_code.co_name != "__init__" or next(iter(variables_of(current).values()), None) is not instance:
                return str(location_of(current))
    return ""
