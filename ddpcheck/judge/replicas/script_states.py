"""DDP306, 214, 217, 523: models outside wrappers that diverge between ranks; states not loaded.

Also running statistics of a rank's own samples that normalise the inputs of a wrapped module (DDP217).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ddpcheck.findings.evidence.loop import ModuleChanged
from ddpcheck.findings.evidence.replicas import NothingLoaded, RunningStatistic, StateUsed, digest_of_values
from ddpcheck.findings.evidence.script import StateHeld
from ddpcheck.findings.report import Finding, Location, Severity
from ddpcheck.findings.wording import (
    counted,
    format_ranks,
    group_by,
    join_names,
    minority_ranks,
    one_finding,
    plural_verb,
    unless_all,
)

_FEWEST_CALLS = 2  # forward calls per rank before which the statistic moved towards the mean of the samples
_FEWEST_EQUATIONS = 3  # over all these calls
_ROUNDING = 1e-5  # relative to the divisor of the inputs


def judge_statistics(held: Sequence[Sequence[RunningStatistic]]) -> list[Finding]:
    """DDP217: running statistics of a rank's own samples that normalise forward inputs.

    Ignored if equal on all ranks at any forward call, or passed to a collective: inputs are then normalised alike.
    `held`: statistics by rank.
    """
    by_name = [group_by(of_rank, lambda one: (one.wrapper, one.name)) for of_rank in held]
    for name in by_name[0] if len(by_name) > 1 else ():
        theirs = [{one.forward: one for one in of_rank.get(name, ())} for of_rank in by_name]
        common = sorted(set.intersection(*map(set, theirs)))
        looks = [[of_rank[forward] for of_rank in theirs] for forward in common]
        if not looks or not all(map(_is_followed, theirs)) or any(one.exchanged for one in looks[-1]):
            continue
        apart = [_distance(of_ranks) for of_ranks in looks]
        if min(apart) > _ROUNDING:
            return _finding_of_statistic(looks, max(apart[-_FEWEST_CALLS:]))
    return []


def _is_followed(looks: dict[int, RunningStatistic]) -> bool:
    """Return True if most changes of the statistic follow the samples."""
    fitting = [one for one in looks.values() if one.equations]
    moves = [one for number, one in looks.items() if number - 1 in looks and looks[number - 1].values != one.values]
    return (
        len(fitting) >= _FEWEST_CALLS
        and sum(one.equations for one in fitting) >= _FEWEST_EQUATIONS
        and 2 * sum(one.equations > 0 for one in moves) >= len(moves)
    )


def _distance(of_ranks: Sequence[RunningStatistic]) -> float:
    """Return the largest distance between ranks, in units of the inputs' divisor."""
    first = of_ranks[0]
    rows = [row for one in of_ranks[1:] for row in zip(one.values, first.values, first.scale, strict=False)]
    return max((abs(value - mine) / scale for value, mine, scale in rows if scale > 0), default=0.0)


def _finding_of_statistic(looks: Sequence[Sequence[RunningStatistic]], apart: float) -> list[Finding]:
    one = looks[-1][0]
    fitting = [of_ranks[0] for of_ranks in looks if of_ranks[0].equations]
    return one_finding(
        "DDP217",
        (one.name,),
        f"{one.name} is a running statistic of each rank's own samples, and the inputs of the wrapped module are "
        "normalised by it: the ranks train one model on differently scaled inputs.",
        location=one.location,
        evidence=[
            f"it differs between ranks by {apart:.2g} times the divisor of the inputs, after "
            f"{counted(one.forward, 'call')} of forward",
            f"before {counted(len(fitting), 'call')} of forward it moved towards the mean of the given samples, and it "
            "is subtracted from them",
        ],
        severity=Severity.WARNING,
        fix="Reduce the sums and the count of each batch over all ranks (dist.all_reduce) before they are added to the "
        "statistics; or keep these in buffers of the wrapped module, as nn.SyncBatchNorm does.",
    )


_FEWEST = 2  # observations; the last two must differ between ranks
_FAR = 0.02  # standard deviations between running means of the same data


Changes = Sequence[Sequence[ModuleChanged]]  # writes into copies, by rank


def judge_states(states: Sequence[Sequence[StateHeld]], changes: Changes = ()) -> list[Finding]:
    """DDP306 and 214: copies, criterion buffers and other modules that differ between ranks.

    Copies that a rank neither changes nor calls are unused there (e.g. an EMA updated by rank 0 only). The finding is
    at the line that made the copy or, if once equal on all ranks, at the line that writes the copy.
    """
    by_name = [_by_name(of_rank) for of_rank in states]
    found: list[Finding] = []
    for name in by_name[0] if by_name else ():
        if not all(name in of_rank for of_rank in by_name):
            continue
        looks = [of_rank[name] for of_rank in by_name]
        common = sorted(set.intersection(*(set(of_rank) for of_rank in looks)))
        every = [[of_rank[count] for of_rank in looks] for count in common]
        last = every[-_FEWEST:]
        apart = [of_ranks for of_ranks in last if _differ([one.values for one in of_ranks])]
        in_use = bool(last) and all(
            one.used or len({str(look.values) for look in of_rank.values()}) > 1
            for one, of_rank in zip(last[-1], looks, strict=True)
        )
        pairs = zip(last[0], last[-1], strict=True) if last else ()
        kept = all(not one.other or one.values == two.values for one, two in pairs)
        if len(apart) == _FEWEST and in_use and kept and not _come_together(looks):
            alike = [number for number, of_ranks in enumerate(every) if len({str(one.values) for one in of_ranks}) == 1]
            found += _finding(every, alike[-1] + 1 if alike else 0, _written_at(changes, name[1]))
    return found[:1]


