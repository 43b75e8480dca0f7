"""DDP801, 802, 803 and 805: faults of evaluation, from counted, exchanged and shown numbers.

A finding requires a number of the program that equals the value produced by the fault.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from operator import eq

from ddpcheck.findings.evidence.evaluation import EvaluationPass, MetricShown, ResultExchanged, RowsCompared
from ddpcheck.findings.evidence.script import LoaderPass
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import counted, one_finding
from ddpcheck.judge.evaluation.evaluation_results import (
    Evaluated,
    are_other_data,
    common,
    first_shown,
    gathered_labels,
    given_numbers,
    is_close,
    numbers_shown,
    shows,
)
from ddpcheck.judge.evaluation.rank_metrics import MEAN, Evaluation, RankMetric, rank_metrics
from ddpcheck.judge.evaluation.script_order import judge_order
from ddpcheck.judge.evaluation.script_shares import judge_lone_share, judge_mean_of_means, judge_own_shard

_FEWEST_ALONE = 256  # samples: a smaller integer is ambiguous


def evaluations_of(
    loaders: Sequence[Sequence[LoaderPass]],
    passes: Sequence[Sequence[EvaluationPass]],
    exchanged: Sequence[Sequence[ResultExchanged]],
    shown: Sequence[Sequence[MetricShown]],
    compared: Sequence[Sequence[RowsCompared]],
) -> list[Evaluation]:
    """Return evaluations with the results of their rounds; arguments by rank, in order."""
    found: dict[tuple[object, ...], dict[int, Evaluated]] = {}
    every = zip(loaders, passes, exchanged, shown, compared or [()] * len(loaders), strict=True)
    for rank, (of_loaders, of_passes, of_exchanged, of_shown, of_rows) in enumerate(every):
        known = {(one.loader, one.number): one for one in of_loaders}
        subsets = {one.loader: one.subset for one in of_loaders if len(one.subset)}
        times: Counter[tuple[object, ...]] = Counter()  # of equal pass numbers: the loader was recreated
        for held in {(one.loader, one.number): one for one in of_passes}.values():  # a pass may be written twice
            if (loader := known.get((held.loader, held.number))) is not None and loader.exhausted:
                place = (loader.location, loader.made, loader.dataset, loader.number)
                times[place] += 1
                found.setdefault((*place, times[place]), {})[rank] = Evaluated(
                    loader,
                    held,
                    [
                        one
                        for one in of_exchanged
                        if one.round == held.round
                        and (not one.during or one.evaluation in (None, (held.loader, held.number)))
                    ],
                    [one for one in of_shown if one.round == held.round],
                    subsets.get(loader.loader, ()),
                    [one for one in of_rows if one.round == held.round],
                )
    return [Evaluation(key[:3], one, rank_metrics([*one.values()])) for key, one in found.items()]


def judge_evaluations(evaluations: Sequence[Evaluation], loaders: Sequence[Sequence[LoaderPass]]) -> list[Finding]:
    """Return at most one finding per rule; `loaders` by rank, in order."""
    found: dict[str, list[Finding]] = {}
    of_all = [one for one in evaluations if len(one.by_rank) == len(loaders)]
    for one in of_all:
        of_ranks = [*one.by_rank.values()]
        means = judge_mean_of_means(of_ranks, one.metrics)
        for finding in (*judge_padded(of_ranks, one.metrics), *judge_order(of_ranks), *means):
            found.setdefault(finding.code, [finding])
    loops = dict.fromkeys(one.loop for one in of_all)
    own = [finding for loop in loops for finding in judge_own_shard([one for one in of_all if one.loop == loop])]
    found["DDP802"] = _in_one(own) if own else judge_lone_share(evaluations, loaders)
    return [finding for findings in found.values() for finding in findings]


def _in_one(findings: Sequence[Finding]) -> list[Finding]:
    """Merge findings on the same ranks into the first, each further metric once."""
    first = findings[0]
    for one in findings:
        if one.ranks == first.ranks and not set(one.subjects) <= set(first.subjects):
            evidence = (*first.evidence, f"also {', '.join(one.subjects)}: {one.message}")
            first = replace(first, subjects=(*first.subjects, *one.subjects), evidence=evidence)
    return [first]


# Duplicate samples


def judge_padded(of_ranks: Sequence[Evaluated], metrics: Sequence[RankMetric]) -> list[Finding]:
    """DDP801: metric with duplicate samples, because a sampler pads the shards."""
    times = Counter(index for one in of_ranks for index in one.loader.indices)
    excess = sum(times.values()) - len(times)
    most = len(of_ranks) * (1 + max(one.batch for one in of_ranks))  # to complete a batch on each rank
    if len(set(times.values())) < 2 or excess >= most:  # e.g. each rank evaluates all samples
        return []
    if any(one.loader.replaces for one in of_ranks) or are_other_data(of_ranks) or _take_own_places(of_ranks):
        return []
    seen = _counted_in_collective(of_ranks, metrics) or _divided_by_all(of_ranks) or _rows_of_all(of_ranks)
    if seen is None:
        return []
    what, where = seen
    one = of_ranks[0]
    return one_finding(
        "DDP801",
        (one.loader.dataset,),
        f"The metric is over {sum(times.values())} samples, and the ranks have {len(times)} different ones: "
        f"{counted(excess, 'sample')} {'counts' if excess == 1 else 'count'} twice.",
        location=one.loader.made or where or one.loader.location,
        evidence=[
            f"{one.loader.sampler} gives each rank {one.samples} of the {one.loader.size} samples",
            f"{what}{f' (at {where})' if where else ''}",
            f"the loop over the loader begins at {one.loader.location}",
        ],
    )


def _take_own_places(of_ranks: Sequence[Evaluated]) -> bool:
    """Return True if duplicates come from different `Subset`s, not the sampler (DDP516)."""
    subsets = [one.subset for one in of_ranks]
    if not all(subsets) or all(list(one) == list(subsets[0]) for one in subsets):
        return False
    by_index = [{index: place for place, index in enumerate(one)} for one in subsets]
    places = [found.get(index) for found, one in zip(by_index, of_ranks, strict=True) for index in one.loader.indices]
    return len(set(places)) == len(places)


_Seen = tuple[str, Location | None]


def _counted_in_collective(of_ranks: Sequence[Evaluated], metrics: Sequence[RankMetric]) -> _Seen | None:
    """Find a collective that gets each rank's sample count, or mean over all samples."""
    samples = [one.samples for one in of_ranks]
    every = list(given_numbers(of_ranks))
    numbers = of_ranks[0].held.numbers
    means = [one for one in metrics if one.name.startswith(MEAN) and not numbers[one.key] % 1 and any(one.bits)]
    counted_in_loop = [tuple(counts) for _, counts in common(of_ranks, "numbers") if any(counts)]
    known = samples[0] >= _FEWEST_ALONE or any(
        given.first.during or any(tuple(values) in counted_in_loop for values in given.values) for given in every
    )
    for given in every:
        for values in given.values:
            if list(values) == samples and known:
                return f"{given.first.operation} is given their number, {samples[0]} on rank 0", given.first.location
            if any(all(map(is_close, values, metric.values)) for metric in means):
                what = f"{given.first.operation} is given each rank's mean over all of its samples"
                return what, given.first.location
    return None


