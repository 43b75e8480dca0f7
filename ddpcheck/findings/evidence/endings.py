"""Evidence on failed, waiting and simulated ranks: lines and collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct, field

from ddpcheck.findings.evidence.script import LoaderPass
from ddpcheck.findings.evidence.steps import Call


class Joining(Struct, frozen=True):
    """Process that waits in `init_process_group`, or that failed there."""

    pid: int  # process id
    rank: int  # argument or RANK; negative if not set
    world_size: int  # argument or WORLD_SIZE; negative if not set
    address: str  # rendezvous address
    location: str  # line of the call; may be empty
    agent: str = ""  # address of torchrun's store, if torch uses only this store; else ""
    started: int = 0  # processes started by torchrun on a single node, including this process; else 0
    error: str = ""  # exception in the call, with class; "" if the process waits or was killed


class PeerWait(Struct, frozen=True):
    """Wait of a rank in a point-to-point call, or for its asynchronous handle."""

    operation: str  # "send", "recv", "isend" or "irecv"
    peer: int  # destination or source rank; negative for any
    tag: int  # of the call
    location: str  # line of the call

    @property
    def sends(self) -> bool:
        """True if the rank is the sender."""
        return self.operation.endswith("send")

    def __str__(self) -> str:
        to = "to" if self.sends else "from"
        peer = f"rank {self.peer}" if self.peer >= 0 else "any rank"
        tag = f" with tag {self.tag}" if self.tag else ""
        return f"{self.operation} {to} {peer}{tag}{f' at {self.location}' if self.location else ''}"


SYSTEM_EXIT = "SystemExit"  # `exit_at` of a rank that raised SystemExit at an unknown line


class RankAtEnd(Struct, frozen=True):
    """State of one rank at the end of the job."""

    rank: int
    calls: Sequence[Call]  # last collectives, from the first that is known on all ranks
    earlier: int = 0  # number of collectives before `calls`
    doing: str = ""  # what the rank is doing, as text that follows its name: "waits in barrier() at train.py:41"
    lines: tuple[str, ...] = ()  # program lines of the stack, innermost first; empty if unknown
    waits: bool = True  # True if the rank waits for others, or failed because another rank did not arrive
    ended: bool = False  # True if the script ran to the end
    passes: Sequence[LoaderPass] = field(default_factory=tuple)  # over data loaders
    exit_at: str = ""  # call that ended the rank: "sys.exit at train.py:41"; "" if none
    for_worker: bool = False  # True if the rank waits for a data loader worker
    # number of forward passes by line number of a wrapper's last forward pass
    forwards: Mapping[int, int] = field(default_factory=dict)
    waits_for: PeerWait | None = None  # point-to-point call in which the rank waits
    constructs: bool = False  # True if the rank is in the constructor of a wrapper
    in_threads: tuple[str, ...] = ()  # collectives in which other threads wait while the main thread waits too


DEFAULT_GROUP = "0"  # name of the default process group in Flight Recorder dumps


class RecordedCall(Struct, frozen=True):
    """Collective, send or receive that a rank entered, from Flight Recorder."""

    group: str  # name of the process group
    number: int  # sequence number in the group; sends and receives have separate numbers
    call: Call  # in words, without members
    ended: bool  # True if known to have ended
    between_two: bool = False  # True for a send or receive, or the end of several ("coalesced")
    peer: int = -1  # other rank of a send or receive; -1 if unknown
    created: float = 0.0  # time of entry, in seconds since 1970; 0 if unknown
    timeout: float = 0.0  # in seconds; 0 if unknown


class RankDump(Struct, frozen=True):
    """Flight Recorder entries of one rank."""

    entries: Sequence[RecordedCall]  # in order of entry
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # ranks of each process group in the dump
    wrapped: bool = False  # True if earlier entries were overwritten
    world_size: int = 0  # derived from sizes of gathered tensors; 0 if unknown
    gloo: bool = False  # True if all entries are gloo's
    active_only: bool = False  # True if the dump has no entries that have ended
    descriptions: Mapping[str, str] = field(default_factory=dict)  # the program's group descriptions, by group name
    enqueued: Mapping[str, int] = field(default_factory=dict)  # number of the last call of each group, if recorded

    @property
    def has_stacks(self) -> bool:
        """True if any entry has a source line."""
        return any(entry.call.location for entry in self.entries)

    def collectives(self, group: str) -> list[RecordedCall]:
        """Return the collectives of a process group."""
        return [entry for entry in self.entries if entry.group == group and not entry.between_two]


class ScheduledCall(Struct, frozen=True):
    """One collective of a simulated rank."""

    call: Call
    waits: bool = False  # True if the rank blocks until all ranks of the group arrive


class SimulatedRank(Struct, frozen=True):
    """Result of one simulated rank."""

    rank: int
    schedule: str  # digest of the collectives: equal digests mean equal collectives


class Simulated(Struct, frozen=True):
    """Settings of a world whose ranks are simulated one by one."""

    world_size: int  # number of ranks
    steps: int  # training steps per rank
    shards: int  # parts of a split batch; if fewer than ranks, some ranks share a part
    folder: Path  # has files with collectives, and with the data that ranks send as `src` of a collective
