"""Means of tensors over ranks by plain all-reduces, which owe nothing to DDP."""

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
_BUCKET = 16 * _MB  # bytes: what our own checks hold twice at a time

_MISSING, _DENSE, _SPARSE = 0, 1, 2


def allreduce_grads(
    params: Iterable[torch.Tensor], coalesce: bool = True, bucket_size_mb: float = -1, *, group: Any = None
) -> None:
    """Replace the gradient of every parameter that requires one by its mean over the ranks; nothing for one rank.

    Which parameters have a gradient may differ from rank to rank: `None` counts as zeros, and stays only where it is
    `None` on every rank, as under DDP with `find_unused_parameters=True`. Gradients change in place. One that is sparse
    on every rank that has it stays so, with the rows of all; beside a dense one it becomes dense. float16 and bfloat16
    are summed in float32.

    Args:
        params: The same in the same order on every rank.
        coalesce: Send gradients of one dtype and device together; else one at a time.
        bucket_size_mb: In parts of about this many MiB; default: all at once.
        group: Process group; default: all ranks. On a rank that is not in it nothing happens.

    Raises:
        UsageError: The ranks hand over different parameters, which is raised on all of them; or an argument is wrong.
    """
    limit = _limit(coalesce, bucket_size_mb)
    owners = [parameter for parameter in _tensors_of("allreduce_grads", params) if parameter.requires_grad]
    if get_dist_info(group)[1] <= 1:
        return
    grads = [owner.grad for owner in owners]
    kinds = _kinds_over_ranks(grads, owners, group)
    dense = [None if kind == {_SPARSE} else grad for grad, kind in zip(grads, kinds, strict=True)]
    strided = [_DENSE if _DENSE in kind else _MISSING for kind in kinds]
    for index, mean in _means(dense, owners, strided, limit, group):
        owners[index].grad = _written(grads[index], mean)
    for index, kind in enumerate(kinds):
        if kind == {_SPARSE}:
            owners[index].grad = _sparse_mean(grads[index], owners[index], group)


def allreduce_params(
    params: Iterable[torch.Tensor], coalesce: bool = True, bucket_size_mb: float = -1, *, group: Any = None
) -> None:
    """Replace every tensor, parameters or buffers, by its mean over the ranks, in place; nothing for one rank.

    Integers and booleans, for example `num_batches_tracked` of BatchNorm, have no mean among their own kind: they
    become those of the first rank of the group, as all buffers do under DDP. float16 and bfloat16 are summed in
    float32.

    Args:
        params: The same in the same order on every rank, for example `model.parameters()` or `model.buffers()`.
        coalesce: Send tensors of one dtype and device together; else one at a time.
        bucket_size_mb: In parts of about this many MiB; default: all at once.
        group: Process group; default: all ranks. On a rank that is not in it nothing happens.

    Raises:
        UsageError: The ranks hand over different tensors, which is raised on all of them; or an argument is wrong.
    """
    limit = _limit(coalesce, bucket_size_mb)
    tensors = [parameter.detach() for parameter in _tensors_of("allreduce_params", params)]
    rank, world_size = get_dist_info(group)
    if world_size <= 1:
        return
    _kinds_over_ranks(tensors, tensors, group)
    counted = [not (tensor.is_floating_point() or tensor.is_complex()) for tensor in tensors]
    # A sum in which all but the first rank are zero: a broadcast that coalesces like the rest.
    given = [
        torch.zeros_like(tensor) if whole and rank else tensor for tensor, whole in zip(tensors, counted, strict=True)
    ]
    for index, mean in _means(given, tensors, [_DENSE] * len(tensors), limit, group):
        tensors[index].copy_(mean)


def average_over_ranks(
    tensors: Sequence[torch.Tensor | None], like: Sequence[torch.Tensor], *, group: Any = None
) -> list[torch.Tensor | None]:
    """The mean of each tensor over the ranks of `group`, as `averages_over_ranks` has it; None where no rank has it."""
    means = dict(averages_over_ranks(tensors, like, group=group))
    return [means.get(index) for index in range(len(tensors))]