def _divided_by_all(of_ranks: Sequence[Evaluated]) -> _Seen | None:
    """Find a shown count over gathered rows, divided by the number of gathered rows."""
    total = sum(one.samples for one in of_ranks)
    for one in of_ranks:
        gathers = [each for each in one.exchanged if each.during and "gather" in each.operation]
        counts = one.held.numbers
        counter = next((name for name, value in counts.items() if value == total), "")
        for shown, number in numbers_shown(one):
            if gathers and counter and any(shows(number, value / total) for value in counts.values() if value < total):
                return f"what is {shown.how} is divided by {counter}, which is {total}", gathers[0].location
    return None


def _rows_of_all(of_ranks: Sequence[Evaluated]) -> _Seen | None:
    """Find a shown accuracy or mean over all gathered rows, duplicates included."""
    gathered = gathered_labels(of_ranks)
    results: list[tuple[Location | None, list[list[float]]]] = [
        (first.location, [[*map(float, map(eq, *rows))] for rows in zip(first.rows, second.rows, strict=True)])
        for first, second in itertools.combinations(gathered, 2)
    ]
    for given in gathered:  # one number per sample: loss or correctness
        if given.values and all(len(row) == 1 for of_rank in given.values for row in of_rank):
            results.append((given.location, [[row[0] for row in of_rank] for of_rank in given.values]))
    for where, of_each in results:
        known = [
            pair
            for one, of_rank in zip(of_ranks, of_each, strict=True)
            if len(of_rank) == len(one.loader.indices)
            for pair in zip(one.loader.indices, of_rank, strict=True)
        ]
        wrong = sum(map(sum, of_each)) / max(1, sum(map(len, of_each)))
        # of the first or last copy of each sample: copies may differ, e.g. by padding
        right, other = (sum(one.values()) / max(1, len(one)) for one in (dict(known[::-1]), dict(known)))
        if known and (seen := first_shown(of_ranks, wrong, right, other)) is not None:
            return (
                f"the {wrong:.6g} that is {seen.how} is that of all gathered rows; without those that are there twice, "
                f"it is {right:.6g}",
                where,
            )
    return None
