"""DDP306, 508, 515, 521, 214, 215 and 216: parameters, buffers and other state that diverge between ranks.

DDP521 is the opposite: equal shards on ranks that should have different shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ddpcheck.findings.evidence.steps import DdpStepEvidence
from ddpcheck.findings.report import Finding, Severity
from ddpcheck.findings.wording import counted, format_ranks, join_names, one_finding, plural_verb, unless_all
from ddpcheck.judge.judge_context import JudgeContext, group_by_step
from ddpcheck.judge.replicas.descriptions import differing_names
from ddpcheck.stream.entries import ReplicaCaptured


def judge_repeated(replicas: Sequence[ReplicaCaptured]) -> list[Finding]:
    """DDP521: ranks have equal shards of parameters that should differ.

    Reported only if all shards with non-constant values are equal: zeros and ones are equal by design, and a single
    parameter may consist of equal blocks.
    """
    count = len({replica.shard for replica in replicas})
    names = list(dict.fromkeys(name for replica in replicas for name in replica.parts))
    values = [replica.state.values.parameters for replica in replicas]
    if count < 2 or not names or any(len({rank_values.get(name) for rank_values in values}) > 1 for name in names):
        return []
    return one_finding(
        "DDP521",
        names,
        f"Every rank has the same shard of {counted(len(names), 'parameter')}, where each should have a different "
        f"part: {plural_verb('it is', 'they are', names)} one part, {count} times.",
        steps=(replicas[0].step,),
        evidence=[
            "a file with the shards of one rank that every rank loads leaves them so, and so do values that each "
            "rank draws for its shards from the same seed"
        ],
    )


RUNNING_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Names of the buffers of torch's normalisation layers."""


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """State of the ranks after each step."""

    by_step: Mapping[int, Sequence[DdpStepEvidence]]  # evidence of all ranks by step, in order
    start: Sequence[Mapping[str, int]]  # parameter fingerprints before the first step, by rank
    known: JudgeContext  # other facts of the check

    def first_steps(self, pick: Callable[[DdpStepEvidence], Mapping[str, int]]) -> dict[str, int]:
        """Return names whose fingerprints differ between ranks, with the first differing step."""
        steps: dict[str, int] = {}
        for step, items in self.by_step.items():
            if items[0].apart:
                continue
            for name in differing_names([pick(item) for item in items]):
                steps.setdefault(name, step)
        return steps


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


def judge_parameters_before_optimizer(facts: ReplicaFacts) -> list[Finding]:
    """DDP515: parameters that differ between ranks before the optimizer's first step."""
    first, known = min(facts.by_step), facts.known
    mismatches = differing_names([item.parameters_before_optimizer for item in facts.by_step[first]])
    names = [name for name in mismatches if name not in known.differing_at_start]
    if not names:
        return []
    return known.names.one_finding(
        "DDP515",
        names,
        f"The forward or backward pass of step {first} sets {join_names(known.names.subjects(names))} to "
        "values that differ between ranks; DDP broadcasts parameters when it is constructed and never again.",
        steps=unless_all((first,), len(facts.by_step)),
        evidence=["equal on all ranks after wrapping, different before the optimizer's step"],
    )


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


def judge_never_averaged(facts: ReplicaFacts) -> list[Finding]:
    """DDP306: ranks train apart under a hook (post-local SGD), and nothing averages parameters.

    Not reported for optimizers outside torch.optim, which may average in a step that was not run.
    """
    local_steps = {step: items for step, items in facts.by_step.items() if items[0].apart}
    if not local_steps or not facts.known.plain_optimizer or steps_that_end_alike(local_steps):
        return []
    last = local_steps[max(local_steps)]
    names = list(differing_names([item.parameters for item in last]))
    return facts.known.names.one_finding(
        "DDP306",
        names,
        never_averaged(names, len(local_steps), min(local_steps), facts.known.wrapper.comm_hook),
        steps=unless_all(sorted(local_steps), len(facts.by_step)),
        fix=AVERAGE_THEM,
    )


AVERAGE_THEM = (
    "Call average_parameters of a PeriodicModelAverager after each step of the optimizer, or wrap the optimizer in "
    "PostLocalSGDOptimizer."
)


def never_averaged(names: Sequence[str], steps: int, first: int, hook: str) -> str:
    """Describe parameters that differ after each of `steps` steps starting at `first`."""
    reason = f"{hook} averages gradients over fewer ranks" if hook else "no_sync leaves each rank its own gradients"
    return (
        f"{counted(len(names), 'parameter')} {plural_verb('differs', 'differ', names)} between ranks after each of "
        f"{counted(steps, 'step')} from step {first} on, in which {reason}: nothing averages the parameters."
    )


def steps_that_end_alike(by_step: Mapping[int, Sequence[DdpStepEvidence]]) -> list[int]:
    """Return steps with equal parameters on all ranks before the next update."""
    after = {step for step, items in by_step.items() if not differing_names([item.parameters for item in items])}
    before = {
        step - 1
        for step, items in by_step.items()
        if not differing_names([item.parameters_before_optimizer for item in items])
    }
    return sorted(after | (before & by_step.keys()))


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


def judge_new_state(facts: ReplicaFacts) -> list[Finding]:
    """DDP216: unregistered tensors of the first step that differ between ranks and never change.

    Judged only if gradients differ from the global batch: a cache of a rank's own samples is harmless.
    """
    first, *later = facts.by_step.values()
    names = [
        name
        for name in differing_names([item.new_state for item in first])
        if later
        and all(
            item.new_state.get(name) == first_item.new_state[name]
            for items in later
            for item, first_item in zip(items, first, strict=True)
        )
    ]
    if not names:
        return []
    return one_finding(
        "DDP216",
        names,
        f"{join_names(names)} is made in the forward pass, with different values on each rank, and kept without "
        "being registered; DDP never synchronises it.",
        evidence=["it stays the same from step to step, and the gradients are not those of the global batch"],
        severity=Severity.ERROR,
    )


def judge_unregistered_state(facts: ReplicaFacts) -> list[Finding]:
    """DDP216: unregistered tensors from before the first step that diverge between ranks."""
    names = list(facts.first_steps(lambda item: item.state))
    if not names:
        return []
    return one_finding(
        "DDP216",
        names,
        f"{join_names(names)} is held by the model without being registered and diverges between ranks; DDP never "
        "synchronises it.",
        location=facts.known.names.location(names),
    )
