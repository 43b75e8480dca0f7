"""Judges of gradients of parameters outside of wrappers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ddpcheck.findings.evidence.loop import ModuleChanged
from ddpcheck.findings.evidence.script import OptimizerEnd
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import join_names, one_finding, plural_verb
from ddpcheck.rules.gradients.ddp501_forward_bypassed import explain_by_late_average, explain_by_no_average
from ddpcheck.rules.parameters.ddp111_ignored_parameter import explain_by_missing_group
from ddpcheck.rules.replicas.ddp306_state_diverged import explain_by_divergence
from ddpcheck.trace.unwrapped_params import (
    VALUES_DIVERGED,
    Steps,
    gradients_differ,
    gradients_mostly_differ,
    is_averaged,
    is_equal,
    param_name,
    params_equal,
)


def judge_unsynchronized(
    steps: Sequence[Steps],
    ends: Sequence[OptimizerEnd],
    others: Sequence[Sequence[Steps]] = (),
    *,
    wrapped: bool,
    in_step: bool = False,
    sharded_at: Location | None = None,
    assigned: Sequence[ModuleChanged] = (),
) -> list[Finding]:
    """Detect parameters that no wrapper averages, trained separately per rank (DDP111, 208, 306, 501, 503)."""
    aligned = (step and all(entry.alone.keys() == step[0].alone.keys() for entry in step) for step in steps)
    if len(steps) < 2 or not all(aligned) or not steps[0][0].alone:
        return []
    marks = [tuple(itertools.chain.from_iterable(step[r].marks for step in steps)) for r in range(len(steps[0]))]
    if len(ends) == len(marks):
        marks = [rank_marks + end.marks for rank_marks, end in zip(marks, ends, strict=True)]
    are_equal = [len(set(step_marks)) == 1 for step_marks in zip(*marks, strict=False)]
    if (False, True) in itertools.pairwise(are_equal):
        return explain_by_divergence(steps, are_equal)
    if any(params_equal(later[0]) and not params_equal(earlier[-1]) for earlier, later in itertools.pairwise(others)):
        return []  # averaged between the steps of two optimizers
    equal = {name: [is_equal(step, name) for step in steps] for name in steps[0][0].alone}
    synced = {name for name, by_step in equal.items() if (False, True) in itertools.pairwise(by_step)}
    diverged = [name for name, by_step in equal.items() if by_step[0] and not by_step[-1] and name not in synced]
    local = [name for name in diverged if any(gradients_differ(step, name) for step in steps)]
    if not local or not gradients_mostly_differ(steps):
        return _judge_start(steps)
    names = [*map(param_name, local)]
    if late := next((location for step in steps for entry in step if (location := entry.late_sum_at)), None):
        return explain_by_late_average(names, steps, late)
    if sharded_at is not None:
        return explain_by_missing_group(names, steps, sharded_at, assigned)
    if all("/" in name for name in local):
        return _added_to_wrapper(names, steps)
    averaged_by = "other steps" if synced else "wrapper" if wrapped else "step" if in_step else "nothing"
    return explain_by_no_average(names, steps, averaged_by)


def _added_to_wrapper(names: Sequence[str], steps: Sequence[Steps]) -> list[Finding]:
    """DDP503: parameters of a wrapped module that the wrapper does not know."""
    was, them = plural_verb("was", "were", names), plural_verb("it", "them", names)
    return one_finding(
        "DDP503",
        names,
        f"{join_names(names)} {was} added or unfrozen after wrapping: every rank trains {them} on its own gradients.",
        location=steps[0][0].location,
        evidence=[VALUES_DIVERGED],
        fix="Finish the module first, wrap it last; wrap again after any such change.",
    )


def _judge_start(steps: Sequence[Steps]) -> list[Finding]:
    """DDP208: parameters that always differ between ranks, with averaged gradients."""
    first = steps[0][0]
    unequal = [name for name in first.alone if not any(is_equal(step, name) for step in steps)]
    averaged = [param_name(name) for name in unequal if is_averaged(steps, name)]
    if not averaged:
        return []
    line = first.broadcast_at or first.made
    return one_finding(
        "DDP208",
        averaged,
        f"{join_names(averaged)} {plural_verb('differs', 'differ', averaged)} between ranks from the first step, "
        "and the gradients are averaged: an average over different models is right for none of them.",
        location=line or first.location,
        related={"optimizer steps": first.location},
        evidence=["the gradients are the same on all ranks in every step that was compared, and the values in none"],
        fix="Broadcast the parameters from rank 0 before the first step, or seed their construction equally.",
    )


def reduces_in_step(steps: Sequence[Steps]) -> bool:
    """Check if steps from rank-local gradients move a parameter equally on all ranks."""
    return len(steps) > 1 and any(
        all(is_equal(step, name) and gradients_differ(step, name) for step in steps)
        and steps[-1][0].alone[name] != value
        for name, value in steps[0][0].alone.items()
    )
