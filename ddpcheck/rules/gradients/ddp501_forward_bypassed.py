"""DDP501 forward-bypassed: error, needs_average

Gradients are computed by a forward pass that bypasses the wrapper.

Why: DDP prepares its reducer in its own forward. ddp.module(x), a parameter used outside forward, functional_call on
    the inner module and torch.autograd.grad all bypass the reducer. Nothing is reduced, and nothing is raised.
    (PyTorch docs, DistributedDataParallel: torch.autograd.grad does not work with it; call the wrapped module.)
Fix: Call the wrapper, not the module in it; move code that uses parameters into the module's forward.
Detected: DDP501 is reported if the loss depends on parameters of the wrapped module, but the wrapper was not called
    for this loss. `ddpcheck run` also reports parameters that an optimizer trains and no wrapper holds.
Ignore: If the gradients are averaged in another way. If each rank should train its own parameters, name them in
    rank_parameters.
Line: The line that computes the loss or calls backward, or the call of torch.autograd.grad. For parameters in no
    wrapper: the line that constructs their optimizer, or the line that reduces the other gradients.
Checks: report reducer; run loop, optimizers; repro reduction
Explains: DDP208 DDP306 DDP515; quietly DDP214 if of a copy
Reports: jingyaogong/minimind#853 intel/e2eAIOK#198 kohya-ss/sd-scripts#989
Example:
    output = ddp.module(x)                   # right: output = ddp(x)
    output.sum().backward()
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ddpcheck.findings.evidence.loop import AutogradGradCalled
from ddpcheck.findings.evidence.steps import DdpStepEvidence
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import format_ranks, join_names, new_finding, plural, plural_verb, ranks_or_all
from ddpcheck.rules.registry import rule
from ddpcheck.stream.ledger import BYPASSING_EVENTS
from ddpcheck.trace.failures import FailureFacts, WrapperErrorFacts
from ddpcheck.trace.gradients import Ledgers, ReducerFacts
from ddpcheck.trace.loop import Loop
from ddpcheck.trace.unwrapped_params import (
    MIN_TAKEN_STEPS,
    VALUES_DIVERGED,
    Steps,
    are_near,
    gradients_differ,
    names_scaled,
)


def explain_error_by_bypassed_forward(facts: WrapperErrorFacts) -> list[Finding]:
    """DDP501: ranks that bypass the wrapper and finish, while the others wait and fail.

    Runs first, because the failure of the waiting ranks only shows that a peer did not come.
    """
    finished = [item for item in facts.finished.values() if isinstance(item, DdpStepEvidence)]
    bypassed = [item.rank for item in finished if item.wrapper_calls == 0 and item.inner_calls > 0]
    if not bypassed:
        return []
    return new_finding(
        "DDP501",
        ("forward",),
        f"On {format_ranks(bypassed)} the loss calls the wrapped module and not the wrapper; the other ranks wait "
        "for its gradients.",
        ranks=bypassed,
        steps=(finished[0].step,),
        evidence=[failure.message for failure in facts.failures],
    )


def explain_by_shards_in_the_loss(facts: WrapperErrorFacts) -> list[Finding]:
    """DDP501: parameter used outside of the module's forward, where only a shard exists."""
    if "mixed torch.Tensor and DTensor" not in facts.text or "forward" not in facts.failures[0].place:
        return []
    return facts.new_finding(
        "DDP501",
        ("forward",),
        "The loss uses parameters outside of the forward of a module that fully_shard was called on, where each rank "
        "has only its shard.",
        location=Location.parse(facts.failures[0].location),
        fix="Call the module, not its forward or another of its methods; or register that method with "
        "torch.distributed.fsdp.register_fsdp_forward_method(module, name).",
    )


def explain_shard_outside_forward(facts: FailureFacts) -> list[Finding]:
    """DDP501: operation on a shard outside of forward, where the parameter is not gathered."""
    return facts.new_finding(
        "DDP501",
        ("forward",),
        "An operation mixes a plain tensor and a shard (DTensor): outside of the forward of a module that fully_shard "
        "was called on, each rank has only its shards of the parameters.",
        fix="Call the module, not its forward or another of its methods; or register that method with "
        "torch.distributed.fsdp.register_fsdp_forward_method(module, name). Other computations on parameters use "
        "parameter.full_tensor(), before forward.",
    )


