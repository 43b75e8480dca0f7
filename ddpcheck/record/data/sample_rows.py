"""Fingerprints of batch rows, and of samples in dataset attributes."""

from __future__ import annotations

import contextlib
import math
import os
import stat
from array import array
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import Dataset, Subset

from ddpcheck.gather.state.fingerprints import digest_of, fingerprint
from ddpcheck.gather.steps.training_step import row_fingerprints
from ddpcheck.recipe.pytree import tree_leaves, tree_tensors

_MOST_ROWS = 1 << 16  # per pass
_MOST_COLUMNS = 256  # max columns of a row, evenly spaced
_MOST_PLAIN = 256  # max items of a dataset attribute
_MOST_ITEMS = 64  # max samples of a dataset
_MOST_PARTS = 16  # max parts of an item
_FEWEST_ITEMS, _DISTINCT = 8, 0.9  # criteria for distinct samples
_MANY = 8  # min elements of a row that is a sample


class SampleRows:
    """Rows of a loader pass and their labels, in loading order."""

    def __init__(self) -> None:
        self._known = True
        self._clear()

    def _clear(self) -> None:
        self.rows, self.labels, self.classes, self.targets = array("q"), array("q"), array("q"), array("d")

    def note(self, batch: Any, count: int) -> None:
        """Add a batch of `count` samples; unusable rows discard the whole pass."""
        tensors = [t.detach() for t in tree_tensors(batch) if t.dim() and t.layout == torch.strided and t.numel()]
        size = max((len(t) for t in tensors), default=0)
        rows = [t for t in tensors if len(t) == size and not _is_label(t)]
        labels = [t for t in tensors if len(t) == size and _is_label(t)]
        usable = rows and all(t.device.type == "cpu" and not t.is_quantized for t in (*rows, *labels))
        usable = usable and next(tree_tensors(uncollated(batch, count)), None) is None
        if not self._known or not usable or len(self.rows) + size > _MOST_ROWS:
            self._known = False
            self._clear()
            return
        self.rows.extend(_together(rows, size))
        if labels:
            self.labels.extend(_together(labels, size))
        integers = labels or [t.flatten() for t in rows if t.numel() == size and _is_whole(t)]
        if len(integers) == 1:
            self.classes.extend(map(int, integers[0].tolist()))
        single = [t for t in rows if t.numel() == size and t.is_floating_point()]
        if len(single) == 1:
            self.targets.extend(single[0].flatten().tolist())


def uncollated(batch: Any, count: int) -> list[list[list[Any]]]:
    """Return each sample's tensors and integers in an uncollated batch (detection).

    The batch is a list of samples, or contains lists with an item per sample.
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


def _is_whole(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and bool((tensor.isfinite() & (tensor == tensor.round())).all())


def _together(tensors: list[torch.Tensor], size: int) -> list[int]:
    total = torch.zeros(size, dtype=torch.int64)
    for tensor in tensors:
        flat = tensor.reshape(size, -1)
        step = max(1, flat.shape[1] // _MOST_COLUMNS)
        total = total * 31 + row_fingerprints(flat[:, ::step][:, :_MOST_COLUMNS].cpu())
    return total.tolist()


def digests_of(dataset: Any) -> dict[str, int]:
    """Return digests of tensors and plain lists in a dataset's attributes."""
    digests = {}
    for name, value in getattr(dataset, "__dict__", {}).items():
        if isinstance(value, torch.Tensor) and value.dim() and value.layout == torch.strided:
            digests[name] = fingerprint(value[:_MOST_PLAIN].cpu())
        elif hasattr(value, "tobytes") and hasattr(value, "shape") and len(getattr(value, "shape", ())):
            digests[name] = _number(value[:_MOST_PLAIN].tobytes())
        elif isinstance(value, list | tuple) and value and _all_plain(value[:_MOST_PLAIN]):
            digests[name] = _number((len(value), value[:_MOST_PLAIN]))
        elif isinstance(value, tuple) and value and all(isinstance(t, torch.Tensor) and t.dim() for t in value):
            digests[name] = _number(tuple(fingerprint(t[:_MOST_PLAIN].cpu()) for t in value))
    return digests


