"""Evidence on ranks that have failed, wait for each other or were simulated: where each was, and what it had called.

Judged in `judge.endings`; put together in `run.ending` and `report.hang.hang_report`, of what ranks have recorded, and
gathered in `report.schedule.schedule_phases`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct, field

from ddpcheck.findings.evidence.script import LoaderPass
from ddpcheck.findings.evidence.steps import Call


class Joining(Struct, frozen=True):
    """A process is in `init_process_group`."""

    pid: int  # of the process
    rank: int  # that it says to have; negative where it says none
    world_size: int  # that it says there is; negative where it says none
    address: str  # where it means to meet the others
    location: str  # the line of the call; may be empty
    agent: str = ""  # the address of torchrun's store, where torch takes that one to be all there is; empty elsewhere
    started: int = 0  # how many processes torchrun has started, where this is one of them and there is one node; else 0
    error: str = ""  # what it has raised there, with its class; "" where it has not, and waits or was ended


class PeerWait(Struct, frozen=True):
    """A rank waits in a point-to-point call, or for one that it has started."""

    operation: str  # "send", "recv", "isend" or "irecv"
    peer: int  # the rank to which it sends, or from which it receives; negative for any
    tag: int  # of the call
    location: str  # the line of the call

    @property
    def sends(self) -> bool:
        """Whether the rank has something to send."""
        return self.operation.endswith("send")

    def __str__(self) -> str:
        to = "to" if self.sends else "from"
        peer = f"rank {self.peer}" if self.peer >= 0 else "any rank"
        tag = f" with tag {self.tag}" if self.tag else ""
        return f"{self.operation} {to} {peer}{tag}{f' at {self.location}' if self.location else ''}"


SYSTEM_EXIT = "SystemExit"  # the `exit_at` of a rank that has raised it itself, at a line that is not known


class RankAtEnd(Struct, frozen=True):
    """One rank when the job had stopped."""

    rank: int
    calls: Sequence[Call]  # its last collectives, from the first that is known of all ranks
    earlier: int = 0  # how many collectives it had made before them
    doing: str = ""  # what it does, in words that come after its name: "waits in barrier() at train.py:41"
    # the lines of the program at which it stands, innermost first; empty where they are not known
    lines: tuple[str, ...] = ()
    waits: bool = True  # whether it waits for others, or has failed because another rank did not come
    ended: bool = False  # whether all of its script has run
    passes: Sequence[LoaderPass] = field(default_factory=tuple)  # over data loaders
    exit_at: str = ""  # the call that has ended it, with its line: "sys.exit at train.py:41"; "" where none has
    for_worker: bool = False  # whether it waits for a worker of its data loader
    # by the number of its line, how many forward passes a wrapper has made there, where it is called last
    forwards: Mapping[int, int] = field(default_factory=dict)
    waits_for: PeerWait | None = None  # what it waits for in a point-to-point call, if that is what it does
    constructs: bool = False  # whether it is in the constructor of a wrapper
    in_threads: tuple[str, ...] = ()  # the collectives in which other threads wait while the main thread does, too


DEFAULT_GROUP = "0"  # its name, in recorders


class RecordedCall(Struct, frozen=True):
    """A collective, or a send or receive, that a rank has entered, by its recorder."""

    group: str  # name of the process group
    number: int  # that the group gave to it; of a send or receive, that among those
    call: Call  # in words; its members are not known yet
    ended: bool  # whether it is known to have ended
    # whether it is a send or a receive, which pairs up with one other rank, or the end of several
    between_two: bool = False
    peer: int = -1  # the other rank of a send or receive; -1 if not known
    created: float = 0.0  # when the rank entered it, in seconds since 1970; 0 if not known
    timeout: float = 0.0  # in seconds; 0 if not known


class RankDump(Struct, frozen=True):
    """Flight Recorder entries of one rank."""

    entries: Sequence[RecordedCall]  # in the order in which they were entered
    # the ranks of each process group, as far as the dump names them
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    wrapped: bool = False  # whether earlier entries are lost, and not left out because they have ended
    world_size: int = 0  # as far as the sizes of what was gathered tell; else 0
    gloo: bool = False  # whether all of it is gloo's
    active_only: bool = False  # whether entries that have ended are left out
    descriptions: Mapping[str, str] = field(default_factory=dict)  # what the program calls its groups, by their names
    enqueued: Mapping[str, int] = field(default_factory=dict)  # the number of the last call of each group, if recorded

    @property
    def has_stacks(self) -> bool:
        """Detect the line of any call."""
        return any(entry.call.location for entry in self.entries)

    def collectives(self, group: str) -> list[RecordedCall]:
        """The collectives of a process group."""
        return [entry for entry in self.entries if entry.group == group and not entry.between_two]


class ScheduledCall(Struct, frozen=True):
    """One collective of a rank."""

    call: Call  # what it is
    waits: bool = False  # whether the rank goes on only when all ranks of the group have come to it


class SimulatedRank(Struct, frozen=True):
    """What one simulated rank has come to."""

    rank: int  # its number
    schedule: str  # the digest of its collectives; ranks with the same have made the same


class Simulated(Struct, frozen=True):
    """The world of which ranks are simulated."""

    world_size: int  # its number of ranks
    steps: int  # that each rank trains for
    shards: int  # into how many parts a batch is split; where these are fewer than ranks, some have the same
    folder: Path  # where ranks leave their collectives, and what they have sent as roots
