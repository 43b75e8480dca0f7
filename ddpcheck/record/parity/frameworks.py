"""Patches that make Lightning and TorchScript run unmodified in a single process."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

from ddpcheck.gather.forward_hooks import scripting_in
from ddpcheck.gather.patching import Patch, Recorder, patched
from ddpcheck.record.parity.draws import CONCATENATIONS, FUNCTIONS
from ddpcheck.record.parity.layers import DROPOUTS
from ddpcheck.record.rank.module_finder import when_imported

_REPLACED = (*FUNCTIONS, *CONCATENATIONS, *DROPOUTS, "scaled_dot_product_attention", "batch_norm")
_LIGHTNING = ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric")


class Frameworks(Recorder, subjects=("parity",)):
    """Patch of Lightning for a single device, and detector of accelerate's schedule stepping.

    Attributes:
        steps_schedules: True if a schedule is stepped once per rank, as accelerate does.
    """

    def __init__(self, *, is_alone: bool) -> None:
        self.steps_schedules = False
        if is_alone:
            when_imported(_LIGHTNING, self._follow_lightning)
        when_imported(("accelerate.scheduler",), lambda home: patched(home.AcceleratedScheduler, "step", self._steps))
        Patch(torch.jit, "script", functools.partial(scripting_in, _originals_in_place))

    def _follow_lightning(self, module: Any) -> None:
        for name in ("Trainer", "Fabric"):
            if hasattr(module, name):
                Patch(getattr(module, name), "__init__", _on_one_device)

    def _steps(self, scheduler: Any, *_arguments: Any, **_named: Any) -> None:
        self.steps_schedules |= scheduler.step_with_optimizer and not scheduler.split_batches


@contextlib.contextmanager
def _originals_in_place(_code: object) -> Iterator[None]:
    """Restore the original functions while TorchScript compiles, instead of the patched ones."""
    places = ((owner, name) for owner in (torch, functional) for name in _REPLACED if hasattr(owner, name))
    current = [(owner, name, getattr(owner, name)) for owner, name in places]
    for owner, name, function in current:
        setattr(owner, name, inspect.unwrap(function))
    try:
        yield
    finally:
        for owner, name, function in current:
            setattr(owner, name, function)


def _on_one_device(construct: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(construct)
    def __init__(trainer: Any, *arguments: Any, **named: Any) -> None:
        construct(trainer, *arguments, **{**named, "devices": 1, "num_nodes": 1})

    return __init__