BYPASSED = "The loss calls the wrapped module and not the wrapper, so DDP does not take part in the step."


def explain_by_bypassed_forward(facts: ReducerFacts) -> list[Finding]:
    """Report a loss that does not call the wrapper (DDP501).

    Runs before DDP301, which is a consequence. If the wrapped module is not called either, a finding requires that
    gradients differ: a loss may need no parameter of the module.
    """
    unequal_steps = {step for steps in facts.unequal.values() for step in steps}
    is_ddp = facts.known.wrapper.is_ddp
    bypassed = [
        item
        for item in facts.evidence
        if item.wrapper_calls == 0 and (item.inner_calls or (is_ddp and item.step in unequal_steps))
    ]
    if not bypassed:
        return []
    names = facts.not_synchronised
    return new_finding(
        "DDP501",
        ("forward",),
        BYPASSED
        if any(item.inner_calls for item in bypassed)
        else "The loss never calls the wrapper, only parts or methods of the module in it, so DDP does not "
        "take part in the step.",
        location=facts.known.loss_location,
        ranks=ranks_or_all(sorted({item.rank for item in bypassed}), len({item.rank for item in facts.evidence})),
        steps=ranks_or_all(sorted({item.step for item in bypassed}), facts.step_count),
        evidence=[
            f"gradients of {plural(len(names), 'parameter')} differ between ranks" if names else "",
            *facts.evidence_between_ranks,
        ],
    )


def explain_by_late_average(names: Sequence[str], steps: Sequence[Steps], location: Location) -> list[Finding]:
    return new_finding(
        "DDP501",
        names,
        f"The gradients of {join_names(names)} are all_reduced only after the optimizer's step that uses them: every "
        "rank steps with its own.",
        location=location,
        evidence=[VALUES_DIVERGED],
        related={"optimizer steps": steps[0][0].location},
        fix="all_reduce every gradient before the optimizer's step, or wrap the module in DistributedDataParallel.",
    )


_CAUSES_AND_FIXES = {  # by what averages the other gradients: the cause and the fix
    "other steps": ("{is_are} never averaged, while the others are, after some steps", "Average it with the others."),
    "wrapper": (
        "{is_are} in no DistributedDataParallel",
        "Put it into the wrapped module, or into a separate DistributedDataParallel.",
    ),
    "step": (
        "{is_are} not reduced inside the optimizer's step, where others are",
        "Have the step reduce every gradient, or average it before the step on all ranks.",
    ),
    "collectives": (
        "{has} a different gradient on each rank after the collectives of a step",
        "all_reduce every gradient, and change it afterwards in the same way on every rank, including random numbers.",
    ),
    "nothing": (
        "{is_are} averaged by nothing in this script",
        "Wrap the module in DistributedDataParallel, or all_reduce every gradient before the step.",
    ),
}


def explain_by_no_average(names: Sequence[str], steps: Sequence[Steps], averaged_by: str) -> list[Finding]:
    """DDP501: parameters whose gradients nothing averages; `averaged_by`: what averages the other gradients."""
    first, calls = steps[0][0], [step[0].collectives for step in steps]
    if averaged_by == "nothing" and all(before < later for before, later in itertools.pairwise(calls)):
        averaged_by = "collectives"
        averaged = [n for n in names if all(n in names_scaled(names, step) for step in steps)]  # by a local clip
        names = [name for name in names if name not in averaged] or names
    if averaged_by == "step":
        names = [name for name in names if all(gradients_differ(step, name) for step in steps)] or names
    line = steps[-1][0].reduced_at if averaged_by in ("step", "collectives") else first.built_at
    cause, fix = _CAUSES_AND_FIXES[averaged_by]
    words = {"is_are": plural_verb("is", "are", names), "has": plural_verb("has", "have", names)}
    return new_finding(
        "DDP501",
        names,
        f"{join_names(names)} {cause.format(**words)}: every rank trains {plural_verb('it', 'them', names)} on its own "
        "gradients.",
        location=(averaged_by != "other steps" and line) or first.location,
        evidence=[VALUES_DIVERGED],
        related={"optimizer steps": first.location},
        fix=fix,
    )


