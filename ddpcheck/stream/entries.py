"""Entries of a rank's log: data that a watch would exchange between ranks.

Fields (with a default) and kinds are only added, so that any version can read the entries it knows. Also the text form
of a rank's activity at a collective, and names of DDP's own collectives.
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
"""Operation in a log for all collectives of DDP in one backward pass."""
DDP_FORWARD = "DistributedDataParallel.forward"
"""Operation for DDP's buffer broadcast at the start of a forward pass."""
SHARD_FORWARD = "fully_shard.forward"
"""Operation for a sharded module's forward pass, before its logged all-gathers."""
JOINED = "Join: without further batches"
"""`place` of collectives that `Join` calls on a rank without further batches."""
JOINING = "Join: before a forward pass"  # likewise, of a rank with another batch
PASSES = (DDP_BACKWARD, SHARD_FORWARD)  # operations whose `place` names the forward pass and batch

_PLACE = re.compile(
    r"forward pass (?P<forward>\d+)(?: \((?P<unsynced>\d+) under no_sync\))?(?: at (?P<line>.+?:\d+))?"
    r"(?:, batch (?P<batch>\d+) of pass (?P<number>\d+) over loader (?P<loader>\d+))?"
)


def place_of_backward(forward: int, line: Location | str | None, unsynced: int, batch: str) -> str:
    """Describe a backward pass for `Call.place`: "forward pass 3 at train.py:12, ..."."""
    no_sync_text = f" ({unsynced} under no_sync)" if unsynced else ""
    return f"forward pass {forward}{no_sync_text}{f' at {line}' if line else ''}{f', {batch}' if batch else ''}"


_HANDLING = re.compile(r"handling (?P<kind>\S+?)(?: of (?P<line>\S+:\d+))?(?:: (?P<text>.*))?", re.DOTALL)


def place_of_handling(kind: str, line: Location | None, text: str) -> str:
    """Describe for `Call.place` a collective in an `except` block: "handling OSError of a.py:3"."""
    return f"handling {kind}{f' of {line}' if line else ''}{f': {text}' if text else ''}"


def handled_in(call: Call) -> tuple[str, str, str] | None:
    """Parse type, line and text of the exception being handled during `call`, or None."""
    match = _HANDLING.fullmatch(call.place) if call.operation not in PASSES else None
    return (match["kind"], match["line"] or "", match["text"] or "") if match else None


def lines_in(phase: str) -> tuple[str, ...]:
    """Return (line of the forward pass,) from a `Call.place`, or () if none."""
    match = _PLACE.fullmatch(phase)
    return (match["line"],) if match and match["line"] else ()


@dataclass(frozen=True, slots=True)
class Backward:
    """Details of a logged DDP backward pass, or of a sharded module's forward pass."""

    call: Call  # logged call
    forward: int  # number of the forward pass at its line
    unsynced: int = 0  # forward passes under `no_sync` so far
    line: str = ""  # line of the forward pass, or ''
    # (pass over the loader, batch) last loaded
    batch: tuple[int, int] = (0, 0)
    loader: int = -1  # number of the loader, or -1


def backward_of(call: Call) -> Backward | None:
    """Parse a logged DDP backward pass or sharded forward pass; None for other calls."""
    if call.operation not in PASSES or not (match := _PLACE.fullmatch(call.place)):
        return None
    batch = (int(match["number"]), int(match["batch"])) if match["loader"] else (0, 0)
    unsynced, loader = int(match["unsynced"] or 0), int(match["loader"] or -1)
    return Backward(call, int(match["forward"]), unsynced, match["line"] or "", batch, loader)


SCHEMA = 2

if TYPE_CHECKING:
    _Array = array[float]
else:
    _Array = array


class Sketch(_Array):
    """Sketch of a tensor: short vector, linear in the tensor (see `gather.steps.gradient_distance`)."""


class RankStarted(Entry, frozen=True):
    """Start of a rank: its process has joined the default process group."""

    rank: int  # rank in the default process group
    world_size: int  # size of the default process group
    backend: str  # backend of the default process group
    restart: int = 0  # restarts by the launcher so far
    schema: int = SCHEMA  # version of the entries
    launched: int = 0  # torchrun processes on this machine, each with its own ranks, or 0


class WrapperMade(Entry, frozen=True):
    """Construction of a `DistributedDataParallel`."""

    module: str  # class of the wrapped module
    ranks: tuple[int, ...]  # ranks of its process group
    context: WatchContext  # context of its watch
    location: Location | None  # line of the script that constructs the wrapper
    by_library: bool  # True if an installed package constructs the wrapper
    # user classes by submodule path ("" for the module itself), each with file and name
    classes: Mapping[str, tuple[tuple[str, str], ...]]
    modules: tuple[ModuleEntry, ...] = ()  # for a report, only from the first wrapper of rank 0


class AttributesSet(Entry, frozen=True):
    """Attributes that the script sets on the wrapper instead of the wrapped module."""

    wrapper: int  # number of the wrapper
    names: tuple[str, ...]
    location: Location | None = None  # line that sets the first of them; `None` if unknown


