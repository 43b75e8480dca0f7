"""Explanations of reduced gradients that are wrong, or of errors in the reducer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from ddpcheck.findings.errors import RankFailure
from ddpcheck.findings.evidence.steps import CompiledStep, DdpStepEvidence, ShardedStep
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import join_names
from ddpcheck.rules.gradients.ddp301_not_synchronised import explain_by_missing_reduction, explain_by_parts_of_models
from ddpcheck.rules.gradients.ddp302_reducer_mismatch import explain_by_losses_of_parts, judge_unexplained_mismatch
from ddpcheck.rules.gradients.ddp310_gradient_changed_before_reduction import explain_by_wrap_hooks
from ddpcheck.rules.gradients.ddp311_saved_tensor_overwritten import (
    explain_by_overwritten_buffers,
    explain_by_overwritten_parameters,
)
from ddpcheck.rules.gradients.ddp501_forward_bypassed import (
    explain_by_bypassed_forward,
    explain_by_shards_in_the_loss,
    explain_error_by_bypassed_forward,
)
from ddpcheck.rules.gradients.ddp502_no_sync_misuse import explain_by_switches
from ddpcheck.rules.gradients.ddp509_backward_without_forward_pairing import explain_by_second_backward
from ddpcheck.rules.gradients.ddp521_shard_as_whole import judge_loaded_state
from ddpcheck.rules.loss.ddp303_scaled_gradient import explain_by_constant_factor
from ddpcheck.rules.parameters.ddp111_ignored_parameter import explain_by_ignored_parameters
from ddpcheck.rules.replicas.ddp306_state_diverged import judge_updates
from ddpcheck.rules.replicas.ddp503_changed_after_wrapping import replaced_after_sharding
from ddpcheck.trace.check_context import JudgeContext, first_explanation
from ddpcheck.trace.failures import MARKED_TWICE, MODIFIED_IN_PLACE, WrapperErrorFacts
from ddpcheck.trace.gradients import ReducerFacts
from ddpcheck.trace.replicas import differing_names


def judge_wrapper_error(
    failures: Sequence[RankFailure], finished: Mapping[int, object], known: JudgeContext
) -> list[Finding]:
    """Return findings for a wrapper error in a step that the bare module completed."""
    return first_explanation(ERROR_EXPLANATIONS, WrapperErrorFacts(failures, finished, known))


def explain_by_replaced_shards(facts: WrapperErrorFacts) -> list[Finding]:
    """DDP503: plain parameters that `wrap` put in place of shards; forward fails."""
    plain = [name for name in facts.known.wrapper.ignored if facts.known.wrapper.sharded]
    if "object has no attribute '_local_tensor'" not in facts.text or not plain:
        return []
    findings = replaced_after_sharding(sorted(plain), facts.known.names.location(plain), later=False)
    return [replace(finding, ranks=facts.raised_on, evidence=(facts.failures[0].message,)) for finding in findings]


SENTENCES = {  # torch's message -> (code, message of the finding)
    MARKED_TWICE: ("DDP406", "DDP took a gradient to be complete, and it came again"),
    "gradient which is undefined, but still allreduced": (
        "DDP509",
        "A second backward pass of an earlier step delivered gradients after the reduction of that step: DDP takes "
        "them for the start of the next reduction, and waits for the rest",
    ),
    MODIFIED_IN_PLACE: ("DDP311", "A tensor that backward needs was overwritten after the forward pass"),
    "Expected to have finished reduction": (
        "DDP302",
        "A parameter that contributes to the loss without the wrapper did not contribute under it",
    ),
    "not used in producing the loss returned by training_step": (  # Lightning's version of the message
        "DDP302",
        "A parameter that contributes to the loss without the wrapper did not contribute under it",
    ),
    "training graph has changed in this iteration": (
        "DDP513",
        "The graph is not the one that DDP recorded in the first step",
    ),
}


def explain_by_sentence_of_torch(facts: WrapperErrorFacts) -> list[Finding]:
    """DDP302, 311, 406, 509 or 513: known DDP or autograd message, and its parameters."""
    for sentence, (code, message) in SENTENCES.items():
        if sentence in facts.text:
            names = tuple(dict.fromkeys(re.findall(r"parameter (?:name|at index \d+ with name) (\S+)", facts.text)))
            subjects = facts.known.names.subjects(names) or ("backward",)
            return facts.one_finding(code, subjects, f"{message}, in {facts.failures[0].place or 'the step'}.")
    return []


ERROR_EXPLANATIONS = (
    explain_error_by_bypassed_forward,
    explain_by_overwritten_parameters,
    explain_by_shards_in_the_loss,
    explain_by_replaced_shards,
    explain_by_second_backward,
    explain_by_sentence_of_torch,
)
"""Explanations in order; the first with findings is reported."""


def judge_reducer(evidence: Sequence[DdpStepEvidence], known: JudgeContext) -> list[Finding]:
    """Judge gradients under the wrapper (DDP301, 302, 303; causes DDP111, 310, 311, 501)."""
    facts = ReducerFacts.of(evidence, known)
    between_ranks = explain_by_ignored_parameters(facts) + first_explanation(BETWEEN_RANKS, facts)
    return between_ranks or first_explanation(FROM_AVERAGE, facts)


_Explanations = tuple[Callable[[ReducerFacts], list[Finding]], ...]


BETWEEN_RANKS: _Explanations = (explain_by_bypassed_forward, explain_by_parts_of_models, explain_by_missing_reduction)
"""Explanations, in order, of gradients that differ between ranks."""


FROM_AVERAGE: _Explanations = (
    explain_by_losses_of_parts,
    explain_by_constant_factor,
    explain_by_wrap_hooks,
    explain_by_overwritten_buffers,
    judge_unexplained_mismatch,
)
"""Explanations, in order, of equal gradients that are not the ranks' average."""


