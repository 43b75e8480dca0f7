"""What a demonstration knows of the script that it will be part of: the names here are written into its place.

Never imported when ddpcheck runs; it lets the demonstrations be linted and type-checked like any other code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

MODEL_SEED: int = 0
BATCH_SEEDS: list[int] = []
STEP_SEEDS: list[list[int]] = []
BACKEND: str = "gloo"
STEPS: int = 1
TIMEOUT: int = 30
TOLERANCE: float = 0.0


class target:
    """The functions of the user's."""

    @staticmethod
    def model() -> nn.Module:
        """Becomes `model()`, or `recipe.model()`."""
        raise NotImplementedError

    @staticmethod
    def batch(step: int) -> Any:
        """Becomes `batch(step)`."""
        raise NotImplementedError

    @staticmethod
    def whole(step: int) -> Any:
        """Becomes `batch(step)`, on the device of this rank."""
        raise NotImplementedError

    @staticmethod
    def loss(model: nn.Module, batch: Any) -> Any:
        """Becomes `loss(model, batch)`."""
        raise NotImplementedError

    @staticmethod
    def part(batch: Any) -> Any:
        """Becomes the recipe's `shard`, or a split of dim 0."""
        raise NotImplementedError

    @staticmethod
    def ddp(module: nn.Module) -> Any:
        """Becomes the recipe's `wrap`, or `DistributedDataParallel(module)`."""
        raise NotImplementedError

    @staticmethod
    def sgd(module: nn.Module) -> torch.optim.Optimizer:
        """Becomes the recipe's `optimizer`, or SGD."""
        raise NotImplementedError

    @staticmethod
    def facts(module: Any, optim: Any = None) -> dict[str, Any]:
        """Becomes the function of `facts.py` that tells what is compared between ranks."""
        raise NotImplementedError
