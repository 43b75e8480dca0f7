"""Whether replicas are ever the same again while ranks train apart: by a communication hook, or under no_sync."""

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
    """Fingerprints of one small parameter before each forward pass in which it has changed, on this rank."""

    def __init__(self, recorder: Callable[[], StepRecorder], number: int = 0, *, under_no_sync: bool = False) -> None:
        """Of the `number`-th wrapper; `recorder` returns what follows its steps; `under_no_sync`: there too."""
        self._recorder = recorder
        self._number = number
        self._under_no_sync = under_no_sync
        self._marks: list[int] = []
        self._since, self._hook = 0, ""

    def forward_begins(self) -> None:
        """Take one, where ranks train apart and have not left the loop by right."""
        recorder = self._recorder()
        apart = recorder.apart or (self._under_no_sync and recorder.steps_alone)
        if apart and not recorder.joins and len(self._marks) < _MOST:
            if not self._marks and (wrapper := recorder.wrapper) is not None:
                self._since, self._hook = recorder.step, comm_hook_of(wrapper)
            self._add(recorder)

    def at_last(self) -> TrainedApart | None:
        """What there is at the end, with the last values of all parameters; `None` where ranks have not been apart."""
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
