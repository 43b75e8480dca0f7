"""Map, copy and shard nested tensors (dicts, lists, tuples, named tuples, dataclasses)."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from ddpcheck.findings.errors import TargetError


def tree_map(function: Callable[[Any], Any], nest: Any, *, is_leaf: Callable[[Any], bool] = lambda _: False) -> Any:
    """Apply `function` to all leaves of `nest`: values in dicts, lists, tuples and dataclasses.

    Unchanged containers are returned without a copy.
    """
    if is_leaf(nest):
        return function(nest)
    if all(function(leaf) is leaf for leaf in tree_leaves(nest, is_leaf=is_leaf)):
        return nest
    if isinstance(nest, tuple | list):
        return _with_items(nest, [tree_map(function, item, is_leaf=is_leaf) for item in nest])
    if isinstance(nest, Mapping):
        mapped = {key: tree_map(function, value, is_leaf=is_leaf) for key, value in nest.items()}
        if type(nest) is dict or not isinstance(nest, MutableMapping):
            return mapped
        clone: Any = copy.copy(nest)  # keep attributes of a subclass
        for key, value in mapped.items():
            clone[key] = value
        return clone
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        clone = copy.copy(nest)
        for attribute in dataclasses.fields(nest):
            value = tree_map(function, getattr(nest, attribute.name), is_leaf=is_leaf)
            object.__setattr__(clone, attribute.name, value)  # works for frozen dataclasses
        return clone
    return function(nest)


def _with_items(nest: Any, items: list[Any]) -> Any:
    """Copy a list or tuple with other items, without calling a subclass constructor."""
    kind = type(nest)
    if kind is torch.Size:  # holds integers only
        return tuple(items)
    if kind in (list, tuple) or hasattr(kind, "n_sequence_fields"):  # such as torch.return_types.max
        return kind(items)
    if isinstance(nest, list):
        clone = copy.copy(nest)
        clone[:] = items
        return clone
    new_tuple = tuple.__new__(kind, items)
    if hasattr(nest, "__dict__"):
        new_tuple.__dict__.update(nest.__dict__)
    return new_tuple


def tree_leaves(nest: Any, *, is_leaf: Callable[[Any], bool] = lambda _: False) -> Iterator[Any]:
    """Yield the leaves of `nest` in order; unreadable containers count as leaves."""
    items: Any = None
    if is_leaf(nest):
        pass
    elif isinstance(nest, list | tuple):
        items = list(nest)
    elif isinstance(nest, Mapping) or (dataclasses.is_dataclass(nest) and not isinstance(nest, type)):
        try:
            fields = nest if isinstance(nest, Mapping) else [field.name for field in dataclasses.fields(nest)]
            items = [nest[key] if isinstance(nest, Mapping) else getattr(nest, key) for key in fields]
        except Exception:  # user-defined mapping
            pass
    if items is None:
        yield nest
    else:
        for item in items:
            yield from tree_leaves(item, is_leaf=is_leaf)


def tree_tensors(nest: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in `nest` in order."""
    return (leaf for leaf in tree_leaves(nest) if isinstance(leaf, torch.Tensor))


