"""The entries of the log that a watched rank leaves: what a watch would have exchanged with the other ranks.

Fields are only added, with a default, and kinds are only added: so that any version reads what it knows. Also, as the
log has it in a text, what a rank was doing when it came to a collective; and the collectives of DDP's own.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msgspec import field

from ddpcheck.findings.evidence import Entry, evaluation, loop, replicas, script  # noqa: F401
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.figures import ModuleEntry
from ddpcheck.findings.report import Location
from ddpcheck.stream.rank_report import RankReport, ReplicaState, WatchContext

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


SCHEMA = 1

if TYPE_CHECKING:
    _Array = array[float]
else:
    _Array = array


class Sketch(_Array):
    """The numbers of a sketch (see `gather.steps.gradient_distance`), of typecode "f": most of a log is of them."""


class RankStarted(Entry, frozen=True):
    """A process has joined its default process group, and so is a rank.

    Attributes:
        rank: In that group.
        world_size: Of that group.
        backend: Of that group.
        restart: How often the launcher had restarted the ranks before.
        schema: The version of these entries.
    """

    rank: int
    world_size: int
    backend: str
    restart: int = 0
    schema: int = SCHEMA


class WrapperMade(Entry, frozen=True):
    """A `DistributedDataParallel` has been constructed.

    Attributes:
        module: The class of what it wraps.
        ranks: Of its process group.
        context: Of the watch on it.
        location: The line of the script that constructs it.
        by_library: Whether an installed package does, and not the script.
        classes: By path of a submodule ("" for the module itself), its classes of the user, each with file and name.
        modules: For a report: those of the first wrapper of rank 0.
    """

    module: str
    ranks: tuple[int, ...]
    context: WatchContext
    location: Location | None
    by_library: bool
    classes: Mapping[str, tuple[tuple[str, str], ...]]
    modules: tuple[ModuleEntry, ...] = ()


class StepsReported(Entry, frozen=True):
    """What a rank would report when the ranks exchange reports.

    Attributes:
        wrapper: The number of the wrapper.
        report: Of the rank.
        closing: Whether the watch ends with it.
        alone: Whether it shows a fault whatever the other ranks report.
        begun: Whether its step has only begun: what the step itself reports takes its place.
    """

    wrapper: int
    report: RankReport
    closing: bool = False
    alone: bool = False
    begun: bool = False


class ReplicaCaptured(Entry, frozen=True):
    """What a rank would compare with the others after the backward pass of a step.

    Attributes:
        wrapper: The number of the wrapper.
        step: How many had ended before.
        state: Of the replica.
        own: Of the rank's own gradients; empty where they were not kept. Of parts of them, which are reduced onto
            other ranks each, by "number of the shard/name".
        averaged: Of what the wrapper left in `.grad`.
        eps: The machine epsilon of each parameter's dtype, or what a communication hook loses, if that is more.
        hook: The name of the communication hook.
        own_hook: Whether it is none of torch's.
        shard: The number of the rank's shard of each parameter; negative where it has the whole of them.
        parts: The names of the parameters of which it is a part, whose elements are not all the same. In the first
            step also of those that DDP averages over some ranks only, which may have a part.
        values: Sketches of the parameters; only where something else than an optimizer's step has changed some.
    """

    wrapper: int
    step: int
    state: ReplicaState
    own: Mapping[str, Sketch] = field(default_factory=dict)
    averaged: Mapping[str, Sketch] = field(default_factory=dict)
    eps: Mapping[str, float] = field(default_factory=dict)
    hook: str = ""
    own_hook: bool = False
    shard: int = -1
    parts: tuple[str, ...] = ()
    values: Mapping[str, Sketch] = field(default_factory=dict)


class BuffersKept(Entry, frozen=True):
    """The buffers with which a rank goes on after a captured step: at its next forward pass, or when it is left.

    Attributes:
        wrapper: The number of the wrapper.
        step: That was captured.
        buffers: Their fingerprints, but for those of normalisation layers.
    """

    wrapper: int
    step: int
    buffers: Mapping[str, int]


class NotCompared(Entry, frozen=True):
    """Steps of a wrapper are not compared between ranks, although it would be their turn; `why`: in words."""

    wrapper: int
    why: str


class TrainedApart(Entry, frozen=True):
    """The ranks of a wrapper have trained apart, by a communication hook (post-local SGD), until it was left.

    Attributes:
        wrapper: Its number.
        step: How many had ended before.
        marks: Fingerprints of one parameter, before each forward pass since then in which it had changed, and at last.
        parameters: Those of all parameters at last.
        hook: The name of the communication hook.
    """

    wrapper: int
    step: int
    marks: tuple[int, ...]
    parameters: Mapping[str, int]
    hook: str = ""


class GroupUsed(Entry, frozen=True):
    """A process group has been used for the first time; its name, and the ranks in it.

    And once more where a function of autograd has used it, with the line.
    """

    name: str
    members: tuple[int, ...]
    differentiated_at: Location | None = None


class CallersSeen(Entry, frozen=True):
    """Lines of the program have led to a collective for the first time.

    Attributes:
        number: Of them.
        lines: Innermost first.
        files: Of each of the lines.
    """

    number: int
    lines: tuple[str, ...]
    files: tuple[str, ...]


class ExitCalled(Entry, frozen=True):
    """The script has called `sys.exit`; the lines that led to it, innermost first."""

    lines: tuple[str, ...]


class RankRaised(Entry, frozen=True):
    """The script has ended in an exception on this rank; `reply` is as `worlds.failures.described` makes it."""

    reply: Mapping[str, Any]


class WatchingFailed(Entry, frozen=True):
    """An error, of ddpcheck's own or of writing the log, after which this rank is not watched any more."""

    error: str


class PeerReceived(Entry, frozen=True):
    """The script has received a tensor or an object from one other rank, for the first time."""


class GroupDestroyed(Entry, frozen=True):
    """The script has destroyed its default process group."""


class ProgramEnded(Entry, frozen=True):
    """Python has come to the end of the program; no entry after a signal or `os._exit`."""


KINDS: Mapping[str, type[Entry]] = {kind.__name__: kind for kind in Entry.__subclasses__()}
"""By name: those above, and those that are evidence, for which its modules are imported."""
