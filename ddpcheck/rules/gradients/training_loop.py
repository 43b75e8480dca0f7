"""Judges of the order of forward, backward, no_sync and optimizer steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ddpcheck.findings.evidence.steps import DdpStepEvidence, LocalStep, LoopEvent
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import counted, one_finding
from ddpcheck.rules.gradients.ddp501_forward_bypassed import judge_bypassed_forward
from ddpcheck.rules.gradients.ddp502_no_sync_misuse import judge_unreduced_steps, judge_useless_no_sync
from ddpcheck.rules.gradients.ddp509_backward_without_forward_pairing import judge_backward_pairing
from ddpcheck.rules.gradients.ddp517_gradients_discarded import judge_discarded_gradients
from ddpcheck.stream.ledger import Ledger


def judge_samples(local: Sequence[LocalStep], *, gradients_differ: bool) -> list[Finding]:
    """DDP505 and 519: samples of a step on several ranks, or on no rank.

    DDP505 requires evidence in the gradients, since ranks may use the same samples differently. It goes before DDP519,
    which has the same shards as cause. `gradients_differ`: the average over ranks is not the gradient of the global
    batch.
    """
    step, rows = local[0].evidence.step, [item.sample_fingerprints for item in local]
    batch = Counter(local[0].global_sample_fingerprints)
    if len(local) < 2 or not batch or not all(rows):
        return []
    on_ranks = Counter(sample for samples in rows for sample in samples)
    repeated = {sample for sample, count in on_ranks.items() if 0 < batch[sample] < count}
    missing = sum((batch - on_ranks).values()) if on_ranks.keys() <= batch.keys() else 0  # else ranks create samples
    left_out = f"{missing} of {batch.total()} samples of the global batch are on no rank"
    gradients_alike = len({item.norm for item in local}) == 1 and local[0].norm > 0
    if repeated and (gradients_differ or gradients_alike):
        shared = []
        for place, item in enumerate(local):
            for other in local[:place]:
                if common := len(repeated & set(rows[place]) & set(other.sample_fingerprints)):
                    is_are = "is" if common == 1 else "are"
                    rank, other_rank = item.evidence.rank, other.evidence.rank
                    shared.append(f"{counted(common, 'sample')} on rank {rank} {is_are} on rank {other_rank} too")
        return one_finding(
            "DDP505",
            ("shard",),
            f"{len(repeated)} of the {batch.total()} samples of step {step} are on more than one rank, and count more "
            "than once in the average."
            if len(repeated) < len(set(rows[0]))
            else f"The ranks train on the same samples in step {step}, so together they do the work of fewer.",
            evidence=[*shared[:3], left_out if missing else ""],
        )
    if not missing or not gradients_differ:
        return []
    return one_finding(
        "DDP519",
        ("shard",),
        f"The shards leave samples out: {left_out} in step {step}.",
        evidence=[f"samples a rank: {', '.join(str(len(samples)) for samples in rows)}"],
    )


def judge_loop(evidence: Sequence[DdpStepEvidence], *, unequal: bool) -> list[Finding]:
    """DDP501, 502, 509 and 517: lost or unreduced gradients, by rank ledgers.

    DDP501, 509 and unreduced steps only if gradients are `unequal` between ranks, or not averaged.
    """
    ledgers = [(item, Ledger(_with_passes(item.events))) for item in evidence]
    findings = judge_discarded_gradients(ledgers)
    if unequal:
        findings += judge_unreduced_steps(ledgers) + judge_bypassed_forward(ledgers) + judge_backward_pairing(ledgers)
    return findings or judge_useless_no_sync(ledgers)


def _with_passes(events: Sequence[LoopEvent]) -> Sequence[LoopEvent]:
    """Return the events, with passes that an older version omitted under `no_sync`."""
    if [event.kind for event in events] == ["enter no_sync", "step"]:
        return events[0], LoopEvent("forward"), LoopEvent("backward"), events[1]
    return events
