"""Nests of tensors (dicts, lists, tuples, named tuples, dataclasses): walking, copying and sharding them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

from ddpcheck.errors import TargetError


def map_nest(function: Callable[[Any], Any], nest: Any, *, is_leaf: Callable[[Any], bool] = lambda _: False) -> Any:
    """A copy of `nest` with `function` applied to every leaf (what is no dict, list, tuple or dataclass, or `is_leaf`).

    Containers in which nothing changes are handed on as they are.
    """
    if is_leaf(nest):
        return function(nest)
    if all(function(leaf) is leaf for leaf in iter_leaves(nest, is_leaf=is_leaf)):
        return nest
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return type(nest)(*(map_nest(function, item, is_leaf=is_leaf) for item in nest))
    if isinstance(nest, tuple | list):
        items = [map_nest(function, item, is_leaf=is_leaf) for item in nest]
        try:
            return type(nest)(items)
        except Exception:  # a subclass with a constructor of its own
            return items if isinstance(nest, list) else tuple(items)
    if isinstance(nest, Mapping):
        mapped = {key: map_nest(function, value, is_leaf=is_leaf) for key, value in nest.items()}
        if type(nest) is dict or not isinstance(nest, MutableMapping):
            return mapped
        clone: Any = copy.copy(nest)  # keeps what a subclass carries beside its items
        for key, value in mapped.items():
            clone[key] = value
        return clone
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        clone = copy.copy(nest)
        for attribute in dataclasses.fields(nest):
            value = map_nest(function, getattr(nest, attribute.name), is_leaf=is_leaf)
            object.__setattr__(clone, attribute.name, value)  # also where the dataclass is frozen
        return clone
    return function(nest)


def iter_leaves(nest: Any, *, is_leaf: Callable[[Any], bool] = lambda _: False) -> Iterator[Any]:
    """The leaves of `nest`, in order; what cannot be looked into is a leaf."""
    inside: Any = None
    if is_leaf(nest):
        pass
    elif isinstance(nest, list | tuple):
        inside = list(nest)
    elif isinstance(nest, Mapping) or (dataclasses.is_dataclass(nest) and not isinstance(nest, type)):
        try:
            fields = nest if isinstance(nest, Mapping) else [field.name for field in dataclasses.fields(nest)]
            inside = [nest[key] if isinstance(nest, Mapping) else getattr(nest, key) for key in fields]
        except Exception:  # a mapping of the user's that does not answer
            pass
    if inside is None:
        yield nest
    else:
        for item in inside:
            yield from iter_leaves(item, is_leaf=is_leaf)


def iter_tensors(nest: Any) -> Iterator[torch.Tensor]:
    """The tensors in `nest`, in order."""
    return (leaf for leaf in iter_leaves(nest) if isinstance(leaf, torch.Tensor))


def to_device(nest: Any, device: torch.device) -> Any:
    """A copy of `nest` with its tensors on `device`."""
    return map_nest(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, nest)


def upcast(nest: Any) -> Any:
    """A copy of `nest` with its floating-point tensors in float64 and its complex ones in complex128."""

    def leaf_upcast(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            return leaf.double()
        return leaf.to(torch.complex128) if isinstance(leaf, torch.Tensor) and leaf.is_complex() else leaf

    return map_nest(leaf_upcast, nest)


def _is_splittable(leaf: Any) -> bool:
    return bool(getattr(leaf, "ndim", 0)) and hasattr(leaf, "shape")  # tensors and numpy arrays, not scalars


def batch_size(batch: Any) -> int:
    """The number of samples in `batch`: the size of dim 0 that all its tensors share.

    Raises:
        TargetError: The tensors disagree, or none has a dim 0.
    """
    sizes: list[int] = []
    map_nest(lambda leaf: sizes.append(int(leaf.shape[0])) if _is_splittable(leaf) else None, batch)
    if not sizes:
        raise TargetError("batch: no tensor has a dim 0 to split over the ranks; give the recipe a shard function")
    if len(set(sizes)) > 1:
        raise TargetError(
            f"batch: its tensors have {' and '.join(map(str, sorted(set(sizes))))} samples in dim 0, so it cannot be "
            "split over the ranks; put the samples in dim 0 everywhere, or give the recipe a shard function"
        )
    return sizes[0]


def shard_bounds(size: int, rank: int, world_size: int) -> tuple[int, int]:
    """First and one past the last sample of `rank`; the first `size % world_size` ranks get one more."""
    share, rest = divmod(size, world_size)
    start = rank * share + min(rank, rest)
    return start, start + share + (rank < rest)


def shard_batch(batch: Any, rank: int, world_size: int) -> Any:
    """Split dim 0 of every tensor (or numpy array) of `batch` over the ranks, in order, as equally as can be.

    Lists with a string for each sample are split too; scalars and whatever else is no tensor go to every rank as it is.

    Raises:
        TargetError: The batch has fewer samples than there are ranks, or its tensors disagree on how many.
    """
    size = batch_size(batch)
    if size < world_size:
        raise TargetError(
            f"batch: {size} sample(s) cannot be split over {world_size} ranks; "
            f"return at least {world_size} samples, or check with a smaller --world-size"
        )
    start, stop = shard_bounds(size, rank, world_size)

    def are_words(value: Any) -> bool:
        """Whether `value` is a list with a word for each sample."""
        return isinstance(value, list | tuple) and len(value) == size and all(isinstance(item, str) for item in value)

    def part(leaf: Any) -> Any:
        return leaf[start:stop] if _is_splittable(leaf) or are_words(leaf) else leaf

    return map_nest(part, batch, is_leaf=are_words)
