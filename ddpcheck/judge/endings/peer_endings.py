"""DDP402: ranks that wait for each other in point-to-point calls, or for a rank that does something else.

Pure functions from `findings.evidence.endings` to findings.
"""

from __future__ import annotations

from collections.abc import Sequence

from ddpcheck.findings.evidence.endings import PeerWait, RankAtEnd
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import capitalized, join_names, one_finding

_ORDER = (
    "Let one of two ranks send first and the other one receive first (if rank % 2: ...), or start both directions "
    "together: batch_isend_irecv([P2POp(isend, ...), P2POp(irecv, ...)]), and wait for all of them after that."
)
_PARTNER = "Let every send have its recv on the other rank: of the same two ranks, group and tag, in the same order."


def judge_circle(ranks: Sequence[RankAtEnd]) -> list[Finding]:
    """Ranks of which each waits for the next one, in a circle: before collectives, to which they do not come."""
    by_rank = {rank.rank: rank for rank in ranks}
    for rank in ranks:
        circle = [rank.rank]
        while (wait := by_rank[circle[-1]].waits_for) is not None and wait.peer in by_rank and wait.peer not in circle:
            circle.append(wait.peer)
        waits = [wait for number in circle if (wait := by_rank[number].waits_for) is not None]
        if len(waits) == len(circle) > 1 and waits[-1].peer == rank.rank:
            return _one(by_rank, circle, waits, ": each waits for the next one")
    return []


def judge_missing_peer(ranks: Sequence[RankAtEnd]) -> list[Finding]:
    """A rank that waits for another one, which is in no point-to-point call. Last."""
    by_rank = {rank.rank: rank for rank in ranks}
    for rank in ranks:
        wait = rank.waits_for
        if wait is not None and wait.peer in by_rank and by_rank[wait.peer].waits_for is None:
            return _one(by_rank, [rank.rank, wait.peer], [wait], "")
    return []


def _one(by_rank: dict[int, RankAtEnd], ranks: Sequence[int], waits: Sequence[PeerWait], how: str) -> list[Finding]:
    alike = len({wait.sends for wait in waits}) == 1 and len(waits) > 1
    return one_finding(
        "DDP402",
        tuple(dict.fromkeys(wait.operation for wait in waits)),
        f"{capitalized(join_names([f'rank {number} {by_rank[number].doing}' for number in ranks], most=8))}{how}.",
        ranks=ranks if len(ranks) < len(by_rank) else (),
        location=Location.parse(waits[0].location),
        fix=_ORDER if alike else _PARTNER,
    )
