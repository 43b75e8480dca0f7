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
    for group in evaluations:
        evals = [*group.by_rank.values()]
        for rank, ev in enumerate(evals if _are_shares(evals) else ()):
            values |= {(ev.held.round, rank, metric.key, metric.name): metric.values[rank] for metric in group.metrics}
            for key, shown, number in _placed(rank, evals):
                numbers.setdefault(key, {})[ev.held.round] = number
                if any(shows(number, metric.pooled) for metric in group.metrics):
                    continue
                for metric in group.metrics:
                    if _is_own(number, rank, metric) and not _is_known(evals, rank, shown, metric):
                        match = metric.evidence(number, rank), shown, evals, metric
                        matches.setdefault(key, {}).setdefault((metric.key, metric.name), []).append(match)
    by_key: dict[tuple[int, str], list[_Match]] = {}
    for key, by_metric in matches.items():
        always = [
            (sum(_distinct(hits).values()), hits)
            for metric, hits in by_metric.items()
            if all(
                (value := values.get((number_of_round, key[0], *metric))) is None or shows(number, value)
                for number_of_round, number in numbers[key].items()
            )
        ]
        if always:
            _, hits = max(always, key=lambda pair: pair[0])
            by_key.setdefault((key[0], hits[0][3].key), []).extend(hits)
    return [
        _own_shard(rank, *hits[0][1:])
        for (rank, _), hits in by_key.items()
        if sum(_distinct(hits).values()) >= FEWEST_BITS
    ]


def _are_shares(evals: Sequence[Evaluated]) -> bool:
    """Return True if ranks evaluated different samples and no rank gathered all results."""
    differ = len({frozenset(ev.loader.indices) for ev in evals}) > 1
    return differ and not any(gathered_labels([ev]) for ev in evals)


def _placed(rank: int, evals: Sequence[Evaluated]) -> Iterator[tuple[_Place, MetricShown, ShownNumber]]:
    """Yield the numbers that a rank shows at lines where not all ranks do."""
    counters: dict[Location | None, Iterator[int]] = {}
    for shown in evals[rank].shown:
        call = next(counters.setdefault(shown.location, itertools.count()))
        if not all(any(output.location == shown.location for output in ev.shown) for ev in evals):
            for index, number in enumerate(shown.numbers):
                yield (rank, shown.location, call, index), shown, number


def _distinct(matches: Sequence[_Match]) -> dict[float, float]:
    """Return the bits of each distinct shown value."""
    return {float(f"{metric.values[0]:.5g}"): bits for bits, _, _, metric in matches}


def _is_own(number: ShownNumber, rank: int, metric: RankMetric) -> bool:
    """Return True if a number is the metric of `rank` only."""
    expected = metric.values[rank]
    return shows(number, expected) and all(
        abs(value - expected) > _APART * abs(expected) for peer, value in enumerate(metric.values) if peer != rank
    )


def _is_known(evals: Sequence[Evaluated], rank: int, shown: MetricShown, metric: RankMetric) -> bool:
    """Return True if the ranks exchange the metric anyway, or the match is uncertain."""
    ev = evals[rank]
    before = next(index for index, output in enumerate(ev.shown) if output is shown)
    kept = [call for call in ev.exchanged if not (call.sums and call.shown <= before)]
    if any(_gives(call, ev, rank, metric) for call in kept):
        return True
    numbers = [number for _, number in numbers_shown(ev)]
    of_all = all(any(shows(number, value) for number in numbers) for value in metric.values)  # e.g. by broadcasts
    return of_all or any(shows(number, metric.pooled) for number in numbers)


def _gives(exchanged: ResultExchanged, ev: Evaluated, rank: int, metric: RankMetric) -> bool:
    """Return True if a rank passes the metric, or its inputs, to a collective."""
    count = ev.held.numbers.get(metric.key, metric.values[rank])
    table = ev.held.tables.get(metric.key)
    if table is not None and (exchanged.numbers == table or exchanged.total == sum(table)):
        return True
    quotients = (a / b for a, b in itertools.permutations(exchanged.numbers, 2) if b)
    pairs = itertools.product((*exchanged.numbers, *quotients), (count, metric.values[rank], metric.values[rank] / 100))
    return any(itertools.starmap(is_close, pairs))


def _line_of(exchanged: ResultExchanged, function: str) -> Location | None:
    """Return the line in `function` that calls the collective, or calls its helper."""
    (name, line), *callers = [*exchanged.lines.items(), ("", exchanged.location)]
    return line if name == function or len(callers) < 2 else callers[0][1]


