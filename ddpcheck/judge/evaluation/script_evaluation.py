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
    by_key: dict[tuple[object, ...], dict[int, Evaluated]] = {}
    records = zip(loaders, passes, exchanged, shown, compared or [()] * len(loaders), strict=True)
    for rank, (rank_loaders, rank_passes, rank_calls, rank_outputs, rank_rows) in enumerate(records):
        by_pass = {(loader.loader, loader.number): loader for loader in rank_loaders}
        subsets = {loader.loader: loader.subset for loader in rank_loaders if len(loader.subset)}
        counts: Counter[tuple[object, ...]] = Counter()  # of equal pass numbers: the loader was recreated
        for eval_pass in {(p.loader, p.number): p for p in rank_passes}.values():  # a pass may be written twice
            if (loader := by_pass.get((eval_pass.loader, eval_pass.number))) is not None and loader.exhausted:
                key = (loader.location, loader.made, loader.dataset, loader.number)
                counts[key] += 1
                by_key.setdefault((*key, counts[key]), {})[rank] = Evaluated(
                    loader,
                    eval_pass,
                    [
                        call
                        for call in rank_calls
                        if call.round == eval_pass.round
                        and (not call.during or call.evaluation in (None, (eval_pass.loader, eval_pass.number)))
                    ],
                    [output for output in rank_outputs if output.round == eval_pass.round],
                    subsets.get(loader.loader, ()),
                    [rows for rows in rank_rows if rows.round == eval_pass.round],
                )
    return [Evaluation(key[:3], by_rank, rank_metrics([*by_rank.values()])) for key, by_rank in by_key.items()]


def judge_evaluations(evaluations: Sequence[Evaluation], loaders: Sequence[Sequence[LoaderPass]]) -> list[Finding]:
    """Return at most one finding per rule; `loaders` by rank, in order."""
    by_code: dict[str, list[Finding]] = {}
    full = [evaluation for evaluation in evaluations if len(evaluation.by_rank) == len(loaders)]
    for evaluation in full:
        evals = [*evaluation.by_rank.values()]
        means = judge_mean_of_means(evals, evaluation.metrics)
        for finding in (*judge_padded(evals, evaluation.metrics), *judge_order(evals), *means):
            by_code.setdefault(finding.code, [finding])
    loops = dict.fromkeys(evaluation.loop for evaluation in full)
    own_shard = [finding for loop in loops for finding in judge_own_shard([e for e in full if e.loop == loop])]
    by_code["DDP802"] = _in_one(own_shard) if own_shard else judge_lone_share(evaluations, loaders)
    return [finding for findings in by_code.values() for finding in findings]


def _in_one(findings: Sequence[Finding]) -> list[Finding]:
    """Merge findings on the same ranks into the first, each further metric once."""
    first = findings[0]
    for finding in findings:
        if finding.ranks == first.ranks and not set(finding.subjects) <= set(first.subjects):
            evidence = (*first.evidence, f"also {', '.join(finding.subjects)}: {finding.message}")
            first = replace(first, subjects=(*first.subjects, *finding.subjects), evidence=evidence)
    return [first]


# Duplicate samples


def judge_padded(evals: Sequence[Evaluated], metrics: Sequence[RankMetric]) -> list[Finding]:
    """DDP801: metric with duplicate samples, because a sampler pads the shards."""
    counts = Counter(index for ev in evals for index in ev.loader.indices)
    excess = sum(counts.values()) - len(counts)
    most = len(evals) * (1 + max(ev.batch for ev in evals))  # to complete a batch on each rank
    if len(set(counts.values())) < 2 or excess >= most:  # e.g. each rank evaluates all samples
        return []
    if any(ev.loader.replaces for ev in evals) or are_other_data(evals) or _take_own_places(evals):
        return []
    seen = _counted_in_collective(evals, metrics) or _divided_by_all(evals) or _rows_of_all(evals)
    if seen is None:
        return []
    message, location = seen
    ev = evals[0]
    return one_finding(
        "DDP801",
        (ev.loader.dataset,),
        f"The metric is over {sum(counts.values())} samples, and the ranks have {len(counts)} different ones: "
        f"{counted(excess, 'sample')} {'counts' if excess == 1 else 'count'} twice.",
        location=ev.loader.made or location or ev.loader.location,
        evidence=[
            f"{ev.loader.sampler} gives each rank {ev.samples} of the {ev.loader.size} samples",
            f"{message}{f' (at {location})' if location else ''}",
            f"the loop over the loader begins at {ev.loader.location}",
        ],
    )


