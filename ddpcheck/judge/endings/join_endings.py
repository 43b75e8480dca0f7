"""DDP403: a collective of the program inside torch's `Join`, in which ranks without further batches take no part.

A pure function from `judge.endings.ending_facts` to findings.
"""

from __future__ import annotations

from ddpcheck.findings.evidence.endings import RankAtEnd
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import format_ranks, one_finding, plural_verb
from ddpcheck.judge.endings.ending_facts import EndingFacts, Position, calls_there, described_call, told
from ddpcheck.stream.places import DDP_BACKWARD, DDP_FORWARD, JOINED, JOINING

_OF_DDP = (DDP_BACKWARD, DDP_FORWARD)


def explain_by_join(facts: EndingFacts, one: Position, other: Position) -> list[Finding]:
    """DDP403: under `Join`, ranks call something more than DDP does. Before loaders, which may be uneven there."""
    done = [rank for rank in facts.ranks if has_joined(rank)]
    by_rank = {rank.rank: call for rank in facts.ranks if rank not in done for call in _in_addition(rank)[:1]}
    if not done or not by_rank:
        return []
    calling, missing = list(by_rank), [rank.rank for rank in done]
    call = by_rank[calling[0]]
    return one_finding(
        "DDP403",
        (call.operation,),
        f"{format_ranks(calling).capitalize()} {plural_verb('calls', 'call', calling)} {described_call(call)} inside "
        f"of `Join`, and {format_ranks(missing)} {plural_verb('does', 'do', missing)} not: without further batches, a "
        f"rank joins the collectives of DDP only; {told(facts, missing)}.",
        ranks=calling,
        location=Location.parse(call.location) if call.location else None,
        evidence=calls_there(one, other),
        fix="Take the collective out of the `with Join(...)` block: add up on each rank, and reduce after it. Or give "
        "Join a Joinable of its own, whose hook makes the same call.",
    )


def has_joined(rank: RankAtEnd) -> bool:
    """Whether a rank has no further batch, and answers the collectives of those that have one."""
    return bool(rank.calls) and rank.calls[-1].place == JOINED


def _in_addition(rank: RankAtEnd) -> list[Call]:
    """What a rank has called since its first forward pass under the `Join` in which it is, and DDP has not."""
    calls = list(rank.calls)
    left = max((at for at, call in enumerate(calls) if call.place == JOINED), default=-1)
    first = next((at for at, call in enumerate(calls) if at > left and call.place == JOINING), len(calls))
    return [call for call in calls[first:] if call.place != JOINING and call.operation not in _OF_DDP]
