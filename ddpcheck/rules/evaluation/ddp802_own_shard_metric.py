"""DDP802 own-shard-metric: warning, keeps_gradients

One rank shows a metric of its shard, or decides by it, as if it covered all samples.

Why: Each rank evaluates 1/W of the data (W is the world size). Rank 0 may print or log its own metric, or select the
    best checkpoint by it. This metric is a noisy estimate, and changes with the number of ranks. DDP reduces
    gradients and nothing else.
Fix: all_reduce the sum and the count over the ranks, then divide; or evaluate all of the data on one rank.
Detected: After a pass over a loader without backward, `ddpcheck run` reads the variables of the script's functions.
    It reads counters, sums, meters, confusion matrices, and lists with one number or label per sample. From these, it
    computes metrics of each rank: means, accuracy, IoU, F1, precision, recall and areas under curves. A mean may be
    shown as its error rate, root or exponential. DDP802 is reported if two conditions hold. Some ranks, not all,
    print, log or save a metric of the samples on that rank alone. (Or they save a file inside an `if` that tests this
    metric.) The metric has a different value on the other ranks and over all ranks together. To rule out coincidence,
    the number must match the metric after each evaluation. The number must also be specific: 91 is enough, 0.5 is
    not. DDP802 is also reported if one rank alone evaluates, but its DistributedSampler splits the data between
    several ranks. Only the first three passes over a loader are covered. A loop without a DataLoader is not covered.
    If a schedule gets such a metric, see DDP518.
Ignore: If the number is intended as the metric of one rank, and is labelled so.
Line: The line after the loop, in the function that computes the metric. If a collective gets the value and its result
    is not used, the call of the collective. If one rank alone evaluates, the constructor of the sampler or the
    loader.
Checks: run evaluation
Reports: Lightning-AI/pytorch-lightning#379
Example:
    accuracy = correct / total               # right: dist.all_reduce of correct and total first
    if rank == 0:
        print(f"accuracy {accuracy:.4f}")
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from ddpcheck.findings.evidence.evaluation import MetricShown, ResultExchanged, ShownNumber
from ddpcheck.findings.evidence.script import LoaderPass
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import format_ranks, make_finding, new_finding, plural
from ddpcheck.rules.registry import rule
from ddpcheck.trace.evaluation import RankEvaluation, exchange_line, gathered_labels, is_close, numbers_shown, shows
from ddpcheck.trace.evaluations import Evaluations
from ddpcheck.trace.metrics import FEWEST_BITS, Evaluation, RankMetric

LEAST_DIFFERENCE = 1e-4  # relative, of a metric that differs between ranks


@rule
def judge_shard_metric(evaluations: Evaluations) -> list[Finding]:
    """DDP802: metric of one rank's shard, shown as if of the whole dataset."""
    complete = evaluations.complete
    loops = dict.fromkeys(evaluation.loop for evaluation in complete)
    findings = [finding for loop in loops for finding in judge_rank_shard([e for e in complete if e.loop == loop])]
    if not findings:
        return judge_single_share(evaluations.evaluations, evaluations.passes)
    first = findings[0]
    for finding in findings:  # each further metric once
        if finding.ranks == first.ranks and not set(finding.subjects) <= set(first.subjects):
            evidence = (*first.evidence, f"also {', '.join(finding.subjects)}: {finding.message}")
            first = replace(first, subjects=(*first.subjects, *finding.subjects), evidence=evidence)
    return [first]


_OutputKey = tuple[int, Location | None, int, int]
"""(rank, line, earlier outputs of the line in the same round, index of the number in the output)"""

_Match = tuple[float, MetricShown, Sequence[RankEvaluation], RankMetric]
"""(bits of evidence, output with the number, evaluation by rank, matching metric)"""


def judge_rank_shard(evaluations: Sequence[Evaluation]) -> list[Finding]:
    """DDP802: metric of a rank's shard that is shown or decides on saving checkpoints."""
    matches: dict[_OutputKey, dict[tuple[str, str], list[_Match]]] = {}
    numbers: dict[_OutputKey, dict[int, ShownNumber]] = {}  # by round
    values: dict[tuple[int, int, str, str], float] = {}  # by round, rank and metric
    for group in evaluations:
        evals = group.evals
        for rank, ev in enumerate(evals if _are_ungathered_shards(evals) else ()):
            values |= {(ev.results.round, rank, m.key, m.name): m.values[rank] for m in group.metrics}
            for key, shown, number in _numbers_not_on_all_ranks(rank, evals):
                numbers.setdefault(key, {})[ev.results.round] = number
                if any(shows(number, metric.pooled) for metric in group.metrics):
                    continue
                for metric in group.metrics:
                    if _is_only_of_rank(number, rank, metric) and not _is_metric_shared(evals, rank, shown, metric):
                        match = metric.evidence(number, rank), shown, evals, metric
                        matches.setdefault(key, {}).setdefault((metric.key, metric.name), []).append(match)
    by_key: dict[tuple[int, str], list[_Match]] = {}
    for key, by_metric in matches.items():
        always = [
            (sum(_bits_by_value(hits).values()), hits)
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
        _rank_shard_finding(rank, *hits[0][1:])
        for (rank, _), hits in by_key.items()
        if sum(_bits_by_value(hits).values()) >= FEWEST_BITS
    ]


def _are_ungathered_shards(evals: Sequence[RankEvaluation]) -> bool:
    """Return True if ranks evaluated different samples and no rank gathered all results."""
    differ = len({frozenset(ev.loader.indices) for ev in evals}) > 1
    return differ and not any(gathered_labels([ev]) for ev in evals)


