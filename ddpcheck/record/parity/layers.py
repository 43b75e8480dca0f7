"""Per-rank dropout and batch normalization in a single process."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import cat, nn
from torch.nn import functional

from ddpcheck.gather.patching import Patch, Recorder
from ddpcheck.record.parity.samples import Samples

DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


class RankLayers(Recorder, subjects=("parity",)):
    """Recorder of the generator state before each dropout, or per-rank replay.

    Batch normalization uses the statistics of each rank's rows. The first rank updates the running statistics: rank 0,
    which DDP broadcasts, or another rank if noise is measured.
    """

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._process = os.getpid()
        self._backward, self._calls = -1, 0  # forward calls since the last backward pass
        for name in DROPOUTS:
            Patch(functional, name, self._dropping)
        Patch(functional, "scaled_dot_product_attention", self._attending)
        if samples.replays:
            Patch(functional, "batch_norm", self._normalizing)

    def _parts(self, inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the rows of each rank; empty if unknown."""
        owners = self._samples.owners(len(inputs)) if inputs.dim() else None
        if owners is None:
            return ()
        # Random numbers are drawn in memory order, so keep the memory format of a rank's tensor.
        strides = inputs.stride()
        order = sorted(range(len(strides)), key=strides.__getitem__, reverse=True)
        inverse = sorted(range(len(strides)), key=order.__getitem__)
        parts = (inputs[owners.to(inputs.device) == rank] for rank in range(int(owners.max()) + 1))
        return tuple(part.permute(order).contiguous().permute(inverse) for part in parts)

    def _dropping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def dropout(inputs: torch.Tensor, *arguments: Any, **named: Any) -> Any:
            training = arguments[1] if len(arguments) > 1 else named.get("training", True)
            p = arguments[0] if arguments else named.get("p", 0.5)
            if not training or not p or not self._follows():
                return original(inputs, *arguments, **named)
            return self._with_states(lambda part: original(part, *arguments, **named), inputs)

        return dropout

    def _attending(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def attention(query: Any, key: Any, value: Any, *arguments: Any, **named: Any) -> Any:
            p = arguments[1] if len(arguments) > 1 else named.get("dropout_p", 0.0)
            mask = arguments[0] if arguments else named.get("attn_mask")
            if not p or not self._follows():
                return original(query, key, value, *arguments, **named)
            if mask is None or len(mask) != len(query):  # one mask for all rows
                return self._with_states(lambda *parts: original(*parts, *arguments, **named), query, key, value)
            rest_args, kwargs = arguments[1:], {name: item for name, item in named.items() if name != "attn_mask"}
            return self._with_states(lambda *parts: original(*parts, *rest_args, **kwargs), query, key, value, mask)

        return attention

    def _follows(self) -> bool:
        is_rank = not self.is_off and os.getpid() == self._process
        return is_rank and self._samples.draws and not torch.compiler.is_compiling()

    def _with_states(self, compute: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        """Record the generator state; in a single process, compute on each rank's rows."""
        if self._backward != self._samples.backwards:
            self._backward, self._calls = self._samples.backwards, 0
        key, generator = f"dropout {self._calls}", _generator(inputs[0])
        self._calls += 1
        if not self._samples.replays:
            entry = generator.get_state(), *(tuple(tensor.shape) for tensor in inputs)
            self._samples.keep(f"{key}#{self._backward}", entry)
            return compute(*inputs)
        states, parts = self._samples.of_ranks(key, self._backward), [self._parts(tensor) for tensor in inputs]
        if not states or any(len(input_parts) != len(states) for input_parts in parts):
            return compute(*inputs)
        saved_state, outputs = generator.get_state(), []
        for (state, *shapes), *args in zip(states, *parts, strict=True):
            generator.set_state(state)
            outputs.append(_without_padding(compute, args, shapes) if self._samples.is_padded else compute(*args))
        generator.set_state(saved_state)
        return self._samples.in_rows(cat(outputs))

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
            outputs: list[torch.Tensor] = []
            for part in parts or (inputs,):
                statistics = (None, None) if outputs else (mean, variance)
                outputs.append(original(part, *statistics, weight, bias, training, *more, **named))
            if parts:
                self._samples.splits_statistics = True
            return self._samples.in_rows(cat(outputs)) if parts else outputs[0]

        return batch_norm


def _generator(inputs: torch.Tensor) -> torch.Generator:
    if inputs.device.type == "cuda":
        return torch.cuda.default_generators[inputs.device.index or 0]
    return torch.default_generator


def _without_padding(
    compute: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]
) -> torch.Tensor:
    """Compute without padding, to draw as many numbers as the rank; pad afterwards."""
    trimmed = [x[tuple(map(slice, (len(x), *shape[1:])))].clone() for x, shape in zip(inputs, shapes, strict=True)]
    output = compute(*trimmed)
    sizes = inputs[0].shape if len(inputs) == 1 else (*inputs[0].shape[:-1], output.shape[-1])  # dropout, attention
    missing = [size - output_size for size, output_size in zip(sizes, output.shape, strict=True)]
    return functional.pad(output, [count for size in reversed(missing) for count in (0, size)])
