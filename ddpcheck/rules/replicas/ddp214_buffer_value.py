"""DDP214 buffer-value: warning, takes_severity, spreads, buffers_only, stops_run

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
Line: The line that writes the buffer. If there is none, the line that creates the first buffer. For BatchNorm
    statistics that are estimated again, the line of this estimate.
Checks: report wrapping, reducer; run replicas; repro buffers
Explains: DDP304 DDP312; DDP516 if only the loss
Reports: pytorch/pytorch#13711 open-mmlab/mmdetection#4582 open-mmlab/mmpose#998
Example:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    DistributedDataParallel(model, broadcast_buffers=False)
    # right: DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(model))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from ddpcheck.findings.evidence.replicas import EvalCall
from ddpcheck.findings.evidence.script import LocalModel
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location, Severity
from ddpcheck.findings.wording import format_ranks, join_names, new_finding, plural_verb
from ddpcheck.rules.replicas.comparisons import judge_buffers_after_steps, judge_initial_values
from ddpcheck.trace.replicas import Changes, ReplicaFacts, buffer_writes

judge_initial_buffers = partial(judge_initial_values, "DDP214")


def judge_drifted_buffers(facts: ReplicaFacts) -> list[Finding]:
    """DDP214: buffers that differ between ranks after a step, unless the wrapper broadcasts them."""
    if facts.known.broadcasts_buffers:
        return []
    not_saved = facts.known.wrapper.not_saved.issuperset(facts.first_steps(lambda item: item.buffers))
    saved = "" if not_saved else ", and a checkpoint keeps rank 0's"
    return judge_buffers_after_steps("DDP214", facts, f"nothing synchronises {{them}}{saved}")


def relocate(finding: Finding, changes: Changes, _wrapped_at: Location | None) -> Finding:
    """Relocate a finding to the write of the buffer, and add the writing ranks."""
    for name in finding.subjects:
        writes = buffer_writes(changes, name)
        if 0 < len(writes) < len(changes):
            evidence = (*finding.evidence, f"{name} changes on {format_ranks(writes)} only")
            finding = replace(finding, evidence=evidence, ranks=tuple(writes))
        if location := next((change.location for change in writes.values() if change.location is not None), None):
            return replace(finding, location=location)
    return finding


def batchnorm_finding(uses: Mapping[int, EvalCall], distance: float) -> list[Finding]:
    use = next(iter(uses.values()))
    return new_finding(
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


def outer_buffers_finding(
    state: LocalModel, names: Sequence[str], ranks: Sequence[int], evidence: Sequence[str]
) -> list[Finding]:
    """Report buffers of a module outside of the wrappers, such as a criterion."""
    return new_finding(
        "DDP214",
        [f"{state.name}.{name}" for name in names],
        f"{state.name} ({state.kind}) is in no wrapper, backward comes through it, and its "
        f"{plural_verb('buffer', 'buffers', names)} {join_names(names)} {plural_verb('has', 'have', names)} other "
        "values on each rank.",
        ranks=ranks,
        steps=(state.count,),
        location=state.location,
        evidence=evidence,
        fix="all_reduce or gather the values that the buffer is computed from.",
    )
