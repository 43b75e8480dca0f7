"""The ledger: what becomes of the gradients of each backward pass around one wrapper, on one rank.

A rank keeps one while its loop runs, and a judge makes one of the events that a rank has left. It judges nothing: that
a step has used what was not reduced is a fact.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

from ddpcheck.findings.evidence.steps import LoopEvent

AROUND = ("forward inside", "backward inside")
"""Kinds of events that stand for a backward pass around the wrapper, and say how it came to that."""

_NOTHING = LoopEvent("")


class Contribution(Struct):
    """What one backward pass has added to the gradients of the wrapper's parameters."""

    number: int  # of the event `backward`, counted from 0
    backward: LoopEvent  # the pass
    forward: LoopEvent | None = None  # of the wrapper, to whose output it belongs; `None`: it has none of its own
    under: str | None = None  # the line of the `no_sync` under which that forward pass ran; `None`: under none
    after: LoopEvent | None = None  # without a forward pass of its own: the one that has ended the reduction before it
    reduced: bool = False  # whether its gradients were averaged before anything has used or zeroed them
    # what has become of them: an optimizer's step has used them, they were zeroed before one has, or neither
    fate: Literal["open", "used", "discarded"] = "open"
    ended: int = -1  # the number of the event that has used or zeroed them; -1 for none
    ended_by: LoopEvent = _NOTHING  # that event; of no kind where there is none
    # whether what was zeroed may be meant to go: the pass was for other tensors, or the optimizer rests
    excused: bool = False

    @property
    def events(self) -> tuple[LoopEvent, ...]:
        """The events that tell of it alone."""
        no_sync = () if self.under is None else (LoopEvent("enter no_sync", self.under),)
        return (*no_sync, *filter(None, (self.forward, self.backward, self.ended_by)))


class Ledger:
    """The contributions of the backward passes so far.

    A backward pass is reduced where a forward pass has prepared DDP for it; then all that `.grad` holds is averaged,
    also what earlier passes have added. What a step has used is not followed any further.

    Attributes:
        events: Those that were taken in, as far as they are kept; who has no use for them any more may clear them.
        contributions: In order; the last ones, where not all are kept.
        open: Those that nothing has used or zeroed.
        prepared: The forward pass after which DDP averages, while its backward pass is awaited.
        waiting: The forward passes after which it does not, likewise, each with the line of its `no_sync`.
        not_entered: Calls of `no_sync` whose context was not entered.
        around_backward: Each `no_sync` that has enclosed a backward pass and not its forward, and so changed nothing.
        zeroed: Whether `zero_grad` was called since the last step.
        forwards: The number of forward passes since the last step, after which DDP does not average and does.
    """

    def __init__(self, events: Iterable[LoopEvent] = (), *, kept: int | None = None) -> None:
        """Take in `events`; `kept`: how many contributions are kept, at most."""
        self.events: deque[LoopEvent] = deque(maxlen=kept)
        self.contributions: deque[Contribution] = deque(maxlen=kept)
        self.open: deque[Contribution] = deque(maxlen=kept)
        self.prepared: LoopEvent | None = None
        self.waiting: deque[tuple[LoopEvent, str | None]] = deque(maxlen=kept)
        self.not_entered: deque[LoopEvent] = deque(maxlen=kept)
        self.around_backward: deque[LoopEvent] = deque(maxlen=kept)
        self.zeroed = False
        self.forwards = [0, 0]
        self._no_sync: LoopEvent | None = None  # in which the loop is
        self._called: LoopEvent | None = None  # the last call of one
        self._forwards_inside = 0
        self._reducing: LoopEvent | None = None  # the backward pass that was reduced last
        self._number = -1
        for event in events:
            self.add(event)

    @property
    def lost(self) -> list[Contribution]:
        """Gradients that were zeroed before a step has used them, and for which nothing speaks."""
        return [one for one in self.contributions if one.fate == "discarded" and not one.excused]

    @property
    def used_unreduced(self) -> list[Contribution]:
        """Gradients that a step has used and that were not averaged."""
        return [one for one in self.contributions if one.fate == "used" and not one.reduced]

    @property
    def unpaired(self) -> list[Contribution]:
        """Gradients of passes without a forward pass of their own, which come after the reduction and are not in it."""
        return [one for one in self.contributions if one.after is not None and not one.reduced]

    @property
    def unreduced(self) -> bool:
        """Whether gradients are there that were not averaged."""
        for one in self.open:  # no generator: this runs in each step
            if not one.reduced:
                return True
        return False

    @property
    def put_off(self) -> bool:
        """Whether such gradients are there of a forward pass of the wrapper: they may be averaged with later ones."""
        return any(not one.reduced and one.forward is not None for one in self.open)

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
                under = None if self._no_sync is None else self._no_sync.location or None
                self.waiting.append((event, under))
        elif kind == "backward":
            self._backward(event)
        elif kind == "reduction":
            self._reduce()
        elif kind == "step":
            self.zeroed, self.forwards = False, [0, 0]
            self._end("used", event)
        elif kind == "zero_grad":
            self.zeroed = True
            if event.discarded:
                self._discard(event)
        elif kind in AROUND:
            self._contribute(event)
        elif kind == "no_sync":
            self.not_entered.append(event)
            self._called = event
        elif kind == "enter no_sync":
            self._no_sync, self._forwards_inside = event if event.location else self._called or event, 0
            if self.not_entered:
                self.not_entered.pop()
        elif kind == "leave no_sync":
            self._no_sync = None

    def _backward(self, event: LoopEvent) -> None:
        made = self._contribute(event)
        if self.prepared is not None:
            made.forward, self.prepared, self._reducing = self.prepared, None, event
            if self._no_sync is not None and not self._forwards_inside:
                self.around_backward.append(self._no_sync)
            self._reduce()
        elif self.waiting:
            made.forward, made.under = self.waiting.popleft()
        else:
            made.after = self._reducing

    def _contribute(self, event: LoopEvent) -> Contribution:
        made = Contribution(self._number, event)
        self.contributions.append(made)
        self.open.append(made)
        return made

    def _reduce(self) -> None:
        self.waiting.clear()
        for one in self.open:
            one.reduced = True

    def _discard(self, event: LoopEvent) -> None:
        if not self.open:  # its backward pass is of the time before these events
            self._contribute(LoopEvent("backward"))
        excused = event.resting or any(one.backward.others for one in self.open)
        for one in self.open:
            one.excused = excused
        self._end("discarded", event)

    def _end(self, fate: Literal["used", "discarded"], event: LoopEvent) -> None:
        for _ in range(len(self.open)):
            one = self.open.popleft()
            if event.spares_unreduced and not one.reduced:
                self.open.append(one)
            else:
                one.fate, one.ended, one.ended_by = fate, self._number, event
