"""DDP408 result-not-awaited: error, keeps_gradients, keeps_results

No code waits for an asynchronous collective, or its tensor is written before wait() returns.

Why: With async_op=True a collective returns a handle immediately, and works on the tensor in its own thread or
    stream. Code that reads the tensor before wait() has returned may find the rank's own numbers, those of all ranks,
    or a mixture. Code that writes the tensor before that may change the numbers that other ranks receive. Nothing is
    raised. (PyTorch docs, torch.distributed, synchronous and asynchronous collective operations.)
Fix: Keep the handle that the call returns, and call its wait() before anything reads or writes the tensor; or leave
    out async_op=True.
Detected: ddpcheck follows the handles that the script's own calls return. It reports a handle that is freed and was
    never used, if its tensor is still needed. A tensor is needed if a variable refers to it, or if an optimizer uses
    it as a gradient. It also reports a tensor that the program writes before wait() returns. For tensors on a GPU,
    unused handles are not reported. For views, writes are not reported.
Ignore: If nothing ever reads the tensor.
Line: The call that starts the asynchronous collective.
Checks: run collectives
Explains: DDP208 DDP301 DDP306 DDP501 if of gradients
Example:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, async_op=True)    # right: works.append(...), and wait() on each of them
        parameter.grad /= dist.get_world_size()
"""

from __future__ import annotations

from collections.abc import Sequence

from ddpcheck.findings.evidence.loop import PendingTensorWritten, WorkDropped
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import make_finding, ranks_or_all
from ddpcheck.rules.registry import rule
from ddpcheck.trace.collectives import ON_GRADIENTS, AsyncHandles

HandleEntry = WorkDropped | PendingTensorWritten


@rule
def judge_async_handles(handles: AsyncHandles) -> list[Finding]:
    """DDP408: asynchronous collectives whose result is not awaited; one finding per line.

    Dropped handles of a line are ignored if any handle of that line was awaited: a loop may drop only its last handle.
    """
    waited = {use.location for uses in handles.used for use in uses}
    lines: dict[Location, list[tuple[int, HandleEntry]]] = {}
    for rank, (works, changed) in enumerate(zip(handles.dropped, handles.written, strict=True)):
        entries: list[HandleEntry] = [*changed, *(work for work in works if work.location not in waited)]
        for entry in entries:
            lines.setdefault(entry.location, []).append((rank, entry))
    return [_unawaited_finding(by_rank, len(handles.dropped)) for by_rank in lines.values()]


def _unawaited_finding(entries: Sequence[tuple[int, HandleEntry]], world_size: int) -> Finding:
    _, entry = entries[0]
    call = f"{entry.operation}(async_op=True)"
    if isinstance(entry, PendingTensorWritten):
        at = f" at {entry.waits_at}" if entry.waits_at else ""
        message = f"The tensor of {call} is written before the wait(){at}: the collective may be reading or writing it."
    else:
        message = f"Nothing waits for the result of {call}: its handle is dropped."
    ranks = ranks_or_all(sorted({rank for rank, _ in entries}), world_size)
    tags = (ON_GRADIENTS,) if any(item.of_gradients for _, item in entries) else ()
    return make_finding("DDP408", (entry.operation,), message, ranks=ranks, location=entry.location, tags=tags)
