"""Averages of tensors over ranks by plain all-reduces, independent of DDP."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddpcheck.findings.errors import UsageError, WrongTypeError
from ddpcheck.gather.collectives.groups import backend_of
from ddpcheck.worlds.launchers.init_dist import get_dist_info

_MB = 1 << 20
_BUCKET = 16 * _MB  # bytes; ddpcheck's own averages use twice as much


def allreduce_grads(
    params: Iterable[torch.Tensor], coalesce: bool = True, bucket_size_mb: float = -1, *, group: Any = None
) -> None:
    """Average the gradients of parameters that require grad over the ranks, in place.

    No-op for one rank. Ranks may have different sets of gradients: a gradient that is `None` counts as zeros, and stays
    `None` only if it is `None` on every rank, as under DDP with `find_unused_parameters=True`. A sparse gradient stays
    sparse, with the rows of all ranks, and becomes dense if any rank has a dense gradient of the same parameter.
    float16 and bfloat16 are summed in float32.

    Args:
        params: Parameters, the same in the same order on every rank.
        coalesce: If True, reduce gradients of the same dtype and device together, else each gradient separately.
        bucket_size_mb: Bucket size in MiB; default: a single bucket.
        group: Process group; default: all ranks. No-op on a rank that is not in the group.

    Raises:
        UsageError: The ranks pass different parameters (raised on all ranks), or an argument is invalid.
    """
    limit = _bucket_limit(coalesce, bucket_size_mb)
    owners = [parameter for parameter in _checked_tensors("allreduce_grads", params) if parameter.requires_grad]
    if get_dist_info(group)[1] <= 1:
        return
    grads = [owner.grad for owner in owners]
    layouts = _layouts_over_ranks(grads, owners, group)
    for index, mean in _means(grads, owners, [is_dense for is_dense, _ in layouts], limit, group):
        owners[index].grad = _overwrite(grads[index], mean)
    for index, (is_dense, is_sparse) in enumerate(layouts):
        if is_sparse and not is_dense:
            owners[index].grad = _sparse_mean(grads[index], owners[index], group)


def allreduce_params(
    params: Iterable[torch.Tensor], coalesce: bool = True, bucket_size_mb: float = -1, *, group: Any = None
) -> None:
    """Average every tensor (parameters or buffers) over the ranks, in place.

    No-op for one rank. Integers and booleans, e.g. `num_batches_tracked` of BatchNorm, are not averaged: the first rank
    of the group broadcasts them, as DDP does for buffers. float16 and bfloat16 are summed in float32.

    Args:
        params: Tensors, the same in the same order on every rank, e.g. `model.parameters()` or `model.buffers()`.
        coalesce: If True, reduce tensors of the same dtype and device together, else each tensor separately.
        bucket_size_mb: Bucket size in MiB; default: a single bucket.
        group: Process group; default: all ranks. No-op on a rank that is not in the group.

    Raises:
        UsageError: The ranks pass different tensors (raised on all ranks), or an argument is invalid.
    """
    limit = _bucket_limit(coalesce, bucket_size_mb)
    tensors = [parameter.detach() for parameter in _checked_tensors("allreduce_params", params)]
    rank, world_size = get_dist_info(group)
    if world_size <= 1:
        return
    _layouts_over_ranks(tensors, tensors, group)
    # Sum integers with zeros on all ranks except the first: a broadcast, coalesced with the other tensors.
    contributes = [tensor.is_floating_point() or tensor.is_complex() or not rank for tensor in tensors]
    inputs = [t if has_values else torch.zeros_like(t) for t, has_values in zip(tensors, contributes, strict=True)]
    for index, mean in _means(inputs, tensors, [True] * len(tensors), limit, group):
        tensors[index].copy_(mean)


def average_over_ranks(
    tensors: Sequence[torch.Tensor | None], like: Sequence[torch.Tensor], *, group: Any = None
) -> list[torch.Tensor | None]:
    """Return each tensor's mean over `group`; None for a tensor that no rank has."""
    means = dict(averages_over_ranks(tensors, like, group=group))
    return [means.get(index) for index in range(len(tensors))]


