"""The seeds of a check, the global batches that are made under them, and fingerprints of batches and samples."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from ddpcheck.findings.errors import TargetError
from ddpcheck.gather.state.module_description import fingerprint
from ddpcheck.gather.state.randomness import mixed_seed, seed_everything
from ddpcheck.recipe.pytree import batch_size, equal_parts, tree_tensors
from ddpcheck.recipe.recipe import Recipe
from ddpcheck.worlds import rank as this_rank

_BATCH_SEED, _MODEL_SEED, _STEP_SEED = 1, 2, 3
_MOST_BYTES = 1 << 28  # of a batch whose samples are told apart
_ODD = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number


def model_seed(seed: int) -> int:
    """The seed under which `model()` is called."""
    return mixed_seed(seed, _MODEL_SEED)


def step_seed(seed: int, step: int, rank: int = 0) -> int:
    """The seed of the random numbers that a rank draws in a step; a single process draws as rank 0."""
    return mixed_seed(seed, _STEP_SEED, step, rank)


def batch_seed(seed: int, step: int) -> int:
    """The seed under which `batch(step)` is called."""
    return mixed_seed(seed, _BATCH_SEED, step)


def make_batch(recipe: Recipe, step: int, *, seed: int, world_size: int) -> Any:
    """The global batch of `step`, made under a seed of its own.

    Where ddpcheck splits it itself, samples that do not divide by the ranks are left out: unequal shards would make the
    mean of the ranks another thing than the mean of the batch, and that would be no fault of the recipe.
    """
    this_rank.set_status(f"step {step}: batch")
    seed_everything(batch_seed(seed, step))
    batch = recipe.global_batch(step)
    if recipe.shard is None:
        with contextlib.suppress(TargetError):  # told where the batch is split
            return equal_parts(batch, world_size)
    return batch


def uneven_batch(recipe: Recipe, step: int, *, seed: int, world_size: int) -> str:
    """A sentence on the samples that `make_batch` leaves out; empty where there are none."""
    if recipe.shard is not None:
        return ""
    seed_everything(batch_seed(seed, step))
    with contextlib.suppress(TargetError):
        size = batch_size(recipe.global_batch(step))
        if size > world_size and size % world_size:
            return (
                f"the batch of {size} samples does not divide by {world_size} ranks: it was checked with equal shards, "
                f"without the last {size % world_size}"
            )
    return ""


def batch_fingerprint(batch: Any) -> tuple[int, ...]:
    """Tells whether two processes hold the same batch."""
    return tuple(fingerprint(tensor) for tensor in tree_tensors(batch))


def sample_fingerprints(batch: Any) -> tuple[int, ...]:
    """One fingerprint for each sample of `batch`, of the bits of its row in every tensor.

    Returns:
        Nothing where the tensors do not agree on the number of samples, or are too large.
    """
    tensors = [t.detach() for t in tree_tensors(batch) if t.dim() > 0]
    try:
        size = batch_size(batch)
    except TargetError:
        return ()
    if size == 0 or sum(t.numel() * t.element_size() for t in tensors) > _MOST_BYTES:
        return ()
    if any(t.layout != torch.strided or t.is_quantized for t in tensors):
        return ()
    total = torch.zeros(size, dtype=torch.int64)
    for tensor in tensors:
        total = (total ^ (total >> 29)) * _ODD + _row_sums(tensor.cpu())
    return tuple(total.tolist())


def _row_sums(tensor: torch.Tensor) -> torch.Tensor:
    rows = tensor.resolve_conj().resolve_neg().contiguous().reshape(len(tensor), -1).view(torch.uint8)
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[1] % 8)).contiguous().view(torch.int64)
    index = torch.arange(1, padded.shape[1] + 1, dtype=torch.int64)
    weights = (index * _ODD) | 1
    return (((padded >> 32) & 0xFFFFFFFF ^ padded) * weights).sum(1)
