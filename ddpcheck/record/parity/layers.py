"""Layers of a single process that compute for the samples of each rank alone: dropout, and statistics of a batch."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ddpcheck.gather.patching import Patch, Recorder
from ddpcheck.record.parity.samples import Samples

_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


class RankLayers(Recorder, subjects=("parity",)):
    """Records the state of the generator before each dropout, or has a single process use those of all ranks.

    Batch normalization takes the statistics of each rank's rows, and its running statistics from those that come first:
    of rank 0, which DDP broadcasts, or of another rank if noise is measured.
    """

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._process = os.getpid()
        self._backward, self._calls = -1, 0  # in the forward passes before a backward pass
        for name in _DROPOUTS:
            Patch(functional, name, self._dropping)
        if samples.replays:
            Patch(functional, "batch_norm", self._normalizing)

    def _parts(self, inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the rows of each rank; empty if they are not known."""
        rows = self._samples.rows or (len(inputs),) * self._samples.takes_turns
        total = sum(rows)
        if not rows or not inputs.dim() or not total or len(inputs) % total:
            return ()
        sizes = [count * (len(inputs) // total) for count in rows]
        return tuple(torch.split(inputs, sizes))

    def _dropping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def dropout(inputs: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
            training = arguments[1] if len(arguments) > 1 else named.get("training", True)
            p = arguments[0] if arguments else named.get("p", 0.5)
            follows = training and p and self._samples.draws and not torch.compiler.is_compiling()
            if not follows or self.is_off or os.getpid() != self._process:
                result: torch.Tensor = original(inputs, *arguments, **named)
                return result
            if self._backward != self._samples.backwards:
                self._backward, self._calls = self._samples.backwards, 0
            key = f"dropout {self._calls}"
            self._calls += 1
            generator = _generator(inputs)
            if not self._samples.replays:
                self._samples.keep(f"{key}#{self._backward}", generator.get_state())
                result = original(inputs, *arguments, **named)
                return result
            states, parts = self._samples.of_ranks(key, self._backward), self._parts(inputs)
            if len(states) != len(parts) or not parts:
                result = original(inputs, *arguments, **named)
                return result
            before, made = generator.get_state(), []
            for state, part in zip(states, parts, strict=True):
                generator.set_state(state)
                made.append(original(part, *arguments, **named))
            generator.set_state(before)
            return torch.cat(made)

        return dropout

    def _normalizing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def batch_norm(
            inputs: torch.Tensor,
            mean: torch.Tensor | None,
            variance: torch.Tensor | None,
            weight: torch.Tensor | None = None,
            bias: torch.Tensor | None = None,
            training: bool = False,
            *more: Any,
            **named: Any,
        ) -> torch.Tensor:
            layer = sys._getframe(1).f_locals.get("self")
            parts = self._parts(inputs) if training and not isinstance(layer, nn.SyncBatchNorm) else ()
            made: list[torch.Tensor] = []
            for part in parts or (inputs,):
                statistics = (None, None) if made else (mean, variance)
                made.append(original(part, *statistics, weight, bias, training, *more, **named))
            if parts:
                self._samples.splits_statistics = True
            return torch.cat(made) if parts else made[0]

        return batch_norm


def _generator(inputs: torch.Tensor) -> torch.Generator:
    if inputs.device.type == "cuda":
        return torch.cuda.default_generators[inputs.device.index or 0]
    return torch.default_generator
