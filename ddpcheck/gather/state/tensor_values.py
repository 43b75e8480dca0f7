"""The values of a tensor of any kind as plain tensors, or that it has none that can be read."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

PLAIN = (torch.Tensor, nn.Parameter)
"""The types of tensors that hold their values themselves."""


def is_shard(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a `DTensor`, of which a rank holds a shard or a replica."""
    dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return dtensor is not None and isinstance(tensor, dtensor)


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, detached; of a `DTensor`, what this rank holds of it, in the same memory."""
    detached: Any = tensor.detach()
    local: torch.Tensor = detached.to_local() if is_shard(detached) else detached
    return local


def plain_values(tensor: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
    """The values of `tensor` as dense tensors: one, or those of a nested one's parts; none where there are none.

    Of a `DTensor` they are what this rank holds; an operation on the whole may be a collective.

    There are none on the meta device, in a fake tensor, in one whose memory has been freed, and in a subclass that does
    not compute what is asked of it here. Such tensors are compared by what they have: shape and dtype.
    """
    try:
        value = own_part(tensor)
        if (
            type(value) is torch.Tensor
            and value.layout == torch.strided
            and not (value.is_nested or value.is_quantized or value.is_conj() or value.is_neg())
        ):  # as nearly all are
            return (value,) if has_memory(value) else None
        if value.is_nested:
            parts = [plain_values(part) for part in value.unbind()]
            return None if any(part is None for part in parts) else tuple(one for part in parts for one in part or ())
        if value.layout != torch.strided:
            value = value.to_dense() if value.layout != torch.sparse_coo else value.coalesce().to_dense()
        if value.is_quantized:
            value = value.int_repr()
        value = value.resolve_conj().resolve_neg()
        return (value,) if has_memory(value) else None
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, AssertionError):  # what an operation raises that torch or a subclass lacks
        return None


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether the elements are there; to read those of a storage that was freed ends the process."""
    if tensor.is_meta:
        return False
    if type(tensor) not in PLAIN:
        if isinstance(tensor, torch._subclasses.FakeTensor):
            return False
        if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            return True  # it holds others; an operation of it says so where it cannot be read
    count = tensor.numel()
    if count and not tensor.is_contiguous():
        count = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + count) * tensor.element_size() if count else 0
    return tensor.untyped_storage().nbytes() >= needed


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor has been written in place; -1 for one of inference mode, of which torch does not know."""
    return -1 if tensor.is_inference() else tensor._version


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of `tensor`; -1 for a size that is not the same everywhere in it."""
    if not tensor.is_nested:
        return tuple(tensor.shape)
    sizes = [-1] * tensor.dim()
    for place in range(tensor.dim()):
        try:
            size = tensor.size(place)
            sizes[place] = size if type(size) is int else -1
        except RuntimeError:  # ragged
            continue
    return tuple(sizes)
