"""The entries of the log that a watched rank leaves: what a watch would have exchanged with the other ranks.

Fields are only added, with a default, and kinds are only added: so that any version reads what it knows. Also, as the
log has it in a text, what a rank was doing when it came to a collective; and the collectives of DDP's own.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from msgspec import field

from ddpcheck.findings.evidence import Entry, evaluation, loop, parity, replicas, script  # noqa: F401
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
JOINING = "Join: before a forward pass"  # likewise, of what one calls that has another batch
PASSES = (DDP_BACKWARD, SHARD_FORWARD)  # those of which the `place` says which pass it is, of which batch

_PLACE = re.compile(
    r"forward pass (?P<forward>\d+)(?: \((?P<unsynced>\d+) under no_sync\))?(?: at (?P<line>.+?:\d+))?"
    r"(?:, batch (?P<batch>\d+) of pass (?P<number>\d+) over loader (?P<loader>\d+))?"
)


def place_of_backward(forward: int, line: Location | str | None, unsynced: int, batch: str) -> str:
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
    """A backward pass that DDP has averaged; or a forward pass of shards, which are reduced after it."""

    call: Call  # in the log
    forward: int  # the number of the forward pass, among those of its line
    unsynced: int = 0  # how many forward passes under `no_sync` there had been
    line: str = ""  # of the forward pass; may be empty
    # the number of the pass over the loader whose batch was taken last, and of that batch
    batch: tuple[int, int] = (0, 0)
    loader: int = -1  # that loader; negative where there is none


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
    """A process has joined its default process group, and so is a rank."""

    rank: int  # in that group
    world_size: int  # of that group
    backend: str  # of that group
    restart: int = 0  # how often the launcher had restarted the ranks before
    schema: int = SCHEMA  # the version of these entries
    launched: int = 0  # processes of torchrun's on this machine, of which each starts ranks of its own; 0 if none does


class WrapperMade(Entry, frozen=True):
    """A `DistributedDataParallel` has been constructed."""

    module: str  # the class of what it wraps
    ranks: tuple[int, ...]  # of its process group
    context: WatchContext  # of the watch on it
    location: Location | None  # the line of the script that constructs it
    by_library: bool  # whether an installed package does, and not the script
    # by path of a submodule ("" for the module itself), its classes of the user, each with file and name
    classes: Mapping[str, tuple[tuple[str, str], ...]]
    modules: tuple[ModuleEntry, ...] = ()  # for a report: those of the first wrapper of rank 0


class StepsReported(Entry, frozen=True):
    """What a rank would report when the ranks exchange reports."""

    wrapper: int  # the number of the wrapper
    report: RankReport  # of the rank
    closing: bool = False  # whether the watch ends with it
    alone: bool = False  # whether it shows a fault whatever the other ranks report
    begun: bool = False  # whether its step has only begun: what the step itself reports takes its place


class ReplicaCaptured(Entry, frozen=True):
    """What a rank would compare with the others after the backward pass of a step."""

    wrapper: int  # the number of the wrapper
    step: int  # how many had ended before
    state: ReplicaState  # of the replica
    # of the rank's own gradients; empty where they were not kept. Of parts of them, which are reduced onto other ranks
    # each, by "number of the shard/name"
    own: Mapping[str, Sketch] = field(default_factory=dict)
    averaged: Mapping[str, Sketch] = field(default_factory=dict)  # of what the wrapper left in `.grad`
    # the machine epsilon of each parameter's dtype, or what a communication hook loses, if that is more
    eps: Mapping[str, float] = field(default_factory=dict)
    hook: str = ""  # the name of the communication hook
    own_hook: bool = False  # whether it is none of torch's
    shard: int = -1  # the number of the rank's shard of each parameter; negative where it has the whole of them
    # the names of the parameters of which it is a part, whose elements are not all the same. In the first step also of
    # those that DDP averages over some ranks only, which may have a part
    parts: tuple[str, ...] = ()
    # sketches of the parameters; only where something else than an optimizer's step has changed some
    values: Mapping[str, Sketch] = field(default_factory=dict)


class BuffersKept(Entry, frozen=True):
    """The buffers with which a rank goes on after a captured step: at its next forward pass, or when it is left."""

    wrapper: int  # the number of the wrapper
    step: int  # that was captured
    buffers: Mapping[str, int]  # their fingerprints, but for those of normalisation layers


UNNUMBERED = -1  # a wrapper that is not watched at all


class NotCompared(Entry, frozen=True):
    """Steps of a wrapper are not compared between ranks, although it would be their turn; `why`: in words."""

    wrapper: int  # its number, or UNNUMBERED
    why: str


class TrainedApart(Entry, frozen=True):
    """The ranks of a wrapper have trained apart, by a communication hook (post-local SGD), until it was left."""

    wrapper: int  # its number
    step: int  # how many had ended before
    # fingerprints of one parameter, before each forward pass since then in which it had changed, and at last
    marks: tuple[int, ...]
    parameters: Mapping[str, int]  # those of all parameters at last
    hook: str = ""  # the name of the communication hook


class GroupUsed(Entry, frozen=True):
    """A process group has been used for the first time; its name, and the ranks in it.

    And once more where a function of autograd has used it, with the line.
    """

    name: str
    members: tuple[int, ...]
    differentiated_at: Location | None = None
    words: str = ""  # as in `Call`


class CallersSeen(Entry, frozen=True):
    """Lines of the program have led to a collective for the first time."""

    number: int  # of them
    lines: tuple[str, ...]  # innermost first
    files: tuple[str, ...]  # of each of the lines


class ExitCalled(Entry, frozen=True):
    """The script has called `sys.exit`, or `os._exit`, which nothing can catch; with the lines that led to it."""

    lines: tuple[str, ...]  # innermost first
    function: str = "sys.exit"
    handled: Mapping[str, Any] | None = None  # the exception that was handled there, as in `RankRaised`


class RankRaised(Entry, frozen=True):
    """The script has ended in an exception on this rank; `reply` is as `worlds.failures.described` makes it."""

    reply: Mapping[str, Any]


class ThreadRaised(Entry, frozen=True):
    """An exception has ended a thread beside the main one; `reply` as in `RankRaised`."""

    thread: str  # its name
    reply: Mapping[str, Any]


class WatchingFailed(Entry, frozen=True):
    """An error, of ddpcheck's own or of writing the log, after which a recorder records nothing any more."""

    error: str  # its traceback
    recorder: str = ""  # its class; empty where nothing at all is recorded any more
    subjects: tuple[str, ...] = ()  # the check lines that cannot be made then
    step: int = 0  # how many steps of optimizers, or of a wrapper, there had been
    why: str = ""  # the error on one line


class PeerReceived(Entry, frozen=True):
    """The script receives a tensor or an object from one other rank, for the first time, or while it trains."""

    peer: int = -1  # that rank; -1 where it takes what comes first
    training: bool = False  # whether an optimizer has stepped before


class GroupDestroyed(Entry, frozen=True):
    """The script has destroyed its default process group."""


class ProgramEnded(Entry, frozen=True):
    """Python has come to the end of the program; no entry after a signal or `os._exit`."""

    # whether that was its last line; else `line`, of the main module, has raised SystemExit, or what that has called
    # ("raise", "call"); "" where it is not known
    how: Literal["", "end", "raise", "call"] = ""
    line: str = ""


KINDS: Mapping[str, type[Entry]] = {kind.__name__: kind for kind in Entry.__subclasses__()}
"""By name: those above, and those that are evidence, for which its modules are imported."""
