"""Record of a wrapper's loop: events, listeners, and snapshots of forward passes."""

from __future__ import annotations

import contextlib
import copy
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from weakref import ref

import torch
from msgspec import Struct
from torch import nn

from ddpcheck.findings.evidence.steps import SYNC_SETTING, LoopEvent, PathEnd
from ddpcheck.findings.source_lines import step_location
from ddpcheck.gather.autograd.autograd_graph import MODULE_INTERNALS, LossGraph, node_of
from ddpcheck.gather.autograd.gradient_paths import Explainer
from ddpcheck.gather.collectives.fake_collectives import fake_collectives
from ddpcheck.gather.ddp.ddp_wrapper import is_ddp
from ddpcheck.gather.ddp.loop_events import wrap_no_sync
from ddpcheck.gather.ddp.sharding import note_settings
from ddpcheck.gather.patching import Patch, Recorder
from ddpcheck.gather.state.module_state import capture_state
from ddpcheck.gather.state.reachable import refill
from ddpcheck.recipe.pytree import tree_leaves
from ddpcheck.record.recording import Followers
from ddpcheck.record.source.source_scope import assignment_in_program
from ddpcheck.stream.ledger import Ledger
from ddpcheck.worlds.compilation import stance
from ddpcheck.worlds.rank_setup import generators, set_generators

FORWARDS = (LoopEvent("forward"), LoopEvent("forward", synchronises=True))
BACKWARD, STEP, ZEROED = LoopEvent("backward"), LoopEvent("step"), LoopEvent("zero_grad")
_REDUCTION = LoopEvent("reduction")
_EVENTS_KEPT = 64  # max events kept of a step, the last ones

_DDP: Any = nn.parallel.DistributedDataParallel


class LoopRecord(Recorder, subjects=("loop",), inner=("__init__",)):
    """Loop events of one wrapper in the current and the previous step."""

    def __init__(self, alarm: Callable[[int], None]) -> None:
        self.ledger = Ledger(kept=_EVENTS_KEPT)  # ledger of all events so far; keeps events of the current step
        self.add = self.ledger.add  # function that records an event
        self.to_report: tuple[LoopEvent, ...] = ()  # events in this rank's next report
        self._alarm = alarm  # called with the number of the step after which this rank has to report
        self._last_step: tuple[LoopEvent, ...] = ()
        self._wrapper: Callable[[], nn.Module | None] = lambda: None

    def attach(self, wrapper: nn.Module) -> None:
        """Record when `no_sync` (DDP) or a setting (`fully_shard`) turns reductions off or on."""
        if not is_ddp(wrapper):
            follow_switches()
        self._wrapper = ref(wrapper)
        _records.add(self)

    def detach(self) -> None:
        _records.discard(self)
        while _switch_patches and not _records:
            _switch_patches.pop().undo()

    def note(self, kind: str) -> None:
        """Record an event with its script line (no line if `no_sync` begins or ends)."""
        self.add(LoopEvent(kind, location="" if kind.endswith(" no_sync") else str(step_location() or "")))

    def report(self, step: int) -> None:
        """Request a report after `step`: the events recorded so far show a fault."""
        if not self.to_report:
            events = (*self._last_step, *self.ledger.events)
            is_off = any(event.kind == "forward" and not event.synchronises for event in events)
            line = assignment_in_program(SYNC_SETTING, value=False) if is_off else None
            self.to_report = events if line is None else (*events, LoopEvent(SYNC_SETTING, str(line)))
            self._alarm(step)

    def step_ended(self, step: int, *, reduced: bool) -> None:
        """End a step, and record the next step; `reduced`: True if gradients were averaged."""
        if reduced:
            self.add(_REDUCTION)
        if self.ledger.not_entered or self.ledger.around_backward:
            self.report(step + 1)
            self.ledger.not_entered.clear()
            self.ledger.around_backward.clear()
        self._last_step = tuple(self.ledger.events)
        self.ledger.events.clear()


