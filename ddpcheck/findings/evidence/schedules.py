"""Evidence on the collectives of ranks that were simulated one after the other.

Judged in `judge.endings.schedules`; gathered in `report.schedule.schedule_phases`.
"""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from ddpcheck.findings.evidence.steps import Call


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
