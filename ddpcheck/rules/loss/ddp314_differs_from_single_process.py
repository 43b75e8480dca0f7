"""DDP314 differs-from-single-process: error

The script's results on several ranks differ from those of a single process on the same samples.

Why: The reference for data-parallel training is one process on the global batch. Gradients, evaluation results and
    checkpoints should be the same, however many ranks share the samples. A result that differs changes with the
    number of ranks, and no error is raised. (PyTorch docs, DistributedDataParallel: if a loss is summed over the
    samples and not averaged, the gradient is M times smaller on M nodes than on one node with the whole batch.)
Fix: At the line, look for a value of one rank's samples that is used as if it covered all samples: a mean, a maximum
    or a normaliser of the rank's batch, a mean of the ranks' results, a division by the size of the whole dataset, a
    count of the rank's own steps. Compute it over all ranks, with an all_reduce before it is used (sums and counts
    for a mean, MAX for a maximum).
Detected: `ddpcheck run --check-parity` runs the script on the ranks, and again in a single process. The single
    process gets the batches and the random numbers of all ranks together. ddpcheck compares the gradients of each
    optimizer step, the final learning rates and the number of steps. It also compares the numbers that are shown
    after an evaluation, and the tensors that torch.save saves. Differences in these are warnings. The ranks together
    must also get at least three quarters of the samples of an epoch. If something differs, a third run in another
    order of samples measures noise. A difference of up to four times the noise is not reported. The single process
    acts as rank 0. A difference in gradients is reported only if the single process has the same gradients when it
    acts as rank 1. So code that depends on the rank number is not blamed. If a finding of another rule may explain
    the difference, DDP314 is not reported. The line of this check in the report then names the other rule.
Ignore: If the value should cover the rank's own samples only, as the negatives of a contrastive loss may.
Line: For gradients, the line that computes the loss, or that clips the gradients. For parameters, the constructor of
    the optimizer, and for the learning rate, the line that sets it. For numbers and saved states, the line that
    computes the first different value, else the line that shows or saves it. For samples, the constructor of the
    loader.
Checks: run parity
Example:
    weights = errors.detach().exp()
    loss = (weights / weights.mean() * errors).mean()   # right: all_reduce weights.mean() (AVG) first
"""

from __future__ import annotations

from collections.abc import Sequence

from ddpcheck.findings.report import Finding, Severity
from ddpcheck.findings.rules import RULES
from ddpcheck.findings.wording import new_finding
from ddpcheck.rules.registry import rule
from ddpcheck.trace.divergences import TRAINING_QUANTITIES, Parity

_FIXES = {
    "gradients": "Check the divisor of the loss, and the values that it takes from other samples of its batch: each "
    "rank has only its own samples, and DDP averages the gradients of the ranks' losses.",
    "later gradients": "Check what the script changes after a step and computes the loss with, such as averages and "
    "queues: the first steps had equal gradients. Then check the loss itself: each rank has only its own "
    "samples, and DDP averages the gradients.",
    "clip": "Clip the averaged gradients by the limit of a single process, whatever the world size: DDP averages, and "
    "their norm does not grow with the number of ranks.",
    "update": "Check the options of the optimizer, and what changes parameters between steps: neither may depend on "
    "the world size, except a learning rate that is scaled on purpose.",
    "saved": "Make the saved state independent of the number of ranks: gather what each rank has a part of "
    "(dist.all_gather), and update averages and counters by the steps and samples of all ranks.",
    "schedule": "Give the schedule the number of steps that the ranks make, and step it once for each of them.",
    "steps": "Let the ranks decide together, by the value of a single process, such as the mean over all samples.",
    "samples": "Split the samples of an epoch between the ranks once: by the sampler, or by the dataset.",
}


@rule
def judge_parity(parity: Parity) -> list[Finding]:
    """Return at most one finding: the first divergence, with later divergences as evidence."""
    diverged = parity.divergences
    if not diverged:
        return []
    first = min(diverged, key=lambda divergence: (divergence.kind not in TRAINING_QUANTITIES, divergence.step))
    other_messages = [divergence.message for divergence in diverged if divergence is not first]
    return new_finding(
        "DDP314",
        (first.kind,),
        first.message,
        location=first.location,
        evidence=[*first.evidence, *other_messages[:4]],
        fix=_FIXES.get("later gradients" if first.kind == "gradients" and first.step else first.kind, ""),
        severity=Severity.ERROR
        if first.kind in (*TRAINING_QUANTITIES, "steps", "schedule", "samples")
        else Severity.WARNING,
    )


def codes_that_explain(finding: Finding, others: Sequence[Finding]) -> list[str]:
    """Return the codes of `others` whose defects may explain the divergence in `finding`."""
    codes = {f.code for f in others if f.severity is not Severity.NOTE} - {finding.code}
    if finding.severity is Severity.ERROR:
        return sorted(code for code in codes if not RULES[code].keeps_gradients)
    return sorted(code for code in codes if not RULES[code].keeps_results)
