"""Fingerprints of batch rows, dataset attributes and forward inputs; orders of samplers."""

from __future__ import annotations

import ast
import contextlib
import copy
import itertools
import math
import os
import stat
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import CO_GENERATOR
from typing import Any

import torch
from torch.utils.data import Dataset, Subset

from ddpcheck.findings.evidence.script import EvaluationInputs, Inputs
from ddpcheck.findings.program_blocks import blocks_around
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import file_of, frames_from, is_of_program, location_of, parsed_source, user_frame
from ddpcheck.gather.collectives.collective_log import without_logging
from ddpcheck.gather.collectives.fake_collectives import fake_collectives
from ddpcheck.gather.patching import Recorder
from ddpcheck.gather.state.fingerprints import digest_of, fingerprint
from ddpcheck.gather.state.randomness import preserve_generators
from ddpcheck.gather.steps.gradient_distance import sketch
from ddpcheck.gather.steps.training_step import batch_fingerprint, row_fingerprints, sample_fingerprints
from ddpcheck.recipe.pytree import tree_leaves, tree_tensors

_MOST_ROWS = 1 << 16  # max rows of a pass
_MOST_COLUMNS = 256  # max columns of a row, evenly spaced
_MOST_PLAIN = 256  # max items of a dataset attribute
_MOST_ITEMS = 64  # max samples of a dataset
_MOST_PARTS = 16  # max parts of an item
_FEWEST_ITEMS, _DISTINCT = 8, 0.9  # min samples, and min share of distinct samples
_FEWEST_SAMPLE_ELEMENTS = 8  # min elements of a row that is a sample


class SampleRows:
    """Fingerprints and labels of all samples of one pass over a loader, in order."""

    def __init__(self) -> None:
        self._is_usable = True
        self._clear()

    def _clear(self) -> None:
        self.rows, self.labels, self.classes, self.targets = array("q"), array("q"), array("q"), array("d")

    def note(self, batch: Any, count: int) -> None:
        """Add a batch of `count` samples; an unusable batch discards the whole pass."""
        tensors = [t.detach() for t in tree_tensors(batch) if t.dim() and t.layout == torch.strided and t.numel()]
        size = max((len(t) for t in tensors), default=0)
        rows = [t for t in tensors if len(t) == size and not _is_label(t)]
        labels = [t for t in tensors if len(t) == size and _is_label(t)]
        usable = rows and all(t.device.type == "cpu" and not t.is_quantized for t in (*rows, *labels))
        usable = usable and next(tree_tensors(uncollated(batch, count)), None) is None
        if not self._is_usable or not usable or len(self.rows) + size > _MOST_ROWS:
            self._is_usable = False
            self._clear()
            return
        self.rows.extend(_combined_fingerprints(rows, size))
        if labels:
            self.labels.extend(_combined_fingerprints(labels, size))
        integers = labels or [t.flatten() for t in rows if t.numel() == size and _has_whole_numbers(t)]
        if len(integers) == 1:
            self.classes.extend(map(int, integers[0].tolist()))
        single = [t for t in rows if t.numel() == size and t.is_floating_point()]
        if len(single) == 1:
            self.targets.extend(single[0].flatten().tolist())


def uncollated(batch: Any, count: int) -> list[list[list[Any]]]:
    """Return the tensors and integers of each sample, if a batch is not collated.

    An uncollated batch (in object detection) is a list of samples, or contains lists with an item per sample.
    """
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    lists = [part for part in (batch, *parts) if isinstance(part, list | tuple) and len(part) == count]
    return [
        [[leaf for leaf in tree_leaves(item) if isinstance(leaf, torch.Tensor) or type(leaf) is int] for item in items]
        for items in lists
        if not all(isinstance(item, torch.Tensor) and item.dim() and len(item) == count for item in items)
    ]


