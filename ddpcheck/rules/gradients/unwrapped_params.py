"""Judges of gradients of parameters outside of wrappers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ddpcheck.findings.evidence.loop import ModuleChanged
from ddpcheck.findings.evidence.script import OptimizerEnd
from ddpcheck.findings.report import Finding, Location
from ddpcheck.rules.gradients.ddp501_forward_bypassed import explain_by_late_average, explain_by_no_average
from ddpcheck.rules.parameters.ddp111_ignored_parameter import explain_by_missing_group
from ddpcheck.rules.replicas.ddp208_parameter_value import judge_start
from ddpcheck.rules.replicas.ddp306_state_diverged import explain_by_divergence
from ddpcheck.rules.replicas.ddp503_changed_after_wrapping import explain_by_addition
from ddpcheck.trace.unwrapped_params import (
    Steps,
    gradients_differ,
    gradients_mostly_differ,
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
        return judge_start(steps)
    names = [*map(param_name, local)]
    if late := next((location for step in steps for entry in step if (location := entry.late_sum_at)), None):
        return explain_by_late_average(names, steps, late)
    if sharded_at is not None:
        return explain_by_missing_group(names, steps, sharded_at, assigned)
    if all("/" in name for name in local):
        return explain_by_addition(names, steps)
    averaged_by = "other steps" if synced else "wrapper" if wrapped else "step" if in_step else "nothing"
    return explain_by_no_average(names, steps, averaged_by)


def reduces_in_step(steps: Sequence[Steps]) -> bool:
    """Check if steps from rank-local gradients move a parameter equally on all ranks."""
    return len(steps) > 1 and any(
        all(is_equal(step, name) and gradients_differ(step, name) for step in steps)
        and steps[-1][0].alone[name] != value
        for name, value in steps[0][0].alone.items()
    )