def _numbers_not_on_all_ranks(
    rank: int, evals: Sequence[RankEvaluation]
) -> Iterator[tuple[_OutputKey, MetricShown, ShownNumber]]:
    """Yield numbers shown by `rank` at lines at which another rank shows no number."""
    counters: dict[Location | None, Iterator[int]] = {}
    for shown in evals[rank].shown:
        call = next(counters.setdefault(shown.location, itertools.count()))
        if not all(any(output.location == shown.location for output in ev.shown) for ev in evals):
            for index, number in enumerate(shown.numbers):
                yield (rank, shown.location, call, index), shown, number


def _bits_by_value(matches: Sequence[_Match]) -> dict[float, float]:
    """Map each distinct metric value to the evidence of one match, in bits."""
    return {float(f"{metric.values[0]:.5g}"): bits for bits, _, _, metric in matches}


def _is_only_of_rank(number: ShownNumber, rank: int, metric: RankMetric) -> bool:
    expected = metric.values[rank]
    return shows(number, expected) and all(
        abs(value - expected) > LEAST_DIFFERENCE * abs(expected)
        for peer, value in enumerate(metric.values)
        if peer != rank
    )


def _is_metric_shared(evals: Sequence[RankEvaluation], rank: int, shown: MetricShown, metric: RankMetric) -> bool:
    """Return True if `rank` exchanges its metric or shows the metric of all ranks."""
    ev = evals[rank]
    position = next(index for index, output in enumerate(ev.shown) if output is shown)
    kept = [call for call in ev.exchanged if not (call.sums and call.shown <= position)]
    if any(_exchanges_metric(call, ev, rank, metric) for call in kept):
        return True
    numbers = [number for _, number in numbers_shown(ev)]
    all_shown = all(any(shows(number, value) for number in numbers) for value in metric.values)  # e.g. by broadcasts
    return all_shown or any(shows(number, metric.pooled) for number in numbers) or metric.is_combined(rank, evals)


def _exchanges_metric(exchanged: ResultExchanged, ev: RankEvaluation, rank: int, metric: RankMetric) -> bool:
    """Return True if a collective gets the metric, or its numerator and denominator."""
    count = ev.results.numbers.get(metric.key, metric.values[rank])
    table = ev.results.tables.get(metric.key)
    if table is not None and (exchanged.numbers == table or exchanged.total == sum(table)):
        return True
    quotients = (a / b for a, b in itertools.permutations(exchanged.numbers, 2) if b)
    pairs = itertools.product((*exchanged.numbers, *quotients), (count, metric.values[rank], metric.values[rank] / 100))
    return any(itertools.starmap(is_close, pairs))


def _rank_shard_finding(rank: int, shown: MetricShown, evals: Sequence[RankEvaluation], metric: RankMetric) -> Finding:
    ev, values = evals[rank], metric.values
    function, _, variable = metric.key.partition(".")
    peers = [f"rank {r} has {value:.6g}" for r, value in enumerate(values[:4]) if r != rank]
    value = f"{values[rank]:.6g}"
    decides = shown.how == "decides"
    message = f"saves a file depending on {value}" if decides else f"{shown.how} {value}"
    sums = next((call for call in ev.exchanged if call.sums and _exchanges_metric(call, ev, rank, metric)), None)
    if sums:
        reduced = f"{sums.operation} is given it at {sums.location}, and the metric is not computed from the result"
    return make_finding(
        "DDP802",
        (variable or metric.key,),
        f"Rank {rank} {message}, a metric that covers only its own {ev.samples} samples; {peers[0]}, and all "
        f"ranks together have {metric.pooled:.6g}.",
        ranks=(rank,),
        location=exchange_line(sums, function) if sums else ev.results.after.get(function) or shown.location,
        evidence=[
            reduced if sums else "",
            f"it {'decides' if decides else f'is {shown.how}'} at {shown.location}",
            f"the loop over the loader begins at {ev.loader.location}; each rank has other samples",
            *peers[1:],
        ],
        fix="Compute the metric from the tensor that the collective has reduced." if sums else "",
    )


def judge_single_share(evaluations: Sequence[Evaluation], loaders: Sequence[Sequence[LoaderPass]]) -> list[Finding]:
    """DDP802: metric of a sampler's shard, while no rank evaluates the other shards."""
    for evaluation in evaluations:
        for index, (rank, ev) in enumerate(evaluation.by_rank.items()):
            parts = ev.loader.replicas
            data = (ev.loader.dataset, ev.loader.size, parts, False)
            evaluated = [[(p.dataset, p.size, p.replicas, p.trains) for p in passes] for passes in loaders]
            ranks = [r for r, passes in enumerate(evaluated) if data in passes]
            if parts < 2 or len(ranks) >= parts or not 0 < ev.samples < ev.loader.size:
                continue
            for metric, (shown, number) in itertools.product(evaluation.metrics, numbers_shown(ev)):
                key, value = metric.key, metric.values[index]
                if metric.evidence(number, index) < FEWEST_BITS:
                    continue
                role = "what decides" if shown.how == "decides" else shown.how
                return new_finding(
                    "DDP802",
                    (key.rpartition(".")[2] or key,),
                    f"{format_ranks(ranks).capitalize()} alone {'evaluates' if len(ranks) == 1 else 'evaluate'}, and "
                    f"the sampler splits the {ev.loader.size} samples between {plural(parts, 'rank')}: rank "
                    f"{rank} has {value:.6g} of {ev.samples} of them, and the remaining samples are on no rank.",
                    ranks=ranks,
                    location=ev.loader.built_at or ev.loader.location,
                    evidence=[
                        f"it is {role} at {shown.location}",
                        f"the loop over the loader begins at {ev.loader.location}",
                    ],
                    fix="Give a loader that one rank alone evaluates no DistributedSampler; or evaluate on every rank, "
                    "and all_reduce the sum and the count.",
                )
    return []
