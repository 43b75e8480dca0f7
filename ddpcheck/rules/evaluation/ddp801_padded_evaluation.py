"""DDP801 padded-evaluation: warning, keeps_gradients

A sampler gave some samples to two ranks, and a metric counts these samples twice.

Why: DistributedSampler gives every rank the same number of samples. If the world size does not divide the dataset,
    the sampler repeats some samples. In training, this hardly matters. A metric over all ranks counts the repeated
    samples twice, and changes with the number of ranks. (PyTorch docs, DistributedSampler, drop_last.)
Fix: Cut gathered results to the length of the dataset, evaluate with a sampler that repeats nothing
    (indices[rank::world_size]), or evaluate on one rank with the inner module.
Detected: In a pass without backward, `ddpcheck run` looks for indices that the loaders of several ranks give. DDP801
    is reported if a metric counts these samples twice, in one of three ways. (1) Each rank passes the number of its
    samples to a collective, or a confusion matrix whose entries add up to this number. (2) Each rank passes a mean
    over its samples to a collective. (3) A printed, logged or saved number is a metric over all gathered rows. Not
    covered: sums divided by the length of the dataset, and results that files or other processes evaluate.
Ignore: If the dataset is large, and the metric only has to be roughly right.
Line: The constructor of the sampler or the loader. If it is unknown, the call of the collective.
Checks: run evaluation
Example:
    correct, total = evaluate(ddp, DataLoader(data, sampler=DistributedSampler(data)))
    counts = torch.tensor([correct, total])  # right: of a loader over Subset(data, range(rank, len(data), world_size))
    dist.all_reduce(counts)
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from operator import eq

from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import new_finding, plural
from ddpcheck.rules.registry import rule
from ddpcheck.trace.evaluation import (
    RankEvaluation,
    data_differ,
    exchanged_numbers,
    first_shown,
    gathered_labels,
    is_close,
    numbers_shown,
    shows,
)
from ddpcheck.trace.evaluations import Evaluations
from ddpcheck.trace.metrics import MEAN, Evaluation, RankMetric
from ddpcheck.trace.replicas import common_values

FEWEST_SAMPLES = 256  # smaller integers may equal the number of samples by chance


@rule
def judge_padded(evaluations: Evaluations) -> list[Finding]:
    """DDP801: metric with duplicate samples, because a sampler pads the shards."""
    return evaluations.first_findings(_judge_padded)


def _judge_padded(evaluation: Evaluation) -> list[Finding]:
    evals, metrics = evaluation.evals, evaluation.metrics
    counts = Counter(index for ev in evals for index in ev.loader.indices)
    excess = sum(counts.values()) - len(counts)
    most = len(evals) * (1 + max(ev.batch for ev in evals))  # to complete a batch on each rank
    if len(set(counts.values())) < 2 or excess >= most:  # e.g. each rank evaluates all samples
        return []
    if any(ev.loader.replaces for ev in evals) or data_differ(evals) or _are_subset_duplicates(evals):
        return []
    seen = _find_collective_of_counts(evals, metrics) or _find_count_over_all(evals) or _find_mean_over_all(evals)
    if seen is None:
        return []
    (message, location), ev = seen, evals[0]
    return new_finding(
        "DDP801",
        (ev.loader.dataset,),
        f"The metric is over {sum(counts.values())} samples, and the ranks have {len(counts)} different ones: "
        f"{plural(excess, 'sample')} {'counts' if excess == 1 else 'count'} twice.",
        location=ev.loader.built_at or location or ev.loader.location,
        evidence=[
            f"{ev.loader.sampler} gives each rank {ev.samples} of the {ev.loader.size} samples",
            f"{message}{f' (at {location})' if location else ''}",
            f"the loop over the loader begins at {ev.loader.location}",
        ],
    )


def _are_subset_duplicates(evals: Sequence[RankEvaluation]) -> bool:
    """Return True if duplicates come from different `Subset`s, not the sampler (DDP516)."""
    subsets = [ev.subset for ev in evals]
    if not all(subsets) or all(list(subset) == list(subsets[0]) for subset in subsets):
        return False
    by_index = [{index: i for i, index in enumerate(subset)} for subset in subsets]
    positions = [lookup.get(index) for lookup, ev in zip(by_index, evals, strict=True) for index in ev.loader.indices]
    return len(set(positions)) == len(positions)


_Evidence = tuple[str, Location | None]


def _find_collective_of_counts(evals: Sequence[RankEvaluation], metrics: Sequence[RankMetric]) -> _Evidence | None:
    """Find evidence of duplicates: a collective gets the ranks' sample counts or sample means."""
    samples = [ev.samples for ev in evals]
    calls = list(exchanged_numbers(evals))
    numbers = evals[0].results.numbers
    means = [m for m in metrics if m.name.startswith(MEAN) and not numbers[m.key] % 1 and any(m.bits)]
    counted_in_loop = [*map(tuple, filter(any, common_values([ev.results.numbers for ev in evals]).values()))]
    certain = samples[0] >= FEWEST_SAMPLES or any(
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


def _find_count_over_all(evals: Sequence[RankEvaluation]) -> _Evidence | None:
    """Find evidence of duplicates: a count shown as fraction of all gathered rows."""
    total = sum(ev.samples for ev in evals)
    for ev in evals:
        gathers = [call for call in ev.exchanged if call.during and "gather" in call.operation]
        counts = ev.results.numbers
        counter = next((name for name, value in counts.items() if value == total), "")
        for shown, number in numbers_shown(ev):
            if gathers and counter and any(shows(number, value / total) for value in counts.values() if value < total):
                return f"what is {shown.how} is divided by {counter}, which is {total}", gathers[0].location
    return None


def _find_mean_over_all(evals: Sequence[RankEvaluation]) -> _Evidence | None:
    """Find evidence of duplicates: a shown accuracy or mean over all gathered rows."""
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
