"""DDP302 reducer-mismatch: error, gradients_differ, keeps_results

DDP's gradients differ from the plain average of the ranks' own gradients.

Why: Without the wrapper, the same module on the same samples gives a different average of the gradients. So the
    difference comes from the wrapper: a communication hook, a second backward pass that was not reduced, gradients
    that existed before the step, or parameters that are paired incorrectly.
Fix: Remove the communication hook and check again; on a sharded module, it is set by set_all_reduce_hook. Or call
    zero_grad() before each accumulation, reduce in the last backward pass of a step, or give the parameters the same
    order on the ranks (DDP202).
Detected: ddpcheck runs the same module on the same samples without the wrapper, and averages the gradients with a
    plain all-reduce. DDP302 is reported if DDP's gradients are the same on all ranks but differ from this average. A
    tolerance for rounding is relative to the ranks' own gradients, before averaging.
Ignore: If a communication hook compresses gradients and you accept its rounding. ddpcheck allows the rounding of
    bfloat16. For a communication hook that the script registers, `ddpcheck run` reports only a note.
Line: The call that registers the communication hook, else the line that creates the first parameter. If ranks that
    compute one model together have different losses: the line that computes the loss.
Checks: report reducer; run reducer; repro average
Example:
    loss = ddp(x).sum()
    loss.backward(retain_graph=True)
    loss.backward()                          # only the first of the two is reduced; right: (2 * loss).backward()
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ddpcheck.findings.evidence.gradients import Difference
from ddpcheck.findings.evidence.steps import CompiledStep
from ddpcheck.findings.report import Finding, Severity
from ddpcheck.findings.wording import make_finding, plural
from ddpcheck.rules.replicas.changes import locate_reduction
from ddpcheck.trace.check_context import JudgeContext
from ddpcheck.trace.failures import NOT_FINISHED, NOT_FINISHED_IN_LIGHTNING, WrapperErrorFacts
from ddpcheck.trace.gradients import AVERAGE_ALL, ReducerFacts, draws_differ


def explain_error_of_unfinished_reduction(facts: WrapperErrorFacts) -> list[Finding]:
    """Explain DDP's error: a parameter contributes to the loss only without the wrapper (DDP302)."""
    message = "A parameter that contributes to the loss without the wrapper did not contribute under it"
    return facts.finding_of_error("DDP302", message, NOT_FINISHED, NOT_FINISHED_IN_LIGHTNING)


def judge_compiled_average(items: Sequence[CompiledStep], known: JudgeContext) -> list[Finding]:
    """Report gradients that are the ranks' average except under `torch.compile` (DDP302)."""
    wrong = {bad.name: bad for item in items for bad in item.differences if bad.bad}
    if not wrong or draws_differ(items):
        return []
    return known.names.new_finding(
        "DDP302",
        list(wrong),
        f"Under torch.compile the gradients of {len(wrong)} of {len(items[0].gradients)} parameters, in step "
        f"{items[0].step}, are not the average of the ranks' own; without torch.compile they are.",
        steps=(items[0].step,),
        evidence=[*map(str, sorted(wrong.values(), key=lambda item: -item.error)[:3])],
    )


def explain_by_losses_of_parts(facts: ReducerFacts) -> list[Finding]:
    """Report ranks of a tensor parallel group with different losses (DDP302)."""
    if not facts.differing_losses or not facts.mismatched:
        return []
    return facts.mismatch(
        "DDP302",
        f"{facts.differing_losses}: the gradients of {plural(len(facts.mismatched), 'parameter')} are those of "
        "their sum.",
        subjects=("loss",),
        location=facts.known.loss_location,
        fix="Replicate the inputs of the loss in the plan of parallelize_module (output_layouts=Replicate()), or "
        "compute the loss of the DTensor under loss_parallel().",
    )


def judge_unexplained_mismatch(facts: ReducerFacts) -> list[Finding]:
    """Report gradients that are not the ranks' average, without known cause (DDP302).

    Runs last. A user's communication hook may cause this on purpose: compression delays parts of gradients.
    """
    if not facts.mismatched:
        return []
    hook, sharded = facts.known.wrapper.comm_hook, facts.known.wrapper.sharded
    parameters = plural(len(facts.mismatched), "parameter")
    if facts.known.own_hook:
        return facts.mismatch(
            "DDP302",
            f"The communication hook {hook} leaves gradients that are the same on every rank, but not the average of "
            "the ranks' own.",
            subjects=(hook,),
            location=None,
            severity=Severity.NOTE,
            fix="Nothing, if the hook compresses. If it is to average, return the sum of bucket.buffer() over the "
            "ranks, divided by their number, in the order of its elements.",
        )
    under = "fully_shard" if sharded else "the wrapper"
    message = f"Under {under}, the gradients of {parameters} are not the average of the ranks' own gradients."
    fix = "" if sharded or facts.known.wrapper.is_ddp else AVERAGE_ALL
    if facts.known.models and not hook:
        message = f"With the model split over ranks, the gradients of {parameters} differ from those of the unsplit "
        message += "model, averaged over the ranks."
        fix = "Compare the plan of parallelize_module with forward: its layouts define which inputs and outputs of a "
        fix += "layer are replicated, and which are sharded."
    return facts.mismatch("DDP302", message, fix=fix)


def describe_rounding(finding: Finding, hook: str, error: float) -> str:
    """Return a finding's message, preceded in a DDP302 by the communication hook's rounding error."""
    rounding = f"what {hook} rounds away is up to {error:.2g} of a gradient: " if finding.code == "DDP302" else ""
    return rounding + finding.message


def whole_batch_mismatch(worst: Difference) -> Finding:
    """DDP302: gradients of a compiled or micro-batch step that differ from whole-batch gradients."""
    message = f"through the wrapper, these gradients differ from those of the whole batch ({worst})"
    return make_finding("DDP302", (worst.name,), message)


relocate = partial(locate_reduction, ("hook",))
