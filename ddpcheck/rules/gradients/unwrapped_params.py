"""Judges of gradients of parameters outside of wrappers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ddpcheck.findings.evidence.loop import ModuleChanged
from ddpcheck.findings.evidence.script import OptimizerEnd
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import join_names, make_finding, plural_verb
from ddpcheck.rules.gradients.ddp501_forward_bypassed import explain_by_late_average
from ddpcheck.rules.parameters.ddp111_ignored_parameter import explain_by_missing_group
from ddpcheck.rules.replicas.ddp306_state_diverged import explain_by_divergence
from ddpcheck.trace.unwrapped_params import (
    VALUES_DIVERGED,
    Steps,
    are_near,
    are_scaled,
    gradients_differ,
    gradients_mostly_differ,
    param_name,
    params_equal,
)


def gradients_agree(steps: Steps, name: str) -> bool:
    """Check if an unwrapped parameter has the same nonzero gradient on all ranks."""
    sketches = [entry.gradients[name] for entry in steps if name in entry.gradients]
    return len(sketches) == len(steps) and are_near(sketches) and any(sketches[0])


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
    """Detect parameters that no wrapper averages, trained separately per rank (DDP501, 503, 208)."""
    aligned = [step for step in steps if step and all(entry.alone.keys() == step[0].alone.keys() for entry in step)]
    if len(aligned) < 2 or not aligned[0][0].alone or len(aligned) < len(steps):
        return []
    marks = [tuple(itertools.chain.from_iterable(step[r].marks for step in aligned)) for r in range(len(steps[0]))]
    if len(ends) == len(marks):
        marks = [rank_marks + end.marks for rank_marks, end in zip(marks, ends, strict=True)]
    are_equal = [len(set(step_marks)) == 1 for step_marks in zip(*marks, strict=False)]
    if any(later and not before for before, later in itertools.pairwise(are_equal)):
        return explain_by_divergence(aligned, are_equal)
    if any(params_equal(later[0]) and not params_equal(earlier[-1]) for earlier, later in itertools.pairwise(others)):
        return []  # averaged between the steps of two optimizers
    names = list(aligned[0][0].alone)

    def is_equal(step: Steps, name: str) -> bool:
        return len({entry.alone[name] for entry in step}) == 1

    equal = [name for name in names if is_equal(aligned[0], name)]
    synced = {name for name in names for before, later in itertools.pairwise(aligned) if _syncs(name, before, later)}
    diverged = [name for name in equal if name not in synced and not any(is_equal(step, name) for step in aligned[-1:])]
    local = [name for name in diverged if any(gradients_differ(step, name) for step in aligned)]
    if local and gradients_mostly_differ(aligned):
        is_added = all("/" in name for name in local)  # parameters of a wrapper
        local = [*map(param_name, local)]
        if late := next((location for step in aligned for entry in step if (location := entry.late_sum_at)), None):
            return explain_by_late_average(local, aligned, late)
        if sharded_at is not None:
            return explain_by_missing_group(local, aligned, sharded_at, assigned)
        location = aligned[0][0].made
        cause = f"{plural_verb('is', 'are', local)} averaged by nothing in this script"
        fix = "Wrap the module in DistributedDataParallel, or all_reduce every gradient before the step."
        if is_added:
            location = None
            cause = f"{plural_verb('was', 'were', local)} added or unfrozen after wrapping"
            fix = "Finish the module first, wrap it last; wrap again after any such change."
        elif synced:
            location = None
            cause = f"{plural_verb('is', 'are', local)} never averaged, while the others are, after some steps"
            fix = "Average it with the others."
        elif wrapped:
            cause = f"{plural_verb('is', 'are', local)} in no DistributedDataParallel"
            fix = "Put it into the wrapped module, or into a separate DistributedDataParallel."
        elif in_step:
            location = aligned[-1][0].reduced_at
            local = [name for name in local if all(gradients_differ(step, name) for step in aligned)] or local
            cause = f"{plural_verb('is', 'are', local)} not reduced inside the optimizer's step, where others are"
            fix = "Have the step reduce every gradient, or average it before the step on all ranks."
        elif all(later.collectives > before.collectives for before, later in itertools.pairwise(s[0] for s in aligned)):
            location = aligned[-1][0].reduced_at
            # leave out averaged gradients that a clip with a local norm scaled
            local = [name for name in local if not all(name in are_scaled(local, step) for step in aligned)] or local
            cause = (
                f"{plural_verb('has', 'have', local)} a different gradient on each rank after the collectives of a step"
            )
            fix = (
                "all_reduce every gradient, and change it afterwards in the same way on every rank, including random "
                "numbers."
            )
        return _unwrapped_finding(
            "DDP503" if is_added else "DDP501",
            local,
            f"{join_names(local)} {cause}: every rank trains {plural_verb('it', 'them', local)} on its own gradients.",
            aligned,
            VALUES_DIVERGED,
            fix,
            location,
        )
    unequal = [name for name in names if name not in equal and not any(is_equal(step, name) for step in aligned)]
    sketches = {name: [[entry.gradients.get(name, ()) for entry in step] for step in aligned] for name in unequal}
    averaged = [  # may be zero in the first step if a later layer is zero-initialized
        param_name(name)
        for name, by_step in sketches.items()
        if all(all(row) and are_near(row) for row in by_step) and any(any(row[0]) for row in by_step)
    ]
    if averaged:
        return _unwrapped_finding(
            "DDP208",
            averaged,
            f"{join_names(averaged)} {plural_verb('differs', 'differ', averaged)} between ranks from the first step, "
            "and the gradients are averaged: an average over different models is right for none of them.",
            aligned,
            "the gradients are the same on all ranks in every step that was compared, and the values in none",
            "Broadcast the parameters from rank 0 before the first step, or seed their construction equally.",
            aligned[0][0].broadcast_at or aligned[0][0].made,
        )
    return []


def reduces_in_step(steps: Sequence[Steps]) -> bool:
    """Check if steps from rank-local gradients move a parameter equally on all ranks."""

    def is_equal(name: str) -> bool:
        return all(len({entry.alone.get(name) for entry in step}) == 1 for step in steps)

    return len(steps) > 1 and any(
        is_equal(name) and steps[-1][0].alone[name] != value and all(gradients_differ(step, name) for step in steps)
        for name, value in steps[0][0].alone.items()
    )


def _syncs(name: str, before: Steps, later: Steps) -> bool:
    """Check if an unwrapped parameter goes from different to equal between two steps."""
    first, second = (len({entry.alone[name] for entry in step}) for step in (before, later))
    return second == 1 < first


def _unwrapped_finding(
    code: str, names: Sequence[str], text: str, steps: Sequence[Steps], evidence: str, fix: str, line: Location | None
) -> list[Finding]:
    finding = make_finding(code, names, text, location=steps[0][0].location, evidence=[evidence], fix=fix)
    return [finding.relocated(line, "optimizer steps")]