def judge_loads(loads: Sequence[Sequence[NothingLoaded]]) -> list[Finding]:
    """DDP523: `load_state_dict(strict=False)` calls without a matching key (`loads` by rank)."""
    first = next((one for of_rank in loads for one in of_rank), None)
    if first is None:
        return []
    ranks = [rank for rank, of_rank in enumerate(loads) if any(one.location == first.location for one in of_rank)]
    one, other = ("state", "module") if first.of_state else ("module", "state")
    return one_finding(
        "DDP523",
        (first.name,),
        f"load_state_dict(strict=False) loads nothing into {first.name}, which stays unchanged: the keys of the "
        f"{one} begin with {first.prefix!r}, those of the {other} do not.",
        ranks=unless_all(ranks, len(loads)),
        location=first.location,
        evidence=[f"none of the {counted(first.keys, 'key')} of {first.name} is in the state"],
    )


_Written = tuple[Location | None, list[str], tuple[int, ...]]


def _written_at(changes: Changes, copy: str) -> _Written:
    """Return the line that writes a copy, preferably on some ranks; evidence; ranks."""
    ranks: dict[tuple[Location | None, str], list[int]] = {}
    for rank, of_rank in enumerate(changes):
        for one in of_rank:
            if copy in one.names:
                ranks.setdefault((one.location, one.how), []).append(rank)
    some = {line: on for line, on in ranks.items() if len(on) < len(changes)} or ranks
    if len({line for line, _ in some}) != 1:
        return None, [], ()
    (where, how), on = next(iter(some.items()))
    if len(on) == len(changes):
        return where, [f"it is written there ({how}), on every rank"], ()
    return where, [f"it is written there ({how}), on {format_ranks(on)}"], tuple(on)


def judge_uses(
    uses: Sequence[Sequence[StateUsed]], states: Sequence[Sequence[StateHeld]], changes: Changes = ()
) -> list[Finding]:
    """DDP306: weights that differ between the ranks that evaluate them at one line.

    The weights are copies, or wrapped modules with a loaded state. Evaluation on a single rank, or of weights received
    from other ranks, is correct. DDP214: equal weights, but running statistics that each rank estimated separately.
    """
    by_use = [{(one.step, one.name, one.lines): one for one in of_rank} for of_rank in uses]
    kept = [{digest_of_values(one.values.values()): one for one in of_rank if one.copies} for of_rank in states]
    for use in dict.fromkeys(use for of_rank in by_use for use in of_rank):
        theirs = {rank: of_rank[use] for rank, of_rank in enumerate(by_use) if use in of_rank}
        copies = [copy for rank, one in theirs.items() if (copy := kept[rank].get(one.digest))]
        known = copies or any(one.loaded or not one.wrapped for one in theirs.values())
        if known and len({one.digest for one in theirs.values()}) > 1:
            written = _written_at(changes, use[1])
            return _finding_of_use(theirs, states, copies[0].location if copies else None, written)
        if len(theirs) > 1 and (apart := _apart([one.statistics for one in theirs.values()])) > _FAR:
            return _finding_of_statistics(theirs, apart)
    return []


def _apart(statistics: Sequence[Sequence[float]]) -> float:
    """Return the largest distance between running means, in standard deviations."""
    half = len(statistics[0]) // 2
    if not half or any(len(one) != 2 * half for one in statistics):
        return 0.0
    columns: list[tuple[float, ...]] = list(zip(*statistics, strict=True))
    pairs = zip(columns[:half], columns[half:], strict=True)
    return max((max(means) - min(means)) / math.sqrt(max(*variances, 1e-12)) for means, variances in pairs)


def _finding_of_statistics(uses: Mapping[int, StateUsed], apart: float) -> list[Finding]:
    one = next(iter(uses.values()))
    return one_finding(
        "DDP214",
        (one.name,),
        f"{one.name} is evaluated with different running statistics of BatchNorm on each rank: every rank has "
        "recomputed them from its own part of the data, while the parameters are the same.",
        location=one.estimated_at or one.location,
        evidence=[
            f"running means are up to {apart:.2g} standard deviations apart",
            f"evaluated at {one.lines[0]} on {format_ranks(uses)}",
        ],
        severity=Severity.WARNING,
        fix="Estimate them on every rank from the same samples; or all_reduce running_mean and running_var after that, "
        "or broadcast them from rank 0.",
    )


