"""The events of a watched loop: forward and backward passes, optimizer steps, `no_sync`; wrong ones are reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import nn

from ddpcheck.findings.evidence.steps import LoopEvent
from ddpcheck.findings.source_lines import user_location
from ddpcheck.gather.ddp.loop_events import noted_no_sync
from ddpcheck.gather.patching import Patch
from ddpcheck.judge.watched_steps import judge_events

_FORWARDS = (LoopEvent("forward"), LoopEvent("forward", synchronises=True))
BACKWARD, STEP = LoopEvent("backward"), LoopEvent("step")
_EVENTS_KEPT = 64

_DDP: Any = nn.parallel.DistributedDataParallel
_patches: list[Patch] = []  # of DDP's `no_sync`, while a wrapper is watched
_records: WeakKeyDictionary[nn.Module, ref[LoopRecord]] = WeakKeyDictionary()


class LoopRecord:
    """The events of the step that is under way, and of the one before.

    Attributes:
        to_report: Events that this rank reports when the ranks exchange reports next.
        forwards: The number of forward passes since the last optimizer step, under `no_sync` and after which DDP
            averages.
    """

    def __init__(self, alarm: Callable[[int], None]) -> None:
        """`alarm` is called with the step after which they are to be reported."""
        self.to_report: tuple[LoopEvent, ...] = ()
        self.forwards = [0, 0]
        self._alarm = alarm
        self._events: list[LoopEvent] = []
        self._last_step: list[LoopEvent] = []

    def attach(self, wrapper: nn.Module) -> None:
        """Record each `no_sync` of `wrapper`, its begin and its end."""
        if not _patches:
            _patches.append(Patch(_DDP, "no_sync", lambda original: noted_no_sync(original, _note_of)))
        _records[wrapper] = ref(self)

    def detach(self, wrapper: nn.Module | None) -> None:
        """Record it no more; the wrapper may be gone."""
        if wrapper is not None:
            _records.pop(wrapper, None)
        if _patches and not _records:
            _patches.pop().undo()

    def note(self, kind: str) -> None:
        """Record an event of a kind, with the line of the user's code; begin and end of `no_sync` without."""
        self.add(LoopEvent(kind, location="" if kind.endswith(" no_sync") else str(user_location() or "")))

    def add(self, event: LoopEvent) -> None:
        """Record an event."""
        self._events.append(event)
        if len(self._events) > _EVENTS_KEPT:
            del self._events[0]

    def add_forward(self, *, synced: bool) -> None:
        """Record a forward pass, and whether DDP averages after it."""
        self.forwards[synced] += 1
        self.add(_FORWARDS[synced])

    def report(self, step: int) -> None:
        """Report the events so far, which show a fault, when `step` has ended."""
        if not self.to_report:
            self.to_report = (*self._last_step, *self._events)
            self._alarm(step)

    def step_ended(self, step: int) -> None:
        """Begin with the events of the next step."""
        if any(event.kind == "no_sync" for event in self._events) and judge_events(self._events):
            self.report(step + 1)
        self._last_step, self._events = self._events, []


def _note_of(wrapper: nn.Module) -> Callable[[str], None] | None:
    record = found() if (found := _records.get(wrapper)) else None
    return None if record is None else record.note
