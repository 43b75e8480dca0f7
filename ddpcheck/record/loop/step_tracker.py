"""Split forward and backward passes under DDP into steps, and make each reduction end.

A step begins with a forward pass after which DDP will average gradients, and ends with the average. At the start of a
backward pass, the autograd engine knows which parameters will be reached. If some are missing, DDP would never
finish: the other ranks would hang in this backward pass, and this rank would raise at its next forward pass. So missing
parameters get zero gradients at the end of the backward pass, and the step ends on every rank.

Under `fully_shard`, backward decides if gradients are averaged, for any forward pass, and nothing waits for a
parameter. But a rank with a missing gradient reduces less than the others, which is reported before the reduction.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ddpcheck.gather.autograd.autograd_graph import (
    at_end_of_backward,
    in_compiled_backward,
    keeps_graph,
    node_of,
    running_node,
    will_be_reached,
)
from ddpcheck.gather.ddp.ddp_wrapper import inner_module
from ddpcheck.gather.patching import OF_A_WRAPPER, Recorder
from ddpcheck.recipe.pytree import tree_leaves
from ddpcheck.record.loop.loop_record import (
    BACKWARD,
    FORWARDS,
    LoopRecord,
    Snapshot,
    StepListener,
    differentiable_tensors,
    trainable_leaves,
)
from ddpcheck.record.loop.synced_parameters import NONE, SyncedParameters
from ddpcheck.record.recording import UnpickledHook, follow_forward, inside_forward, remove_hooks, unfollow_forward

_FORWARDS_KEPT = 2  # forward passes per step whose outputs are referenced


_FREQUENT_EVENTS = ("called", "forward_begins", "step_begins", "forward_returned", "backward_begins", "step_ended")


class BackwardKind(Enum):
    """Kind of the running backward pass; `NO_SYNC` may change to `SYNCED` during the pass."""

    NONE = "none runs: no gradient has reached an output of a forward pass"
    NO_SYNC = "of forward passes under no_sync"
    SYNCED = "of a forward pass after which DDP averages"
    GRAD = "reaches no parameter: torch.autograd.grad, or all of them are in re-entrant checkpoints"


_SYNCED_KINDS = (BackwardKind.SYNCED, BackwardKind.GRAD)
_NO_NAMES: frozenset[str] = frozenset()
_NO_KEYWORDS: Mapping[str, Any] = MappingProxyType({})


@dataclass(slots=True)
class _Step:
    """State of the current step.

    The first synchronized forward pass sets `ready`. After all backward passes, `_finish_step` starts the next step.
    """

    # True once a forward pass that averages has returned; otherwise, a backward pass is unpaired
    ready: bool = False
    # parameters not reached by a backward pass of the step yet; empty before the first forward pass
    unused: Set[int] = NONE
    still_expected: Set[int] = NONE  # unused parameters that a later backward pass may reach
    # parameters that only a second backward pass may reach, too late: it also reaches parameters reduced before
    late: Set[int] = NONE
    # nodes of the returned tensors, by forward pass
    roots: deque[list[Any]] = field(default_factory=lambda: deque(maxlen=_FORWARDS_KEPT))
    snapshot: Snapshot | None = None  # of the last forward pass; `None` if not repeatable


class StepTracker(Recorder, subjects=OF_A_WRAPPER, inner=("__init__", "before_forward", "after_forward", "detach")):
    """Tracker of one wrapper's steps, by hooks of forward and backward passes."""

    def __init__(
        self, wrapper: nn.Module, loop: LoopRecord, listeners: Sequence[StepListener], *, completes: bool = True
    ) -> None:
        """Follow `wrapper`; if `completes`, add zero gradients for missing parameters that DDP awaits."""
        self.parameters = SyncedParameters(wrapper)  # parameters that the wrapper synchronizes
        self._module = inner_module(wrapper)
        inside_forward.discard(id(wrapper))  # left by a freed wrapper that raised in its forward pass
        self.number = 0  # number of the current or next step, equal to the number of ended steps
        # names of parameters missing in the last step, while a second backward pass may come
        self.late: frozenset[str] = frozenset()
        self.unreduced: set[int] = set()  # indices of parameters with gradients added since the last reduction
        self.accumulated: frozenset[str] = frozenset()  # names of parameters whose last average includes such gradients
        self.in_forward = False  # True while a forward pass of the wrapper runs
        self.hooks_parameters = False  # True if backward passes are also detected at parameters, at one hook each
        self._loop = loop
        self._listeners = listeners
        # overridden methods of the listeners, by event
        (
            self._call_callbacks,
            self._forward_callbacks,
            self._begin_callbacks,
            self._return_callbacks,
            self._backward_callbacks,
            self._step_end_callbacks,
        ) = (
            [getattr(obj, name) for obj in listeners if getattr(type(obj), name) is not getattr(StepListener, name)]
            for name in _FREQUENT_EVENTS
        )
        self._adds_zeros = completes
        self._step = _Step()
        self._last_snapshot: Snapshot | None = None  # of the last step, while parameters are late
        self._ddp_waits = False  # True if DDP waits for gradients missing in the last step
        self._kind = BackwardKind.NONE
        self._reached: Set[int] = NONE  # indices reached by the running backward pass; `parameters.all` if complete
        self._is_compiled = False  # True once backward runs under compiled autograd; no hooks are registered then
        self._expects_inner_backward = False  # True if backward passes are expected inside the running forward pass
        self._is_direct_call = False  # True if the running forward pass is a call of `wrapper.forward`
        self._hook = UnpickledHook(self._on_gradient)
        self._no_sync_hook = UnpickledHook(self._on_no_sync_gradient)
        self._end_hook = UnpickledHook(self._on_backward_end)
        self._finish_hooks = UnpickledHook(self._finish_step), UnpickledHook(self._finish_in_next_callback)
        self._handles: list[Any] = []
        self._pass_handles: list[Any] = []  # removed at the end of the backward pass

    @property
    def wrapper(self) -> nn.Module | None:
        return self.parameters.wrapper()

    def attach(self) -> None:
        before, after = UnpickledHook(self.before_forward), UnpickledHook(self.after_forward)
        wrapper: Any = self.wrapper
        self._handles = [
            wrapper.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
            wrapper.register_forward_hook(after),
            *self.parameters.hooks_for_unsharded(),
        ]
        follow_forward(self)

    def detach(self) -> None:
        unfollow_forward(self)
        remove_hooks(self._pass_handles)
        remove_hooks(self._handles)
        self._step.roots.clear()
        self._step.snapshot = None
        inside_forward.discard(id(self.wrapper))

    # Forward

    def before_forward(self, wrapper: Any, arguments: tuple[Any, ...], named: Mapping[str, Any] = _NO_KEYWORDS) -> None:
        """Handle a call of the wrapper; torch omits `named` if the hook was removed."""
        if self._step.still_expected or self.late:
            self.end_pending_step()
        self.in_forward = True
        inside_forward.add(id(wrapper))
        self._kind = BackwardKind.NONE  # the last backward pass may have raised
        self._expects_inner_backward = False
        if not self._step.ready:
            self._step.roots.clear()
        for callback in self._call_callbacks:
            callback(wrapper, arguments, named)
        if not torch.is_grad_enabled():
            return
        for callback in self._forward_callbacks:
            callback()
        if self.parameters.is_sharded or self.parameters.are_averaged:
            self._begin_step()
            self._step.snapshot = Snapshot.take(self._module, arguments, named, thorough=self.number < 1)
        else:
            self._loop.add(FORWARDS[False])

    def note_direct_call(self, wrapper: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Handle the start of a direct call of `wrapper.forward`, which runs no hooks."""
        if self.wrapper is wrapper and not self.in_forward:
            self._is_direct_call = True
            self.before_forward(wrapper, arguments, named)
            inside_forward.discard(id(wrapper))

    def note_direct_return(self, wrapper: Any, output: Any) -> None:
        if self._is_direct_call and self.wrapper is wrapper:
            self._is_direct_call = False
            self.after_forward(wrapper, (), output)

    def _begin_step(self) -> None:
        if len(self._step.unused) in (0, len(self.parameters.all)):  # no backward pass of the step has run yet
            self._step.unused = self.parameters.all
            for callback in self._begin_callbacks:
                callback(self.number)

    def after_forward(self, wrapper: Any, _arguments: Any, output: Any) -> None:
        self.in_forward = False
        inside_forward.discard(id(wrapper))
        synced = self.parameters.are_averaged
        if torch.is_grad_enabled() and (synced or not self._expects_inner_backward):
            self._expect_backward(output, synced=synced)

    def expect(self, loss: Any) -> None:
        """Treat `loss` as forward output: a framework will call backward inside forward."""
        self._step.snapshot = None
        self._expects_inner_backward = True
        synced = torch.is_grad_enabled() and self.parameters.are_averaged
        if synced:
            self._begin_step()
        else:
            self._loop.add(FORWARDS[False])
        self._expect_backward(loss, synced=synced)

    def _expect_backward(self, output: Any, *, synced: bool) -> None:
        """Hook tensors in `output`, to detect backward; `synced`: True if DDP will average."""
        tensors, sharded = differentiable_tensors(output), self.parameters.is_sharded
        if synced or sharded:
            self._step.ready = True
            if not sharded:
                self._loop.add(FORWARDS[True])
            if len(tensors) != 1 or tensors[0] is not output:  # else there are no nested tensors
                self._hook_leaves(output)
            self._step.roots.append([*map(node_of, tensors)])
        for callback in self._return_callbacks:
            callback(self.number, output, tensors, synced=synced)
        if self._is_compiled:
            return
        for tensor in tensors:
            tensor.register_hook(self._hook if synced or sharded else self._no_sync_hook)
        if (synced or sharded) and (self.hooks_parameters or not tensors):  # no hooked output
            remove_hooks(self._pass_handles)
            self._pass_handles = [p.register_hook(self._hook) for p in self.parameters.leaves if p.requires_grad]

    def _hook_leaves(self, output: Any) -> None:
        """Hook leaf tensors that forward created: backward may end there (e.g. an empty batch)."""
        leaves = [leaf for leaf in trainable_leaves(output) if not isinstance(leaf, nn.Parameter)]
        if leaves and (snapshot := self._step.snapshot) is not None:
            input_ids = {id(value) for value in tree_leaves((snapshot.arguments, snapshot.named))}
            for leaf in leaves:
                if id(leaf) not in input_ids:
                    leaf.register_post_accumulate_grad_hook(UnpickledHook(self._on_leaf_gradient))

    def end_pending_step(self) -> None:
        """End a step still awaiting backward passes; called at optimizer steps and forward passes."""
        if self._step.still_expected:
            self._step.still_expected = NONE
            self._end_step(callbacks=0)
        if self.late:
            late, snapshot = self.late, self._last_snapshot
            self.late, self._last_snapshot = frozenset(), None
            for listener in self._listeners:
                listener.parameters_left_out(self.number - 1, sorted(late), snapshot)

    # Backward

    def _on_no_sync_gradient(self, _gradient: torch.Tensor) -> None:
        if self._kind is not BackwardKind.NONE or self._is_compiled or (in_compiled_backward() and self._disable()):
            return
        reached = self.parameters.reached()
        if reached:  # empty under torch.autograd.grad
            at_end_of_backward(UnpickledHook(self._after_no_sync_backward))
            self._kind = BackwardKind.NO_SYNC
            self.unreduced |= reached
            if self.parameters.is_sharded:
                self._loop.add(FORWARDS[False])
            self._loop.add(BACKWARD)

    def _after_no_sync_backward(self) -> None:
        if self._kind is BackwardKind.NO_SYNC:
            self._kind = BackwardKind.NONE

    def _on_leaf_gradient(self, _leaf: torch.Tensor) -> None:
        if self._step.ready:
            self._on_gradient(_leaf, is_grad=False)

    def _on_gradient(self, _gradient: torch.Tensor, *, is_grad: bool = True) -> None:
        if self._kind in _SYNCED_KINDS or self._is_compiled or (in_compiled_backward() and self._disable()):
            return
        if sharded := self.parameters.is_sharded:
            self._step.ready = True
            if self._kind is BackwardKind.NO_SYNC or not self.parameters.are_averaged:
                self._on_no_sync_gradient(_gradient)
                return
        self._kind = BackwardKind.SYNCED
        at_end_of_backward(self._end_hook)
        self._reached = reached = self.parameters.reached()
        if self.parameters.unused_first and (unexpected := self.parameters.newly_used(reached)):
            for listener in self._listeners:
                listener.static_graph_broken(self.number, [self.parameters.names[index] for index in unexpected])
        is_complete = reached is self.parameters.all
        if not is_complete:
            reached = reached | self.parameters.reached_by_another_node(self.parameters.all - reached)
            if is_grad and not reached:
                self._kind = BackwardKind.GRAD
        if self._kind is BackwardKind.SYNCED:
            if sharded:
                self._loop.add(FORWARDS[True])
            if self._step.ready:
                self._loop.add(BACKWARD)
            else:
                self._note_unpaired_backward(reached)
            for callback in self._backward_callbacks:
                callback()
        if is_complete:
            return
        self._hook_unreached(reached)
        self._step.still_expected = NONE if self._kind is BackwardKind.GRAD else self._expected_later(reached)
        absent = self.parameters.all - reached - self._step.still_expected - self.unreduced
        if sharded and absent and self._kind is BackwardKind.SYNCED:
            for listener in self._listeners:
                listener.parameters_absent(self.number, sorted(self.parameters.names_of(absent)))

    def _note_unpaired_backward(self, reached: Set[int]) -> None:
        self._loop.note("backward")
        self.unreduced |= reached
        self.late -= self.parameters.names_of(reached)
        for listener in self._listeners:
            listener.backward_unpaired(raises=self._ddp_waits)

    def _disable(self) -> bool:
        """Stop following steps, since backward runs in compiled autograd; always return True."""
        self._is_compiled = True
        for listener in self._listeners:
            listener.backward_hidden()
        return True

    def _hook_unreached(self, reached: Set[int]) -> None:
        """Hook parameters not in `reached`, which a re-entrant checkpoint may reach later in backward."""
        self._reached = reached_now = set(reached)
        for index in self.parameters.all - reached:
            parameter = self.parameters.leaves[index]
            if parameter.requires_grad:
                handle = parameter.register_post_accumulate_grad_hook(lambda _, index=index: reached_now.add(index))
                self._pass_handles.append(handle)

    def _expected_later(self, reached: Set[int]) -> set[int]:
        """Return indices of parameters that a later backward pass may reach through unused outputs.

        If an unused output also depends on a parameter that DDP reduces now, a later backward pass through the output
        comes too late. If the graph is kept for such a pass, the output's parameters are added to `self._step.late`.
        """
        later: set[int] = set()
        late: set[int] = set()
        reduced = reached | (self.parameters.all - self._step.unused)
        node = running_node()
        for roots in self._step.roots:
            used = [is_used or root is node for root, is_used in zip(roots, will_be_reached(roots), strict=True)]
            if self._step.snapshot is not None and roots is self._step.roots[-1]:
                self._step.snapshot.used = tuple(index for index, is_used in enumerate(used) if is_used)
            for root, is_used in zip(roots, used, strict=True):
                if not is_used:
                    reachable = self.parameters.reached_from(root)
                    (late if reduced & reachable else later).update(reachable)
        if keeps_graph():
            self._step.late = self._step.late | late
        return later

    def _on_backward_end(self) -> None:
        backward, self._kind, step = self._kind, BackwardKind.NONE, self._step
        step.roots.clear()
        if self._pass_handles:
            remove_hooks(self._pass_handles)
        if backward is BackwardKind.GRAD and not self._reached:
            return
        if not step.ready:
            if backward is BackwardKind.GRAD:  # reached by a re-entrant checkpoint
                self._note_unpaired_backward(self._reached)
            return
        if self._reached is self.parameters.all:  # fast path of a healthy step
            step.unused = step.still_expected = NONE
        else:
            step.unused = step.unused - self._reached
            step.still_expected = step.still_expected & step.unused
        if not step.still_expected:
            self._end_step(callbacks=2 if self.parameters.is_static_graph else 1)

    # End of a step

    def _end_step(self, callbacks: int) -> None:
        """End the step when DDP's reduction has ended, in an autograd engine callback.

        `callbacks`: number of nested callbacks to wait for. The step ends immediately if the number is 0, or if DDP
        awaits parameters that the step did not use.
        """
        if self._step.unused and (missing := sorted(self.parameters.awaited_by_ddp(self._step.unused))):
            if names := [self.parameters.names[index] for index in missing if index not in self._step.late]:
                for listener in self._listeners:
                    listener.parameters_missing(self.number, names)
            if self._adds_zeros:
                self.parameters.add_zero_gradients(missing)
            callbacks = 0
        if callbacks:  # DDP ends the reduction in a callback, nested under static_graph
            at_end_of_backward(self._finish_hooks[callbacks - 1])
        else:
            self._finish_step()

    def _finish_in_next_callback(self) -> None:
        at_end_of_backward(self._finish_hooks[0])

    def _finish_step(self) -> None:
        step, unused = self._step, self._step.unused
        if self.parameters.is_sharded:  # also reduces gradients of earlier backward passes
            unused = unused - self.unreduced
        number, snapshot, names_of = self.number, step.snapshot, self.parameters.names_of
        self.accumulated = names_of(self.unreduced) if self.unreduced else _NO_NAMES
        awaited, names, names_awaited, self.late = NONE, _NO_NAMES, _NO_NAMES, _NO_NAMES
        if unused:
            awaited = self.parameters.awaited_by_ddp(unused)
            names, names_awaited, self.late = names_of(unused), names_of(awaited), names_of(step.late & awaited)
        if self.parameters.unused_first is None:
            self.parameters.unused_first = unused
        self._last_snapshot, self._ddp_waits = snapshot if self.late else None, bool(awaited) and not self._adds_zeros
        self.number, step.ready, step.unused, step.late, step.snapshot = number + 1, False, NONE, NONE, None
        self.unreduced.clear()
        for callback in self._step_end_callbacks:
            callback(number, names, names_awaited, snapshot)