def _finding_of_use(
    uses: Mapping[int, StateUsed], states: Sequence[Sequence[StateHeld]], copied: Location | None, written: _Written
) -> list[Finding]:
    ranks = list(uses)
    one = next((one for one in uses.values() if one.loaded), uses[ranks[0]])
    held = [[look for look in of_rank if look.copies and look.name == one.name] for of_rank in states]
    changed = {rank: len({str(look.values) for look in held[rank]}) > 1 for rank in ranks if len(held[rank]) > 1}
    moved, left = ([rank for rank, yes in changed.items() if yes is which] for which in (True, False))
    evidence = [f"evaluated at {one.lines[0]} on {format_ranks(ranks)}, after {one.step} optimizer steps"]
    where = one.location or copied or Location.parse(one.lines[0])
    starts = [min(looks, key=lambda look: look.count).values for looks in held if looks]
    on: tuple[int, ...] = ()
    if not one.loaded and written[0] and len(starts) == len(states) and not _differ(starts):
        where, evidence, on = written[0], evidence + written[1], written[2]
    if moved and left:
        evidence.append(f"in the training loop it has changed on {format_ranks(moved)}, not on {format_ranks(left)}")
    return one_finding(
        "DDP306",
        (one.name,),
        f"{one.name} is evaluated with different weights on each rank: "
        + ("the state loaded into it" if one.loaded else "the copy of the weights")
        + " is not the same on every rank.",
        ranks=on,
        location=where,
        evidence=evidence,
        severity=Severity.WARNING,
        fix="Make the same change to the copy on every rank (all_reduce the condition), or broadcast it before "
        "evaluation.",
    )


def _differ(values: Sequence[Mapping[str, int]]) -> bool:
    """Return True if the same tensors have different values on some ranks."""
    return all(one.keys() == values[0].keys() for one in values) and any(one != values[0] for one in values)


def _come_together(looks: Sequence[Mapping[int, StateHeld]]) -> bool:
    """Return True if collectives synchronise a copy again after its ranks diverge."""
    common = sorted(set.intersection(*(set(of_rank) for of_rank in looks)))
    apart = [count for count in common if _differ([of_rank[count].values for of_rank in looks])]
    return all(of_rank[apart[-1]].together > of_rank[apart[0]].together for of_rank in looks)


def _by_name(states: Sequence[StateHeld]) -> dict[tuple[int, str], dict[int, StateHeld]]:
    by_name = group_by(states, lambda one: (one.optimizer, one.name))
    return {name: {one.count: one for one in looks} for name, looks in by_name.items()}


def _finding(looks: Sequence[Sequence[StateHeld]], first: int, written: _Written) -> list[Finding]:
    """Report a copy that diverges from index `first` of its observations `looks` on."""
    of_ranks, one = looks[first], looks[first][0]
    names = [name for name in one.values if len({other.values.get(name) for other in of_ranks}) > 1]
    ranks = minority_ranks([tuple(other.values.items()) for other in of_ranks]) if len(of_ranks) > 2 else ()
    apart = f"{len(names)} of {len(one.values)} tensors are not the same on every rank before step {one.count}"
    evidence = [f"{apart}: {join_names(names[:3])}{' ...' if len(names) > 3 else ''}"]
    evidence.append(f"before step {looks[first - 1][0].count} they were" if first else "they were not compared before")
    where, how, on = written if first else (None, [], ())
    if one.other:
        return one_finding(
            "DDP306",
            (one.name,),
            f"{one.name} ({one.kind}) is in no wrapper and in no optimizer, the training loop calls it, and its "
            "parameters are not the same on every rank.",
            ranks=ranks,
            steps=(one.count,),
            location=one.location,
            evidence=[evidence[0], "they do not change from step to step"],
            severity=Severity.WARNING,
            fix="Load the same state into it on every rank, construct it under one seed, or broadcast it from rank 0.",
        )
    if one.copies:
        return one_finding(
            "DDP306",
            (one.name,),
            f"{one.name}, a copy of a wrapped module's parameters or created like it, is not the same on every rank.",
            ranks=on or ranks,
            steps=(one.count,),
            location=where or one.location,
            evidence=[*evidence, *how],
            severity=Severity.WARNING,
            fix="Make the copy after DistributedDataParallel has been constructed, and make the same change on every "
            "rank (all_reduce the condition). If it is not a copy, construct it under one seed, or load one state into "
            "it.",
        )
    return one_finding(
        "DDP214",
        [f"{one.name}.{name}" for name in names],
        f"{one.name} ({one.kind}) is in no wrapper, backward comes through it, and its "
        f"{plural_verb('buffer', 'buffers', names)} {join_names(names)} {plural_verb('has', 'have', names)} other "
        "values on each rank.",
        ranks=ranks,
        steps=(one.count,),
        location=one.location,
        evidence=evidence,
        fix="all_reduce or gather the values that the buffer is computed from.",
    )