def judge_compiled(evidence: Sequence[CompiledStep], known: JudgeContext) -> list[Finding]:
    """Judge compiled steps whose eager gradients are correct (DDP301, 302)."""
    for step in dict.fromkeys(item.step for item in evidence):
        items = [item for item in evidence if item.step == step]
        count = len(items[0].gradients)
        if names := list(differing_names([item.gradients for item in items])):
            return known.names.one_finding(
                "DDP301",
                names,
                f"Under torch.compile the gradients of {len(names)} of {count} parameters differ between ranks after "
                f"backward, in step {step}; without it they are equal.",
                steps=(step,),
            )
        wrong = {} if _drew_others(items) else {bad.name: bad for item in items for bad in item.differences if bad.bad}
        if wrong:
            return known.names.one_finding(
                "DDP302",
                list(wrong),
                f"Under torch.compile the gradients of {len(wrong)} of {count} parameters, in step {step}, are not the "
                "average of the ranks' own; without torch.compile they are.",
                steps=(step,),
                evidence=[*map(str, sorted(wrong.values(), key=lambda item: -item.error)[:3])],
            )
    return []


def tell_compiled(evidence: Sequence[CompiledStep]) -> str:
    """Describe the steps run under `torch.compile`."""
    if not evidence:
        return "torch.compile was not run: everything is checked as the code is written"
    errors = [difference.error for item in evidence for difference in item.differences]
    effect = (
        "draws different random numbers"
        if _drew_others(evidence)
        else f"gives the same gradients, within a relative error of {max(errors, default=0.0):.1g}"
    )
    return f"only the steps under the wrapper are repeated with torch.compile, which {effect}; the rest runs without it"


def _drew_others(evidence: Sequence[CompiledStep]) -> bool:
    """Check if compiled gradients differ and the model drew random numbers."""
    differ = any(difference.bad for item in evidence for difference in item.differences)
    return differ and any(item.drew for item in evidence)


NOT_COMPARED = (
    "under fully_shard these are not compared: the reducer's buckets, its broadcast of parameters and buffers, and its "
    "search for unused parameters, which are DDP's own"
)


def why_not_updated(item: ShardedStep) -> str:
    """Return why updates are not compared with an unsharded step, or ''."""
    lost = [bad.name for bad in item.against_whole if bad.bad and bad.name not in item.updated_alone]
    if item.uncompared or not lost:
        return item.uncompared
    return f"in {join_names(lost)}, the rounding error of a step may be as large as the step"


def judge_sharded(evidence: Sequence[DdpStepEvidence], known: JudgeContext) -> list[Finding]:
    """Judge gradients, loaded state and updates under `fully_shard`."""
    facts = ReducerFacts.of(evidence, known)
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
