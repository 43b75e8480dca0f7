"""Ledger of the gradients of each backward pass through a wrapped module.

A rank keeps a ledger while its loop runs, and a judge builds one from a rank's logged events. The ledger records facts,
such as a step with gradients that were not reduced, without judging.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

from ddpcheck.findings.evidence.steps import LoopEvent

BYPASSING_EVENTS = ("forward inside", "backward inside")
"""Kinds of events for a backward pass that bypassed the wrapper, by cause."""

_NOTHING = LoopEvent("")


class Contribution(Struct):
    """Gradients that a backward pass has added to the wrapper's parameters."""

    number: int  # number of the `backward` event, counted from 0
    backward: LoopEvent  # the backward pass
    forward: LoopEvent | None = None  # forward pass whose output the backward pass starts from, or None
    no_sync_line: str | None = None  # line of the forward pass's `no_sync`, or None
    after: LoopEvent | None = None  # without a forward pass: the backward pass of the last reduction
    reduced: bool = False  # True if averaged before being used or zeroed
    # "used" by an optimizer step, "discarded": zeroed before a step, or still "open"
    fate: Literal["open", "used", "discarded"] = "open"
    ended: int = -1  # number of the event that used or zeroed the gradients, or -1
    ended_by: LoopEvent = _NOTHING  # event with that number, of kind '' if none
    # True if zeroing may be intended: backward was for other tensors, or the learning rate is zero
    excused: bool = False

    @property
    def events(self) -> tuple[LoopEvent, ...]:
        no_sync = () if self.no_sync_line is None else (LoopEvent("enter no_sync", self.no_sync_line),)
        return (*no_sync, *filter(None, (self.forward, self.backward, self.ended_by)))


class Ledger:
    """Record of what happened to the gradients that each backward pass added.

    A backward pass is reduced if a forward pass has prepared DDP for it; then all of `.grad` is averaged, including
    accumulated gradients of earlier passes. Gradients used by a step are no longer followed.
    """

    def __init__(self, events: Iterable[LoopEvent] = (), *, kept: int | None = None) -> None:
        """Add `events`; `kept`: maximum number of kept events and contributions, None for all."""
        self.events: deque[LoopEvent] = deque(maxlen=kept)  # may be cleared
        self.contributions: deque[Contribution] = deque(maxlen=kept)
        self.open: deque[Contribution] = deque(maxlen=kept)  # neither used nor zeroed
        self.prepared: LoopEvent | None = None  # forward pass after which DDP averages, if backward is pending
        # forward passes without averaging and pending backward, with the line of their `no_sync`
        self.waiting: deque[tuple[LoopEvent, str | None]] = deque(maxlen=kept)
        self.not_entered: deque[LoopEvent] = deque(maxlen=kept)  # calls of `no_sync` whose context was not entered
        # each `no_sync` that enclosed a backward pass but not its forward pass, without effect
        self.around_backward: deque[LoopEvent] = deque(maxlen=kept)
        self.zeroed = False  # True if `zero_grad` was called since the last step
        self.forwards = [0, 0]  # forward passes since the last step [without, with] averaging
        self._no_sync: LoopEvent | None = None  # the entered `no_sync`
        self._called: LoopEvent | None = None  # last call of `no_sync`
        self._forwards_inside = 0
        self._reducing: LoopEvent | None = None  # last reduced backward pass
        self._number = -1
        for event in events:
            self.add(event)

    @property
    def lost(self) -> list[Contribution]:
        """Return gradients zeroed before a step used them, unless zeroing may be intended."""
        return [entry for entry in self.contributions if entry.fate == "discarded" and not entry.excused]

    @property
    def used_unreduced(self) -> list[Contribution]:
        """Return gradients that a step used without averaging."""
        return [entry for entry in self.contributions if entry.fate == "used" and not entry.reduced]

    @property
    def unpaired(self) -> list[Contribution]:
        """Return gradients not averaged because no forward pass preceded the repeated backward pass."""
        return [entry for entry in self.contributions if entry.after is not None and not entry.reduced]

    @property
    def has_unreduced(self) -> bool:
        """Return True if any gradients that no step has used yet are not averaged."""
        for contribution in self.open:  # not a generator, for speed in each step
            if not contribution.reduced:
                return True
        return False

    @property
    def awaits_reduction(self) -> bool:
        """Return True if a later reduction may average gradients that are not reduced yet."""
        return any(not contribution.reduced and contribution.forward is not None for contribution in self.open)

    def add(self, event: LoopEvent) -> None:
        self.events.append(event)
        self._number += 1
        kind = event.kind
        if kind == "forward":
            self._forwards_inside += 1
            self.forwards[event.synchronises] += 1
            if event.synchronises:
                self.prepared = event
            else:
                no_sync_line = None if self._no_sync is None else self._no_sync.location or None
                self.waiting.append((event, no_sync_line))
        elif kind == "backward":
            self._add_backward(event)
        elif kind == "reduction":
            self._mark_reduced()
        elif kind == "step":
            self.zeroed, self.forwards = False, [0, 0]
            self._end_contributions("used", event)
        elif kind == "zero_grad":
            self.zeroed = True
            if event.discarded:
                self._discard_open(event)
        elif kind in BYPASSING_EVENTS:
            self._add_contribution(event)
        elif kind == "no_sync":
            self.not_entered.append(event)
            self._called = event
        elif kind == "enter no_sync":
            self._no_sync, self._forwards_inside = event if event.location else self._called or event, 0
            if self.not_entered:
                self.not_entered.pop()
        elif kind == "leave no_sync":
            self._no_sync = None

    def _add_backward(self, event: LoopEvent) -> None:
        contribution = self._add_contribution(event)
        if self.prepared is not None:
            contribution.forward, self.prepared, self._reducing = self.prepared, None, event
            if self._no_sync is not None and not self._forwards_inside:
                self.around_backward.append(self._no_sync)
            self._mark_reduced()
        elif self.waiting:
            contribution.forward, contribution.no_sync_line = self.waiting.popleft()
        else:
            contribution.after = self._reducing

    def _add_contribution(self, event: LoopEvent) -> Contribution:
        contribution = Contribution(self._number, event)
        self.contributions.append(contribution)
        self.open.append(contribution)
        return contribution

    def _mark_reduced(self) -> None:
        self.waiting.clear()
        for contribution in self.open:
            contribution.reduced = True

    def _discard_open(self, event: LoopEvent) -> None:
        if not self.open:  # the backward pass was before these events
            self._add_contribution(LoopEvent("backward"))
        excused = event.resting or any(contribution.backward.others for contribution in self.open)
        for contribution in self.open:
            contribution.excused = excused
        self._end_contributions("discarded", event)

    def _end_contributions(self, fate: Literal["used", "discarded"], event: LoopEvent) -> None:
        for _ in range(len(self.open)):
            contribution = self.open.popleft()
            if event.spares_unreduced and not contribution.reduced:
                self.open.append(contribution)
            else:
                contribution.fate, contribution.ended, contribution.ended_by = fate, self._number, event