def averages_over_ranks(
    tensors: Sequence[torch.Tensor | None], like: Sequence[torch.Tensor], *, group: Any = None, consume: bool = False
) -> Iterator[tuple[int, torch.Tensor]]:
    """The position and the mean of each tensor over the ranks of `group`, dense, coalesced by dtype and device.

    A tensor that is None on some ranks counts as zeros there, and is left out only where it is None on every rank, so
    ranks with different sets of gradients cannot pair up the wrong ones. float16 and bfloat16 are summed in float32. A
    tensor is not read any more once its mean is there.

    Args:
        tensors: One a position, the same positions and dtypes on every rank.
        like: What each position looks like where it is None; same length.
        group: Default: all ranks.
        consume: Whether a mean may have the memory of its tensor, where nothing else looks at that.

    Raises:
        UsageError: The ranks hand over different positions; it is raised on all of them.
    """
    somewhere = [max(kind) for kind in _kinds_over_ranks(tensors, like, group)]
    yield from _means(tensors, like, somewhere, _BUCKET, group, consume=consume)


def _limit(coalesce: bool, bucket_size_mb: float) -> float:
    """The bytes of a bucket: it is full as soon as it holds that many."""
    number = isinstance(bucket_size_mb, (int, float)) and not isinstance(bucket_size_mb, bool)
    if not number or math.isnan(bucket_size_mb):
        raise UsageError(f"bucket_size_mb must be a number of MiB, or -1 for a single bucket; got {bucket_size_mb!r}.")
    if not coalesce:
        return 0
    return bucket_size_mb * _MB if bucket_size_mb > 0 else float("inf")


def _tensors_of(function: str, params: object) -> list[torch.Tensor]:
    """The tensors of an iterable, having refused whatever else is easily mistaken for one."""
    takes = f"{function} takes tensors in a list or another iterable, for example model.parameters()"
    kind = type(params).__name__
    if isinstance(params, torch.nn.Module):
        raise WrongTypeError(f"{takes}, and not a module ({kind}); pass its .parameters().")
    if isinstance(params, torch.Tensor):  # its rows, of which none has a gradient
        raise WrongTypeError(f"{takes}, and not a single one ({kind}); put it in a list.")
    if isinstance(params, Mapping):
        raise WrongTypeError(f"{takes}, not a mapping ({kind}), whose keys are not tensors; pass its .values().")
    if not isinstance(params, Iterable):
        raise WrongTypeError(f"{takes}; got {params!r}.")
    tensors = []
    for index, one in enumerate(params):
        if not isinstance(one, torch.Tensor):
            pair = isinstance(one, tuple) and len(one) == 2 and isinstance(one[1], torch.Tensor)
            hint = "; pass .parameters() instead of .named_parameters(), or the second of each pair" if pair else ""
            raise WrongTypeError(f"{takes}, but number {index} (from 0) is a {type(one).__name__}{hint}.")
        tensors.append(one)
    return tensors


# --- What the ranks bring --------------------------------------------------------------------------------------------


def _kinds_over_ranks(
    tensors: Sequence[torch.Tensor | None], like: Sequence[torch.Tensor], group: Any
) -> list[set[int]]:
    """The kinds of each position over all ranks: `_MISSING` (only where no rank holds more), `_DENSE`, `_SPARSE`."""
    kinds = [_MISSING if t is None else _DENSE if t.layout == torch.strided else _SPARSE for t in tensors]
    if get_dist_info(group)[1] <= 1:
        return [{kind} for kind in kinds]
    device = like[0].device if like else torch.device("cuda" if "nccl" in backend_of(group) else "cpu")
    _check_same(like, device, group)
    if not kinds:
        return []
    held = torch.tensor([[kind == _DENSE, kind == _SPARSE] for kind in kinds], dtype=torch.int32, device=device)
    dist.all_reduce(held, op=dist.ReduceOp.MAX, group=group)
    return [
        {kind for kind, there in ((_DENSE, dense), (_SPARSE, sparse)) if there} or {_MISSING}
        for dense, sparse in held.tolist()
    ]


