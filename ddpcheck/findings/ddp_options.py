"""Options of `DistributedDataParallel` and of optimizers: which of them ranks may set differently."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

MAY_DIFFER = frozenset({"module", "device_ids", "output_device"})
"""Arguments of the DDP constructor that belong to the rank."""

WHEN_NONE: Mapping[str, object] = {"broadcast_buffers": True, "forward_sync_buffers": True, "bucket_cap_mb": 25}
"""Values that DDP's constructor uses for None."""

_LOCAL = frozenset({"gradient_as_bucket_view", "batched_grad_copy", "check_reduction", "dim"})
_OF_BUCKETS = "bucket_cap_mb"


def are_harmless(differing: Iterable[str], options: Sequence[Mapping[str, str]]) -> bool:
    """Whether the ranks still compute the right gradients and updates although these options differ.

    Measured on torch 2.13 with gloo: ranks may store their gradients in different ways. Rank 0 sends its bucket sizes
    to all ranks when buckets are rebuilt after the first step, which is not done under `find_unused_parameters`; the
    first step has one bucket, unless `bucket_cap_mb_list` says otherwise.

    Args:
        differing: Names of options.
        options: All of them, one mapping a rank.
    """
    fixed_buckets = any(
        of_rank.get("find_unused_parameters") == "True" or of_rank.get("bucket_cap_mb_list", "None") != "None"
        for of_rank in options
    )
    return all(
        name in _LOCAL or name.endswith(" order") or (name == _OF_BUCKETS and not fixed_buckets) for name in differing
    )
