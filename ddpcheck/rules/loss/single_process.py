"""Explanations of gradients that differ from those of the global batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ddpcheck.findings.evidence.gradients import LOOSEST_FIT, Difference, ShardAnalysis
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import ranks_or_all
from ddpcheck.rules.data.ddp516_rank_dependent_program_data import judge_program_data, judge_shard_losses
from ddpcheck.rules.gradients.ddp310_gradient_changed_before_reduction import explain_by_changed_gradients
from ddpcheck.rules.loss.ddp303_scaled_gradient import (
    explain_by_common_factor,
    explain_by_factors_of_terms,
    explain_by_rank_weights,
)
from ddpcheck.rules.loss.ddp304_batch_coupled import explain_by_batch_choice, explain_by_statistics, judge_coupling
from ddpcheck.rules.loss.ddp305_loss_normalisation import (
    explain_by_batch_weights,
    explain_by_common_weight,
    judge_normalisation,
    normalising_line_finding,
)
from ddpcheck.rules.loss.ddp309_collective_without_gradient import explain_by_collective_without_gradient
from ddpcheck.rules.loss.ddp312_unexplained_difference import judge_unexplained
from ddpcheck.rules.loss.ddp514_accumulation_scale import explain_by_micro_batches
from ddpcheck.rules.replicas.ddp216_unregistered_state import judge_changing_data
from ddpcheck.trace.check_context import JudgeContext, SingleProcessFacts, first_explanation, worst_first


def explain_by_terms(facts: SingleProcessFacts) -> list[Finding]:
    """Judge the normalisation of each loss term, and coupled samples (DDP305, 304).

    Runs last: the weights fitted to terms assume that ranks' gradients are weighted sums of the shards' gradients.
    """
    if routing := explain_by_batch_choice(facts):  # shards use different parts of the model than the global batch
        return routing
    analysis = facts.analysis
    wrong = [term for term in analysis.terms if term.error > facts.tolerance]
    fitted = [term for term in wrong if term.is_normalised]
    if facts.world_changed and not all(term.rank_weights for term in fitted):
        fitted = []
    if all(term.coupled and not term.count and not term.is_sum for term in wrong):
        fitted = []  # one weight per shard also fits the root of a mean
    others = [term for term in wrong if term not in fitted]
    fitted += [term for term in others if term.doubles_with_batch and not facts.world_changed]
    findings = judge_normalisation(facts, fitted) if fitted else []
    counts_fit = bool(wrong) and not others and not analysis.frozen  # then modules that mix samples change no gradients
    if facts.known.local.drew_from:
        return findings  # random numbers drawn per sample look like coupling
    coupling = analysis.coupling
    mixes_samples = coupling.module_class and not counts_fit
    gathers = facts.world_changed and any(call.elements > 1 for call in facts.known.local.calls)
    has_coupled = any(term.coupled for term in others)
    if mixes_samples or (has_coupled and not gathers):  # if ranks gather samples, coupling changes no gradient
        findings += judge_coupling(facts, others)
    elif not counts_fit and coupling.line is not None and not facts.world_changed:
        findings += normalising_line_finding(facts) if coupling.scaled and others else judge_coupling(facts, others)
    is_explained = (coupling.module_class and not analysis.frozen) or has_coupled or coupling.line
    if not others or is_explained:
        return findings
    return findings + (explain_by_batch_weights(facts, others) or (judge_unexplained(facts) if findings else []))


def judge_single_process(
    differences: Mapping[int, Sequence[Difference]], analysis: ShardAnalysis | None, known: JudgeContext
) -> list[Finding]:
    """Explain averaged gradients that differ from the gradients of the global batch.

    Reports the first match of `EXPLANATIONS` (DDP216, 303, 304, 305, 309, 310, 312, 514 or 516), else DDP312.
    `differences` are by step; `analysis` is about the shards in the first mismatched step.
    """
    bad = {step: [item for item in items if item.bad] for step, items in differences.items()}
    bad = {step: items for step, items in bad.items() if items}
    if not bad:
        return []
    first = bad[min(bad)]
    count = f"{len(first)} of {len(differences[min(bad)])} gradients differ from the single process"
    facts = SingleProcessFacts(
        wrong=tuple(first),
        steps=ranks_or_all(sorted(bad), len(differences)),
        tolerance=min(max(max(item.tolerance for item in first), 1e-6), LOOSEST_FIT),
        analysis=analysis or ShardAnalysis(error="they were not run"),
        known=known,
        evidence=(count, *map(str, worst_first(first)[:3])),
        largest_error_of_steps=max(item.error for items in bad.values() for item in items),
    )
    return first_explanation(EXPLANATIONS, facts) or judge_unexplained(facts)


def _explain_by_program(facts: SingleProcessFacts) -> list[Finding]:
    """Report ranks whose program values or losses differ (DDP216, 516).

    Runs before rank weights and collectives: an observed difference in values is the cause of both.
    """
    analysis, known = facts.analysis, facts.known
    if not facts.world_changed:
        return []
    if findings := judge_changing_data(facts) or judge_program_data(facts):
        return findings
    if known.local.calls or analysis.rank_weights.residual <= facts.tolerance:
        return []
    return judge_shard_losses(facts)


EXPLANATIONS: tuple[Callable[[SingleProcessFacts], list[Finding]], ...] = (
    explain_by_changed_gradients,
    explain_by_micro_batches,
    explain_by_statistics,
    explain_by_common_factor,
    explain_by_common_weight,
    _explain_by_program,
    explain_by_rank_weights,
    explain_by_collective_without_gradient,
    explain_by_factors_of_terms,
    explain_by_terms,
)
"""Explanations in order (reasons in their docstrings); the first with findings is reported."""