@rule
def judge_autograd_grad(loop: Loop) -> list[Finding]:
    """DDP501: parameters of a wrapper that are updated by gradients of `torch.autograd.grad`."""
    return next(filter(None, map(judge_autograd_calls, loop.taken)), [])


def judge_autograd_calls(calls: Sequence[Sequence[AutogradGradCalled]]) -> list[Finding]:
    """Detect wrapped parameters updated by unaveraged `torch.autograd.grad` gradients (DDP501).

    A finding requires that parameters are equal on all ranks at the first call and diverge later: then nothing averages
    gradients or parameters. `calls`: by rank, the calls for parameters of one wrapper.
    """
    rows = list(zip(*calls, strict=False))
    all_calls = [call for row in rows for call in row]
    is_paired = len(all_calls) == sum(map(len, calls)) and all(len({call.count for call in row}) == 1 for row in rows)
    if len(rows) < MIN_TAKEN_STEPS or not is_paired:
        return []
    if any(call.reductions or call.is_unreduced for call in all_calls):
        return []  # the wrapper averages backward passes, now or later

    def is_equal(row: Sequence[AutogradGradCalled], name: str) -> bool:
        return len({call.parameters.get(name) for call in row}) == 1

    marks = zip(*([mark for call in rank_calls for mark in call.marks] for rank_calls in calls), strict=False)
    are_equal = [len(set(row)) == 1 for row in marks]
    diverged = [name for name in rows[0][0].parameters if is_equal(rows[0], name) and not is_equal(rows[-1], name)]
    differ = [not all(is_equal(row, name) for name in diverged) for row in rows]
    if not diverged or (False, True) in itertools.pairwise(are_equal) or (True, False) in itertools.pairwise(differ):
        return []
    sketches = [[[call.gradients.get(name, ()) for call in row] for name in diverged] for row in rows]
    local = [by_name for by_name in sketches if any(all(by_rank) and not are_near(by_rank) for by_rank in by_name)]
    known = [row for row in rows if row[0].gradients]
    if 2 * len(local) <= len(known):
        return []
    first = rows[0][0]
    return new_finding(
        "DDP501",
        ("torch.autograd.grad",),
        "Gradients of the wrapped module are computed with torch.autograd.grad, and DDP averages those of backward() "
        f"only: every rank updates {join_names(diverged)} by its own.",
        location=first.location,
        evidence=[
            "the values were the same on all ranks when the first gradients were taken, and are not any more",
            f"the gradients differ between ranks in {len(local)} of {len(known)} calls that were compared",
            "the wrapper has averaged no backward pass",
        ],
        fix="Call loss.backward(), whose gradients DDP averages into .grad; or all_reduce each gradient that "
        "torch.autograd.grad returns, and divide it by the world size, before it is used.",
    )


def judge_bypassed_forward(ledgers: Ledgers) -> list[Finding]:
    """DDP501: optimizer step on gradients of a backward pass that bypassed the wrapper."""
    bypassed = [c for _, ledger in ledgers for c in ledger.used_unreduced if c.backward.kind in BYPASSING_EVENTS]
    if not bypassed:
        return []
    line, noticed = bypassed[0].backward.location, bypassed[0].ended_by.location
    inside_forward = bypassed[0].backward.kind == "backward inside"
    return new_finding(
        "DDP501",
        ("forward",),
        "Backward runs inside of the wrapper's forward, before DDP has prepared for it: nothing is averaged."
        if inside_forward
        else BYPASSED,
        location=Location.parse(line or noticed),
        related={"optimizer steps": Location.parse(noticed)},
        fix="Call backward when forward has returned; in a LightningModule with manual optimization, "
        "call self.manual_backward(loss) instead of loss.backward()."
        if inside_forward
        else "",
    )
