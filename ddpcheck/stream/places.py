"""What a rank was doing when it came to a collective, as the log has it in a text; and the collectives of DDP's own."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.report import Location

DDP_BACKWARD = "DistributedDataParallel.backward"
"""Stands in a log for the collectives that DDP makes in one backward pass."""
DDP_FORWARD = "DistributedDataParallel.forward"
"""Likewise, for the broadcast of buffers with which a forward pass begins."""
SHARD_FORWARD = "fully_shard.forward"
"""Likewise, for what a forward pass of a sharded module is about to gather; each gathering stands in the log, too."""
JOINED = "Join: without further batches"
"""The `place` of what a rank calls in torch's `Join` for batches that it does not have."""
JOINING = "Join: before a forward pass"
"""Likewise, of what one calls that has another batch."""
PASSES = (DDP_BACKWARD, SHARD_FORWARD)
"""Those of which the `place` says which pass it is, of which batch."""

_PLACE = re.compile(
    r"forward pass (?P<forward>\d+)(?: \((?P<unsynced>\d+) under no_sync\))?(?: at (?P<line>.+?:\d+))?"
    r"(?:, batch (?P<batch>\d+) of pass (?P<number>\d+) over loader (?P<loader>\d+))?"
)


def place_of_backward(forward: int, line: Location | None, unsynced: int, batch: str) -> str:
    """The `place` of a backward pass in the log of a rank: after which forward pass of a line, with which batch."""
    under = f" ({unsynced} under no_sync)" if unsynced else ""
    return f"forward pass {forward}{under}{f' at {line}' if line else ''}{f', {batch}' if batch else ''}"


_HANDLING = re.compile(r"handling (?P<kind>\S+?)(?: of (?P<line>\S+:\d+))?(?:: (?P<text>.*))?", re.DOTALL)


def place_of_handling(kind: str, line: Location | None, text: str) -> str:
    """The `place` of a collective that is called while an exception is handled."""
    return f"handling {kind}{f' of {line}' if line else ''}{f': {text}' if text else ''}"


def handled_in(call: Call) -> tuple[str, str, str] | None:
    """The exception that was handled where a collective was called: its type, its line and its text."""
    match = _HANDLING.fullmatch(call.place) if call.operation not in PASSES else None
    return (match["kind"], match["line"] or "", match["text"] or "") if match else None


def lines_in(place: str) -> tuple[str, ...]:
    """The line of the forward pass in the `place` of a backward pass."""
    match = _PLACE.fullmatch(place)
    return (match["line"],) if match and match["line"] else ()


@dataclass(frozen=True, slots=True)
class Backward:
    """A backward pass that DDP has averaged; or a forward pass of shards, which are reduced after it.

    Attributes:
        call: In the log.
        forward: The number of the forward pass, among those of its line.
        unsynced: How many forward passes under `no_sync` there had been.
        line: Of the forward pass; may be empty.
        batch: The number of the pass over the loader whose batch was taken last, and of that batch.
        loader: That loader; negative where there is none.
    """

    call: Call
    forward: int
    unsynced: int = 0
    line: str = ""
    batch: tuple[int, int] = (0, 0)
    loader: int = -1


def backward_of(call: Call) -> Backward | None:
    """A call as a backward pass that DDP has averaged, or a forward pass of shards; `None` for another one."""
    if call.operation not in PASSES or not (match := _PLACE.fullmatch(call.place)):
        return None
    batch = (int(match["number"]), int(match["batch"])) if match["loader"] else (0, 0)
    unsynced, loader = int(match["unsynced"] or 0), int(match["loader"] or -1)
    return Backward(call, int(match["forward"]), unsynced, match["line"] or "", batch, loader)
