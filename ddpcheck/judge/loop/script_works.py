"""DDP408: asynchronous collectives without wait(), or with tensors written before wait()."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ddpcheck.findings.evidence.loop import TensorOfWorkWritten, WorkDropped, WorkUsed
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import make_finding, unless_all

OF_GRADIENTS = "of gradients"  # tag: the optimizer's gradients may not be the result

_Told = WorkDropped | TensorOfWorkWritten


def judge_works(
    dropped: Sequence[Sequence[WorkDropped]],
    used: Sequence[Iterable[WorkUsed]],
    written: Sequence[Sequence[TensorOfWorkWritten]],
) -> list[Finding]:
    """Return one finding per line; each argument by rank.

    Ignores lines where any handle was waited on: the last handle may be left over at the end of a loop.
    """
    asked = {one.location for of_rank in used for one in of_rank}
    lines: dict[Location, list[tuple[int, _Told]]] = {}
    for rank, (gone, changed) in enumerate(zip(dropped, written, strict=True)):
        told: list[_Told] = [*changed, *(one for one in gone if one.location not in asked)]
        for one in told:
            lines.setdefault(one.location, []).append((rank, one))
    return [_finding(by_rank, len(dropped)) for by_rank in lines.values()]


def _finding(told: Sequence[tuple[int, _Told]], world_size: int) -> Finding:
    _, one = told[0]
    call = f"{one.operation}(async_op=True)"
    if isinstance(one, TensorOfWorkWritten):
        at = f" at {one.waits_at}" if one.waits_at else ""
        message = f"The tensor of {call} is written before the wait(){at}: the collective may be reading or writing it."
    else:
        message = f"Nothing waits for the result of {call}: its handle is dropped."
    ranks = unless_all(sorted({rank for rank, _ in told}), world_size)
    tags = (OF_GRADIENTS,) if any(one.of_gradients for _, one in told) else ()
    return make_finding("DDP408", (one.operation,), message, ranks=ranks, location=one.location, tags=tags)
