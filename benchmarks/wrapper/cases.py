"""What is trained: models of many small tensors and of few large ones, and one transformer."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Case:
    """A model, and how it is trained.

    Attributes:
        key: What it is called on the command line.
        title: What it is called in tables.
        tensors: The number of its parameters, as `nn.Module.parameters` counts.
        weights: The number of their elements, roughly.
        samples: Of a batch in one rank: few, so that a step is short, which makes our part of it large.
        dtype: Of parameters and activations.
        quick: Whether it is part of a quick run.
    """

    key: str
    title: str
    tensors: int
    weights: float
    samples: int = 8
    dtype: str = "float32"
    quick: bool = False

    @property
    def is_transformer(self) -> bool:
        """Whether it is no chain of linear layers."""
        return self.key == "transformer"

    @property
    def width(self) -> int:
        """Of the linear layers, each of which has two tensors, the weight and the bias."""
        return max(2, math.isqrt(int(2 * self.weights / self.tensors)))

    @property
    def memory(self) -> float:
        """Bytes that one copy of the model needs in one rank: parameters, and gradients as views of DDP's buckets."""
        return self.weights * (2 if self.dtype == "bfloat16" else 4) * 2


CASES = {
    case.key: case
    for case in (
        Case("few-1", "10 tensors, 1 M weights", 10, 1e6),
        Case("few-1-64", "10 tensors, 1 M weights, 64 samples", 10, 1e6, samples=64),
        Case("few-10", "10 tensors, 10 M weights", 10, 1e7),
        Case("few-100", "10 tensors, 100 M weights", 10, 1e8),
        Case("few-1000", "10 tensors, 1,000 M weights, bfloat16", 10, 1e9, dtype="bfloat16"),
        Case("many-1", "1,000 tensors, 1 M weights", 1000, 1e6, quick=True),
        Case("many-10", "1,000 tensors, 10 M weights", 1000, 1e7),
        Case("many-100", "1,000 tensors, 100 M weights", 1000, 1e8),
        Case("most-1", "3,000 tensors, 1 M weights", 3000, 1e6),
        Case("most-10", "3,000 tensors, 10 M weights", 3000, 1e7),
        Case("most-100", "3,000 tensors, 100 M weights", 3000, 1e8),
        Case("transformer", "transformer, 148 tensors, 21 M weights", 148, 2.1e7),
    )
}
