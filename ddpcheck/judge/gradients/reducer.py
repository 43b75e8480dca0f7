"""DDP301 to 303, and their causes: gradients after the reducer, compiled or eager."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddpcheck.findings.evidence.gradients import LOOSEST_FIT, Difference
from ddpcheck.findings.evidence.steps import CompiledStep, DdpStepEvidence, ShardedStep
from ddpcheck.findings.report import Finding, Location, Severity
from ddpcheck.findings.wording import (
    capitalized,
    counted,
    format_ranks,
    format_steps,
    join_names,
    one_finding,
    plural_verb,
    unless_all,
)
from ddpcheck.judge.judge_context import JudgeContext, first_explanation, group_by_step, worst_first
from ddpcheck.judge.replicas.descriptions import differing_names


@dataclass(frozen=True, slots=True)
class ReducerFacts:
    """Gradients under the wrapper, over all steps."""

    evidence: Sequence[DdpStepEvidence]  # by rank and step
    # by parameter, the steps in which gradients differ between ranks
    unequal: Mapping[str, Sequence[int]]
    # by parameter and step, the largest difference from the average of the ranks' own gradients
    wrong: Mapping[str, Mapping[int, Difference]]
    known: JudgeContext  # further facts

    @classmethod
    def of(cls, evidence: Sequence[DdpStepEvidence], known: JudgeContext) -> ReducerFacts:
        """Compare gradients between ranks, and with the average of local gradients."""
        unequal: dict[str, list[int]] = {}
        wrong: dict[str, dict[int, Difference]] = {}
        for step, items in group_by_step([item for item in evidence if not item.apart]).items():
            for name in differing_names([item.gradients for item in items]):
                unequal.setdefault(name, []).append(step)
            for difference in (difference for item in items for difference in item.against_local if difference.bad):
                by_step = wrong.setdefault(difference.name, {})
                by_step[step] = max(by_step.get(step, difference), difference, key=lambda item: item.error)
        return cls(evidence, unequal, wrong, known)

    @property
    def step_count(self) -> int:
        return len({item.step for item in self.evidence})

    @property
    def not_synchronised(self) -> list[str]:
        """Parameters in `unequal` that the wrapper has to average."""
        return [name for name in self.unequal if name not in self.known.wrapper.ignored]

    @property
    def mismatched(self) -> Mapping[str, Mapping[int, Difference]]:
        """Parameters in `wrong` whose gradients are equal on all ranks."""
        return {name: by_step for name, by_step in self.wrong.items() if name not in self.unequal}

    @property
    def mismatches(self) -> list[Difference]:
        """Difference of each mismatched parameter in its first step."""
        return [by_step[min(by_step)] for by_step in self.mismatched.values()]

    def reduction(self, names: Sequence[str]) -> list[str]:
        """Return options that replace or delay DDP's reduction of `names`."""
        wrapper, facts = self.known.wrapper, []
        if wrapper.comm_hook:
            facts.append(f"gradients are reduced by the communication hook {wrapper.comm_hook}")
        if names and wrapper.delayed.issuperset(names):
            facts.append(
                "delay_all_reduce_named_params reduces them when the gradient of param_to_hook_all_reduce arrives, "
                "which has to come after theirs"
            )
        return facts

    def mismatch(self, code: str, message: str, *evidence: str, **more: Any) -> list[Finding]:
        """Create a finding on the gradients in `mismatched`."""
        names = list(self.mismatched)
        steps = sorted({step for by_step in self.mismatched.values() for step in by_step})
        facts = [*evidence, *self.reduction(names), *map(str, worst_first(self.mismatches)[:3])]
        more = {"subjects": self.known.names.subjects(names), "location": self.known.names.location(names), **more}
        return one_finding(code, message=message, steps=unless_all(steps, self.step_count), evidence=facts, **more)


