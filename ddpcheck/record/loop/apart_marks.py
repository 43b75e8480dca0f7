"""Detect if replicas become equal again under a communication hook or `no_sync`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ddpcheck.gather.ddp.ddp_wrapper import comm_hook_of
from ddpcheck.gather.patching import Recorder
from ddpcheck.gather.state.fingerprints import fingerprint, fingerprints
from ddpcheck.record.loop.step_listener import StepListener
from ddpcheck.record.loop.step_recorder import StepRecorder
from ddpcheck.stream.entries import TrainedApart

_MOST = 4096


class ApartMarks(StepListener, Recorder, subjects=("replicas",)):
    """Fingerprints of one small parameter before each forward pass that finds it changed."""

    def __init__(self, recorder: Callable[[], StepRecorder], number: int = 0, *, under_no_sync: bool = False) -> None:
        """Begin for the `number`-th wrapper; `under_no_sync`: also while steps use `no_sync`."""
        self._recorder = recorder
        self._number = number
        self._under_no_sync = under_no_sync
        self._marks: list[int] = []
        self._since, self._hook = 0, ""

    def forward_begins(self) -> None:
        """Record a fingerprint if ranks train apart and none has left by `Join`."""
        recorder = self._recorder()
        apart = recorder.apart or (self._under_no_sync and recorder.steps_alone)
        if apart and not recorder.joins and len(self._marks) < _MOST:
            if not self._marks and (wrapper := recorder.wrapper) is not None:
                self._since, self._hook = recorder.step, comm_hook_of(wrapper)
            self._add(recorder)

    def at_last(self) -> TrainedApart | None:
        """Return all marks and final parameter fingerprints, or `None` without marks."""
        if not self._marks:
            return None
        recorder = self._recorder()
        self._add(recorder)
        values = fingerprints(recorder.module.named_parameters())
        return TrainedApart(self._number, self._since, tuple(self._marks), values, self._hook)

    def _add(self, recorder: StepRecorder) -> None:
        mark = fingerprint(min(recorder.parameters.values(), key=torch.Tensor.numel))
        if self._marks[-1:] != [mark]:
            self._marks.append(mark)
