"""What a rank does between two reductions of a wrapper: how many forward passes, and how many batches it takes."""

from __future__ import annotations

import ast
import sys

from ddpcheck.findings.evidence.loop import PaceRun
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import user_frame, user_location
from ddpcheck.record.recording import Position, Recording
from ddpcheck.record.source.source_scope import body_of, location_in, own_nodes, scope_of_frame

MOST_RUNS = 1024


class PaceRecorder:
    """The pace of one wrapper.

    Attributes:
        forwards: Forward passes in training mode since the last reduction.
    """

    def __init__(self, run: Recording, number: int) -> None:
        """Of the `number`-th wrapper."""
        self._run = run
        self._number = number
        self.forwards = 0
        self._last: Position = (-1, -1, 0)
        self._runs = 0
        self._now = (-1, -1)

    def reduced(self, step: int) -> None:
        """A reduction has ended."""
        forwards, self.forwards = self.forwards, 0
        now, last = self._run.position, self._last
        self._last = now
        batches = now[2] - (last[2] if now[:2] == last[:2] else 0)
        if (forwards, batches) != self._now and self._runs < MOST_RUNS:
            where = _left_out() if self._runs else user_location()
            self._now, self._runs = (forwards, batches), self._runs + 1
            self._run.add(PaceRun(self._number, step, forwards, batches, where))


def _left_out() -> Location | None:
    """The one `continue` in the loop before the line at which the script's function is now; else that line."""
    frame = user_frame(sys._getframe(1))
    scope = None if frame is None else scope_of_frame(frame)
    if frame is None or scope is None:
        return user_location()
    body = body_of(frame.f_code)
    loops = [node for node in own_nodes(body) if isinstance(node, ast.For | ast.While)] if body is not None else []
    around = [node for node in loops if node.lineno < frame.f_lineno <= (node.end_lineno or 0)]
    inner = max(around, key=lambda node: node.lineno, default=None)
    nodes = [] if inner is None else [*own_nodes(inner)]
    found = [one.lineno for one in nodes if isinstance(one, ast.Continue) and one.lineno < frame.f_lineno]
    return location_in(scope, found[0]) if len(found) == 1 else user_location(frame)
