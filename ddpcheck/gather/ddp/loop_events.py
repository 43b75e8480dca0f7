"""Events of one training step in order: forward, backward, `no_sync`, `zero_grad`."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
from torch import nn

from ddpcheck.findings.evidence.steps import LoopEvent
from ddpcheck.findings.replace import replace
from ddpcheck.findings.source_lines import step_location
from ddpcheck.findings.tracebacks import forwards_calls
from ddpcheck.gather.autograd.autograd_graph import LossGraph, named_parameters
from ddpcheck.gather.patching import Patch, patched
from ddpcheck.gather.state.fingerprints import fingerprint
from ddpcheck.gather.steps.gradient_distance import has_gradient

_DDP: Any = nn.parallel.DistributedDataParallel


class LoopEventRecorder:
    """Recorder of forward, backward, `no_sync` and `zero_grad` calls in one step."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.events: list[LoopEvent] = []
        self.values: dict[str, int] = {}  # fingerprints of parameters after the last backward pass
        self._parameters = named_parameters(module)

    def note(self, kind: str, **more: Any) -> None:
        """Add a `LoopEvent` at the current line of user code, with fields `more`."""
        location = step_location(sys._getframe(1))
        self.events.append(LoopEvent(kind, location=str(location) if location else "", **more))

    @forwards_calls
    def backward(self, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.note("backward")
        location = self.events[-1].location  # '' for ddpcheck's own final backward
        if location and self._reaches_other_leaves(args[0] if args else kwargs.get("tensors")):
            self.events[-1] = replace(self.events[-1], others=True)
        try:
            return original(*args, **kwargs)
        finally:
            self.values = {name: fingerprint(p) for name, p in self._parameters.items()}

    def _reaches_other_leaves(self, roots: Any) -> bool:
        tensors = [roots] if isinstance(roots, torch.Tensor) else list(roots or ())
        graph = LossGraph(tensors)
        param_ids = {id(p) for p in self._parameters.values()}
        return not graph.is_complete or any(id(leaf) not in param_ids for leaf in graph.leaves)

    def zero_grad(self, *_args: Any, **_kwargs: Any) -> Generator[None, Any, None]:
        """Record an event if `zero_grad` discards all gradients before an optimizer step uses them."""
        with_gradient = {n: p for n, p in self._parameters.items() if has_gradient(p)}
        yield
        unused = [n for n, p in with_gradient.items() if self.values.get(n) == fingerprint(p) and not has_gradient(p)]
        if unused and len(unused) == len(with_gradient):
            resting = all(float(group.get("lr", 1.0)) == 0.0 for group in self._optimizer.param_groups)  # warm-up
            self.note("zero_grad", discarded=tuple(unused), resting=resting)


@contextlib.contextmanager
def record_loop_events(
    module: nn.Module, wrapper: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[LoopEventRecorder]:
    """Record events of a training step in the block, by hooks and patches."""
    recorder = LoopEventRecorder(module, optimizer)

    def before_forward(_module: nn.Module, _inputs: Any) -> None:
        if torch.is_grad_enabled():
            recorder.note("forward", synchronises=bool(getattr(wrapper, "require_backward_grad_sync", True)))

    with contextlib.ExitStack() as stack:
        stack.callback(wrapper.register_forward_pre_hook(before_forward).remove)
        stack.enter_context(route_backward(recorder.backward))
        stack.enter_context(Patch(_DDP, "no_sync", lambda original: wrap_no_sync(original, lambda _: recorder.note)))
        stack.enter_context(patched(nn.Module, "zero_grad", recorder.zero_grad))
        stack.enter_context(patched(torch.optim.Optimizer, "zero_grad", recorder.zero_grad))
        yield recorder
        recorder.events.append(LoopEvent("step"))


def wrap_no_sync(original: Any, note_of: Callable[[Any], Callable[[str], None] | None]) -> Any:
    """Wrap `no_sync` to report its call, enter and exit to the function `note_of(wrapper)`."""

    @functools.wraps(original)
    def no_sync(self: Any) -> Any:
        note = note_of(self)
        if note is None:
            return original(self)
        note("no_sync")
        return _report_enter_and_exit(original(self), note)

    return no_sync


@contextlib.contextmanager
@forwards_calls
def _report_enter_and_exit(inner: Any, note: Callable[[str], None]) -> Iterator[Any]:
    note("enter no_sync")
    with inner as entered:
        try:
            yield entered
        finally:
            note("leave no_sync")


def route_backward(handler: Any) -> Patch:
    """Call `handler` instead of `torch.autograd.backward`, except for backward calls inside `handler`."""

    def make_wrapper(original: Any) -> Any:
        is_inside = False

        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_inside
            if is_inside:
                return original(*args, **kwargs)
            is_inside = True
            try:
                return handler(original, args, kwargs)
            finally:
                is_inside = False

        return backward

    return Patch(torch.autograd, "backward", make_wrapper)


@contextlib.contextmanager
def count_backwards() -> Iterator[list[int]]:
    """Yield a list whose only element counts the backward passes in the block."""
    count = [0]

    @forwards_calls
    def handler(original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        count[0] += 1
        return original(*args, **kwargs)

    with route_backward(handler):
        yield count
