"""Detect backward passes that bypass the wrapper, and the call that causes the bypass.

Only calls of the wrapper's own forward lead to a reduction. If `.grad` has grown without a reduction and without
`no_sync`, the loss came from the inner module. From then on, hooks on the inner module find the script line to fix.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn

from ddpcheck.findings.evidence.steps import LoopEvent
from ddpcheck.findings.source_lines import frames_from, is_of_program, location_of, user_location
from ddpcheck.gather.forward_hooks import OutsideOfCompiledCode, before_forward
from ddpcheck.gather.patching import Recorder
from ddpcheck.gather.state.fingerprints import version_of
from ddpcheck.record.module_hooks import UnpickledHook, remove_hooks

DDP_FILE = inspect.getfile(nn.parallel.DistributedDataParallel)

_Marks = list[tuple[int, int] | None]


class BypassRecorder(Recorder, subjects=("loop",)):
    """Recorder of backward passes that bypass one wrapper.

    Attributes:
        reductions: Number of finished reductions at the start of the running backward pass.
    """

    def __init__(
        self, module: nn.Module, parameters: Sequence[torch.Tensor], sink: Callable[[LoopEvent], object]
    ) -> None:
        """Begin; `sink` receives an event for each bypass."""
        self._event = LoopEvent("forward inside")
        self._sink = sink
        self._module = module
        self._some = [*parameters[:1], *parameters[-1:]]  # first and last: `.grad` shows a backward pass
        self._marks: _Marks = []
        self.reductions = 0
        self._in_forward = False
        self._listens = True
        self._handles: list[Any] = []

    def backward_begins(self, reductions: int, *, in_forward: bool) -> None:
        """Record gradient versions at the start of any backward pass of the script."""
        self._in_forward = in_forward
        self._marks, self.reductions = self._marked(), reductions

    def backward_ended(self) -> None:
        """Detect gradients added by a finished backward pass without a reduction."""
        marks, before = self._marked(), self._marks
        if any(mark is not None and mark != previous for mark, previous in zip(marks, before, strict=False)):
            if self._in_forward:
                self._event = LoopEvent("backward inside", location=str(user_location() or ""))
            else:
                self._listen()
            self._sink(self._event)

    def found(self) -> LoopEvent:
        """Start to listen; return the call that causes the bypass."""
        self._listen()
        return self._event

    def close(self) -> None:
        """Stop listening."""
        self._listens = False
        remove_hooks(self._handles)

    def _marked(self) -> _Marks:
        marks: _Marks = []
        for parameter in self._some:
            gradient = parameter.grad
            marks.append(None if gradient is None else (id(gradient), version_of(gradient)))
        return marks

    def _listen(self) -> None:
        if self._listens and not self._handles and not self._event.location:
            hook = OutsideOfCompiledCode(UnpickledHook(self._called))
            self._handles = [before_forward(part, hook) for part in self._module.modules()]

    def _called(self, *_arguments: Any) -> None:
        """Record the program line that calls a part, unless the wrapper does."""
        if self._event.location or not torch.is_grad_enabled():
            return
        parts = set(self._module.modules())
        frames = [*frames_from(sys._getframe(1))]
        if any(frame.f_code.co_filename == DDP_FILE for frame in frames):
            return
        user_frames = (frame for frame in frames if is_of_program(frame.f_code.co_filename))
        caller = next((frame for frame in user_frames if not _is_method_of(frame, parts)), None)
        if caller is not None:
            self._event = LoopEvent("forward inside", location=str(location_of(caller)))


def _is_method_of(frame: FrameType, parts: set[nn.Module]) -> bool:
    """Return True if the frame runs a method of one of the modules."""
    code = frame.f_code
    instance = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    return isinstance(instance, nn.Module) and instance in parts
