"""DDP312 unexplained-difference: error, gradients_differ

Gradients differ from the single process, and no pattern that ddpcheck knows explains it.

Why: The same model on the same samples has different gradients under DDP and in one process. No constant factor, no
    weight of samples and no coupling of samples explains the difference. So nothing says that the difference is
    harmless. (PyTorch docs, DistributedDataParallel: gradients are averaged over processes.)
Fix: Return the terms of the loss as a dict, and check again. Or compute each term twice: on a batch, and as the mean
    over its two halves. If the results differ, the term does not treat samples separately.
Detected: The gradients differ from those of a single process on the global batch by more than the measured rounding.
    No explanation of DDP303 to DDP310, DDP514 and DDP516 fits. The size of a difference is relative to the norm of
    the parameter's gradient on the global batch.
Ignore: If you have explained the difference yourself. If you have not, report it: the pattern may deserve a rule.
Line: The line that computes the loss.
Checks: report parity; repro single-process
Example:
    smoothing = 0.1 if dist.is_initialized() else 0.0   # right: the same loss with and without a process group
    loss = cross_entropy(model(x), labels, label_smoothing=smoothing)
"""

from __future__ import annotations

from ddpcheck.findings.report import Finding
from ddpcheck.trace.check_context import SingleProcessFacts

UNEXPLAINED = "unexplained"  # tag


def judge_unexplained(facts: SingleProcessFacts) -> list[Finding]:
    """Report a gradient mismatch that fits no pattern (DDP312)."""
    analysis = facts.analysis
    clues = [
        f"the shards could not be looked at one by one: {analysis.error}" if analysis.error else "",
        "gradients on the ranks differ from those of the same shards without a process group"
        if facts.world_changed
        else "",
        *(f"called in forward: {call}" for call in facts.known.local.calls[:3] if call.elements > 0),
    ]
    return facts.new_finding(
        "DDP312",
        f"The averaged gradients are up to {facts.largest_error:.2g} (relative) away from those of the global batch, "
        "and no cause was found.",
        *clues,
        location=facts.known.loss_location,
        tags=(UNEXPLAINED,),
    )