def samples_of(dataset: Any, size: int, depth: int = 2) -> tuple[dict[str, tuple[int, ...]], bool]:
    """Return fingerprints of first items of attributes with an item per sample.

    Also return True if any attribute contains the samples themselves (rows of many numbers, or existing files). Nested
    datasets are searched; a dataset may be a list.
    """
    if type(dataset) is Subset:  # its indices are no samples
        whole: Any = dataset.dataset
        return samples_of(whole, _length_of(whole), depth - 1) if depth else ({}, False)
    attributes = {"": dataset} if isinstance(dataset, list) else getattr(dataset, "__dict__", {})
    samples: dict[str, tuple[int, ...]] = {}
    whole = False
    for name, value in attributes.items():
        for number, val in enumerate(value if isinstance(value, tuple) else (value,)):
            if isinstance(val, Dataset):
                below, known = samples_of(val, size, depth - 1) if depth else ({}, False)
                samples.update({f"{name}.{number}{key}": items for key, items in below.items()})
                whole = whole or known
            elif type(val) in (list, range, array, torch.Tensor) or (hasattr(val, "tobytes") and hasattr(val, "shape")):
                items = _items(val) if size >= _FEWEST_ITEMS and _length(val) == size else ()
                if len(set(items)) >= _DISTINCT * max(1, len(items)):
                    samples[f"{name}.{number}"] = items
                    whole = whole or _are_samples(val)
    return {name: items for name, items in samples.items() if items}, whole


def _are_samples(values: Any) -> bool:
    if hasattr(values, "shape"):
        return bool(math.prod(values.shape[1:]) >= _MANY)
    return all(_file_of(value) is not None for value in values[:_MOST_ITEMS])


def _file_of(value: Any) -> tuple[str, int] | None:
    """Return path and size of the file that a sample names, or None."""
    first = value[0] if isinstance(value, tuple | list) and value else value
    if isinstance(first, str | os.PathLike):
        with contextlib.suppress(OSError, ValueError):
            status = os.stat(first)
            return (os.fspath(first), status.st_size) if stat.S_ISREG(status.st_mode) else None
    return None


def _length_of(dataset: Any) -> int:
    """Return the number of samples, or 0 if unknown."""
    with contextlib.suppress(Exception):
        return len(dataset)
    return 0


def _length(value: Any) -> int:
    shape = getattr(value, "shape", None)
    return int(shape[0]) if shape else 0 if shape is not None else len(value)


def _items(values: Any) -> tuple[int, ...]:
    first = values[:_MOST_ITEMS]
    if isinstance(first, torch.Tensor):
        dense = first.layout == torch.strided and not first.is_quantized and first.device.type != "meta"
        return tuple(_together([first.detach()], len(first))) if dense else ()
    items = tuple(map(_item, first))
    return () if None in items else items  # type: ignore[return-value]


def _item(value: Any) -> int | None:
    """Return a fingerprint of a sample or part, or None if not plain."""
    if isinstance(value, torch.Tensor):
        return fingerprint(value.detach().cpu()) if value.layout == torch.strided else None
    if hasattr(value, "tobytes"):
        return _number(value.tobytes())
    if isinstance(value, tuple | list | dict):
        parts = [_item(part) for part in list(value.values() if isinstance(value, dict) else value)[:_MOST_PARTS]]
        return None if None in parts else _number(tuple(parts))
    if (file := _file_of(value)) is not None:
        return _number(file)
    return _number(value) if _is_plain(value) else None


def state_of(dataset: Any) -> dict[str, int]:
    """Return digests of a dataset's plain attributes, which may change by epoch."""
    attributes = getattr(dataset, "__dict__", {})
    lists = {name: value[:_MOST_PLAIN] for name, value in attributes.items() if isinstance(value, list)}
    plain = {name: value for name, value in attributes.items() if isinstance(value, str | int | float)}
    return {name: _number(value) for name, value in {**plain, **lists}.items() if name in plain or _all_plain(value)}


def rows_of_whole(dataset: Any) -> int:
    """Return the rows of a slice's base array; -1 for texts; else 0."""
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


def _number(value: object) -> int:
    return int(digest_of(value)[:15], 16)


def _all_plain(values: Any) -> bool:
    return all(_is_plain(value) for value in values)


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(isinstance(item, str | int | float) for item in value)
    return isinstance(value, str | int | float)
