"""Backward passes that reach the parameters of a wrapper and that it does not reduce, and the call that makes them so.

Only the calls of a wrapper's own forward are followed by a reduction. Where `.grad` has grown and neither a reduction
has ended nor `no_sync` has put it off, the loss came from the module inside. From then on that module is listened to,
and the line by which the script enters it is the one to change. Calls of `wrapper.forward(...)` call no hook: DDP's own
forward is noticed instead.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpcheck.findings.evidence.steps import LoopEvent
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import is_of_program, relative_path, user_location
from ddpcheck.gather.forward_hooks import OutsideOfCompiledCode, before_forward
from ddpcheck.gather.patching import Patch, patched
from ddpcheck.gather.state.fingerprints import version_of
from ddpcheck.record.loop.step_tracker import inside
from ddpcheck.record.module_hooks import Living, UnpickledHook, remove_hooks


class Follower(Protocol):
    """Is told of DDP's own forward of every wrapper, also where a call of the wrapper has called its hooks before."""

    def forward_entered(self, wrapper: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """It begins."""

    def forward_left(self, wrapper: nn.Module, output: Any) -> None:
        """It returns."""


_followers: Living[Follower] = Living()
_patches: list[Patch] = []


def follow_forward(follower: Follower) -> None:
    """Tell `follower` from now on."""
    _followers.add(follower)
    if not _patches:
        for name, around in (("_pre_forward", _enters), ("_post_forward", _leaves)):
            if hasattr(DistributedDataParallel, name):  # private to torch; without them such a call is not known
                _patches.append(patched(DistributedDataParallel, name, around))


def unfollow_forward(follower: Follower) -> None:
    """Tell it no more; may be called again."""
    _followers.discard(follower)
    while _patches and not _followers:
        _patches.pop().undo()


def _enters(wrapper: nn.Module, /, *arguments: Any, **named: Any) -> None:
    if id(wrapper) in inside:
        return
    for follower in _followers:
        follower.forward_entered(wrapper, arguments, named)


def _leaves(wrapper: nn.Module, *_arguments: Any) -> Generator[None, Any, None]:
    if id(wrapper) in inside:
        return
    output = yield
    for follower in _followers:
        follower.forward_left(wrapper, output)


DDP_FILE = inspect.getfile(nn.parallel.DistributedDataParallel)

_Marks = list[tuple[int, int] | None]


class BypassRecorder:
    """Follows the backward passes around one wrapper.

    Attributes:
        event: That makes them so: the module inside of the wrapper is called, or backward inside of its forward; with
            the line, once it is known.
        reductions: How many had ended when the backward pass that runs has begun.
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
        self.reductions = 0
        self._in_forward = False
        self._listens = True
        self._handles: list[Any] = []

    def backward_begins(self, reductions: int, *, in_forward: bool) -> None:
        """Any backward pass of the script begins; so many reductions have ended, and the wrapper's forward runs."""
        self._in_forward = in_forward
        self._marks, self.reductions = self._marked(), reductions

    def backward_ended(self) -> None:
        """It has ended, no reduction has, and its gradients are not to be reduced with those of a later one."""
        marks, before = self._marked(), self._marks
        if any(now is not None and now != then for now, then in zip(marks, before, strict=False)):
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
        marks: _Marks = []
        for parameter in self._some:
            gradient = parameter.grad
            marks.append(None if gradient is None else (id(gradient), version_of(gradient)))
        return marks

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
            of_users = is_of_program(code.co_filename)
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