def _own_shard(rank: int, shown: MetricShown, evals: Sequence[Evaluated], metric: RankMetric) -> Finding:
    ev, values = evals[rank], metric.values
    function, _, variable = metric.key.partition(".")
    peers = [f"rank {r} has {value:.6g}" for r, value in enumerate(values[:4]) if r != rank]
    value = f"{values[rank]:.6g}"
    decides = shown.how == "decides"
    message = f"saves a file depending on {value}" if decides else f"{shown.how} {value}"
    sums = next((call for call in ev.exchanged if call.sums and _gives(call, ev, rank, metric)), None)
    if sums:
        reduced = f"{sums.operation} is given it at {sums.location}, and the metric is not computed from the result"
    return make_finding(
        "DDP802",
        (variable or metric.key,),
        f"Rank {rank} {message}, a metric that covers only its own {ev.samples} samples; {peers[0]}, and all "
        f"ranks together have {metric.pooled:.6g}.",
        ranks=(rank,),
        location=_line_of(sums, function) if sums else ev.held.after.get(function) or shown.location,
        evidence=[
            reduced if sums else "",
            f"it {'decides' if decides else f'is {shown.how}'} at {shown.location}",
            f"the loop over the loader begins at {ev.loader.location}; each rank has other samples",
            *peers[1:],
        ],
        fix="Compute the metric from the tensor that the collective has reduced." if sums else "",
    )


def judge_lone_share(evaluations: Sequence[Evaluation], loaders: Sequence[Sequence[LoaderPass]]) -> list[Finding]:
    """DDP802: metric of one shard, as the sampler splits for more ranks than evaluate."""
    for evaluation in evaluations:
        for index, (rank, ev) in enumerate(evaluation.by_rank.items()):
            parts = ev.loader.replicas
            data = (ev.loader.dataset, ev.loader.size, parts)
            ranks = [
                r
                for r, passes in enumerate(loaders)
                if any((p.dataset, p.size, p.replicas) == data and not p.trains for p in passes)
            ]
            if parts < 2 or len(ranks) >= parts or not 0 < ev.samples < ev.loader.size:
                continue
            for metric, (shown, number) in itertools.product(evaluation.metrics, numbers_shown(ev)):
                key, value = metric.key, metric.values[index]
                if metric.evidence(number, index) < FEWEST_BITS:
                    continue
                role = "what decides" if shown.how == "decides" else shown.how
                return one_finding(
                    "DDP802",
                    (key.rpartition(".")[2] or key,),
                    f"{format_ranks(ranks).capitalize()} alone {'evaluates' if len(ranks) == 1 else 'evaluate'}, and "
                    f"the sampler splits the {ev.loader.size} samples between {counted(parts, 'rank')}: rank {rank} "
                    f"has {value:.6g} of {ev.samples} of them, and the remaining samples are on no rank.",
                    ranks=ranks,
                    location=ev.loader.made or ev.loader.location,
                    evidence=[
                        f"it is {role} at {shown.location}",
                        f"the loop over the loader begins at {ev.loader.location}",
                    ],
                    fix="Give a loader that one rank alone evaluates no DistributedSampler; or evaluate on every rank, "
                    "and all_reduce the sum and the count.",
                )
    return []


# Means of means


def judge_mean_of_means(evals: Sequence[Evaluated], metrics: Sequence[RankMetric]) -> list[Finding]:
    """DDP805: shown mean or sum of per-rank metrics, not the metric of all samples."""
    samples = [ev.samples for ev in evals]
    sums = [counts for _, counts in common(evals, "numbers") if not any(count % 1 for count in counts)]
    for call in given_numbers(evals):
        for values, metric in itertools.product(call.values, metrics):
            if not metric.name or list(values) in sums or not all(map(is_close, values, metric.values)):
                continue
            right = metric.pooled
            for kind, wrong in (("mean", sum(values) / len(values)), ("sum", sum(values))):
                bits = min(sum(metric.bits), bits_of(wrong)) - math.log2(metric.tries)
                if bits < FEWEST_BITS or abs(wrong - right) <= _SOME * abs(right):
                    continue
                if (seen := first_shown(evals, wrong, right)) is None:
                    continue
                by_rank = list(zip(values, samples, strict=True))[:4]
                return one_finding(
                    "DDP805",
                    (evals[0].loader.dataset,),
                    f"The {wrong:.6g} that is {seen.how} is the {kind} of the ranks' values, the {metric.name} of "
                    f"{min(samples)} to {max(samples)} samples each: over all samples it is {right:.6g}.",
                    location=_line_of(call.first, metric.key.partition(".")[0]),
                    evidence=[
                        f"rank {rank} gives {call.first.operation} {value:.6g}, of {counted(count, 'sample')}"
                        for rank, (value, count) in enumerate(by_rank)
                    ]
                    + [
                        f"{call.first.operation} is called at {call.first.location}, and it is {seen.how} at "
                        f"{seen.location}"
                    ],
                )
    return []
