"""DDP521: ranks that hold the same shard of the parameters, where each should hold another one."""

from __future__ import annotations

from collections.abc import Sequence

from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import counted, one_finding, plural_verb
from ddpcheck.stream.entries import ReplicaCaptured


def judge_repeated(everyone: Sequence[ReplicaCaptured]) -> list[Finding]:
    """DDP521: ranks have the same values where each should have another part of the parameters.

    Of all parameters whose shards have values of several kinds: zeros and ones are the same by right, and a model may
    have single parameters that are made of equal blocks.
    """
    count = len({one.shard for one in everyone})
    names = list(dict.fromkeys(name for one in everyone for name in one.parts))
    values = [one.state.values.parameters for one in everyone]
    if count < 2 or not names or any(len({of_rank.get(name) for of_rank in values}) > 1 for name in names):
        return []
    return one_finding(
        "DDP521",
        names,
        f"Every rank has the same shard of {counted(len(names), 'parameter')}, where each should have another part: "
        f"{plural_verb('it is', 'they are', names)} one part, {count} times.",
        steps=(everyone[0].step,),
        evidence=[
            "a file with the shards of one rank that every rank loads leaves them so, and so do values that each "
            "rank draws for its shards from the same seed"
        ],
    )
