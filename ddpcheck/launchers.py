"""What stands between ranks and their world: who am I, and an all-reduce of gradients that owes nothing to DDP."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

_BUCKET_ELEMENTS = 1 << 22


def get_dist_info(group: Any = None) -> tuple[int, int]:
    """Rank and world size; (0, 1) without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(group), dist.get_world_size(group)
    return 0, 1


def average_over_ranks(
    tensors: Sequence[torch.Tensor | None], like: Sequence[torch.Tensor], *, group: Any = None
) -> list[torch.Tensor | None]:
    """The mean of each tensor over the ranks of `group`, dense, coalesced by dtype and device.

    A tensor that is None on some ranks counts as zeros there, and stays None only where it is None on every rank, so
    ranks with different sets of gradients cannot pair up the wrong ones. float16 and bfloat16 are summed in float32.

    Args:
        tensors: One a position, the same positions and dtypes on every rank.
        like: What each position looks like where it is None; same length.
        group: Default: all ranks.
    """
    _, world_size = get_dist_info(group)
    device = like[0].device if like else torch.device("cpu")
    present = torch.tensor([tensor is not None for tensor in tensors], dtype=torch.int32, device=device)
    if world_size > 1 and len(present):
        dist.all_reduce(present, group=group)
    somewhere = present.tolist()
    result: list[torch.Tensor | None] = [None] * len(tensors)
    for dtype, indices in _buckets(like, somewhere):
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        parts = [_dense(tensors[index], like[index]).to(wide).reshape(-1) for index in indices]
        flat = torch.cat(parts)
        if world_size > 1:
            dist.all_reduce(flat, group=group)
            flat /= world_size
        for index, part in zip(indices, flat.split([part.numel() for part in parts]), strict=True):
            result[index] = part.reshape(like[index].shape).to(dtype)
    return result


def _buckets(like: Sequence[torch.Tensor], somewhere: Sequence[int]) -> list[tuple[torch.dtype, list[int]]]:
    """Positions that travel together: of one dtype and device, and of about `_BUCKET_ELEMENTS` in all."""
    buckets: list[tuple[torch.dtype, list[int]]] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    for index, model in enumerate(like):
        if somewhere[index]:
            key = (model.dtype, model.device)
            members, size = filling.get(key, ([], _BUCKET_ELEMENTS))
            if size >= _BUCKET_ELEMENTS:
                members, size = [], 0
                buckets.append((model.dtype, members))
            members.append(index)
            filling[key] = (members, size + model.numel())
    return buckets


def _dense(tensor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    if tensor is None:
        return torch.zeros_like(like, memory_format=torch.contiguous_format)
    return tensor.to_dense() if tensor.layout != torch.strided else tensor


def allreduce_grads(parameters: Iterable[nn.Parameter], *, group: Any = None) -> None:
    """Replace every gradient by its mean over the ranks; nothing at world size 1.

    Every rank must hand over the same parameters in the same order; which of them have a gradient may differ.
    """
    owners = [parameter for parameter in parameters if parameter.requires_grad]
    if get_dist_info(group)[1] == 1:
        return
    averaged = average_over_ranks([owner.grad for owner in owners], owners, group=group)
    for owner, gradient in zip(owners, averaged, strict=True):
        owner.grad = gradient
