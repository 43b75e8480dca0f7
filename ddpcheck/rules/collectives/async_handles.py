"""Judges of handles of asynchronous collectives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ddpcheck.findings.evidence.loop import TensorOfWorkWritten, WorkDropped, WorkUsed
from ddpcheck.findings.report import Finding, Location
from ddpcheck.rules.collectives.ddp408_result_not_awaited import unawaited_finding
from ddpcheck.trace.collectives import HandleEntry


def judge_async_handles(
    dropped: Sequence[Sequence[WorkDropped]],
    used: Sequence[Iterable[WorkUsed]],
    written: Sequence[Sequence[TensorOfWorkWritten]],
) -> list[Finding]:
    """Return one finding per line; each argument by rank.

    Ignores lines where any handle was waited on: the last handle may be left over at the end of a loop.
    """
    waited = {use.location for uses in used for use in uses}
    lines: dict[Location, list[tuple[int, HandleEntry]]] = {}
    for rank, (works, changed) in enumerate(zip(dropped, written, strict=True)):
        entries: list[HandleEntry] = [*changed, *(work for work in works if work.location not in waited)]
        for entry in entries:
            lines.setdefault(entry.location, []).append((rank, entry))
    return [unawaited_finding(by_rank, len(dropped)) for by_rank in lines.values()]
