"""DDP408: asynchronous collectives without wait(), or with tensors written before wait()."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ddpcheck.findings.evidence.loop import TensorOfWorkWritten, WorkDropped, WorkUsed
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import make_finding, unless_all

OF_GRADIENTS = "of gradients"  # tag: the optimizer's gradients may not be the result

_Entry = WorkDropped | TensorOfWorkWritten


def judge_works(
    dropped: Sequence[Sequence[WorkDropped]],
    used: Sequence[Iterable[WorkUsed]],
    written: Sequence[Sequence[TensorOfWorkWritten]],
) -> list[Finding]:
    """Return one finding per line; each argument by rank.

    Ignores lines where any handle was waited on: the last handle may be left over at the end of a loop.
    """
    waited = {use.location for uses in used for use in uses}
    lines: dict[Location, list[tuple[int, _Entry]]] = {}
    for rank, (works, changed) in enumerate(zip(dropped, written, strict=True)):
        entries: list[_Entry] = [*changed, *(work for work in works if work.location not in waited)]
        for entry in entries:
            lines.setdefault(entry.location, []).append((rank, entry))
    return [_finding(by_rank, len(dropped)) for by_rank in lines.values()]


def _finding(entries: Sequence[tuple[int, _Entry]], world_size: int) -> Finding:
    _, entry = entries[0]
    call = f"{entry.operation}(async_op=True)"
    if isinstance(entry, TensorOfWorkWritten):
        at = f" at {entry.waits_at}" if entry.waits_at else ""
        message = f"The tensor of {call} is written before the wait(){at}: the collective may be reading or writing it."
    else:
        message = f"Nothing waits for the result of {call}: its handle is dropped."
    ranks = unless_all(sorted({rank for rank, _ in entries}), world_size)
    tags = (OF_GRADIENTS,) if any(other.of_gradients for _, other in entries) else ()
    return make_finding("DDP408", (entry.operation,), message, ranks=ranks, location=entry.location, tags=tags)