def named_tensors(nest: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in `nest` in order, with their access expressions ("batch['mask']")."""
    items: list[tuple[str, Any]] = []
    if isinstance(nest, torch.Tensor):
        yield path, nest
    elif isinstance(nest, Mapping):
        items = [(f"{path}[{key!r}]", nest[key]) for key in nest]
    elif isinstance(nest, tuple) and hasattr(nest, "_fields"):
        items = [(f"{path}.{key}", getattr(nest, key)) for key in nest._fields]
    elif isinstance(nest, list | tuple):
        items = [(f"{path}[{index}]", item) for index, item in enumerate(nest)]
    elif dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        items = [(f"{path}.{item.name}", getattr(nest, item.name)) for item in dataclasses.fields(nest)]
    for name, item in items:
        yield from named_tensors(item, name)


def copied(nest: Any) -> Any:
    """Copy containers, tensors and numpy arrays of `nest`, so that they may be modified.

    Tensors that require grad are shared, since autograd forbids in-place writes to leaves.
    """
    copies: dict[int, Any] = {}

    def copy_leaf(leaf: Any) -> Any:
        if id(leaf) not in copies:
            is_array = type(leaf).__module__ == "numpy" and hasattr(leaf, "copy")
            is_copied = not leaf.requires_grad if isinstance(leaf, torch.Tensor) else is_array
            copies[id(leaf)] = leaf if not is_copied else leaf.copy() if is_array else leaf.clone()
        return copies[id(leaf)]

    return tree_map(copy_leaf, nest)


def to_device(nest: Any, device: torch.device) -> Any:
    """Copy `nest` with its tensors moved to `device`."""
    kinds: Any = (torch.Tensor, PackedSequence)

    def move_leaf(leaf: Any) -> Any:
        return leaf.to(device) if isinstance(leaf, kinds) else leaf

    # PackedSequence.to keeps the lengths on the CPU.
    return tree_map(move_leaf, nest, is_leaf=lambda part: isinstance(part, PackedSequence))


def upcast(nest: Any) -> Any:
    """Copy `nest` with floating-point tensors in float64 and complex tensors in complex128."""

    def upcast_leaf(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            return leaf.double()
        return leaf.to(torch.complex128) if isinstance(leaf, torch.Tensor) and leaf.is_complex() else leaf

    return tree_map(upcast_leaf, nest)


def _has_custom_constructor(nest: Any) -> bool:
    """Return True for a tuple subclass with a custom `__new__`, such as `PackedSequence`."""
    if not isinstance(nest, tuple) or hasattr(type(nest), "n_sequence_fields"):
        return False
    maker = next(kind for kind in type(nest).__mro__ if "__new__" in vars(kind))
    return maker is not tuple and "_fields" not in vars(maker)


def _split_error(leaf: Any) -> TargetError:
    return TargetError(
        f"batch: a {type(leaf).__name__} cannot be split over the ranks by dim 0; give the recipe a shard function"
    )


def _is_splittable(leaf: Any) -> bool:
    return bool(getattr(leaf, "ndim", 0)) and hasattr(leaf, "shape")  # tensors and numpy arrays, not scalars


def batch_size(batch: Any) -> int:
    """Return the common size of dim 0; raise `TargetError` if there is none."""
    for leaf in tree_leaves(batch, is_leaf=_has_custom_constructor):
        if _has_custom_constructor(leaf) and next(tree_tensors(leaf), None) is not None:
            raise _split_error(leaf)
    sizes = sorted({int(leaf.shape[0]) for leaf in tree_leaves(batch) if _is_splittable(leaf)})
    if not sizes:
        raise TargetError("batch: no tensor has a dim 0 to split over the ranks; give the recipe a shard function")
    if len(sizes) > 1:
        raise TargetError(
            f"batch: its tensors have {' and '.join(map(str, sizes))} samples in dim 0, so it cannot be "
            "split over the ranks; put the samples in dim 0 everywhere, or give the recipe a shard function"
        )
    return sizes[0]


def shard_bounds(size: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return `(start, stop)` of a rank's samples; the first ranks get the remainder."""
    share, rest = divmod(size, world_size)
    start = rank * share + min(rank, rest)
    return start, start + share + (rank < rest)


def shard_batch(batch: Any, rank: int, world_size: int) -> Any:
    """Split dim 0 of all tensors and arrays in `batch` over the ranks.

    Shards are in order and nearly equal. Lists with one string per sample are split; other objects are replicated.

    Raises:
        TargetError: The batch has fewer samples than ranks, or its tensors have different sizes in dim 0.
    """
    size = batch_size(batch)
    if size < world_size:
        raise TargetError(
            f"batch: {size} sample{'' if size == 1 else 's'} cannot be split over {world_size} ranks; "
            f"return at least {world_size} samples, or check with a smaller --world-size"
        )
    return _samples(batch, size, *shard_bounds(size, rank, world_size))


def equal_parts(batch: Any, parts: int) -> Any:
    """Drop the last samples of `batch`, so that `parts` shards have equal sizes."""
    size = batch_size(batch)
    return _samples(batch, size, 0, size - size % parts) if parts <= size and size % parts else batch


def _samples(batch: Any, size: int, start: int, stop: int) -> Any:
    def are_words(value: Any) -> bool:
        return isinstance(value, list | tuple) and len(value) == size and all(isinstance(item, str) for item in value)

    def take_samples(leaf: Any) -> Any:
        if not _is_splittable(leaf) and not are_words(leaf):
            return leaf
        try:
            return leaf[start:stop]
        except Exception as error:  # a sparse tensor
            raise _split_error(leaf) from error

    return tree_map(take_samples, batch, is_leaf=are_words)