def _check_same(like: Sequence[torch.Tensor], device: torch.device, group: Any) -> None:
    """Refuse, on every rank alike, positions that differ between ranks: they would pair up the wrong ones, or hang."""
    described = repr([(tuple(tensor.shape), str(tensor.dtype)) for tensor in like])
    digest = int.from_bytes(hashlib.sha256(described.encode()).digest()[:7], "big")
    mine = [len(like), digest]
    most = torch.tensor([*mine, *(-number for number in mine)], dtype=torch.int64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    count, last, fewest, first = most.tolist()
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
    kinds: Sequence[int],
    limit: float,
    group: Any,
    *,
    consume: bool = False,
) -> Iterable[tuple[int, torch.Tensor]]:
    """The mean of each position that is on any rank, contiguous and dense; integers are summed only."""
    _, world_size = get_dist_info(group)
    for dtype, indices in _buckets(like, kinds, limit):
        own = consume and len(indices) == 1 and is_alone(tensors[indices[0]])
        parts = [_dense(tensors[index], like[index]).to(_wide(dtype)).reshape(-1) for index in indices]
        flat = parts[0] if own else torch.cat(parts)
        if world_size > 1:
            dist.all_reduce(flat, group=group)
            if flat.is_floating_point() or flat.is_complex():
                flat /= world_size
        for index, part in zip(indices, flat.split([part.numel() for part in parts]), strict=True):
            yield index, part.reshape(like[index].shape).to(dtype)


def is_alone(tensor: torch.Tensor | None) -> bool:
    """Whether no other tensor is known to look at the memory of `tensor`; False where torch does not tell.

    The count is private to torch.
    """
    count = getattr(torch._C, "_storage_Use_Count", None)
    if tensor is None or tensor.layout != torch.strided or count is None:
        return False
    storage: Any = tensor.untyped_storage()
    return bool(count(storage._cdata) == 2)  # that of `tensor`, and `storage`


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which another is sent: sums in it are exact enough, and backends know it."""
    if dtype in (torch.float16, torch.bfloat16):
        return torch.float32
    return torch.uint8 if dtype == torch.bool else dtype


def _buckets(like: Sequence[torch.Tensor], kinds: Sequence[int], limit: float) -> list[tuple[torch.dtype, list[int]]]:
    """Positions that travel together: of one dtype and device, and of about `limit` bytes in all."""
    buckets: list[tuple[torch.dtype, list[int]]] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[int], float]] = {}
    for index, model in enumerate(like):
        if kinds[index] != _MISSING:
            key = (model.dtype, model.device)
            members, size = filling.get(key, ([], float("inf")))
            if not members or size >= limit:
                members, size = [], 0
                buckets.append((model.dtype, members))
            members.append(index)
            filling[key] = (members, size + model.numel() * _wide(model.dtype).itemsize)
    return buckets


def _dense(tensor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    if tensor is None:
        return torch.zeros_like(like, memory_format=torch.contiguous_format)
    return tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()


def _written(gradient: torch.Tensor | None, mean: torch.Tensor) -> torch.Tensor:
    """The gradient itself with its new value where it can hold it: others may look at its memory, DDP for one."""
    if gradient is None or gradient.layout != torch.strided or gradient.requires_grad:
        return mean
    if any(stride == 0 and size > 1 for stride, size in zip(gradient.stride(), gradient.shape, strict=True)):
        return mean  # elements share memory
    return gradient.copy_(mean)


def _sparse_mean(gradient: torch.Tensor | None, owner: torch.Tensor, group: Any) -> torch.Tensor:
    """The mean of a gradient that is sparse on every rank that has it: COO, with the rows that any of them has."""
    width = torch.tensor([gradient.sparse_dim() if gradient is not None else 1], device=owner.device)
    dist.all_reduce(width, op=dist.ReduceOp.MAX, group=group)
    rows = torch.zeros(owner.shape[: int(width)], dtype=torch.uint8, device=owner.device)
    if gradient is not None:
        gradient = gradient.detach().coalesce()
        rows[tuple(gradient.indices())] = 1
    dist.all_reduce(rows, op=dist.ReduceOp.MAX, group=group)
    ((_, mean),) = _means([gradient], [owner], [_DENSE], 0, group)
    indices = rows.nonzero().T
    return torch.sparse_coo_tensor(
        indices, mean[tuple(indices)], owner.shape, check_invariants=False, is_coalesced=True
    )
