"""Packages that read the world size from elsewhere than the process group: given a world of one, or noted."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ddpcheck.gather.patching import Patch, Recorder, patched
from ddpcheck.record.rank.module_finder import when_imported

_LIGHTNING = ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric")


class Frameworks(Recorder, subjects=("parity",)):
    """Has Lightning use one device, and notes whether accelerate steps schedules.

    Attributes:
        steps_schedules: Whether a schedule is stepped once for each rank, as accelerate does.
    """

    def __init__(self, *, is_alone: bool) -> None:
        self.steps_schedules = False
        if is_alone:
            when_imported(_LIGHTNING, self._follow_lightning)
        when_imported(("accelerate.scheduler",), self._follow_accelerate)

    def _follow_lightning(self, module: Any) -> None:
        for name in ("Trainer", "Fabric"):
            if hasattr(module, name):
                Patch(getattr(module, name), "__init__", _on_one_device)

    def _follow_accelerate(self, module: Any) -> None:
        patched(module.AcceleratedScheduler, "step", self._steps)

    def _steps(self, scheduler: Any, *_arguments: Any, **_named: Any) -> None:
        self.steps_schedules |= scheduler.step_with_optimizer and not scheduler.split_batches


def _on_one_device(construct: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(construct)
    def __init__(trainer: Any, *arguments: Any, **named: Any) -> None:
        construct(trainer, *arguments, **{**named, "devices": 1, "num_nodes": 1})

    return __init__