def _take_own_places(evals: Sequence[Evaluated]) -> bool:
    """Return True if duplicates come from different `Subset`s, not the sampler (DDP516)."""
    subsets = [ev.subset for ev in evals]
    if not all(subsets) or all(list(subset) == list(subsets[0]) for subset in subsets):
        return False
    by_index = [{index: i for i, index in enumerate(subset)} for subset in subsets]
    positions = [lookup.get(index) for lookup, ev in zip(by_index, evals, strict=True) for index in ev.loader.indices]
    return len(set(positions)) == len(positions)


_Seen = tuple[str, Location | None]


def _counted_in_collective(evals: Sequence[Evaluated], metrics: Sequence[RankMetric]) -> _Seen | None:
    """Find a collective that gets each rank's sample count, or mean over all samples."""
    samples = [ev.samples for ev in evals]
    calls = list(given_numbers(evals))
    numbers = evals[0].held.numbers
    means = [m for m in metrics if m.name.startswith(MEAN) and not numbers[m.key] % 1 and any(m.bits)]
    counted_in_loop = [tuple(counts) for _, counts in common(evals, "numbers") if any(counts)]
    certain = samples[0] >= _FEWEST_ALONE or any(
        call.first.during or any(tuple(values) in counted_in_loop for values in call.values) for call in calls
    )
    for call in calls:
        for values in call.values:
            if list(values) == samples and certain:
                return f"{call.first.operation} is given their number, {samples[0]} on rank 0", call.first.location
            if any(all(map(is_close, values, metric.values)) for metric in means):
                message = f"{call.first.operation} is given each rank's mean over all of its samples"
                return message, call.first.location
    return None


def _divided_by_all(evals: Sequence[Evaluated]) -> _Seen | None:
    """Find a shown count over gathered rows, divided by the number of gathered rows."""
    total = sum(ev.samples for ev in evals)
    for ev in evals:
        gathers = [call for call in ev.exchanged if call.during and "gather" in call.operation]
        counts = ev.held.numbers
        counter = next((name for name, value in counts.items() if value == total), "")
        for shown, number in numbers_shown(ev):
            if gathers and counter and any(shows(number, value / total) for value in counts.values() if value < total):
                return f"what is {shown.how} is divided by {counter}, which is {total}", gathers[0].location
    return None


def _rows_of_all(evals: Sequence[Evaluated]) -> _Seen | None:
    """Find a shown accuracy or mean over all gathered rows, duplicates included."""
    gathered = gathered_labels(evals)
    results: list[tuple[Location | None, list[list[float]]]] = [
        (first.location, [[*map(float, map(eq, *rows))] for rows in zip(first.rows, second.rows, strict=True)])
        for first, second in itertools.combinations(gathered, 2)
    ]
    for call in gathered:  # one number per sample: loss or correctness
        if call.values and all(len(row) == 1 for rank_rows in call.values for row in rank_rows):
            results.append((call.location, [[row[0] for row in rank_rows] for rank_rows in call.values]))
    for location, by_rank in results:
        pairs = [
            pair
            for ev, rank_values in zip(evals, by_rank, strict=True)
            if len(rank_values) == len(ev.loader.indices)
            for pair in zip(ev.loader.indices, rank_values, strict=True)
        ]
        wrong = sum(map(sum, by_rank)) / max(1, sum(map(len, by_rank)))
        # of the first or last copy of each sample: copies may differ, e.g. by padding
        right, last = (sum(by_index.values()) / max(1, len(by_index)) for by_index in (dict(pairs[::-1]), dict(pairs)))
        if pairs and (seen := first_shown(evals, wrong, right, last)) is not None:
            return (
                f"the {wrong:.6g} that is {seen.how} is that of all gathered rows; without those that are there twice, "
                f"it is {right:.6g}",
                location,
            )
    return None