def _note_method_of(wrapper: nn.Module) -> Callable[[str], None] | None:
    return next((record.note for record in reversed([*_records]) if record._wrapper() is wrapper), None)


_records = Followers(lambda: [Patch(_DDP, "no_sync", lambda original: wrap_no_sync(original, _note_method_of)).undo])


switch_calls: deque[LoopEvent] = deque(maxlen=16)
"""Last calls that turned reductions of `fully_shard` on or off; `synchronises` is the value set."""

_switch_patches: list[Patch] = []
_kept_patches: list[Patch] = []  # never undone


def follow_switches(fsdp: Any = None, *, to_the_end: bool = False) -> None:
    """Record in `switch_calls` when the script turns reductions of `fully_shard` off or on.

    `to_the_end`: True to record until the script ends, even after `detach`.
    """
    fsdp = fsdp or getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if not _switch_patches and not _kept_patches:
        (_kept_patches if to_the_end else _switch_patches).extend(note_settings(fsdp, switch_calls.append))


class StepListener:
    """Receiver of the step events of a wrapper; `step` counts from 0."""

    def called(self, wrapper: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Handle the start of a forward pass, with gradients enabled or not."""

    def forward_begins(self) -> None:
        """Handle the start of a forward pass with gradients enabled, even under `no_sync`."""

    def step_begins(self, step: int) -> None:
        """Handle the start of a synchronized forward pass before the step's first backward pass."""

    def forward_returned(self, step: int, output: Any, tensors: Sequence[torch.Tensor], *, synced: bool) -> None:
        """Handle a forward pass with gradients enabled; `synced`: True if not under `no_sync`."""

    def backward_begins(self) -> None:
        """Handle the start of a synchronized backward pass: a forward output gets a gradient."""

    def parameters_missing(self, step: int, names: Sequence[str]) -> None:
        """Handle parameters that the step did not use and that DDP waits for."""

    def parameters_left_out(self, step: int, names: Sequence[str], snapshot: Snapshot | None) -> None:
        """Handle missing parameters of an ended step, whose possible second backward pass never ran."""

    def parameters_absent(self, step: int, names: Sequence[str]) -> None:
        """Handle shards that backward will not reach; `fully_shard` does not wait for them."""

    def backward_hidden(self) -> None:
        """Handle the first backward pass under compiled autograd: steps are no longer followed."""

    def static_graph_broken(self, step: int, names: Sequence[str]) -> None:
        """Handle parameters first used after step 0 under `static_graph`: DDP will raise."""

    def backward_unpaired(self, *, raises: bool) -> None:
        """Handle a backward pass without a forward pass; `raises`: True if DDP will raise."""

    def step_ended(self, step: int, unused: frozenset[str], awaited: frozenset[str], snapshot: Snapshot | None) -> None:
        """Handle a step's end; `awaited`: the subset of `unused` that DDP waits for."""


_MOST_DEPTH = 3  # nesting depth of searched objects


class Snapshot(Struct):
    """Recorded forward call of the wrapped module: arguments (by reference) and random states."""

    arguments: tuple[Any, ...]  # positional arguments
    named: Mapping[str, Any]  # keyword arguments
    forward: Any  # replacement of the module's `forward` by a framework, or `None`
    random: dict[str, Any]  # state of torch's generator; if `thorough`, also of Python's and numpy's
    autocast: tuple[tuple[str, torch.dtype], ...]  # (device type, dtype) of each enabled autocast
    # indices of the returned tensors that the loss uses; `None` if unknown
    used: tuple[int, ...] | None = None

    @classmethod
    def take(
        cls, module: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any], *, thorough: bool
    ) -> Snapshot:
        """Record a forward pass that begins; `thorough`: True to save Python's and numpy's generators."""
        autocast: tuple[tuple[str, torch.dtype], ...] = ()
        for device_type in ("cuda", "cpu"):
            if torch.is_autocast_enabled(device_type):
                autocast = (*autocast, (device_type, torch.get_autocast_dtype(device_type)))
        return cls(arguments, named, vars(module).get("forward"), generators(thorough=thorough), autocast)

    def explain(
        self,
        module: nn.Module,
        missing: Mapping[str, torch.Tensor],
        context: Callable[[], contextlib.AbstractContextManager[Any]],
    ) -> dict[str, PathEnd]:
        """Rerun forward on this rank; return where each missing parameter's path to loss ends.

        Restores the module's buffers and attributes, the generators and `.grad`. Side effects outside of the module
        happen twice. Compiled code runs eagerly. `context()` makes a framework neither count nor log the rerun.
        """
        if any(isinstance(argument, Iterator) for argument in (*self.arguments, *self.named.values())):
            return dict.fromkeys(missing, PathEnd("unknown"))  # a rerun would consume data of the run

        reached: set[int] = set()

        def forward() -> Sequence[torch.Tensor]:
            set_generators(self.random)
            with contextlib.ExitStack() as stack:
                for device_type, dtype in self.autocast:
                    stack.enter_context(torch.autocast(device_type, dtype))
                stack.callback(_set_forward, module, vars(module).get("forward"))
                _set_forward(module, self.forward)
                output = module(*self.arguments, **self.named)
            tensors = differentiable_tensors(output)
            losses = [t for index, t in enumerate(tensors) if self.used is None or index in self.used]
            constants = (t for t in _tensors(output) if not t.requires_grad and t.is_floating_point())
            losses += constants  # the loss may use constants, too
            reached.update(id(leaf) for leaf in LossGraph(losses).leaves)
            return losses

        random_state = generators(thorough=True)
        state = capture_state(module, parameters=False)
        containers = [(value, copy.copy(value)) for value in _containers(module)]
        try:
            with context(), fake_collectives(), torch.enable_grad(), stance("force_eager"), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # already shown by the first run
                ends = Explainer(module, forward, lambda: state.restore(module)).explain(missing)
        except Exception:  # report the finding without a cause
            return dict.fromkeys(missing, PathEnd("unknown"))
        finally:
            state.restore(module)
            for value, content in containers:
                refill(value, content)
            set_generators(random_state)
        # A branch may depend on the state of a step (a counter): then the rerun has taken another branch.
        return {name: PathEnd("unknown") if id(missing[name]) in reached else end for name, end in ends.items()}


