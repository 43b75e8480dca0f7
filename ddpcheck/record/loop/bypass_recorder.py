"""Backward passes that reach the parameters of a wrapper and that it does not reduce, and the call that makes them so.

Only the calls of a wrapper's own forward are followed by a reduction. Where `.grad` has grown and neither a reduction
has ended nor `no_sync` has put it off, the loss came from the module inside. From then on that module is listened to,
and the line by which the script enters it is the one to change.
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
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import is_installed, is_user_file, relative_path, user_location
from ddpcheck.gather.forward_hooks import OutsideOfCompiledCode, before_forward
from ddpcheck.gather.state.tensor_values import version_of
from ddpcheck.record.module_hooks import UnpickledHook, remove_hooks

DDP_FILE = inspect.getfile(nn.parallel.DistributedDataParallel)

_Marks = list[tuple[int, int] | None]


class BypassRecorder:
    """Follows the backward passes around one wrapper.

    Attributes:
        event: That makes them so: the module inside of the wrapper is called, or backward inside of its forward; with
            the line, once it is known.
    """

    def __init__(
        self, module: nn.Module, parameters: Sequence[torch.Tensor], sink: Callable[[LoopEvent], object]
    ) -> None:
        """Begin; `sink` is told of each such pass."""
        self.event = LoopEvent("forward inside")
        self._sink = sink
        self._module = module
        self._some = [*parameters[:1], *parameters[-1:]]  # by which a backward pass is known to have come
        self._marks: _Marks = []
        self._reductions = 0
        self._in_forward = False
        self._listens = True
        self._handles: list[Any] = []

    def backward_begins(self, reductions: int, *, in_forward: bool) -> None:
        """Any backward pass of the script begins; so many reductions have ended, and the wrapper's forward runs."""
        self._in_forward = in_forward
        self._marks, self._reductions = self._marked(), reductions

    def backward_ended(self, reductions: int, *, put_off: bool) -> None:
        """It has ended; `put_off`: its gradients are to be reduced with those of a later one."""
        marks, before = self._marked(), self._marks
        grown = any(now is not None and now != then for now, then in zip(marks, before, strict=False))
        if grown and reductions == self._reductions and not put_off:
            if self._in_forward:
                self.event = LoopEvent("backward inside", location=str(user_location() or ""))
            else:
                self._listen()
            self._sink(self.event)

    def close(self) -> None:
        """Listen no more."""
        self._listens = False
        remove_hooks(self._handles)

    def _marked(self) -> _Marks:
        return [None if p.grad is None else (id(p.grad), version_of(p.grad)) for p in self._some]

    def _listen(self) -> None:
        if self._listens and not self._handles and not self.event.location:
            hook = OutsideOfCompiledCode(UnpickledHook(self._called))
            self._handles = [before_forward(part, hook) for part in self._module.modules()]

    def _called(self, *_arguments: Any) -> None:
        """A part of the module is called: by a line outside of it, if not by the wrapper."""
        if self.event.location or not torch.is_grad_enabled():
            return
        parts = set(self._module.modules())
        frame: FrameType | None = sys._getframe(1)
        found: FrameType | None = None
        while frame is not None:
            code = frame.f_code
            if code.co_filename == DDP_FILE:
                return
            of_users = is_user_file(code.co_filename) and not is_installed(code.co_filename)
            if found is None and of_users and not _is_method_of(frame, parts):
                found = frame
            frame = frame.f_back
        if found is not None:
            where = Location(relative_path(found.f_code.co_filename), found.f_lineno)
            self.event = LoopEvent("forward inside", location=str(where))


def _is_method_of(frame: FrameType, parts: set[nn.Module]) -> bool:
    """Whether a frame is of a method of one of the modules."""
    code = frame.f_code
    own = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    return isinstance(own, nn.Module) and own in parts