def _is_label(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 1 and not tensor.is_floating_point()


def _has_whole_numbers(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and bool((tensor.isfinite() & (tensor == tensor.round())).all())


def _combined_fingerprints(tensors: list[torch.Tensor], size: int) -> list[int]:
    total = torch.zeros(size, dtype=torch.int64)
    for tensor in tensors:
        flat = tensor.reshape(size, -1)
        step = max(1, flat.shape[1] // _MOST_COLUMNS)
        total = total * 31 + row_fingerprints(flat[:, ::step][:, :_MOST_COLUMNS].cpu())
    return total.tolist()


def digests_of(dataset: Any) -> dict[str, int]:
    """Return digests of tensors, arrays and plain lists in a dataset's attributes, by name."""
    digests = {}
    for name, value in getattr(dataset, "__dict__", {}).items():
        if isinstance(value, torch.Tensor) and value.dim() and value.layout == torch.strided:
            digests[name] = fingerprint(value[:_MOST_PLAIN].cpu())
        elif hasattr(value, "tobytes") and hasattr(value, "shape") and len(getattr(value, "shape", ())):
            digests[name] = _digest_number(value[:_MOST_PLAIN].tobytes())
        elif isinstance(value, list | tuple) and value and all(map(_is_plain, value[:_MOST_PLAIN])):
            digests[name] = _digest_number((len(value), value[:_MOST_PLAIN]))
        elif isinstance(value, tuple) and value and all(isinstance(t, torch.Tensor) and t.dim() for t in value):
            digests[name] = _digest_number(tuple(fingerprint(t[:_MOST_PLAIN].cpu()) for t in value))
    return digests


def first_samples(dataset: Any, size: int, depth: int = 2) -> tuple[dict[str, tuple[int, ...]], bool]:
    """Return fingerprints of first items, for each dataset attribute with an item per sample.

    The second result is True if any attribute contains the samples themselves: the items are rows of many numbers, or
    names of existing files. Nested datasets are searched; a dataset may be a list.
    """
    if type(dataset) is Subset:  # its indices are no samples
        whole: Any = dataset.dataset
        return first_samples(whole, length_of(whole), depth - 1) if depth else ({}, False)
    attributes = {"": dataset} if isinstance(dataset, list) else getattr(dataset, "__dict__", {})
    samples: dict[str, tuple[int, ...]] = {}
    whole = False
    for name, value in attributes.items():
        for number, val in enumerate(value if isinstance(value, tuple) else (value,)):
            if isinstance(val, Dataset):
                nested, known = first_samples(val, size, depth - 1) if depth else ({}, False)
                samples.update({f"{name}.{number}{key}": items for key, items in nested.items()})
                whole = whole or known
            elif type(val) in (list, range, array, torch.Tensor) or (hasattr(val, "tobytes") and hasattr(val, "shape")):
                items = _item_digests(val) if size >= _FEWEST_ITEMS and length_of(val) == size else ()
                if len(set(items)) >= _DISTINCT * max(1, len(items)):
                    samples[f"{name}.{number}"] = items
                    whole = whole or _are_samples(val)
    return {name: items for name, items in samples.items() if items}, whole


def _are_samples(values: Any) -> bool:
    if hasattr(values, "shape"):
        return bool(math.prod(values.shape[1:]) >= _FEWEST_SAMPLE_ELEMENTS)
    return all(_file_of(value) is not None for value in values[:_MOST_ITEMS])


def _file_of(value: Any) -> tuple[str, int] | None:
    first = value[0] if isinstance(value, tuple | list) and value else value
    if isinstance(first, str | os.PathLike):
        with contextlib.suppress(OSError, ValueError):
            status = os.stat(first)
            return (os.fspath(first), status.st_size) if stat.S_ISREG(status.st_mode) else None
    return None


def length_of(sized: Any) -> int:
    """Return the length of a dataset, loader or sampler, or -1 if unknown."""
    with contextlib.suppress(Exception):  # an error in user code
        return len(sized)
    return -1


def _item_digests(values: Any) -> tuple[int, ...]:
    first = values[:_MOST_ITEMS]
    if isinstance(first, torch.Tensor):
        dense = first.layout == torch.strided and not first.is_quantized and first.device.type != "meta"
        return tuple(_combined_fingerprints([first.detach()], len(first))) if dense else ()
    items = tuple(map(_item_digest, first))
    return () if None in items else items  # type: ignore[return-value]


def _item_digest(value: Any) -> int | None:
    if isinstance(value, torch.Tensor):
        return fingerprint(value.detach().cpu()) if value.layout == torch.strided else None
    if hasattr(value, "tobytes"):
        return _digest_number(value.tobytes())
    if isinstance(value, tuple | list | dict):
        parts = [_item_digest(p) for p in list(value.values() if isinstance(value, dict) else value)[:_MOST_PARTS]]
        return None if None in parts else _digest_number(tuple(parts))
    if (file := _file_of(value)) is not None:
        return _digest_number(file)
    return _digest_number(value) if _is_plain(value) else None


def attribute_digests(dataset: Any) -> dict[str, int]:
    """Return digests of the plain attributes of a dataset, to notice changes between epochs."""
    attributes = getattr(dataset, "__dict__", {})
    lists = {name: value[:_MOST_PLAIN] for name, value in attributes.items() if isinstance(value, list)}
    plain = {name: value for name, value in attributes.items() if isinstance(value, str | int | float)}
    lists = {name: value for name, value in lists.items() if all(map(_is_plain, value))}
    return {name: _digest_number(value) for name, value in {**plain, **lists}.items()}


def length_before_slicing(dataset: Any) -> int:
    """Return the length of the whole array of which `dataset` contains a slice.

    The result is -1 if the dataset contains a list of texts, and 0 if it contains no slice.
    """
    for value in getattr(dataset, "__dict__", {}).values():
        for part in value if isinstance(value, tuple) else (value,):
            base = getattr(part, "_base", None) if isinstance(part, torch.Tensor) else getattr(part, "base", None)
            shape, base_shape = getattr(part, "shape", ()), getattr(base, "shape", ())
            if shape and base_shape and shape[1:] == base_shape[1:] and shape[0] < base_shape[0]:
                return int(base_shape[0])
        if isinstance(value, list) and value:
            first = value[0][0] if isinstance(value[0], tuple) and value[0] else value[0]
            if isinstance(first, str):
                return -1
    return 0


def _digest_number(value: object) -> int:
    return int(digest_of(value)[:15], 16)


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(isinstance(item, str | int | float) for item in value)
    return isinstance(value, str | int | float)


_MOST_INDICES = 1 << 16  # max indices of an order
_MOST_SAMPLES = 4  # max samples read from a dataset


def epoch_of(sampler: Any) -> int:
    """Return the `epoch` attribute of a sampler, or -1 if unknown."""
    value = getattr(sampler, "epoch", None)
    return value if type(value) is int else -1


@contextlib.contextmanager
def _without_side_effects() -> Iterator[None]:
    """Run user code: suppress errors, restore random generators, and communicate with no rank."""
    with contextlib.suppress(Exception), preserve_generators(), without_logging(), fake_collectives():
        yield


def shuffles_by_epoch(sampler: Any, dataset: Any) -> bool:
    """Return True if a sampler's copies have different orders in epochs 0 and 1.

    Runs user code, so call only for suspicious orders. Copies share the dataset and draw the same random numbers. Their
    collectives do not communicate, but return as if all ranks contributed the same values.
    """
    shared = [dataset, *(value for value in getattr(sampler, "__dict__", {}).values() if isinstance(value, Dataset))]
    orders = []
    for epoch in (0, 1):
        with _without_side_effects():
            copied = copy.deepcopy(sampler, {id(value): value for value in shared})
            copied.set_epoch(epoch) if hasattr(copied, "set_epoch") else setattr(copied, "epoch", epoch)
            orders.append(list(itertools.islice(copied, _MOST_INDICES)))
    return len(orders) > 1 and orders[0] != orders[1]


def has_changed_samples(dataset: Any, size: int, before: Mapping[str, Any]) -> bool:
    """Return True if `dataset` returns different samples when attributes get the values `before`."""
    digests = []
    for state in (before, {}):
        with _without_side_effects():
            copied = copy.copy(dataset)
            vars(copied).update(state)
            samples = [copied[index] for index in range(0, size, -(-size // _MOST_SAMPLES))]
            digests.append([fingerprint(tensor) for tensor in tree_tensors(samples)])
    return len(digests) > 1 and digests[0] != digests[1]


def epoch_line() -> Location | None:
    """Return the line of the loop over epochs, which contains the loop over batches.

    If the loop over epochs calls `iter(loader)` instead, return the line of this call.
    """
    begun = user_frame(sys._getframe(1))
    for frame in frames_from(begun):
        location, file = location_of(frame), frame.f_code.co_filename
        loops = [block for block in blocks_around(file, location.path, location.line) if block.kind == "loop"]
        if is_of_program(file) and (outer_loops := [block for block in loops if block.line != location.line]):
            is_iter_call = frame is begun and outer_loops == loops and not frame.f_code.co_flags & CO_GENERATOR
            return location if is_iter_call else replace(location, line=outer_loops[-1].line)
    return None


def persistent_workers_line(call: Location) -> Location:
    """Return the line of argument `persistent_workers`; if absent, the line of the call itself."""
    calls = (node for node in ast.walk(parsed_source(file_of(str(call)))) if isinstance(node, ast.Call))
    keywords = (keyword for node in calls if node.lineno == call.line for keyword in node.keywords)
    lines = (keyword.value.lineno for keyword in keywords if keyword.arg == "persistent_workers")
    return replace(call, line=next(lines, call.line))


_MOST_INPUTS = 16  # max tensors per forward input
_MOST_EVALUATED = 64  # max forward passes without gradients


@dataclass(eq=False)
class InputRecorder(Recorder, subjects=("data",)):
    """Recorder of fingerprints of a wrapper's forward inputs."""

    _sink: Callable[[Inputs | EvaluationInputs], object]
    _wrapper_number: int  # number of the wrapper
    _samples: Callable[[], Sequence[torch.Tensor]]  # returns the last samples from a loader
    _evaluated = 0

    def trained(self, step: int, inputs: Any, line: Location | None) -> None:
        if samples := _input_samples(inputs):
            tensors = itertools.islice(tree_tensors(inputs), _MOST_INPUTS)
            parts = tuple((fingerprint(tensor), tensor.numel()) for tensor in tensors if tensor.numel())
            self._sink(Inputs(self._wrapper_number, step, samples, line, parts, noise_sketch(self._samples(), inputs)))

    def evaluates(self, step: int, inputs: Any) -> None:
        """Record fingerprints of the inputs of the first forward passes without gradients."""
        if self._evaluated < _MOST_EVALUATED:
            self._evaluated += 1
            if samples := _input_samples(inputs):
                self._sink(EvaluationInputs(self._wrapper_number, step, samples))


def _input_samples(inputs: Any) -> tuple[int, ...]:
    """Return fingerprints of samples in forward inputs; () if all tensors may be indices."""
    are_indices = all(tensor.dim() <= 1 and not tensor.is_floating_point() for tensor in tree_tensors(inputs))
    return () if are_indices else sample_fingerprints(inputs) or batch_fingerprint(inputs)


_MOST_ELEMENTS = 1 << 24  # max elements of a batch tensor
_MOST_TENSORS = 4  # max copied tensors of a batch
_FEWEST_COLUMNS = 4  # min elements of a sample: fewer are a label
_ROUNDING = 1e-6  # relative rounding error of the forward inputs


def copied_samples(batch: Any) -> list[torch.Tensor]:
    """Return copies of the tensors of a batch that may contain samples."""
    samples = [tensor for tensor in tree_tensors(batch) if _is_sample_tensor(tensor)]
    return [tensor.detach().clone() for tensor in samples[:_MOST_TENSORS]]


def noise_sketch(samples: Sequence[torch.Tensor], inputs: Any) -> tuple[float, ...]:
    """Return a sketch of the random noise that the program added to a batch.

    `samples`: tensors of the batch from the data loader. `inputs`: forward inputs. A term that is equal for all
    samples, and a scale and an offset per sample, are not noise. The result is () if there is no noise.
    """
    for tensor in tree_tensors(inputs):
        for sample in samples if _is_sample_tensor(tensor) and tensor.is_floating_point() else ():
            if sample.shape == tensor.shape:
                x, y = (t.detach().cpu().double().flatten(1) for t in (sample, tensor))
                x, y = x - x.mean(1, keepdim=True), y - y.mean(1, keepdim=True)
                factors = (x * y).sum(1, keepdim=True) / (x * x).sum(1, keepdim=True).clamp_min(1e-300)
                noise = y - factors * x
                noise -= noise.mean(0)
                return tuple(sketch(noise).tolist()) if noise.norm() > _ROUNDING * y.norm() else ()
    return ()


def _is_sample_tensor(tensor: torch.Tensor) -> bool:
    plain = tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_complex()
    if not plain or tensor.dim() < 2 or tensor.device.type == "meta" or not 0 < tensor.numel() <= _MOST_ELEMENTS:
        return False
    return len(tensor) > 1 and tensor[0].numel() >= _FEWEST_COLUMNS
