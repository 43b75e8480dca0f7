"""The events of a watched loop: forward and backward passes, reductions, optimizer steps, `no_sync`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import nn

from ddpcheck.findings.evidence.steps import SYNC_SETTING, LoopEvent
from ddpcheck.findings.source_lines import user_location
from ddpcheck.gather.ddp.ddp_wrapper import is_ddp
from ddpcheck.gather.ddp.loop_events import noted_no_sync
from ddpcheck.gather.patching import Patch, Recorder
from ddpcheck.record.loop import shard_switches
from ddpcheck.record.source.source_scope import assignment_in_program
from ddpcheck.stream.ledger import Ledger

FORWARDS = (LoopEvent("forward"), LoopEvent("forward", synchronises=True))
BACKWARD, STEP, ZEROED = LoopEvent("backward"), LoopEvent("step"), LoopEvent("zero_grad")
_REDUCTION = LoopEvent("reduction")
_EVENTS_KEPT = 64

_DDP: Any = nn.parallel.DistributedDataParallel
_patches: list[Patch] = []  # of DDP's `no_sync`, while a wrapper is watched
_records: WeakKeyDictionary[nn.Module, ref[LoopRecord]] = WeakKeyDictionary()


class LoopRecord(Recorder, subjects=("loop",), inner=("__init__",)):
    """The events of the step that is under way, and of the one before.

    Attributes:
        ledger: Of all events so far; it keeps those of the step.
        add: Records an event.
        to_report: Events that this rank reports when the ranks exchange reports next.
    """

    def __init__(self, alarm: Callable[[int], None]) -> None:
        """`alarm` is called with the step after which they are to be reported."""
        self.ledger = Ledger(kept=_EVENTS_KEPT)
        self.add = self.ledger.add
        self.to_report: tuple[LoopEvent, ...] = ()
        self._alarm = alarm
        self._last_step: tuple[LoopEvent, ...] = ()

    def attach(self, wrapper: nn.Module) -> None:
        """Record each `no_sync` of `wrapper`, its begin and its end; of shards, what switches their reduction off."""
        if not is_ddp(wrapper):
            shard_switches.follow()
        if not _patches:
            _patches.append(Patch(_DDP, "no_sync", lambda original: noted_no_sync(original, _note_of)))
        _records[wrapper] = ref(self)

    def detach(self, wrapper: nn.Module | None) -> None:
        """Record it no more; the wrapper may be gone."""
        if wrapper is not None:
            _records.pop(wrapper, None)
        if _patches and not _records:
            _patches.pop().undo()
            shard_switches.leave()

    def note(self, kind: str) -> None:
        """Record an event of a kind, with the line of the user's code; begin and end of `no_sync` without."""
        self.add(LoopEvent(kind, location="" if kind.endswith(" no_sync") else str(user_location() or "")))

    def report(self, step: int) -> None:
        """Report the events so far, which show a fault, when `step` has ended."""
        if not self.to_report:
            events = (*self._last_step, *self.ledger.events)
            off = any(event.kind == "forward" and not event.synchronises for event in events)
            line = assignment_in_program(SYNC_SETTING, value=False) if off else None
            self.to_report = events if line is None else (*events, LoopEvent(SYNC_SETTING, str(line)))
            self._alarm(step)

    def step_ended(self, step: int, *, reduced: bool) -> None:
        """Begin with the events of the next step; `reduced`: DDP has averaged, and does not wait for gradients."""
        if reduced:
            self.add(_REDUCTION)
        if self.ledger.not_entered or self.ledger.around_backward:
            self.report(step + 1)
            self.ledger.not_entered.clear()
            self.ledger.around_backward.clear()
        self._last_step = tuple(self.ledger.events)
        self.ledger.events.clear()


def _note_of(wrapper: nn.Module) -> Callable[[str], None] | None:
    record = found() if (found := _records.get(wrapper)) else None
    return None if record is None else record.note
