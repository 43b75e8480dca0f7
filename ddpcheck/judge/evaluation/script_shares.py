"""DDP802 and 805: per-rank metrics, or their means, shown as global metrics.

A shown number is matched with a rank's metric by value only. Small integers match by coincidence, so each number counts
by its bits of information, added over all evaluations of a loop.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from ddpcheck.findings.evidence.evaluation import MetricShown, ResultExchanged, ShownNumber
from ddpcheck.findings.evidence.script import LoaderPass
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import counted, format_ranks, make_finding, one_finding
from ddpcheck.judge.evaluation.evaluation_results import (
    Evaluated,
    common,
    first_shown,
    gathered_labels,
    given_numbers,
    is_close,
    numbers_shown,
    shows,
)
from ddpcheck.judge.evaluation.rank_metrics import FEWEST_BITS, Evaluation, RankMetric, bits_of

_APART = 1e-4  # relative difference of values that differ between ranks
_SOME = 0.01  # relative difference of metrics that matters

_Place = tuple[int, Location | None, int, int]
"""(rank, line, earlier outputs of the line in the same round, index of the number in the output)"""
_Match = tuple[float, MetricShown, Sequence[Evaluated], RankMetric]
"""(bits of evidence, output with the number, evaluation by rank, matching metric)"""


# Metrics of one rank


def judge_own_shard(evaluations: Sequence[Evaluation]) -> list[Finding]:
    """DDP802: metric of a rank's own shard, shown or used to decide on a save."""
    matches: dict[_Place, dict[tuple[str, str], list[_Match]]] = {}
    numbers: dict[_Place, dict[int, ShownNumber]] = {}  # by round
    values: dict[tuple[int, int, str, str], float] = {}  # by round, rank and metric
    for one in evaluations:
        of_ranks = [*one.by_rank.values()]
        for rank, own in enumerate(of_ranks if _are_shares(of_ranks) else ()):
            values |= {(own.held.round, rank, metric.key, metric.name): metric.values[rank] for metric in one.metrics}
            for place, shown, number in _placed(rank, of_ranks):
                numbers.setdefault(place, {})[own.held.round] = number
                if any(shows(number, metric.pooled) for metric in one.metrics):
                    continue
                for metric in one.metrics:
                    if _is_own(number, rank, metric) and not _is_known(of_ranks, rank, shown, metric):
                        match = metric.evidence(number, rank), shown, of_ranks, metric
                        matches.setdefault(place, {}).setdefault((metric.key, metric.name), []).append(match)
    found: dict[tuple[int, str], list[_Match]] = {}
    for place, by_metric in matches.items():
        always = [
            (sum(_distinct(of_metric).values()), of_metric)
            for metric, of_metric in by_metric.items()
            if all(
                (value := values.get((number_of_round, place[0], *metric))) is None or shows(number, value)
                for number_of_round, number in numbers[place].items()
            )
        ]
        if always:
            _, of_metric = max(always, key=lambda pair: pair[0])
            found.setdefault((place[0], of_metric[0][3].key), []).extend(of_metric)
    return [
        _own_shard(rank, *of_key[0][1:])
        for (rank, _), of_key in found.items()
        if sum(_distinct(of_key).values()) >= FEWEST_BITS
    ]


def _are_shares(of_ranks: Sequence[Evaluated]) -> bool:
    """Return True if ranks evaluated different samples and no rank gathered all results."""
    other = len({frozenset(one.loader.indices) for one in of_ranks}) > 1
    return other and not any(gathered_labels([one]) for one in of_ranks)


def _placed(rank: int, of_ranks: Sequence[Evaluated]) -> Iterator[tuple[_Place, MetricShown, ShownNumber]]:
    """Yield the numbers that a rank shows at lines where not all ranks do."""
    times: dict[Location | None, Iterator[int]] = {}
    for shown in of_ranks[rank].shown:
        call = next(times.setdefault(shown.location, itertools.count()))
        if not all(any(other.location == shown.location for other in one.shown) for one in of_ranks):
            for place, number in enumerate(shown.numbers):
                yield (rank, shown.location, call, place), shown, number


def _distinct(matches: Sequence[_Match]) -> dict[float, float]:
    """Return the bits of each distinct shown value."""
    return {float(f"{metric.values[0]:.5g}"): bits for bits, _, _, metric in matches}


def _is_own(number: ShownNumber, rank: int, metric: RankMetric) -> bool:
    """Return True if a number is the metric of `rank` only."""
    own = metric.values[rank]
    return shows(number, own) and all(
        abs(value - own) > _APART * abs(own) for other, value in enumerate(metric.values) if other != rank
    )


def _is_known(of_ranks: Sequence[Evaluated], rank: int, shown: MetricShown, metric: RankMetric) -> bool:
    """Return True if the ranks exchange the metric anyway, or the match is uncertain."""
    one = of_ranks[rank]
    before = next(place for place, other in enumerate(one.shown) if other is shown)
    kept = [each for each in one.exchanged if not (each.sums and each.shown <= before)]
    if any(_gives(each, one, rank, metric) for each in kept):
        return True
    numbers = [other for _, other in numbers_shown(one)]
    of_all = all(any(shows(other, value) for other in numbers) for value in metric.values)  # e.g. by broadcasts
    return of_all or any(shows(other, metric.pooled) for other in numbers)


