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
    """A process is in `init_process_group`.

    Attributes:
        pid: Of the process.
        rank: That it says to have; negative where it says none.
        world_size: That it says there is; negative where it says none.
        address: Where it means to meet the others.
        location: The line of the call; may be empty.
        agent: The address of torchrun's store, where torch takes that one to be all there is; empty elsewhere.
        started: How many processes torchrun has started, where this is one of them and there is one node; else 0.
    """

    pid: int
    rank: int
    world_size: int
    address: str
    location: str
    agent: str = ""
    started: int = 0


class PeerWait(Struct, frozen=True):
    """A rank waits in a point-to-point call, or for one that it has started.

    Attributes:
        operation: "send", "recv", "isend" or "irecv".
        peer: The rank to which it sends, or from which it receives; negative for any.
        tag: Of the call.
        location: The line of the call.
    """

    operation: str
    peer: int
    tag: int
    location: str

    @property
    def sends(self) -> bool:
        """Whether the rank has something to send."""
        return self.operation.endswith("send")

    def __str__(self) -> str:
        to = "to" if self.sends else "from"
        peer = f"rank {self.peer}" if self.peer >= 0 else "any rank"
        tag = f" with tag {self.tag}" if self.tag else ""
        return f"{self.operation} {to} {peer}{tag}{f' at {self.location}' if self.location else ''}"


class RankAtEnd(Struct, frozen=True):
    """One rank when the job had stopped.

    Attributes:
        rank: The rank.
        calls: Its last collectives, from the first that is known of all ranks.
        earlier: How many collectives it had made before them.
        doing: What it does, in words that come after its name: "waits in barrier() at train.py:41".
        lines: The lines of the program at which it stands, innermost first; empty where they are not known.
        waits: Whether it waits for others, or has failed because another rank did not come.
        ended: Whether all of its script has run.
        passes: Over data loaders.
        exit_at: The line that has called `sys.exit`; "" where none has.
        for_worker: Whether it waits for a worker of its data loader.
        forwards: By the number of its line, how many forward passes a wrapper has made there, where it is called last.
        waits_for: What it waits for in a point-to-point call, if that is what it does.
    """

    rank: int
    calls: Sequence[Call]
    earlier: int = 0
    doing: str = ""
    lines: tuple[str, ...] = ()
    waits: bool = True
    ended: bool = False
    passes: Sequence[LoaderPass] = field(default_factory=tuple)
    exit_at: str = ""
    for_worker: bool = False
    forwards: Mapping[int, int] = field(default_factory=dict)
    waits_for: PeerWait | None = None


class ScheduledCall(Struct, frozen=True):
    """One collective of a rank.

    Attributes:
        call: What it is.
        waits: Whether the rank goes on only when all ranks of the group have come to it.
    """

    call: Call
    waits: bool = False


class SimulatedRank(Struct, frozen=True):
    """What one simulated rank has come to.

    Attributes:
        rank: Its number.
        schedule: The digest of its collectives; ranks with the same have made the same.
    """

    rank: int
    schedule: str


class Simulated(Struct, frozen=True):
    """The world of which ranks are simulated.

    Attributes:
        world_size: Its number of ranks.
        steps: That each rank trains for.
        shards: Into how many parts a batch is split; where these are fewer than ranks, some have the same.
        folder: Where ranks leave their collectives, and what they have sent as roots.
    """

    world_size: int
    steps: int
    shards: int
    folder: Path