def judge_reducer(evidence: Sequence[DdpStepEvidence], known: JudgeContext) -> list[Finding]:
    """Judge gradients under the wrapper (DDP301, 302, 303; causes DDP111, 310, 311, 501)."""
    facts = ReducerFacts.of(evidence, known)
    between_ranks = explain_by_ignored_parameters(facts) + first_explanation(BETWEEN_RANKS, facts)
    return between_ranks or first_explanation(FROM_AVERAGE, facts)


def explain_by_ignored_parameters(facts: ReducerFacts) -> list[Finding]:
    """Report parameters that the wrapper ignores or `fully_shard` does not hold (DDP111)."""
    names = facts.known.names
    ignored = [name for name in facts.unequal if name in facts.known.wrapper.ignored]
    if not ignored:
        return []
    subjects, fix = names.subjects(ignored), ""
    message = (
        f"{join_names(subjects)} {plural_verb('is', 'are', subjects)} trained, but the wrapper is configured to ignore "
        f"{plural_verb('it', 'them', subjects)}: {plural_verb('its', 'their', subjects)} gradients are not "
        "averaged and differ between the ranks."
    )
    if facts.known.wrapper.sharded:
        message = (
            f"{join_names(subjects)} {plural_verb('is', 'are', subjects)} trained, and no group of fully_shard holds "
            f"{plural_verb('it', 'them', subjects)}: nothing averages {plural_verb('its', 'their', subjects)} "
            "gradients, which differ between the ranks."
        )
        fix = "Call fully_shard on the root module as well, last, and without this parameter in ignored_params."
    return names.one_finding("DDP111", ignored, message, fix=fix)


BYPASSED = "The loss calls the wrapped module and not the wrapper, so DDP does not take part in the step."


