"""DDP518 unreduced-metric: warning, takes_severity

A metric by which the script decides covers only the samples of one rank.

Why: Rank 0's loss or accuracy describes 1/W of the data (W is the world size). Early stopping or best-model decisions
    made from a rank's own values differ between ranks. DDP reduces gradients and nothing else.
Fix: all_reduce the sum and the count over the ranks, then divide.
Detected: `ddpcheck run` records the values passed to ReduceLROnPlateau, and the metrics by which Lightning's
    EarlyStopping and ModelCheckpoint decide. Values that differ between ranks are reported. Other decisions, and
    metrics that are only logged, are not covered.
Ignore: If the schedule follows one rank on purpose, and its result is broadcast.
Checks: run optimizers
Explains: DDP223 DDP306 DDP507; quietly DDP214 if of a copy
Reports: Lightning-AI/pytorch-lightning#379 karpathy/llm.c#551
Example:
    schedule.step(evaluate(ddp, local_data))  # right: all_reduce the sum and the count, then divide
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ddpcheck.findings.evidence.script import MetricUsed
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import one_finding
from ddpcheck.rules.registry import rule
from ddpcheck.trace.optimizers import Metrics

_OF_SCHEDULES = 1e-6  # relative tolerance of equal metrics


_OF_CALLBACKS = 1e-4  # relative tolerance of equal metrics


def local_metrics_finding(uses: Sequence[MetricUsed]) -> list[Finding]:
    user, metric = uses[0].user, uses[0].metric
    return one_finding(
        "DDP518",
        (user, metric) if metric else (user,),
        f"{user} decides by {metric}, which on each rank is the metric of the rank's own samples only."
        if metric
        else "Each rank passes a metric of only its samples to the learning rate schedule, so the ranks lower the "
        "rate at different times.",
        location=uses[0].location,
        evidence=[f"rank {rank}: {use.value:.6g}" for rank, use in enumerate(uses[:4])],
        fix=f'Reduce the metric over the ranks: self.log("{metric}", ..., sync_dist=True); or log a metric of '
        "torchmetrics itself, which is computed over all ranks."
        if metric
        else "",
    )


@rule
def judge_metrics(metrics: Metrics) -> list[Finding]:
    """DDP518: schedule or callback with a per-rank metric."""
    findings_by_user: dict[str, list[Finding]] = {}
    for uses in zip(*metrics.uses, strict=False):
        first, values = uses[0], [use.value for use in uses]
        if len({(use.user, use.metric, use.schedule, use.count) for use in uses}) > 1:
            break
        about = _OF_CALLBACKS if first.metric else _OF_SCHEDULES
        if not all(math.isclose(value, values[0], rel_tol=about, abs_tol=1e-12) for value in values):
            findings_by_user.setdefault(first.user, local_metrics_finding(uses))
    return [finding for findings in findings_by_user.values() for finding in findings]
