"""DDP805 mean-of-ranks-means: warning, keeps_gradients

A metric is the mean of the ranks' metrics, which differs from the metric over all samples.

Why: Each rank's mean has the same weight, however many samples the rank has. A metric that is not a mean over samples
    (an area under a curve, F1, IoU) has a different value on a part of the data. If each rank divides its sum by the
    size of the whole dataset, the results have to be added up. Their mean is too small by a factor of the world size.
    In all cases, the metric changes with the number of ranks.
Fix: all_reduce the sum and the count over the ranks, then divide; for a metric that is not a mean, gather the scores
    and labels.
Detected: `ddpcheck run` checks the values that ranks give to collectives after a pass over a loader without backward.
    DDP805 is reported if three conditions hold. The value that each rank gives is a metric of the samples on that
    rank (DDP802 lists the metrics). A printed, logged or saved number is the mean or the sum of these values. This
    number differs by more than 1 % from the metric over all samples. Metrics of lists (one score or label per sample)
    are covered up to 2,048 samples per rank. A number that is only passed to a learning rate schedule is not covered.
Ignore: If each rank has a different kind of data, and each kind should have the same weight.
Line: The call of the collective, or the call of the helper that makes it, in the function that computes the metric.
Checks: run evaluation
Example:
    loss = torch.tensor(total / len(own))    # right: all_reduce of total and len(own), then divide
    dist.all_reduce(loss)
    print(loss.item() / world_size)
"""

from __future__ import annotations

import itertools
import math

from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import new_finding, plural
from ddpcheck.rules.registry import rule
from ddpcheck.trace.evaluation import exchange_line, exchanged_numbers, first_shown, is_close
from ddpcheck.trace.evaluations import Evaluations
from ddpcheck.trace.metrics import FEWEST_BITS, Evaluation, bits_of
from ddpcheck.trace.replicas import common_values

LEAST_DIFFERENCE = 0.01  # smallest relative difference between metrics that matters


@rule
def judge_mean_of_means(evaluations: Evaluations) -> list[Finding]:
    """DDP805: shown mean or sum of per-rank metrics, not the metric of all samples."""
    return evaluations.first_findings(_judge_mean_of_means)


def _judge_mean_of_means(evaluation: Evaluation) -> list[Finding]:
    evals, metrics = evaluation.evals, evaluation.metrics
    samples = [ev.samples for ev in evals]
    numbers = common_values([ev.results.numbers for ev in evals]).values()
    sums = [counts for counts in numbers if not any(count % 1 for count in counts)]
    for call in exchanged_numbers(evals):
        for values, metric in itertools.product(call.values, metrics):
            if not metric.name or list(values) in sums or not all(map(is_close, values, metric.values)):
                continue
            right = metric.pooled
            for kind, wrong in (("mean", sum(values) / len(values)), ("sum", sum(values))):
                bits = min(sum(metric.bits), bits_of(wrong)) - math.log2(metric.tries)
                if bits < FEWEST_BITS or abs(wrong - right) <= LEAST_DIFFERENCE * abs(right):
                    continue
                if (seen := first_shown(evals, wrong, right)) is None:
                    continue
                by_rank = list(zip(values, samples, strict=True))[:4]
                return new_finding(
                    "DDP805",
                    (evals[0].loader.dataset,),
                    f"The {wrong:.6g} that is {seen.how} is the {kind} of the ranks' values, the {metric.name} of "
                    f"{min(samples)} to {max(samples)} samples each: over all samples it is {right:.6g}.",
                    location=exchange_line(call.first, metric.key.partition(".")[0]),
                    evidence=[
                        f"rank {rank} gives {call.first.operation} {value:.6g}, of {plural(count, 'sample')}"
                        for rank, (value, count) in enumerate(by_rank)
                    ]
                    + [
                        f"{call.first.operation} is called at {call.first.location}, and it is {seen.how} at "
                        f"{seen.location}"
                    ],
                )
    return []
