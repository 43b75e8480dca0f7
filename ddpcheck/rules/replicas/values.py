"""Judges of parameter and buffer values after a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddpcheck.findings.evidence.steps import DdpStepEvidence
from ddpcheck.findings.report import Finding, Severity
from ddpcheck.findings.wording import counted, format_ranks, join_names, one_finding, plural_verb, unless_all
from ddpcheck.rules.replicas.ddp216_unregistered_state import judge_new_state, judge_unregistered_state
from ddpcheck.rules.replicas.ddp306_state_diverged import judge_never_averaged
from ddpcheck.rules.replicas.ddp515_values_changed_after_wrapping import judge_parameters_before_optimizer
from ddpcheck.trace.check_context import JudgeContext, group_by_step
from ddpcheck.trace.replicas import RUNNING_STATISTICS, ReplicaFacts


def judge_state(
    evidence: Sequence[DdpStepEvidence],
    known: JudgeContext,
    *,
    gradients_differ: bool,
    start: Sequence[Mapping[str, int]] = (),
) -> list[Finding]:
    """DDP306 (508, 515), 214, 215 and 216: state that diverges between ranks in the steps.

    Differing gradients (`gradients_differ`) already explain diverged parameters.
    """
    facts = ReplicaFacts(group_by_step(evidence), start, known)
    return [
        *judge_parameters_before_optimizer(facts),
        *([] if gradients_differ else judge_diverged_parameters(facts) or judge_never_averaged(facts)),
        *judge_buffers(facts),
        *(judge_new_state(facts) if known.gradients_differ else []),
        *judge_unregistered_state(facts),
    ]


_DEPARTURES = {
    "DDP306": "{count} {differ} between ranks after the optimizer's step {step}, although the gradients were equal.",
    "DDP508": "{ranks} skipped the optimizer's step {step} that the others made: {count} {differ} from there on.",
    "DDP515": "The values of {count} were changed on {ranks} in step {step}, by something else than the optimizer.",
}


def judge_diverged_parameters(facts: ReplicaFacts) -> list[Finding]:
    """DDP306, 508 or 515: parameters or optimizer state that diverge despite equal gradients."""
    parameters = facts.first_steps(lambda item: item.parameters)
    optimizer = facts.first_steps(lambda item: item.optimizer)
    diverged = parameters or optimizer
    if not diverged:
        return []
    first = min([*parameters.values(), *optimizer.values()])
    of_first = [name for name, step in diverged.items() if step == first]
    before = {item.rank: item.parameters for item in facts.by_step.get(first - 1, ())} or dict(enumerate(facts.start))
    code, ranks, reason = judge_departure(facts.by_step[first], before, of_first)
    count = len(facts.by_step)
    return facts.known.names.one_finding(
        code,
        list(diverged),
        _DEPARTURES[code].format(
            count=counted(len(diverged), "parameter"),
            differ=plural_verb("differs", "differ", list(diverged)),
            step=first,
            ranks=format_ranks(ranks) if ranks else "",
        ),
        ranks=ranks,
        steps=unless_all(range(first, count), count),
        evidence=[reason, *[f"optimizer state: {name}" for name in optimizer][:3]],
    )


def judge_departure(
    items: Sequence[DdpStepEvidence], previous: Mapping[int, Mapping[str, int]], names: Sequence[str]
) -> tuple[str, tuple[int, ...], str]:
    """Find why parameters diverge in a step: code, ranks and a sentence."""
    after = {item.rank: item.parameters_after_backward for item in items}
    names = [name for name in names if all(name in now for now in after.values())]
    if not names or any(len({values.get(name) for values in previous.values()}) > 1 for name in names):
        return "DDP306", (), ""  # different before the step
    if any(len({now[name] for now in after.values()}) > 1 for name in names):
        before = {rank: {**now, **previous.get(rank, {})} for rank, now in after.items()}
        changed = tuple(rank for rank, now in after.items() if any(now[n] != before[rank][n] for n in names))
        if 0 < len(changed) < len(items):
            return "DDP515", changed, f"changed on {format_ranks(changed)} alone, before the optimizer's step"
        return "DDP306", (), "changed in the forward pass, on each rank differently, and not by the optimizer"
    skipped = tuple(item.rank for item in items if all(after[item.rank][n] == item.parameters.get(n) for n in names))
    if 0 < len(skipped) < len(items):
        return "DDP508", skipped, f"did not change on {format_ranks(skipped)}, where the optimizer's step was skipped"
    return "DDP306", (), ""


def judge_buffers(facts: ReplicaFacts) -> list[Finding]:
    """DDP214 or 215: buffers that differ between ranks; 215 if the wrapper broadcasts buffers."""
    known, mismatches = facts.known, facts.first_steps(lambda item: item.buffers)
    if not mismatches:
        return []
    names = list(mismatches)
    them = plural_verb("it", "them", names)
    saved = "" if known.wrapper.not_saved.issuperset(names) else ", and a checkpoint keeps rank 0's"
    consequence = (
        f"the next forward overwrites {them} with rank 0's, so the values of the other ranks are discarded"
        if known.broadcasts_buffers
        else f"nothing synchronises {them}{saved}"
    )
    return one_finding(
        "DDP215" if known.broadcasts_buffers else "DDP214",
        names,
        f"{counted(len(names), 'buffer')} {plural_verb('differs', 'differ', names)} between ranks after step "
        f"{min(mismatches.values())}: {consequence}.",
        location=known.names.location(names),
        severity=Severity.WARNING,
        evidence=_why_buffers_differ(names, known),
    )


def _why_buffers_differ(names: Sequence[str], known: JudgeContext) -> list[str]:
    """Explain differing buffers by the wrapper's option and per-rank running statistics."""
    facts = []
    if known.wrapper.is_ddp and not known.broadcasts_buffers:
        facts.append(f"{known.wrapper_class or 'DistributedDataParallel'}.broadcast_buffers is False")
    if left_out := [name for name in names if name in known.wrapper.not_saved]:
        facts.append(f"a state dict leaves out {join_names(left_out)} (persistent=False)")
    split = [name.rpartition(".") for name in names]
    layers = list(dict.fromkeys(layer or "the module" for layer, _, last in split if last in RUNNING_STATISTICS))
    if layers:
        takes = plural_verb("takes its", "take their", layers)
        facts.append(f"{join_names(layers)} {takes} running statistics from each rank's own samples")
    return facts
