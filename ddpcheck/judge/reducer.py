"""DDP301, 302, 303, 306 and their kin: what the wrapper and its reducer made of the ranks' own gradients.

Pure functions from measured differences and fingerprints to findings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ddpcheck.findings.errors import RankError
from ddpcheck.findings.evidence.gradients import Difference
from ddpcheck.findings.evidence.single_process import LOOSEST_FIT
from ddpcheck.findings.evidence.steps import DdpStepEvidence
from ddpcheck.findings.report import Finding
from ddpcheck.findings.severity import Severity
from ddpcheck.findings.wording import counted, format_ranks, format_steps, join_names, make_finding, plural_verb
from ddpcheck.judge.judge_context import JudgeContext, format_factor, some_steps
from ddpcheck.judge.replicas import differing_names
from ddpcheck.judge.training_loop import judge_departure

RUNNING_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""The buffers in which torch's normalisation layers keep what they have seen."""


def judge_reducer(evidence: Sequence[DdpStepEvidence], known: JudgeContext) -> list[Finding]:
    """DDP301, 302 and 303 (with DDP111 and 501 as their causes): what the wrapper made of the ranks' gradients."""
    by_step: dict[int, list[DdpStepEvidence]] = {}
    for item in evidence:
        by_step.setdefault(item.step, []).append(item)
    unequal: dict[str, dict[int, tuple[int, ...]]] = {}
    wrong: dict[str, dict[int, Difference]] = {}
    for step, items in sorted(by_step.items()):
        for name, ranks in differing_names([item.gradients for item in items]).items():
            unequal.setdefault(name, {})[step] = ranks
        for item in items:
            for difference in item.against_local:
                seen = wrong.get(difference.name, {}).get(step)
                if difference.bad and (seen is None or seen.error < difference.error):
                    wrong.setdefault(difference.name, {})[step] = difference
    findings = []
    ignored = [name for name in unequal if name in known.wrapper.ignored]
    if ignored:
        findings.append(
            make_finding(
                "DDP111",
                known.names.subjects(ignored),
                f"{join_names(known.names.subjects(ignored))} is trained, but the wrapper was told to ignore it: "
                "its gradients are not averaged and differ between the ranks.",
                location=known.names.location(ignored),
            )
        )
    unequal_in = {step for steps in unequal.values() for step in steps}
    bypassed = [
        item
        for item in evidence
        if item.wrapper_calls == 0 and (item.inner_calls or (known.wrapper.is_ddp and item.step in unequal_in))
    ]
    names = [name for name in unequal if name not in ignored]
    steps = sorted({step for name in names for step in unequal[name]})
    facts = _said_to_the_wrapper(known, names)
    facts += [str(wrong[name][min(wrong[name])]) for name in names if name in wrong][:3]
    if bypassed:
        ranks = tuple(sorted({item.rank for item in bypassed}))
        findings.append(
            make_finding(
                "DDP501",
                ("forward",),
                "The loss calls the wrapped module and not the wrapper, so DDP does not take part in the step."
                if any(item.inner_calls for item in bypassed)
                else "The loss never calls the wrapper, only parts or methods of the module in it, so DDP does not "
                "take part in the step.",
                ranks=ranks if len(ranks) < known.world_size else (),
                steps=some_steps(sorted({item.step for item in bypassed}), len(by_step)),
                evidence=[f"gradients of {counted(len(names), 'parameter')} differ between ranks", *facts]
                if names
                else facts,
            )
        )
    elif names:
        whose = []
        if not known.wrapper.is_ddp:
            whose = [f"the wrapper is a {known.wrapper_class}, which is no DistributedDataParallel"]
        every = len(names) == len(evidence[0].gradients)
        findings.append(
            make_finding(
                "DDP301",
                known.names.subjects(names),
                f"The gradients of {'all' if every else f'{len(names)} of'} "
                f"{counted(len(evidence[0].gradients), 'parameter')} differ between ranks after backward, "
                f"from {format_steps(steps[:1])} on.",
                steps=some_steps(steps, len(by_step)),
                location=known.names.location(names),
                evidence=[*whose, *facts],
            )
        )
    told = set(unequal)
    mismatched = {name: steps for name, steps in wrong.items() if name not in told}
    if mismatched and not findings:
        findings.append(_judge_mismatch(mismatched, by_step, known))
    return findings