class StepsReported(Entry, frozen=True):
    """Report of a rank on its steps with a wrapper."""

    wrapper: int  # number of the wrapper
    report: RankReport
    closing: bool = False  # True if the watch ends
    is_conclusive: bool = False  # True if the report shows a fault without other ranks' reports
    is_unfinished: bool = False  # True if the step has only begun; replaced by the report at its end


class ReplicaCaptured(Entry, frozen=True):
    """Replica state of a rank after a backward pass, for comparison."""

    wrapper: int  # number of the wrapper
    step: int  # steps ended before
    state: ReplicaState
    # sketches of the rank's own gradients; empty if not recorded. For sharded gradients, whose shards are reduced onto
    # different ranks, by "number of the shard/name"
    own: Mapping[str, Sketch] = field(default_factory=dict)
    averaged: Mapping[str, Sketch] = field(default_factory=dict)  # sketches of `.grad` after the wrapper
    # machine epsilon of each parameter's dtype, or the loss of a communication hook if larger
    eps: Mapping[str, float] = field(default_factory=dict)
    hook: str = ""  # name of the communication hook
    own_hook: bool = False  # True if the hook is not torch's
    shard: int = -1  # number of the rank's shard of each parameter, or -1 if unsharded
    # parameters of which the rank has a non-constant shard. In the first step also parameters that DDP averages over a
    # subset of the ranks, possibly sharded
    parts: tuple[str, ...] = ()
    # sketches of the parameters, if anything but an optimizer step changed some
    values: Mapping[str, Sketch] = field(default_factory=dict)


class BuffersKept(Entry, frozen=True):
    """Fingerprints of a rank's buffers at the first forward pass after a captured step."""

    wrapper: int  # number of the wrapper
    step: int  # the captured step
    buffers: Mapping[str, int]  # fingerprints, without buffers of normalization layers


UNNUMBERED = -1  # wrapper without a watch


class NotCompared(Entry, frozen=True):
    """Exclusion of a wrapper from comparison between ranks, with the reason in words."""

    wrapper: int  # number of the wrapper, or UNNUMBERED
    why: str


class LocalSgdEnd(Entry, frozen=True):
    """End of independent training of a wrapper's ranks (post-local SGD communication hook)."""

    wrapper: int  # number of the wrapper
    step: int  # steps ended before
    # fingerprints of a parameter, before each forward pass since then if changed, and at the end
    marks: tuple[int, ...]
    parameters: Mapping[str, int]  # fingerprints of all parameters at the end
    hook: str = ""  # name of the communication hook


class GroupUsed(Entry, frozen=True):
    """First use of a process group, or first differentiable collective of the group."""

    name: str
    members: tuple[int, ...]
    differentiated_at: Location | None = None
    words: str = ""  # as in `Call`


class CallersSeen(Entry, frozen=True):
    """First occurrence of a call stack of a collective."""

    number: int  # number of the call stack
    lines: tuple[str, ...]  # innermost first
    files: tuple[str, ...]  # file of each line


class ExitCalled(Entry, frozen=True):
    """Call of `sys.exit` or `os._exit`, with its stack."""

    lines: tuple[str, ...]  # innermost first
    function: str = "sys.exit"
    handled: Mapping[str, Any] | None = None  # exception being handled, as in `RankRaised`


class RankRaised(Entry, frozen=True):
    """Exception that ended the script on this rank, as `worlds.failures.exception_data` returns it."""

    reply: Mapping[str, Any]


class ThreadRaised(Entry, frozen=True):
    """Exception that ended a thread other than the main thread, as in `RankRaised`."""

    thread: str  # name of the thread
    reply: Mapping[str, Any]


class WatchingFailed(Entry, frozen=True):
    """Error that disabled a recorder: a bug of ddpcheck, or a failed write."""

    error: str  # traceback
    recorder: str = ""  # class of the recorder, '' if all recording ends
    subjects: tuple[str, ...] = ()  # checks that are then not possible
    step: int = 0  # steps of optimizers or a wrapper so far
    why: str = ""  # error on a single line


class PeerReceived(Entry, frozen=True):
    """First receive from a peer, recorded separately before and after the first optimizer step."""

    peer: int = -1  # rank of the peer, -1 for any source
    training: bool = False  # True if an optimizer has stepped before


class GroupDestroyed(Entry, frozen=True):
    """Destruction of the default process group by the script."""


class ProgramEnded(Entry, frozen=True):
    """End of the program in Python, absent after a signal or `os._exit`."""

    # "end" of the main module, or SystemExit in its line `line` ("raise") or in a function called there ("call");
    # "" if unknown
    how: Literal["", "end", "raise", "call"] = ""
    line: str = ""


KINDS: Mapping[str, type[Entry]] = {kind.__name__: kind for kind in Entry.__subclasses__()}
"""Entry types by name, including the evidence types of the modules imported above."""
