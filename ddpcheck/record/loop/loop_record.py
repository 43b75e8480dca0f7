"""Loop events: forward and backward passes, reductions, optimizer steps, and switches of reductions."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from ddpcheck.findings.evidence.steps import SYNC_SETTING, LoopEvent
from ddpcheck.findings.source_lines import user_location
from ddpcheck.gather.ddp.ddp_wrapper import is_ddp
from ddpcheck.gather.ddp.loop_events import noted_no_sync
from ddpcheck.gather.ddp.sharding import note_settings
from ddpcheck.gather.patching import Patch, Recorder
from ddpcheck.record.loop.forward_snapshot import Snapshot
from ddpcheck.record.source.source_scope import assignment_in_program
from ddpcheck.stream.ledger import Ledger

FORWARDS = (LoopEvent("forward"), LoopEvent("forward", synchronises=True))
BACKWARD, STEP, ZEROED = LoopEvent("backward"), LoopEvent("step"), LoopEvent("zero_grad")
_REDUCTION = LoopEvent("reduction")
_EVENTS_KEPT = 64

_DDP: Any = nn.parallel.DistributedDataParallel
_patches: list[Patch] = []  # patches of DDP's `no_sync`, while a wrapper is watched
_records: WeakKeyDictionary[nn.Module, ref[LoopRecord]] = WeakKeyDictionary()


class LoopRecord(Recorder, subjects=("loop",), inner=("__init__",)):
    """Events of the current and the previous step."""

    def __init__(self, alarm: Callable[[int], None]) -> None:
        self.ledger = Ledger(kept=_EVENTS_KEPT)  # ledger of all events so far; keeps events of the current step
        self.add = self.ledger.add  # function that records an event
        self.to_report: tuple[LoopEvent, ...] = ()  # events in this rank's next report
        self._alarm = alarm  # called with the step after which to report
        self._last_step: tuple[LoopEvent, ...] = ()

    def attach(self, wrapper: nn.Module) -> None:
        """Record each `no_sync` of `wrapper`; for shards, each switch of the reduction."""
        if not is_ddp(wrapper):
            follow_switches()
        if not _patches:
            _patches.append(Patch(_DDP, "no_sync", lambda original: noted_no_sync(original, _note_of)))
        _records[wrapper] = ref(self)

    def detach(self, wrapper: nn.Module | None) -> None:
        """Stop recording; `None` if the wrapper is freed."""
        if wrapper is not None:
            _records.pop(wrapper, None)
        if _patches and not _records:
            _patches.pop().undo()
            while _switch_patches:
                _switch_patches.pop().undo()

    def note(self, kind: str) -> None:
        """Record an event with the user's line (no line for `no_sync`)."""
        self.add(LoopEvent(kind, location="" if kind.endswith(" no_sync") else str(user_location() or "")))

    def report(self, step: int) -> None:
        """Request a report of the events so far, which show a fault, after `step`."""
        if not self.to_report:
            events = (*self._last_step, *self.ledger.events)
            is_off = any(event.kind == "forward" and not event.synchronises for event in events)
            line = assignment_in_program(SYNC_SETTING, value=False) if is_off else None
            self.to_report = events if line is None else (*events, LoopEvent(SYNC_SETTING, str(line)))
            self._alarm(step)

    def step_ended(self, step: int, *, reduced: bool) -> None:
        """Start the next step; `reduced`: DDP has averaged and waits for no gradient."""
        if reduced:
            self.add(_REDUCTION)
        if self.ledger.not_entered or self.ledger.around_backward:
            self.report(step + 1)
            self.ledger.not_entered.clear()
            self.ledger.around_backward.clear()
        self._last_step = tuple(self.ledger.events)
        self.ledger.events.clear()


def _note_of(wrapper: nn.Module) -> Callable[[str], None] | None:
    record = record_ref() if (record_ref := _records.get(wrapper)) else None
    return None if record is None else record.note


switch_calls: deque[LoopEvent] = deque(maxlen=16)
"""Last switch_calls; `synchronises` is the value set."""

_switch_patches: list[Patch] = []
_kept_patches: list[Patch] = []  # never undone


def follow_switches(fsdp: Any = None, *, to_the_end: bool = False) -> None:
    """Patch methods of `FSDPModule` until `_leave_switches`, or for the whole process."""
    fsdp = fsdp or getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if not _switch_patches and not _kept_patches:
        (_kept_patches if to_the_end else _switch_patches).extend(note_settings(fsdp, switch_calls.append))


class StepListener:
    """Receiver of the step events of a wrapper; `step` counts from 0."""

    def called(self, wrapper: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Handle the start of a forward pass, with or without gradients."""

    def forward_begins(self) -> None:
        """Handle the start of a forward pass with gradients, perhaps under `no_sync`."""

    def step_begins(self, step: int) -> None:
        """Handle the start of a forward pass before any backward pass of the step."""

    def forward_returned(self, step: int, output: Any, tensors: Sequence[torch.Tensor], *, synced: bool) -> None:
        """Handle the result of a forward pass with gradients; `synced`: not under `no_sync`."""

    def backward_begins(self) -> None:
        """Handle the first gradient of a backward pass at an output of forward."""

    def parameters_missing(self, step: int, names: Sequence[str]) -> None:
        """Handle parameters not used in the step, which DDP waits for (or gets zeros)."""

    def parameters_left_out(self, step: int, names: Sequence[str], snapshot: Snapshot | None) -> None:
        """Handle parameters missing in an ended step whose second backward pass never came."""

    def parameters_absent(self, step: int, names: Sequence[str]) -> None:
        """Handle parameters that the starting backward pass will not reach; nothing waits."""

    def backward_hidden(self) -> None:
        """Handle a backward pass under compiled autograd, once: steps cannot be followed."""

    def static_graph_broken(self, step: int, names: Sequence[str]) -> None:
        """Handle parameters first used after step 0 under `static_graph`: DDP will raise."""

    def backward_unpaired(self, *, raises: bool) -> None:
        """Handle a backward pass after the end of the step; `raises`: DDP will raise."""

    def step_ended(self, step: int, unused: frozenset[str], awaited: frozenset[str], snapshot: Snapshot | None) -> None:
        """Handle averaged gradients; `awaited`: DDP waits; `snapshot`: of the last forward."""
