"""Perturbation of random numbers, clocks and rounding, to measure noise."""

from __future__ import annotations

import functools
import random
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ddpcheck.gather.patching import Patch, patched

_OTHER_SEED = 7919
_FASTER = 16.0  # clock speed-up factor
_CLOCKS = ("time", "perf_counter", "monotonic", "process_time", "time_ns", "perf_counter_ns", "monotonic_ns")


class Noise:
    """Perturbation of clocks at once, and of random numbers after parameter initialization.

    Attributes:
        eps: Relative rounding error of gradients: of float32, or of the coarsest autocast dtype used.
    """

    def __init__(self) -> None:
        self._is_on = False
        self.eps = torch.finfo(torch.float32).eps
        self._signs = torch.Generator().manual_seed(_OTHER_SEED)
        patched(torch.autocast, "__enter__", self._enters)
        for name in _CLOCKS:
            Patch(time, name, _skewed)
        for module in (torch, random):
            Patch(module, "manual_seed" if module is torch else "seed", self._seeding)

    def begin(self) -> None:
        """Reseed the generators; called by an optimizer's constructor or a wrapper's forward."""
        if self._is_on:
            return
        self._is_on = True
        torch.manual_seed(torch.initial_seed() % (1 << 62))
        random.seed(_OTHER_SEED)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(_OTHER_SEED)

    def _enters(self, autocast: Any) -> None:
        if autocast._enabled:
            self.eps = max(self.eps, torch.finfo(autocast.fast_dtype).eps)

    def round(self, tensors: Iterable[torch.Tensor], times: int = 1) -> None:
        """Perturb each element of gradients or parameters by `times` rounding errors."""
        for tensor in tensors:
            if tensor.layout == torch.strided and tensor.is_floating_point():
                eps = times * max(self.eps, torch.finfo(tensor.dtype).eps)
                signs = torch.randint(0, 2, tensor.shape, generator=self._signs).mul_(2).sub_(1)
                tensor.detach().mul_(1 + eps * signs.to(tensor.device, tensor.dtype))

    def _seeding(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def seed(*given: Any, **named: Any) -> Any:
            if self._is_on and given and type(given[0]) is int:
                given = (given[0] + _OTHER_SEED, *given[1:])
            return original(*given, **named)

        return seed


def _skewed(original: Callable[[], Any]) -> Callable[[], Any]:
    begin_time = original()

    @functools.wraps(original)
    def clock() -> Any:
        return type(begin_time)(begin_time + (original() - begin_time) * _FASTER)

    return clock