def _gives(exchanged: ResultExchanged, one: Evaluated, rank: int, metric: RankMetric) -> bool:
    """Return True if a rank passes the metric, or its inputs, to a collective."""
    count = one.held.numbers.get(metric.key, metric.values[rank])
    table = one.held.tables.get(metric.key)
    if table is not None and (exchanged.numbers == table or exchanged.total == sum(table)):
        return True
    quotients = (a / b for a, b in itertools.permutations(exchanged.numbers, 2) if b)
    known = itertools.product((*exchanged.numbers, *quotients), (count, metric.values[rank], metric.values[rank] / 100))
    return any(itertools.starmap(is_close, known))


def _line_of(exchanged: ResultExchanged, function: str) -> Location | None:
    """Return the line in `function` that calls the collective, or calls its helper."""
    (name, line), *callers = [*exchanged.lines.items(), ("", exchanged.location)]
    return line if name == function or len(callers) < 2 else callers[0][1]


def _own_shard(rank: int, shown: MetricShown, of_ranks: Sequence[Evaluated], metric: RankMetric) -> Finding:
    one, values = of_ranks[rank], metric.values
    function, _, variable = metric.key.partition(".")
    others = [f"rank {r} has {value:.6g}" for r, value in enumerate(values[:4]) if r != rank]
    value = f"{values[rank]:.6g}"
    decides = shown.how == "decides"
    what = f"saves a file depending on {value}" if decides else f"{shown.how} {value}"
    sums = next((each for each in one.exchanged if each.sums and _gives(each, one, rank, metric)), None)
    if sums:
        reduced = f"{sums.operation} is given it at {sums.location}, and the metric is not computed from the result"
    return make_finding(
        "DDP802",
        (variable or metric.key,),
        f"Rank {rank} {what}, a metric that covers only its own {one.samples} samples; {others[0]}, and all "
        f"ranks together have {metric.pooled:.6g}.",
        ranks=(rank,),
        location=_line_of(sums, function) if sums else one.held.after.get(function) or shown.location,
        evidence=[
            reduced if sums else "",
            f"it {'decides' if decides else f'is {shown.how}'} at {shown.location}",
            f"the loop over the loader begins at {one.loader.location}; each rank has other samples",
            *others[1:],
        ],
        fix="Compute the metric from the tensor that the collective has reduced." if sums else "",
    )


def judge_lone_share(evaluations: Sequence[Evaluation], loaders: Sequence[Sequence[LoaderPass]]) -> list[Finding]:
    """DDP802: metric of one shard, as the sampler splits for more ranks than evaluate."""
    for evaluation in evaluations:
        for place, (rank, one) in enumerate(evaluation.by_rank.items()):
            parts = one.loader.replicas
            data = (one.loader.dataset, one.loader.size, parts)
            ranks = [
                other
                for other, passes in enumerate(loaders)
                if any((it.dataset, it.size, it.replicas) == data and not it.trains for it in passes)
            ]
            if parts < 2 or len(ranks) >= parts or not 0 < one.samples < one.loader.size:
                continue
            for metric, (shown, number) in itertools.product(evaluation.metrics, numbers_shown(one)):
                key, value = metric.key, metric.values[place]
                if metric.evidence(number, place) < FEWEST_BITS:
                    continue
                what = "what decides" if shown.how == "decides" else shown.how
                return one_finding(
                    "DDP802",
                    (key.rpartition(".")[2] or key,),
                    f"{format_ranks(ranks).capitalize()} alone {'evaluates' if len(ranks) == 1 else 'evaluate'}, and "
                    f"the sampler splits the {one.loader.size} samples between {counted(parts, 'rank')}: rank {rank} "
                    f"has {value:.6g} of {one.samples} of them, and the remaining samples are on no rank.",
                    ranks=ranks,
                    location=one.loader.made or one.loader.location,
                    evidence=[
                        f"it is {what} at {shown.location}",
                        f"the loop over the loader begins at {one.loader.location}",
                    ],
                    fix="Give a loader that one rank alone evaluates no DistributedSampler; or evaluate on every rank, "
                    "and all_reduce the sum and the count.",
                )
    return []


# Means of means


def judge_mean_of_means(of_ranks: Sequence[Evaluated], metrics: Sequence[RankMetric]) -> list[Finding]:
    """DDP805: shown mean or sum of per-rank metrics, not the metric of all samples."""
    samples = [one.samples for one in of_ranks]
    sums = [counts for _, counts in common(of_ranks, "numbers") if not any(count % 1 for count in counts)]
    for given in given_numbers(of_ranks):
        for values, metric in itertools.product(given.values, metrics):
            if not metric.name or list(values) in sums or not all(map(is_close, values, metric.values)):
                continue
            right = metric.pooled
            for how, wrong in (("mean", sum(values) / len(values)), ("sum", sum(values))):
                bits = min(sum(metric.bits), bits_of(wrong)) - math.log2(metric.tries)
                if bits < FEWEST_BITS or abs(wrong - right) <= _SOME * abs(right):
                    continue
                if (seen := first_shown(of_ranks, wrong, right)) is None:
                    continue
                by_rank = list(zip(values, samples, strict=True))[:4]
                return one_finding(
                    "DDP805",
                    (of_ranks[0].loader.dataset,),
                    f"The {wrong:.6g} that is {seen.how} is the {how} of the ranks' values, the {metric.name} of "
                    f"{min(samples)} to {max(samples)} samples each: over all samples it is {right:.6g}.",
                    location=_line_of(given.first, metric.key.partition(".")[0]),
                    evidence=[
                        f"rank {rank} gives {given.first.operation} {value:.6g}, of {counted(count, 'sample')}"
                        for rank, (value, count) in enumerate(by_rank)
                    ]
                    + [
                        f"{given.first.operation} is called at {given.first.location}, and it is {seen.how} at "
                        f"{seen.location}"
                    ],
                )
    return []
