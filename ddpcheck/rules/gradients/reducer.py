"""Explanations of reduced gradients that are wrong, or of errors in the reducer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddpcheck.findings.errors import RankFailure
from ddpcheck.findings.evidence.steps import CompiledStep, DdpStepEvidence, LoopEvent, ShardedStep
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import group_by, join_names
from ddpcheck.rules.collectives.ddp406_marked_ready_twice import explain_error_of_second_gradient
from ddpcheck.rules.gradients.ddp301_not_synchronised import (
    explain_by_missing_reduction,
    explain_by_parts_of_models,
    judge_compiled_ranks,
)
from ddpcheck.rules.gradients.ddp302_reducer_mismatch import (
    explain_by_losses_of_parts,
    explain_error_of_unfinished_reduction,
    judge_compiled_average,
    judge_unexplained_mismatch,
)
from ddpcheck.rules.gradients.ddp310_gradient_changed_before_reduction import explain_by_wrap_hooks
from ddpcheck.rules.gradients.ddp311_saved_tensor_overwritten import (
    explain_by_overwritten_buffers,
    explain_by_overwritten_parameters,
    explain_error_of_overwritten_tensor,
)
from ddpcheck.rules.gradients.ddp501_forward_bypassed import (
    explain_by_bypassed_forward,
    explain_by_shards_in_the_loss,
    explain_error_by_bypassed_forward,
    judge_bypassed_forward,
)
from ddpcheck.rules.gradients.ddp502_no_sync_misuse import (
    explain_by_switches,
    judge_unreduced_steps,
    judge_useless_no_sync,
)
from ddpcheck.rules.gradients.ddp509_backward_without_forward_pairing import (
    explain_by_second_backward,
    explain_error_of_undefined_gradient,
    judge_backward_pairing,
)
from ddpcheck.rules.gradients.ddp517_gradients_discarded import judge_discarded_gradients
from ddpcheck.rules.gradients.ddp521_shard_as_whole import judge_loaded_state
from ddpcheck.rules.loss.ddp303_scaled_gradient import explain_by_constant_factor
from ddpcheck.rules.parameters.ddp111_ignored_parameter import explain_by_ignored_parameters
from ddpcheck.rules.parameters.ddp513_static_graph_violated import explain_error_of_changed_graph
from ddpcheck.rules.replicas.ddp306_state_diverged import judge_updates
from ddpcheck.rules.replicas.ddp503_changed_after_wrapping import replaced_after_sharding
from ddpcheck.stream.ledger import Ledger
from ddpcheck.trace.check_context import JudgeContext, first_explanation
from ddpcheck.trace.failures import WrapperErrorFacts
from ddpcheck.trace.gradients import ReducerFacts, draws_differ


def judge_wrapper_error(
    failures: Sequence[RankFailure], finished: Mapping[int, object], known: JudgeContext
) -> list[Finding]:
    """Return findings on an error in a step that succeeds without the wrapper."""
    return first_explanation(ERROR_EXPLANATIONS, WrapperErrorFacts(failures, finished, known))


def explain_by_replaced_shards(facts: WrapperErrorFacts) -> list[Finding]:
    """DDP503: shards that a recipe's `wrap` replaced by plain parameters; forward then fails."""
    plain = [name for name in facts.known.wrapper.ignored if facts.known.wrapper.sharded]
    if "object has no attribute '_local_tensor'" not in facts.text or not plain:
        return []
    findings = replaced_after_sharding(sorted(plain), facts.known.names.location(plain), later=False)
    return [replace(finding, ranks=facts.raised_on, evidence=(facts.failures[0].message,)) for finding in findings]


ERROR_EXPLANATIONS = (
    explain_error_by_bypassed_forward,
    explain_by_overwritten_parameters,
    explain_by_shards_in_the_loss,
    explain_by_replaced_shards,
    explain_by_second_backward,
    explain_error_of_second_gradient,
    explain_error_of_undefined_gradient,
    explain_error_of_overwritten_tensor,
    explain_error_of_unfinished_reduction,
    explain_error_of_changed_graph,
)
"""Explanations in order; the first with findings is reported."""