def _containers(module: nn.Module) -> Iterator[Any]:
    for part in module.modules():
        for key, value in vars(part).items():
            if key not in MODULE_INTERNALS and type(value) in (list, dict, set, deque):
                yield value


def _set_forward(module: nn.Module, forward: Any) -> None:
    if forward is None:
        vars(module).pop("forward", None)
    else:
        vars(module)["forward"] = forward


# Tensors in a forward output, also inside objects of user classes


def differentiable_tensors(output: Any) -> list[torch.Tensor]:
    """Return the tensors in `output` that have a `grad_fn`."""
    if isinstance(output, torch.Tensor):  # fast path of the usual case
        return [] if node_of(output) is None else [output]
    return [tensor for tensor in _tensors(output) if node_of(tensor) is not None]


def trainable_leaves(output: Any) -> list[torch.Tensor]:
    """Return the leaf tensors in `output` that require grad."""
    if isinstance(output, torch.Tensor):
        return [output] if output.requires_grad and node_of(output) is None else []
    return [tensor for tensor in _tensors(output) if tensor.requires_grad and node_of(tensor) is None]


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    pending = [(output, 0)]
    while pending:
        value, depth = pending.pop()
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                yield leaf
            elif depth < _MOST_DEPTH and not isinstance(leaf, nn.Module | type):
                with contextlib.suppress(Exception):  # no `__dict__`, or attribute access raises
                    pending.append((list(vars(leaf).values()), depth + 1))