def _said_to_the_wrapper(known: JudgeContext, names: Sequence[str]) -> list[str]:
    """What replaces or moves DDP's own reduction, and so may be what went wrong with the gradients of `names`."""
    facts = []
    if known.wrapper.comm_hook:
        facts.append(f"gradients are reduced by the communication hook {known.wrapper.comm_hook}")
    if names and known.wrapper.delayed.issuperset(names):
        facts.append(
            "delay_all_reduce_named_params reduces them when the gradient of param_to_hook_all_reduce arrives, which "
            "has to come after theirs"
        )
    return facts


def _judge_mismatch(
    wrong: Mapping[str, Mapping[int, Difference]],
    by_step: Mapping[int, Sequence[DdpStepEvidence]],
    known: JudgeContext,
) -> Finding:
    names = list(wrong)
    steps = sorted({step for of_name in wrong.values() for step in of_name})
    differences = [of_name[min(of_name)] for of_name in wrong.values()]
    worst = sorted(differences, key=lambda item: -float(f"{item.error:.2g}"))
    ratio = _constant_ratio(differences)
    facts = [*_said_to_the_wrapper(known, names), *map(str, worst[:3])]
    if ratio is not None:
        return make_finding(
            "DDP303",
            known.names.subjects(names),
            f"Under the wrapper every one of these gradients is {format_factor(ratio, known.world_size)} times the "
            "average of the ranks' own gradients.",
            steps=some_steps(steps, len(by_step)),
            evidence=facts,
            fix="Let the communication hook return the average over the ranks, or take it off."
            if known.wrapper.comm_hook
            else "Average once: what wraps the model, or a hook on its parameters, scales gradients that are averaged "
            "already, or adds them up.",
        )
    if known.wrap_hooks and known.wrapper.is_ddp:  # a wrapper of one's own reduces by hooks
        hook = known.wrap_hooks[0]
        return make_finding(
            "DDP310",
            known.names.subjects(names),
            f"{hook.description[0].upper()}{hook.description[1:]}, registered while wrapping, is in the way of "
            f"gradients: what the wrapper left in .grad of {counted(len(names), 'parameter')} is not the average of "
            "the ranks' own.",
            steps=some_steps(steps, len(by_step)),
            location=hook.location or known.names.location(names),
            evidence=[*(f"in the way of gradients: {hook}" for hook in known.wrap_hooks[:3]), *facts],
        )
    drifted = list(known.local.differing_buffers)
    again = max(item.wrapper_calls for items in by_step.values() for item in items)
    if known.broadcasts_buffers and again > 1 and drifted:
        return make_finding(
            "DDP311",
            drifted,
            f"DDP broadcasts {join_names(drifted)} before each of {again} forwards, which overwrites what "
            "the backward of "
            "the forwards before it needs.",
            steps=some_steps(steps, len(by_step)),
            location=known.names.location(drifted),
            evidence=facts,
        )
    return make_finding(
        "DDP302",
        known.names.subjects(names),
        f"What the wrapper left in .grad of {counted(len(names), 'parameter')} is not "
        "the average of the ranks' own gradients.",
        steps=some_steps(steps, len(by_step)),
        location=known.names.location(names),
        evidence=facts,
    )


