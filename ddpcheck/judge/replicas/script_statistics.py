"""DDP217: running statistics of each rank's own samples, by which it normalises the inputs of a wrapped module."""

from __future__ import annotations

from collections.abc import Sequence

from ddpcheck.findings.evidence.running_statistics import RunningStatistic
from ddpcheck.findings.report import Finding, Severity
from ddpcheck.findings.wording import counted, group_by, one_finding

_FEWEST = 2  # calls of forward before which it has moved so, on each rank
_FEWEST_EQUATIONS = 3  # of all of these
_ROUNDING = 1e-5  # relative to what inputs are divided by


def judge_statistics(held: Sequence[Sequence[RunningStatistic]]) -> list[Finding]:
    """At most one finding; `held` by rank.

    What is the same on every rank at one of the calls has been brought together, as has what was given to a collective:
    with the statistics of all ranks, or of one, all inputs are normalised alike.
    """
    by_name = [_by_name(of_rank) for of_rank in held]
    for wrapper, name in by_name[0] if len(by_name) > 1 else ():
        theirs = [of_rank.get((wrapper, name), {}) for of_rank in by_name]
        common = sorted(set.intersection(*map(set, theirs)))
        looks = [[of_rank[forward] for of_rank in theirs] for forward in common]
        if not looks or not all(map(_is_followed, theirs)) or any(one.exchanged for one in looks[-1]):
            continue
        apart = [_distance(of_ranks) for of_ranks in looks]
        if min(apart) > _ROUNDING:
            return _finding(looks, max(apart[-_FEWEST:]))
    return []


def _is_followed(looks: dict[int, RunningStatistic]) -> bool:
    """Whether it moves so more than by chance: mostly, where it has changed from one call of forward to the next."""
    fitting = [one for one in looks.values() if one.equations]
    moves = [one for number, one in looks.items() if number - 1 in looks and looks[number - 1].values != one.values]
    return (
        len(fitting) >= _FEWEST
        and sum(one.equations for one in fitting) >= _FEWEST_EQUATIONS
        and 2 * sum(one.equations > 0 for one in moves) >= len(moves)
    )


def _distance(of_ranks: Sequence[RunningStatistic]) -> float:
    """How far the values are apart, in units of what inputs are divided by."""
    first = of_ranks[0]
    return max(
        (
            abs(value - mine) / max(scale, 1e-300)
            for one in of_ranks[1:]
            for value, mine, scale in zip(one.values, first.values, first.scale, strict=False)
            if scale > 0
        ),
        default=0.0,
    )


def _by_name(held: Sequence[RunningStatistic]) -> dict[tuple[int, str], dict[int, RunningStatistic]]:
    by_name = group_by(held, lambda one: (one.wrapper, one.name))
    return {name: {one.forward: one for one in looks} for name, looks in by_name.items()}


def _finding(looks: Sequence[Sequence[RunningStatistic]], apart: float) -> list[Finding]:
    one = looks[-1][0]
    fitting = [of_ranks[0] for of_ranks in looks if of_ranks[0].equations]
    return one_finding(
        "DDP217",
        (one.name,),
        f"{one.name} is a running statistic of each rank's own samples, and the inputs of the wrapped module are "
        "normalised by it: the ranks train one model on inputs of another scale each.",
        location=one.location,
        evidence=[
            f"it differs between ranks by {apart:.2g} of what inputs are divided by, after "
            f"{counted(one.forward, 'call')} of forward",
            f"before {counted(len(fitting), 'call')} of forward it has moved towards the mean of the samples that "
            "are given, and it is subtracted from them",
        ],
        severity=Severity.WARNING,
        fix="Reduce the sums and the count of each batch over all ranks (dist.all_reduce) before they are added to the "
        "statistics; or keep these in buffers of the wrapped module, as nn.SyncBatchNorm does.",
    )