def explain_by_bypassed_forward(facts: ReducerFacts) -> list[Finding]:
    """Report a loss that does not call the wrapper (DDP501).

    Runs before DDP301, which is a consequence. If the wrapped module is not called either, gradients have to differ: a
    loss may need none of its parameters.
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
    return one_finding(
        "DDP501",
        ("forward",),
        BYPASSED
        if any(item.inner_calls for item in bypassed)
        else "The loss never calls the wrapper, only parts or methods of the module in it, so DDP does not "
        "take part in the step.",
        location=facts.known.loss_location,
        ranks=unless_all(sorted({item.rank for item in bypassed}), len({item.rank for item in facts.evidence})),
        steps=unless_all(sorted({item.step for item in bypassed}), facts.step_count),
        evidence=[
            f"gradients of {counted(len(names), 'parameter')} differ between ranks" if names else "",
            *_evidence_between_ranks(facts),
        ],
    )


def explain_by_parts_of_models(facts: ReducerFacts) -> list[Finding]:
    """Report gradients that differ only within tensor parallel groups (DDP301)."""
    models = facts.known.models
    within = {name for model in models for name in _unequal_on(facts, model)}
    between = {name for replicas in zip(*models, strict=True) for name in _unequal_on(facts, replicas)}
    names = [name for name in facts.unequal if name in within and name not in between]
    if not names:
        return []
    return facts.known.names.one_finding(
        "DDP301",
        names,
        f"The gradients of {join_names(facts.known.names.subjects(names))} differ between "
        f"{' and between '.join(map(format_ranks, models[:2]))}, which compute one model together (tensor "
        "parallelism): each rank has the gradient of its part.",
        steps=unless_all(sorted({step for name in names for step in facts.unequal[name]}), facts.step_count),
        evidence=[_differing_losses(facts), *_evidence_between_ranks(facts)],
        fix=PLAN_ADVICE,
    )


def explain_by_losses_of_parts(facts: ReducerFacts) -> list[Finding]:
    """Report ranks of a tensor parallel group with different losses (DDP302)."""
    description = _differing_losses(facts)
    if not description or not facts.mismatched:
        return []
    return facts.mismatch(
        "DDP302",
        f"{description}: the gradients of {counted(len(facts.mismatched), 'parameter')} are those of their sum.",
        subjects=("loss",),
        location=facts.known.loss_location,
        fix="Replicate the inputs of the loss in the plan of parallelize_module (output_layouts=Replicate()), or "
        "compute the loss of the DTensor under loss_parallel().",
    )


def _differing_losses(facts: ReducerFacts) -> str:
    """Describe the first step with different losses in a tensor parallel group."""
    losses = {(item.step, item.rank): item.loss for item in facts.evidence if isinstance(item, ShardedStep)}
    for step, model in itertools.product(sorted({step for step, _ in losses}), facts.known.models):
        model_losses = [losses.get((step, rank)) for rank in model]
        known = [loss for loss in model_losses if loss is not None]
        if len(known) == len(model) and max(known) - min(known) > _ANOTHER_LOSS * max(map(abs, known)):
            text = " and ".join(f"{loss:.6g}" for loss in known[:4])
            ranks = capitalized(format_ranks(model))
            return f"{ranks} compute one model together, and each a different loss, {text} in step {step}"
    return ""


_ANOTHER_LOSS = 1e-3  # relative rounding tolerance
PLAN_ADVICE = (
    "Name these modules in the plan of parallelize_module (SequenceParallel() for a norm), or all_reduce their "
    "gradients over the group of tensor parallelism before the step."
)


def _unequal_on(facts: ReducerFacts, ranks: Sequence[int]) -> set[str]:
    by_step = group_by_step(item for item in facts.evidence if item.rank in ranks)
    return {name for items in by_step.values() for name in differing_names([item.gradients for item in items])}


_AVERAGING_HOOK = "Let the communication hook return the average over the ranks, or take it off."
_AVERAGE_ALL = "Have the wrapper all_reduce every gradient and divide the sum by the world size, or use DDP."


def explain_by_missing_reduction(facts: ReducerFacts) -> list[Finding]:
    """Report gradients that differ between ranks although the wrapper was called (DDP301).

    Runs before comparisons with the average, because ranks that differ need no reference.
    """
    names = facts.not_synchronised
    if not names:
        return []
    count = len(facts.evidence[0].gradients)
    steps = sorted({step for name in names for step in facts.unequal[name]})
    is_known = facts.known.wrapper.is_ddp or facts.known.wrapper.sharded
    wrapper_note = f"the wrapper is a {facts.known.wrapper_class}, not a DistributedDataParallel"
    fix = _AVERAGING_HOOK if facts.known.wrapper.comm_hook else "" if is_known else _AVERAGE_ALL
    if facts.known.wrapper.named == "tensor parallelism":
        fix = 'Average them in the data dimension too: DistributedDataParallel(model, device_mesh=mesh["dp"]), or '
        fix += 'fully_shard(model, mesh=mesh["dp"]).'
    return facts.known.names.one_finding(
        "DDP301",
        names,
        f"The gradients of {'all' if len(names) == count else f'{len(names)} of'} {counted(count, 'parameter')} "
        f"differ between ranks after backward, from {format_steps(steps[:1])} on.",
        steps=unless_all(steps, facts.step_count),
        evidence=["" if is_known else wrapper_note, *_evidence_between_ranks(facts)],
        fix=fix,
    )


def _evidence_between_ranks(facts: ReducerFacts) -> list[str]:
    names = facts.not_synchronised
    wrong = [facts.wrong[name] for name in names if name in facts.wrong]
    return [*facts.reduction(names), *[str(by_step[min(by_step)]) for by_step in wrong][:3]]


_SCALING = (  # methods of a module sharded by fully_shard
    *("set_gradient_divide_factor", "set_reduce_scatter_divide_factor", "set_force_sum_reduction_for_comms"),
)


def explain_by_constant_factor(facts: ReducerFacts) -> list[Finding]:
    """Report one factor on every mismatched gradient (DDP303).

    Runs before hooks and buffers, which do not leave the same factor on every parameter.
    """
    ratio = _constant_ratio(facts.mismatches)
    if ratio is None:
        return []
    scaled = [event for event in facts.evidence[0].events if event.kind in _SCALING]
    return facts.mismatch(
        "DDP303",
        f"Under the wrapper, each gradient below is {facts.known.factor(ratio)} times the average of the ranks' own "
        "gradients.",
        *(f"{event.kind} is called there" for event in scaled[-1:]),
        location=Location.parse(scaled[-1].location) if scaled else None,
        fix=_AVERAGING_HOOK
        if facts.known.wrapper.comm_hook
        else "Leave out set_gradient_divide_factor, or give it the number of ranks."
        if facts.known.wrapper.sharded
        else "Average once: the wrapper of the model, or a hook on its parameters, scales gradients that are already "
        "averaged, or adds them up.",
    )


def explain_by_wrap_hooks(facts: ReducerFacts) -> list[Finding]:
    """Report a hook registered while wrapping that changes gradients (DDP310).

    Only under DDP, because custom wrappers reduce gradients by such hooks.
    """
    hooks, known = facts.known.wrap_hooks, facts.known
    if not facts.mismatched or not hooks or not known.wrapper.is_ddp:
        return []
    names = list(facts.mismatched)
    return facts.mismatch(
        "DDP310",
        f"{capitalized(hooks[0].description)}, registered while wrapping, changes gradients: under the wrapper, those "
        f"of {counted(len(names), 'parameter')} are not the average of the ranks' own.",
        *(f"on the path of gradients: {hook}" for hook in hooks[:3]),
        location=hooks[0].location or known.names.location(names),
    )


def explain_by_overwritten_buffers(facts: ReducerFacts) -> list[Finding]:
    """Report buffer broadcasts that overwrite tensors needed by an earlier backward (DDP311).

    Runs after hooks, which are observed; several forwards before one backward are only likely.
    """
    buffers = list(facts.known.local.differing_buffers)
    forwards = max((item.wrapper_calls for item in facts.evidence), default=0)
    if not facts.mismatched or not facts.known.broadcasts_buffers or forwards < 2 or not buffers:
        return []
    return facts.mismatch(
        "DDP311",
        f"DDP broadcasts {join_names(buffers)} before each of {forwards} forwards, which overwrites values that the "
        "backward of the earlier forwards needs.",
        subjects=buffers,
        location=facts.known.names.location(buffers),
    )


def judge_unexplained_mismatch(facts: ReducerFacts) -> list[Finding]:
    """Report gradients that are not the ranks' average, without known cause (DDP302).

    Runs last. A user's communication hook may intend the mismatch: compression hooks send the rest later.
    """
    if not facts.mismatched:
        return []
    hook = facts.known.wrapper.comm_hook
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
    sharded = facts.known.wrapper.sharded
    if facts.known.models and not facts.known.wrapper.comm_hook:
        return facts.mismatch(
            "DDP302",
            f"With the model split over ranks, the gradients of {counted(len(facts.mismatched), 'parameter')} differ "
            "from those of the unsplit model, averaged over the ranks.",
            fix="Compare the plan of parallelize_module with forward: its layouts define which inputs and outputs of a "
            "layer are replicated, and which are sharded.",
        )
    return facts.mismatch(
        "DDP302",
        f"Under {'fully_shard' if sharded else 'the wrapper'}, the gradients of "
        f"{counted(len(facts.mismatched), 'parameter')} are not the average of the ranks' own gradients.",
        fix="" if sharded or facts.known.wrapper.is_ddp else _AVERAGE_ALL,
    )


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


def _constant_ratio(differences: Sequence[Difference]) -> float | None:
    """Return the factor common to all differences, or None."""
    ratios = [item.ratio for item in differences]
    if not ratios or any(item.residual > max(item.tolerance, LOOSEST_FIT * item.error) for item in differences):
        return None
    median = sorted(ratios)[len(ratios) // 2]
    spread = max(abs(ratio - median) for ratio in ratios)
    return median if spread <= 0.01 * abs(median) and median != 0.0 else None


# Under torch.compile


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
