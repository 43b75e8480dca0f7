"""DDP803 order-of-gathered-results: warning

Results are gathered rank by rank, and compared with labels in the order of the dataset.

Why: DistributedSampler gives rank r the samples r, r + W, r + 2W and so on (W is the world size). all_gather returns
    all results of rank 0 first, then all results of rank 1. So results are compared with the labels of other samples,
    and the metric is no better than a guess.
Fix: Gather the labels or the indices with the results, or put the results back in order: torch.stack(gathered,
    1).flatten(0, 1)[:len(dataset)].
Detected: `ddpcheck run` keeps the results that ranks gather during or after an evaluation (a loop over a loader
    without backward). It also keeps the labels of the loader or the dataset. From results and labels in their given
    order, it computes accuracy, mean error, correlation and similar metrics. DDP803 is reported if a printed, logged
    or saved number is such a metric, and would be different if each sample were compared with its own label. DDP803
    is also reported if the script itself compares results and labels in this order. Numbers that the script rounds to
    fewer than three digits are not covered.
Ignore: Never: the metric is not that of the model.
Checks: run evaluation
Example:
    dist.all_gather(parts, predictions)      # of a loader with a DistributedSampler
    accuracy = (torch.cat(parts) == dataset.labels).float().mean()  # right: gather the labels too
"""

from __future__ import annotations

from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import one_finding
from ddpcheck.trace.evaluation import Evaluated, Gathered


def misplaced_finding(ev: Evaluated, call: Gathered, reference: str, message: str, seen: str) -> list[Finding]:
    begins = ", ".join(map(str, ev.loader.indices[:4]))
    return one_finding(
        "DDP803",
        (ev.loader.dataset,),
        f"The results are gathered rank by rank and compared with labels in the order of the dataset: {message}.",
        location=call.location,
        evidence=[f"rank 0 has samples {begins} ..., by {ev.loader.sampler}", f"the labels are {reference}", seen],
    )