def _constant_ratio(differences: Sequence[Difference]) -> float | None:
    """The factor that all differences share, or None."""
    ratios = [item.ratio for item in differences]
    if not ratios or any(item.residual > max(item.tolerance, LOOSEST_FIT * item.error) for item in differences):
        return None
    middle = sorted(ratios)[len(ratios) // 2]
    spread = max(abs(ratio - middle) for ratio in ratios)
    return middle if spread <= 0.01 * abs(middle) and middle != 0.0 else None


_DEPARTURES = {
    "DDP306": "{count} {differ} between ranks after the optimizer's step {step}, although the gradients were equal.",
    "DDP508": "{ranks} skipped the optimizer's step {step} that the others made: {count} {differ} from there on.",
    "DDP515": "The values of {count} were changed on {ranks} in step {step}, by something else than the optimizer.",
}


def judge_state(
    evidence: Sequence[DdpStepEvidence],
    known: JudgeContext,
    *,
    gradients_differ: bool,
    start: Sequence[Mapping[str, int]] = (),
) -> list[Finding]:
    """DDP306 (508, 515), 214, 215 and 216: parameters, buffers and the rest after the steps.

    Args:
        evidence: Of every rank and step.
        known: What else is known.
        gradients_differ: Whether a finding says so already.
        start: By rank, fingerprints of the parameters before the first step.
    """
    by_step: dict[int, list[DdpStepEvidence]] = {}
    for item in evidence:
        by_step.setdefault(item.step, []).append(item)
    findings = []
    findings += _judge_changed_in_step(by_step, known)
    diverged: dict[str, int] = {}
    drifted: dict[str, int] = {}
    state: dict[str, int] = {}
    for step, items in sorted(by_step.items()):
        for found, picked in (
            (diverged, [item.parameters for item in items]),
            (diverged, [item.optimizer for item in items]),
            (drifted, [item.buffers for item in items]),
            (state, [item.state for item in items]),
        ):
            for name in differing_names(picked):
                found.setdefault(name, step)
    if diverged and not gradients_differ:
        names = [name for name in diverged if not name.startswith("optimizer ")] or list(diverged)
        first = min(diverged.values())
        parted = [name for name in names if diverged[name] == first]
        previous = by_step.get(first - 1, ())
        before = {item.rank: item.parameters for item in previous} or dict(enumerate(start))
        code, ranks, how = judge_departure(by_step[first], before, parted)
        findings.append(
            make_finding(
                code,
                known.names.subjects(names),
                _DEPARTURES[code].format(
                    count=counted(len(names), "parameter"),
                    differ=plural_verb("differs", "differ", names),
                    step=first,
                    ranks=format_ranks(ranks) if ranks else "",
                ),
                ranks=ranks,
                steps=some_steps(range(first, len(by_step)), len(by_step)),
                location=known.names.location(names),
                evidence=[
                    *([how] if how else []),
                    *[f"optimizer state: {name}" for name in diverged if name.startswith("optimizer ")][:3],
                ],
            )
        )
    if drifted:
        names = list(drifted)
        code = "DDP215" if known.broadcasts_buffers else "DDP214"
        them = plural_verb("it", "them", names)
        consequence = (
            f"the next forward overwrites {them} with rank 0's, so what the other ranks computed is discarded"
            if known.broadcasts_buffers
            else f"nothing synchronises {them}, and a checkpoint keeps rank 0's"
        )
        findings.append(
            make_finding(
                code,
                names,
                f"{counted(len(names), 'buffer')} {plural_verb('differs', 'differ', names)} between ranks after step "
                f"{min(drifted.values())}: {consequence}.",
                location=known.names.location(names),
                severity=Severity.WARNING,
                evidence=_why_buffers_differ(names, known),
            )
        )
    late = _lasting(by_step) if known.gradients_differ else []
    if late:
        findings.append(
            make_finding(
                "DDP216",
                late,
                f"{join_names(late)} is made in the forward pass, on each rank with other values, and kept "
                "without being "
                "registered; DDP never synchronises it.",
                evidence=["it stays the same from step to step, and the gradients are not those of the global batch"],
                severity=Severity.ERROR,
            )
        )
    if state:
        findings.append(
            make_finding(
                "DDP216",
                list(state),
                f"{join_names(list(state))} is held by the model without being registered and drifts apart "
                "between ranks; "
                "DDP never synchronises it.",
                location=known.names.location(list(state)),
            )
        )
    return findings


def _why_buffers_differ(names: Sequence[str], known: JudgeContext) -> list[str]:
    """What the wrapper does about buffers, and which of them are statistics of a rank's own samples."""
    facts = []
    if known.wrapper.is_ddp and not known.broadcasts_buffers:
        facts.append(f"{known.wrapper_class or 'DistributedDataParallel'}.broadcast_buffers is False")
    split = [name.rpartition(".") for name in names]
    layers = list(dict.fromkeys(layer or "the module" for layer, _, last in split if last in RUNNING_STATISTICS))
    if layers:
        takes = plural_verb("takes its", "take their", layers)
        facts.append(f"{join_names(layers)} {takes} running statistics from each rank's own samples")
    return facts


def _judge_changed_in_step(by_step: Mapping[int, Sequence[DdpStepEvidence]], known: JudgeContext) -> list[Finding]:
    """DDP515: parameters that part between ranks before the optimizer's first step has touched them."""
    first = min(by_step)
    differing = differing_names([item.parameters_before_optimizer for item in by_step[first]])
    names = [name for name in differing if name not in known.differing_at_start]
    if not names:
        return []
    return [
        make_finding(
            "DDP515",
            known.names.subjects(names),
            f"The forward or backward pass of step {first} sets {join_names(known.names.subjects(names))}, "
            "on each rank to "
            "a value of its own; DDP broadcasts parameters when it is constructed and never again.",
            steps=some_steps((first,), len(by_step)),
            location=known.names.location(names),
            evidence=["equal on all ranks after wrapping, different before the optimizer's step"],
        )
    ]


def _lasting(by_step: Mapping[int, Sequence[DdpStepEvidence]]) -> list[str]:
    """Unregistered tensors that the first step has made, that stay as they are, and that differ between ranks."""
    first, *others = by_step.values()
    names = differing_names([item.new_state for item in first])
    return [
        name
        for name in names
        if others
        and all(
            item.new_state.get(name) == made.new_state[name]
            for items in others
            for item, made in zip(items, first, strict=True)
        )
    ]


_WRAPPER_ERRORS = (
    (
        "mark a variable ready only once",
        "DDP406",
        "DDP took a gradient to be complete, and it came again",
    ),
    ("modified by an inplace operation", "DDP311", "What backward needs was overwritten after the forward pass"),
    (
        "Expected to have finished reduction",
        "DDP302",
        "A parameter that takes part without the wrapper did not under it",
    ),
    (
        "training graph has changed in this iteration",
        "DDP513",
        "The graph is not the one that DDP recorded in the first step",
    ),
)


def judge_wrapper_error(error: RankError, known: JudgeContext) -> list[Finding]:
    """DDP302, 311, 406, 501 and 513 from how the wrapper fails in a step that the unwrapped module has just done."""
    first = error.first
    finished = [item for item in error.results.values() if isinstance(item, DdpStepEvidence)]
    bypassed = [item.rank for item in finished if item.wrapper_calls == 0 and item.inner_calls > 0]
    if bypassed:
        return [
            make_finding(
                "DDP501",
                ("forward",),
                f"On {format_ranks(bypassed)} the loss calls the wrapped module and not the wrapper; the "
                "other ranks wait "
                "for its gradients.",
                ranks=bypassed,
                steps=(finished[0].step,),
                evidence=[failure.message for failure in error.failures],
            )
        ]
    if first is None or first.kind != "raised":
        return []
    whole = f"{first.message}\n{first.traceback}"
    for words, code, message in _WRAPPER_ERRORS:
        if words in whole:
            ranks = tuple(sorted(failure.rank for failure in error.failures if failure.kind == "raised"))
            overwritten = re.search(r"ddpcheck: overwritten in place: (.+)", first.traceback)
            if code == "DDP311" and overwritten is not None:
                held = tuple(overwritten[1].split(", "))
                return [
                    make_finding(
                        code,
                        known.names.subjects(held),
                        f"{'One of ' if len(held) > 1 else ''}{join_names(held, most=4)} was overwritten "
                        "after the forward "
                        f"pass had read it, and backward needs what was there, in {first.place or 'the step'}.",
                        ranks=ranks if len(ranks) < known.world_size else (),
                        location=known.names.location(held),
                        evidence=[first.message],
                    )
                ]
            named = tuple(dict.fromkeys(re.findall(r"parameter (?:name|at index \d+ with name) (\S+)", whole)))
            return [
                make_finding(
                    code,
                    known.names.subjects(named) or ("backward",),
                    f"{message}, in {first.place or 'the step'}.",
                    ranks=ranks if len(ranks) < known.world_size else (),
                    evidence=[first.message],
                )
            ]
    return []
