"""DDP804: targets that index gathered rows, and name those of another rank."""

from __future__ import annotations

from collections.abc import Sequence

from ddpcheck.findings.evidence.evaluation import GatheredTargets
from ddpcheck.findings.evidence.script import LossDifferentiated
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import format_ranks, one_finding


def judge_targets(
    uses: Sequence[Sequence[GatheredTargets]], losses: Sequence[Sequence[LossDifferentiated]]
) -> list[Finding]:
    """At most one finding, at the line of the loss; all by rank, in order.

    The rows of each rank are at a place of their own among the classes, and the targets are the same numbers on all
    ranks: so they are rows of one rank only, and the others take its samples for their positives. Where a rank puts its
    own rows first, or counts from where they begin, that is not so.
    """
    members = sorted({one.members for of_rank in uses for one in of_rank})
    for group in members:
        of_group = [[one for one in uses[rank] if one.members == group] for rank in group if rank < len(uses)]
        if len(of_group) < len(group):
            continue
        for of_ranks in zip(*of_group, strict=False):
            places = {(one.step, one.location, one.rows, one.classes) for one in of_ranks}
            same = len({one.targets for one in of_ranks}) == 1 and len({one.own for one in of_ranks}) == len(of_ranks)
            if len(places) > 1 or not same:
                continue
            wrong = [rank for rank, one in zip(group, of_ranks, strict=True) if not _names_own(one)]
            if wrong and len(wrong) < len(group):
                made = {one.step: one.made for one in losses[group[0]] if one.made is not None}
                return _finding(wrong, group, of_ranks, made.get(of_ranks[0].step))
    return []


def _names_own(one: GatheredTargets) -> bool:
    """Whether some target is one of the rank's own rows."""
    return any(one.own <= target < one.own + one.rows for target in one.targets)


def _finding(
    wrong: Sequence[int], group: Sequence[int], of_ranks: Sequence[GatheredTargets], line: Location | None
) -> list[Finding]:
    one = of_ranks[group.index(wrong[0])]
    first, last = min(one.targets), max(one.targets)
    return one_finding(
        "DDP804",
        ("cross_entropy",),
        f"The targets on {format_ranks(wrong)} are {first} to {last}, rows of another rank among the {one.classes} "
        f"that all_gather has brought together: those of rank {wrong[0]} begin at {one.own}.",
        ranks=wrong,
        location=line or one.location,
        evidence=[
            *([f"gathered at {one.location}"] if line and one.location else []),
            *(
                f"rank {rank}: its rows are {each.own} to {each.own + each.rows - 1}, its targets {first} to {last}"
                for rank, each in list(zip(group, of_ranks, strict=True))[:4]
            ),
        ],
    )