def judge_reducer(evidence: Sequence[DdpStepEvidence], known: JudgeContext) -> list[Finding]:
    """Judge gradients under the wrapper (DDP301, 302, 303; causes DDP111, 310, 311, 501)."""
    facts = ReducerFacts.from_evidence(evidence, known)
    between_ranks = explain_by_ignored_parameters(facts) + first_explanation(BETWEEN_RANKS, facts)
    return between_ranks or first_explanation(FROM_AVERAGE, facts)


BETWEEN_RANKS = (explain_by_bypassed_forward, explain_by_parts_of_models, explain_by_missing_reduction)
"""Explanations, in order, of gradients that differ between ranks."""

FROM_AVERAGE = (
    explain_by_losses_of_parts,
    explain_by_constant_factor,
    explain_by_wrap_hooks,
    explain_by_overwritten_buffers,
    judge_unexplained_mismatch,
)
"""Explanations, in order, of equal gradients that are not the ranks' average."""


def judge_compiled(evidence: Sequence[CompiledStep], known: JudgeContext) -> list[Finding]:
    """Report the first compiled step whose gradients are wrong only if compiled (DDP301, 302)."""
    for items in group_by(evidence, lambda item: item.step).values():
        if findings := judge_compiled_ranks(items, known) or judge_compiled_average(items, known):
            return findings
    return []


def describe_compiled(evidence: Sequence[CompiledStep]) -> str:
    """Return a sentence on the effect of `torch.compile` on the checked steps."""
    if not evidence:
        return "torch.compile was not run: everything is checked as the code is written"
    errors = [difference.error for item in evidence for difference in item.differences]
    effect = (
        "draws different random numbers"
        if draws_differ(evidence)
        else f"gives the same gradients, within a relative error of {max(errors, default=0.0):.1g}"
    )
    return f"only the steps under the wrapper are repeated with torch.compile, which {effect}; the rest runs without it"


NOT_COMPARED = (
    "under fully_shard these are not compared: the reducer's buckets, its broadcast of parameters and buffers, and its "
    "search for unused parameters, which are DDP's own"
)


def reason_updates_not_compared(item: ShardedStep) -> str:
    """Return why parameter updates are not compared with an unsharded step, or ''."""
    lost = [bad.name for bad in item.against_whole if bad.bad and bad.name not in item.updated_per_shard]
    if item.uncompared or not lost:
        return item.uncompared
    return f"in {join_names(lost)}, the rounding error of a step may be as large as the step"


def judge_sharded(evidence: Sequence[DdpStepEvidence], known: JudgeContext) -> list[Finding]:
    """Judge gradients, loaded optimizer state and parameter updates under `fully_shard`."""
    facts = ReducerFacts.from_evidence(evidence, known)
    findings = explain_by_ignored_parameters(facts) + first_explanation(SHARDED_EXPLANATIONS, facts)
    return findings + judge_loaded_state(evidence) or judge_updates(facts)


SHARDED_EXPLANATIONS = (
    explain_by_switches,
    explain_by_parts_of_models,
    explain_by_missing_reduction,
    explain_by_losses_of_parts,
    explain_by_constant_factor,
    judge_unexplained_mismatch,
)
"""Explanations, in order, of gradient mismatches under `fully_shard`."""


def judge_loop(evidence: Sequence[DdpStepEvidence], *, unequal: bool) -> list[Finding]:
    """Judge backward passes, reductions and steps of each rank (DDP501, 502, 509, 517).

    If not `unequal`, gradients are the ranks' average, and only lost gradients and a useless `no_sync` are reported.
    """
    ledgers = [(item, Ledger(_add_missing_passes(item.events))) for item in evidence]
    findings = judge_discarded_gradients(ledgers)
    if unequal:
        findings += judge_unreduced_steps(ledgers) + judge_bypassed_forward(ledgers) + judge_backward_pairing(ledgers)
    return findings or judge_useless_no_sync(ledgers)


def _add_missing_passes(events: Sequence[LoopEvent]) -> Sequence[LoopEvent]:
    """Return events with forward and backward passes, which older logs lack under `no_sync`."""
    if [event.kind for event in events] == ["enter no_sync", "step"]:
        return events[0], LoopEvent("forward"), LoopEvent("backward"), events[1]
    return events
