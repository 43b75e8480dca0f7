"""Detection of noise that a script adds to samples before the forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ddpcheck.gather.steps.gradient_distance import sketch
from ddpcheck.recipe.pytree import tree_tensors

_MOST_ELEMENTS = 1 << 24  # max elements of a batch tensor
_MOST_TENSORS = 4
_FEWEST_COLUMNS = 4
_ROUNDING = 1e-6  # relative rounding error of the forward inputs


def kept_samples(batch: Any) -> list[torch.Tensor]:
    """Return copies of possible sample tensors of a batch, safe from in-place writes."""
    samples = [tensor for tensor in tree_tensors(batch) if _are_samples(tensor)]
    return [tensor.detach().clone() for tensor in samples[:_MOST_TENSORS]]


def added_to(samples: Sequence[torch.Tensor], given: Any) -> tuple[float, ...]:
    """Return a sketch of the noise in `given` relative to `samples`, or `()`.

    The sketch ignores any part that is equal for all samples, and a scale and offset per sample.
    """
    for tensor in tree_tensors(given):
        for sample in samples if _are_samples(tensor) and tensor.is_floating_point() else ():
            if sample.shape == tensor.shape:
                x, y = (t.detach().cpu().double().flatten(1) for t in (sample, tensor))
                x, y = x - x.mean(1, keepdim=True), y - y.mean(1, keepdim=True)
                factors = (x * y).sum(1, keepdim=True) / (x * x).sum(1, keepdim=True).clamp_min(1e-300)
                rest = y - factors * x
                rest -= rest.mean(0)
                return tuple(sketch(rest).tolist()) if rest.norm() > _ROUNDING * y.norm() else ()
    return ()


def _are_samples(tensor: torch.Tensor) -> bool:
    plain = tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_complex()
    if not plain or tensor.dim() < 2 or tensor.device.type == "meta" or not 0 < tensor.numel() <= _MOST_ELEMENTS:
        return False
    return len(tensor) > 1 and tensor[0].numel() >= _FEWEST_COLUMNS
