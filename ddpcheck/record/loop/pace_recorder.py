"""Count forward passes and batches of a rank between two reductions of a wrapper."""

from __future__ import annotations

import sys

from ddpcheck.findings.evidence.loop import PaceRun
from ddpcheck.findings.source_lines import lines_of_program, user_location
from ddpcheck.gather.patching import Recorder
from ddpcheck.record.recording import Recording
from ddpcheck.record.source.source_scope import lines_left_out_by

MOST_RUNS = 1024


class PaceRecorder(Recorder, subjects=("loop",)):
    """Pace of one wrapper.

    Attributes:
        forwards: Forward passes in training mode since the last reduction.
        lines: Stack of the first such forward pass, program lines only.
    """

    def __init__(self, run: Recording, number: int) -> None:
        self._run = run
        self._number = number
        self.forwards = 0
        self.lines: tuple[str, ...] = ()
        self._taken: dict[int, int] = {}  # batches until the last reduction, by loader
        self._loader = -1  # loader at the last reduction
        self._runs = 0
        self._now = (-1, -1)

    def reduced(self, step: int) -> None:
        pace, self.forwards = (self.forwards, self._batches()), 0
        self._loader, self._taken = self._run.position[0], dict(self._run.batches)
        if pace != self._now and self._runs < MOST_RUNS:
            after_forward = self.lines if pace[0] != self._now[0] else ()
            lines = lines_left_out_by(lines_of_program(sys._getframe(1)), after_forward)
            location = lines[0] if len(lines) == 1 else user_location()  # line that may skip the backward pass
            self._now, self._runs = pace, self._runs + 1
            self._run.add(PaceRun(self._number, step, *pace, location))

    def ended(self, step: int) -> None:
        """Record the pace after the last reduction, unless in another loop."""
        pace = self.forwards, self._batches()
        if any(pace) and self._run.position[0] == self._loader and 0 < self._runs < MOST_RUNS:
            self._run.add(PaceRun(self._number, step, *pace, None))

    def _batches(self) -> int:
        """Return the batches of the current loader since the last reduction."""
        loader = self._run.position[0]
        return self._run.batches[loader] - self._taken.get(loader, 0)
