"""The collectives of the ranks as a trace that ui.perfetto.dev and chrome://tracing open.

The order is what is known, and not the time: each collective is drawn as long as the next one, those with one number
below each other, and what did not end goes on to the end of the trace.

This module is light: it never imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.figures import CollectiveTimeline, RankCollectives
from ddpcheck.findings.report import Report
from ddpcheck.findings.wording import format_ranks
from ddpcheck.render import Medium
from ddpcheck.report.matrix.matrix import Matrix

_LENGTH = 1000  # microseconds of the trace for a collective
_DRAWN = 900


class PerfettoRenderer:
    """A process for each rank, a thread for each process group, and a slice for each collective."""

    def __init__(self, _medium: Medium) -> None:
        pass

    def render(self, report: Report | Matrix) -> str:
        """The trace in Chrome's JSON.

        Raises:
            UsageError: The report has no collectives.
        """
        assert isinstance(report, Report)
        if not report.timelines:
            raise UsageError(
                "this report has no timeline of collectives to draw: one is kept where ranks part, fail or hang, and "
                "by ddpcheck hang"
            )
        events = [event for number, timeline in enumerate(report.timelines) for event in _events(timeline, number)]
        trace = {
            "traceEvents": events,
            "displayTimeUnit": "ms",
            "otherData": {
                "target": report.target,
                "tool": " ".join(filter(None, (report.tool.get("name", "ddpcheck"), report.tool.get("version", "")))),
                "time": "the order of the collectives; how long they took is not known",
            },
        }
        return json.dumps(trace, indent=1) + "\n"


def _events(timeline: CollectiveTimeline, thread: int) -> Iterator[dict[str, Any]]:
    end = max((one.first + len(one.calls) for one in timeline.ranks), default=0) + 1
    for log in timeline.ranks:
        place = {"pid": log.rank, "tid": thread}
        yield {"ph": "M", "name": "process_name", **place, "args": {"name": f"rank {log.rank}"}}
        yield {"ph": "M", "name": "process_sort_index", **place, "args": {"sort_index": log.rank}}
        yield {"ph": "M", "name": "thread_name", **place, "args": {"name": f"process group {timeline.group}"}}
        yield from _slices(timeline, log, end, place)
        if log.at_end:
            at = (log.first + len(log.calls)) * _LENGTH
            yield {"ph": "i", "s": "t", "name": log.at_end, "cat": "end", "ts": at, **place}
        if timeline.parts_at is not None:
            yield {"ph": "i", "s": "p", "name": "part here", "cat": "end", "ts": timeline.parts_at * _LENGTH, **place}


def _slices(
    timeline: CollectiveTimeline, log: RankCollectives, end: int, place: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    for number, at in enumerate(log.calls, log.first):
        call = timeline.calls[at]
        last = number == log.first + len(log.calls) - 1
        is_open = last and log.waiting and not log.later
        about = {"number": number, "payload": call.payload, "location": call.location}
        if is_open:
            about["did not end"] = f"waits for {format_ranks(log.waits_for)}" if log.waits_for else "at the end"
        yield {
            "ph": "X",
            "name": call.operation,
            "cat": "collective",
            "ts": number * _LENGTH,
            "dur": (end - number) * _LENGTH if is_open else _DRAWN,
            **place,
            "args": {name: value for name, value in about.items() if value != ""},
        }
