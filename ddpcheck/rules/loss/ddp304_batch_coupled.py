"""DDP304 batch-coupled: warning, gradients_differ, keeps_results

Gradients differ from the single process because samples of a batch influence each other.

Why: Under DDP, these see only the rank's own samples: BatchNorm, contrastive losses with negatives from the batch,
    batch-wide dice and ranking losses. So the result depends on how the batch is split. This is often accepted, but
    training differs from training in one process. (PyTorch docs, SyncBatchNorm.)
Fix: Convert with nn.SyncBatchNorm.convert_sync_batchnorm, use GroupNorm or LayerNorm, or gather the batch with a
    differentiable all_gather; if coupling within a rank is intended, ignore DDP304.
Detected: In a single process, ddpcheck computes the gradients of the global batch and those of each rank's samples.
    If they differ, ddpcheck tests whether samples influence each other. Coupling is reported if a module's output for
    one sample depends on other samples. It is also reported if a line of code combines samples. To find other
    couplings, ddpcheck changes the first layer's outputs for some samples. Coupling is reported if the gradients at
    these outputs change for other samples. A second, large change is for losses that use only the hardest or easiest
    samples: it makes them select different ones.
Ignore: If coupling within a rank is intended, as with plain BatchNorm, local negatives or batch dice. Many people
    train this way on purpose. So the finding is a warning, however large the difference is. If the loss only gives
    samples different weights, see DDP305.
Line: The constructor of the module that couples the samples. If the loss couples them, the line that combines
    samples, else the line that computes the loss. If parts of the model are chosen by the batch, the line that
    registers their first parameter.
Checks: report parity; repro single-process
Explains: DDP214 DDP215 if its statistics
Reports: pytorch/pytorch#49794 huggingface/accelerate#1154
Example:
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8))
    # right: model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
"""

from __future__ import annotations

from collections.abc import Sequence

from ddpcheck.findings.evidence.gradients import EXACT_FIT, LossTerm
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import join_names
from ddpcheck.trace.check_context import SingleProcessFacts
from ddpcheck.trace.losses import BY_NORMALISATION


def judge_coupling(facts: SingleProcessFacts, terms: Sequence[LossTerm] = ()) -> list[Finding]:
    """Report samples coupled by the model or the loss (DDP304)."""
    coupling, known = facts.analysis.coupling, facts.known
    module = f"{coupling.module or 'the model itself'} ({coupling.module_class})" if coupling.module_class else ""
    clues = ["no module mixes samples: the loss itself couples them"]
    if module:
        clues = [f"the output of {module} for one sample depends on the other samples of the batch"]
    if coupling.line:
        clues += [f"samples first meet at {coupling.line}"]
    if not module and any(term.coupled for term in terms):
        clues += ["if the outputs of the model for some samples change, the gradients of other samples change as well"]
    term_location = next((term.location for term in terms if term.coupled and term.location), None)
    return facts.new_finding(
        "DDP304",
        f"Samples are coupled through {module or 'the loss'}, so gradients on shards are up to "
        f"{facts.largest_error:.2g} (relative) away from those of the global batch.",
        *clues,
        subjects=(coupling.module or "loss",),
        location=known.module_locations.get(coupling.module)
        if coupling.module
        else coupling.line or term_location or known.loss_location,
        fix="Convert with nn.SyncBatchNorm.convert_sync_batchnorm, or use GroupNorm or LayerNorm; if statistics of "
        "each rank's own samples are intended, ignore DDP304."
        if "BatchNorm" in coupling.module_class
        else "Gather the samples to compare with by a differentiable all_gather (torch.distributed.nn.functional), or "
        "reduce the statistics over ranks; if each rank should see its own samples only, ignore DDP304.",
        tags=(BY_NORMALISATION,) if "Norm" in coupling.module_class else (),
    )


def explain_by_batch_choice(facts: SingleProcessFacts) -> list[Finding]:
    """Report model parts whose use depends on the rest of the batch (DDP304)."""
    if facts.world_changed or not facts.analysis.other_parameters:
        return []
    names = facts.known.names
    subjects = names.subjects(facts.analysis.other_parameters)
    return facts.new_finding(
        "DDP304",
        f"Which parts of the model a sample goes through depends on the rest of its batch: {join_names(subjects)} "
        "contribute for some shards and not for the global batch, or vice versa.",
        "a shard gives these gradients in a single process too",
        subjects=subjects,
        location=names.location(facts.analysis.other_parameters),
        fix="Choose for each sample separately, or by a value that is the same on every rank (from the step, or "
        "reduced over ranks); if each rank should choose by its own samples, ignore DDP304.",
    )


def explain_by_statistics(facts: SingleProcessFacts) -> list[Finding]:
    """Report samples coupled by batch statistics, if per-shard statistics explain the gradients exactly (DDP304).

    Runs early, because later explanations do not look for coupled samples if ranks also exchange tensors.
    """
    fit, module = facts.analysis.by_statistics, facts.analysis.coupling.module_class
    is_exact = max(abs(fit.ratio - 1), fit.residual) <= max(facts.tolerance, EXACT_FIT)
    return judge_coupling(facts) if is_exact and module else []
