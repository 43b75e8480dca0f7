"""DDP214 buffer-value: warning, takes_severity, spreads, stops_run

A buffer has drifted: its value differs between ranks.

Why: With broadcast_buffers=False nothing synchronises buffers, not even at construction. Each rank then evaluates a
    different model, and a checkpoint keeps only rank 0's buffers. With broadcast_buffers=True, buffers are equal only
    right after DDP has broadcast them, at the start of forward. (PyTorch docs, DistributedDataParallel,
    broadcast_buffers.)
Fix: Give the buffer the same initial values, and compute it from the data of all ranks (SyncBatchNorm, or an
    all_reduce of the statistics); or synchronise it before evaluation and saving.
Detected: If the wrapper does not broadcast buffers, the ranks compare the values of their buffers, bit by bit. They
    do this after wrapping and after each checked step. `ddpcheck run` also compares the buffers of loss modules
    outside the wrapper. If several ranks evaluate a model after `update_bn`, `ddpcheck run` compares their BatchNorm
    statistics.
Ignore: If each rank should keep its own statistics, as plain BatchNorm does with broadcast_buffers=False.
Checks: report wrapping, reducer; run replicas
Explains: DDP304 DDP312; DDP516 if only the loss
Reports: pytorch/pytorch#13711 open-mmlab/mmdetection#4582 open-mmlab/mmpose#998
Example:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    DistributedDataParallel(model, broadcast_buffers=False)
    # right: DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(model))
"""

from __future__ import annotations

from collections.abc import Mapping

from ddpcheck.findings.evidence.replicas import StateUsed
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Severity
from ddpcheck.findings.wording import format_ranks, one_finding
from ddpcheck.trace.changes import Changes


def locate_buffer_write(finding: Finding, changes: Changes) -> Finding:
    """Relocate to the buffer's update; DDP214 also gets the updating ranks."""
    for name in finding.subjects:
        writes = {
            rank: change
            for rank, rank_changes in enumerate(changes)
            for change in rank_changes
            if change.what == "buffer" and name in change.names
        }
        only = finding.code == "DDP214" and 0 < len(writes) < len(changes)
        notes = [f"{name} changes on {format_ranks(writes)} only"] if only else []
        finding = replace(finding, evidence=(*finding.evidence, *notes), ranks=tuple(writes) if only else finding.ranks)
        if location := next((change.location for change in writes.values() if change.location is not None), None):
            return replace(finding, location=location)
    return finding


def batchnorm_finding(uses: Mapping[int, StateUsed], distance: float) -> list[Finding]:
    use = next(iter(uses.values()))
    return one_finding(
        "DDP214",
        (use.name,),
        f"{use.name} is evaluated with different running statistics of BatchNorm on each rank: every rank has "
        "recomputed them from its own part of the data, while the parameters are the same.",
        location=use.estimated_at or use.location,
        evidence=[
            f"running means are up to {distance:.2g} standard deviations apart",
            f"evaluated at {use.lines[0]} on {format_ranks(uses)}",
        ],
        severity=Severity.WARNING,
        fix="Estimate them on every rank from the same samples; or all_reduce running_mean and running_var after that, "
        "or broadcast them from rank 0.",
    )
