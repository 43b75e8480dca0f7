"""The events of a watched loop: forward and backward passes, optimizer steps, `no_sync`; wrong ones are reported."""

from __future__ import annotations

from ddpcheck.findings.evidence.steps import LoopEvent
from ddpcheck.monitor.alarms import AlarmBoard
from ddpcheck.monitor.judging import judge_events

FORWARD, BACKWARD = LoopEvent("forward", synchronises=True), LoopEvent("backward")
NO_SYNC_FORWARD, STEP = LoopEvent("forward"), LoopEvent("step")
_EVENTS_KEPT = 64


class LoopRecord:
    """The events of the step that is under way, and of the one before.

    Attributes:
        to_report: Events that this rank reports when the ranks exchange reports next.
    """

    def __init__(self, alarms: AlarmBoard) -> None:
        self.to_report: tuple[LoopEvent, ...] = ()
        self._alarms = alarms
        self._events: list[LoopEvent] = []
        self._last_step: list[LoopEvent] = []

    def note(self, kind: str, *, where: str = "") -> None:
        """Record an event of a kind, with the line of the user's code."""
        self.add(LoopEvent(kind, location=where))

    def add(self, event: LoopEvent) -> None:
        """Record an event."""
        self._events.append(event)
        if len(self._events) > _EVENTS_KEPT:
            del self._events[0]

    def report(self, step: int) -> None:
        """Report the events so far, which show a fault, when `step` has ended."""
        if not self.to_report:
            self.to_report = (*self._last_step, *self._events)
            self._alarms.post(step)

    def step_ended(self, step: int) -> None:
        """Begin with the events of the next step."""
        if any(event.kind == "no_sync" for event in self._events) and judge_events(self._events):
            self.report(step + 1)
        self._last_step, self._events = self._events, []
