"""DDP518 unreduced-metric: warning, takes_severity

A metric by which the script decides covers only the samples of one rank.

Why: Rank 0's loss or accuracy describes 1/W of the data (W is the world size). Early stopping or best-model decisions
    made from a rank's own values differ between ranks. DDP reduces gradients and nothing else.
Fix: all_reduce the sum and the count over the ranks, then divide.
Detected: `ddpcheck run` records the values passed to ReduceLROnPlateau, and the metrics by which Lightning's
    EarlyStopping and ModelCheckpoint decide. Values that differ between ranks are reported. Other decisions, and
    metrics that are only logged, are not covered.
Ignore: If the schedule follows one rank on purpose, and its result is broadcast.
Line: The call that passes the metric to the schedule, or the line that logs the metric.
Checks: run optimizers
Explains: DDP223 DDP306 DDP507; quietly DDP214 if of a copy
Reports: Lightning-AI/pytorch-lightning#379 karpathy/llm.c#551
Example:
    schedule.step(evaluate(ddp, local_data))  # right: all_reduce the sum and the count, then divide
"""

from __future__ import annotations

import math

from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import make_finding
from ddpcheck.rules.registry import rule
from ddpcheck.trace.optimizers import Metrics

SCHEDULE_TOLERANCE = 1e-6  # relative difference of equal metrics
CALLBACK_TOLERANCE = 1e-4  # relative difference of equal metrics, which Lightning rounds


@rule
def judge_metrics(metrics: Metrics) -> list[Finding]:
    """DDP518: schedule or callback that uses a metric of only the rank's samples."""
    findings: dict[str, Finding] = {}  # by user of the metric
    for uses in zip(*metrics.uses, strict=False):
        user, metric, values = uses[0].user, uses[0].metric, [use.value for use in uses]
        if len({(use.user, use.metric, use.schedule, use.count) for use in uses}) > 1:
            break
        tolerance = CALLBACK_TOLERANCE if metric else SCHEDULE_TOLERANCE
        if user in findings or all(math.isclose(v, values[0], rel_tol=tolerance, abs_tol=1e-12) for v in values):
            continue
        findings[user] = make_finding(
            "DDP518",
            (user, metric) if metric else (user,),
            f"{user} decides by {metric}, which on each rank is the metric of the rank's own samples only."
            if metric
            else "Each rank passes a metric of only its samples to the learning rate schedule, so the ranks lower the "
            "rate at different times.",
            location=uses[0].location,
            evidence=[f"rank {rank}: {value:.6g}" for rank, value in enumerate(values[:4])],
            fix=f'Reduce the metric over the ranks: self.log("{metric}", ..., sync_dist=True); or log a metric of '
            "torchmetrics itself, which is computed over all ranks."
            if metric
            else "",
        )
    return list(findings.values())