def averages_over_ranks(
    tensors: Sequence[torch.Tensor | None], like: Sequence[torch.Tensor], *, group: Any = None, consume: bool = False
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (index, dense mean over `group`) of each tensor.

    All-reduces are coalesced by dtype and device. A tensor that is None on some ranks counts as zeros there, and is
    omitted only if None on every rank, so ranks with different sets of gradients cannot mismatch. float16 and bfloat16
    are summed in float32. A tensor is not read after its mean is yielded.

    Args:
        tensors: Tensors or None, the same positions and dtypes on every rank.
        like: For each position, a tensor with the shape, dtype and device of the mean.
        group: Process group; default: all ranks.
        consume: If True, a mean may reuse the memory of its tensor if nothing else references it.

    Raises:
        UsageError: Number, shapes or dtypes of `like` differ between ranks; raised on all ranks.
    """
    is_present = [any(layouts) for layouts in _layouts_over_ranks(tensors, like, group)]
    yield from _means(tensors, like, is_present, _BUCKET, group, consume=consume)


def rms_over_ranks(sizes: Sequence[float], device: torch.device, group: Any) -> list[float]:
    """Return the root mean square over ranks of each number, e.g. a gradient norm."""
    _, world_size = get_dist_info(group)
    squares = torch.tensor(sizes, dtype=torch.float64, device=device) ** 2
    if world_size > 1:
        dist.all_reduce(squares, group=group)
    rms: list[float] = (squares / world_size).sqrt().tolist()
    return rms


def _bucket_limit(coalesce: bool, bucket_size_mb: float) -> float:
    number = isinstance(bucket_size_mb, (int, float)) and not isinstance(bucket_size_mb, bool)
    if not number or math.isnan(bucket_size_mb):
        raise UsageError(f"bucket_size_mb must be a number of MiB, or -1 for a single bucket; got {bucket_size_mb!r}.")
    if not coalesce:
        return 0
    return bucket_size_mb * _MB if bucket_size_mb > 0 else float("inf")


def _checked_tensors(function: str, params: object) -> list[torch.Tensor]:
    """Return the tensors of an iterable; raise `WrongTypeError` for modules, tensors and mappings."""
    takes = f"{function} takes tensors in a list or another iterable, for example model.parameters()"
    kind = type(params).__name__
    if isinstance(params, torch.nn.Module):
        raise WrongTypeError(f"{takes}, and not a module ({kind}); pass its .parameters().")
    if isinstance(params, torch.Tensor):  # would iterate over rows, which have no gradient
        raise WrongTypeError(f"{takes}, and not a single one ({kind}); put it in a list.")
    if isinstance(params, Mapping):
        raise WrongTypeError(f"{takes}, not a mapping ({kind}), whose keys are not tensors; pass its .values().")
    if not isinstance(params, Iterable):
        raise WrongTypeError(f"{takes}; got {params!r}.")
    tensors = []
    for index, item in enumerate(params):
        if not isinstance(item, torch.Tensor):
            pair = isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], torch.Tensor)
            hint = "; pass .parameters() instead of .named_parameters(), or the second of each pair" if pair else ""
            raise WrongTypeError(f"{takes}, but number {index} (from 0) is a {type(item).__name__}{hint}.")
        tensors.append(item)
    return tensors


# --- Layouts of gradients on the ranks -------------------------------------------------------------------------------


def _layouts_over_ranks(
    tensors: Sequence[torch.Tensor | None], like: Sequence[torch.Tensor], group: Any
) -> list[tuple[bool, bool]]:
    """Return (is dense on any rank, is sparse on any rank) for each tensor."""
    layouts = [(False, False) if t is None else (t.layout == torch.strided, t.layout != torch.strided) for t in tensors]
    if get_dist_info(group)[1] <= 1:
        return layouts
    device = like[0].device if like else torch.device("cuda" if "nccl" in backend_of(group) else "cpu")
    _require_equal_layouts(like, device, group)
    if not layouts:
        return []
    flags = torch.tensor(layouts, dtype=torch.int32, device=device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    return [(bool(is_dense), bool(is_sparse)) for is_dense, is_sparse in flags.tolist()]


def _require_equal_layouts(like: Sequence[torch.Tensor], device: torch.device, group: Any) -> None:
    described = repr([(tuple(tensor.shape), str(tensor.dtype)) for tensor in like])
    digest = int.from_bytes(hashlib.sha256(described.encode()).digest()[:7], "big")
    local = [len(like), digest]
    maxima = torch.tensor([*local, *(-number for number in local)], dtype=torch.int64, device=device)
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
    count, last, fewest, first = maxima.tolist()
    if count != -fewest:
        raise UsageError(
            f"The ranks pass different tensors: {-fewest} on one and {count} on another ({len(like)} on rank "
            f"{get_dist_info(group)[0]}); pass the same tensors in the same order on every rank."
        )
    if last != -first:
        raise UsageError(
            f"The ranks pass {count} tensors each, but with different shapes or dtypes at the same place; pass the "
            "same tensors in the same order on every rank."
        )


# --- Means -----------------------------------------------------------------------------------------------------------


def _means(
    tensors: Sequence[torch.Tensor | None],
    like: Sequence[torch.Tensor],
    is_present: Sequence[bool],
    limit: float,
    group: Any,
    *,
    consume: bool = False,
) -> Iterable[tuple[int, torch.Tensor]]:
    """Yield (index, contiguous dense mean) of each present tensor; integers are summed, not divided."""
    _, world_size = get_dist_info(group)
    for dtype, indices in _buckets(like, is_present, limit):
        reuse = consume and len(indices) == 1 and owns_storage(tensors[indices[0]])
        parts = [_to_dense(tensors[index], like[index]).to(_wide_dtype(dtype)).reshape(-1) for index in indices]
        flat = parts[0] if reuse else torch.cat(parts)
        if world_size > 1:
            dist.all_reduce(flat, group=group)
            if flat.is_floating_point() or flat.is_complex():
                flat /= world_size
        for index, part in zip(indices, flat.split([part.numel() for part in parts]), strict=True):
            yield index, part.reshape(like[index].shape).to(dtype)


def owns_storage(tensor: torch.Tensor | None) -> bool:
    """Return True if nothing else shares the storage of `tensor`; False if unknown."""
    count = getattr(torch._C, "_storage_Use_Count", None)  # private to torch
    if tensor is None or tensor.layout != torch.strided or count is None:
        return False
    storage: Any = tensor.untyped_storage()
    return bool(count(storage._cdata) == 2)  # references: `tensor` and `storage`


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype in (torch.float16, torch.bfloat16):
        return torch.float32
    return torch.uint8 if dtype == torch.bool else dtype


def _buckets(
    like: Sequence[torch.Tensor], is_present: Sequence[bool], limit: float
) -> list[tuple[torch.dtype, list[int]]]:
    buckets: list[tuple[torch.dtype, list[int]]] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[int], float]] = {}
    for index, model in enumerate(like):
        if is_present[index]:
            key = (model.dtype, model.device)
            members, size = filling.get(key, ([], float("inf")))
            if not members or size >= limit:
                members, size = [], 0
                buckets.append((model.dtype, members))
            members.append(index)
            filling[key] = (members, size + model.numel() * _wide_dtype(model.dtype).itemsize)
    return buckets


def _to_dense(tensor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    if tensor is None:
        return torch.zeros_like(like, memory_format=torch.contiguous_format)
    return tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()


def _overwrite(gradient: torch.Tensor | None, mean: torch.Tensor) -> torch.Tensor:
    """Return `gradient` overwritten by `mean`, or `mean` if `gradient` cannot be overwritten."""
    if gradient is None or gradient.layout != torch.strided or gradient.requires_grad:
        return mean
    if any(stride == 0 and size > 1 for stride, size in zip(gradient.stride(), gradient.shape, strict=True)):
        return mean  # elements share memory
    return gradient.copy_(mean)


def _sparse_mean(gradient: torch.Tensor | None, owner: torch.Tensor, group: Any) -> torch.Tensor:
    width = torch.tensor([gradient.sparse_dim() if gradient is not None else 1], device=owner.device)
    dist.all_reduce(width, op=dist.ReduceOp.MAX, group=group)
    rows = torch.zeros(owner.shape[: int(width)], dtype=torch.uint8, device=owner.device)
    if gradient is not None:
        gradient = gradient.detach().coalesce()
        rows[tuple(gradient.indices())] = 1
    dist.all_reduce(rows, op=dist.ReduceOp.MAX, group=group)
    ((_, mean),) = _means([gradient], [owner], [True], 0, group)
    indices = rows.nonzero().T
    return torch.sparse_coo_tensor(
        indices, mean[tuple(indices)], owner.shape, check_invariants=False, is_coalesced=True
    )
