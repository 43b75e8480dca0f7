"""DDP111, 208, 501, 503: optimizer parameters that no wrapper averages, trained separately per rank.

Also comparisons of optimizer inputs between ranks, shared by other judges.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from statistics import median

from ddpcheck.findings.evidence.gradients import LEAST, relative
from ddpcheck.findings.evidence.loop import GradientsTaken, ModuleChanged
from ddpcheck.findings.evidence.script import OptimizerEnd, OptimizerStep
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import counted, join_names, make_finding, minority_ranks, one_finding, plural_verb

_TOLERANCE = 1e-3  # relative rounding tolerance of norms and sketches

Steps = Sequence[OptimizerStep]  # an optimizer before one step, by rank


def differing(values: Sequence[Mapping[str, float]]) -> list[str]:
    """Return the names whose values differ between ranks beyond rounding."""
    names = list(dict.fromkeys(name for rank_values in values for name in rank_values))
    return [name for name in names if not are_close([rank_values.get(name) for rank_values in values])]


def are_close(values: Sequence[float | None]) -> bool:
    """Check if values agree within rounding, or one has overflowed."""
    known = [value for value in values if value is not None]
    if any(not math.isfinite(value) for value in known):
        return True  # GradScaler skips the step on overflow
    if len(known) < len(values):
        return not known or max(known) <= LEAST
    return relative(max(known) - min(known), max(known)) <= _TOLERANCE


def gradients_differ(steps: Steps, name: str) -> bool:
    """Check if an unwrapped parameter has different gradients on the ranks."""
    sketches = [entry.gradients[name] for entry in steps if name in entry.gradients]
    return len(sketches) == len(steps) and not are_near(sketches)


def gradients_agree(steps: Steps, name: str) -> bool:
    """Check if an unwrapped parameter has the same nonzero gradient on all ranks."""
    sketches = [entry.gradients[name] for entry in steps if name in entry.gradients]
    return len(sketches) == len(steps) and are_near(sketches) and any(sketches[0])


def are_near(sketches: Sequence[Sequence[float]]) -> bool:
    """Check if sketches are of the same gradient."""
    first, *others = sketches
    scale = max(math.hypot(*sketch) for sketch in sketches)
    return all(relative(math.dist(first, sketch), scale) <= _TOLERANCE for sketch in others)


def are_scaled(names: Sequence[str], steps: Steps) -> list[str]:
    """Return parameters whose gradients differ only by the rank's usual factor."""
    sketches = {name: [entry.gradients.get(name, ()) for entry in steps] for name in names}
    norms = {name: [math.hypot(*sketch) for sketch in by_rank] for name, by_rank in sketches.items()}
    factors = [[norm / by_rank[0] for norm in by_rank] for by_rank in norms.values() if min(by_rank) > LEAST]
    usual = [*map(median, zip(*factors, strict=True))]
    return [
        name
        for name, by_rank in sketches.items()
        if usual and are_near([[x / factor for x in sketch] for sketch, factor in zip(by_rank, usual, strict=True)])
    ]


def all_gradients_agree(steps: Steps) -> bool:
    """Check if all gradients of an optimizer step agree between ranks."""
    return bool(steps[0].norms or steps[0].gradients) and not any_gradient_differs(steps)


def any_gradient_differs(steps: Steps) -> bool:
    """Check if any gradient of an optimizer step differs between ranks."""
    differs = any(gradients_differ(steps, name) for name in steps[0].alone)
    return differs or bool(differing([entry.norms for entry in steps]))


# Words


def minority_of(values: Sequence[Mapping[str, float]], names: Sequence[str]) -> tuple[int, ...]:
    """Return the ranks that differ from most; empty for two ranks."""
    if len(values) < 3:
        return ()
    return minority_ranks([tuple(_rounded(rank_values.get(name)) for name in names) for rank_values in values])


def _rounded(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"


def spelled(value: float | None, nothing: str = "no gradient") -> str:
    """Format a norm."""
    return nothing if value is None else f"{value:.6g}"


def short(name: str) -> str:
    """Strip the wrapper number from a parameter name."""
    return name.partition("/")[2] or name


_DIVERGED = "the values were the same on all ranks in the first step of the optimizer, and are not in the last"
_GAP_FACTOR = 3
_FEWEST_TAKEN = 3  # recorded calls of torch.autograd.grad


def judge_alone(
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
        return _parted_for_good(aligned, are_equal)
    if any(_params_equal(later[0]) and not _params_equal(earlier[-1]) for earlier, later in itertools.pairwise(others)):
        return []  # averaged between the steps of two optimizers
    names = list(aligned[0][0].alone)

    def is_equal(step: Steps, name: str) -> bool:
        return len({entry.alone[name] for entry in step}) == 1

    equal = [name for name in names if is_equal(aligned[0], name)]
    synced = {name for name in names for before, later in itertools.pairwise(aligned) if _syncs(name, before, later)}
    diverged = [name for name in equal if name not in synced and not any(is_equal(step, name) for step in aligned[-1:])]
    local = [name for name in diverged if any(gradients_differ(step, name) for step in aligned)]
    if local and _mostly_differ(aligned):
        is_added = all("/" in name for name in local)  # parameters of a wrapper
        local = [*map(short, local)]
        if late := next((location for step in aligned for entry in step if (location := entry.late_sum_at)), None):
            return _averaged_late(local, aligned, late)
        if sharded_at is not None:
            return _in_no_group(local, aligned, sharded_at, assigned)
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
            _DIVERGED,
            fix,
            location,
        )
    unequal = [name for name in names if name not in equal and not any(is_equal(step, name) for step in aligned)]
    sketches = {name: [[entry.gradients.get(name, ()) for entry in step] for step in aligned] for name in unequal}
    averaged = [  # may be zero in the first step if a later layer is zero-initialized
        short(name)
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


def _parted_for_good(steps: Sequence[Steps], are_equal: Sequence[bool]) -> list[Finding]:
    """Detect periodically averaged parameters whose averaging stops (DDP306)."""
    equal_at = [index for index, is_equal in enumerate(are_equal) if is_equal]
    longest = max(later - before for before, later in itertools.pairwise([0, *equal_at]))
    last = steps[-1]
    names = [short(name) for name in last[0].alone if len({entry.alone[name] for entry in last}) > 1]
    if len(are_equal) - equal_at[-1] <= _GAP_FACTOR * longest or not names:
        return []
    return one_finding(
        "DDP306",
        names,
        f"{join_names(names)} {plural_verb('was', 'were', names)} the same on every rank again after at most "
        f"{counted(longest, 'step')} of the optimizer, and {plural_verb('is', 'are', names)} not any more since step "
        f"{equal_at[-1]}.",
        location=last[0].location,
        evidence=[f"{counted(len(are_equal) - equal_at[-1], 'step')} went by since then"],
        fix="Average the parameters until the training ends. If ranks keep values of the last average, to "
        "start the next average from, update these on all ranks.",
    )


def _syncs(name: str, before: Steps, later: Steps) -> bool:
    """Check if an unwrapped parameter goes from different to equal between two steps."""
    first, second = (len({entry.alone[name] for entry in step}) for step in (before, later))
    return second == 1 < first


def _in_no_group(
    names: Sequence[str], steps: Sequence[Steps], sharded_at: Location, changes: Sequence[ModuleChanged]
) -> list[Finding]:
    matches = [mod for mod in changes if all(f".{name}".endswith(tuple(f".{n}" for n in mod.names)) for name in names)]
    change = next((mod for mod in matches if mod.location is not None), None)
    assignment = "" if change is None else f"{change.how} is assigned there, and replaces a sharded module"
    return one_finding(
        "DDP111",
        names,
        f"{join_names(names)} {plural_verb('is', 'are', names)} trained, and no group of fully_shard holds "
        f"{plural_verb('it', 'them', names)}: every rank trains {plural_verb('it', 'them', names)} on its own "
        "gradients.",
        location=sharded_at if change is None else change.location,
        evidence=[assignment, _DIVERGED],
        related={"optimizer steps": steps[0][0].location},
        fix="Call fully_shard on the root module as well, last, and without these in ignored_params."
        if change is None
        else "Replace modules before fully_shard.",
    )


def _averaged_late(names: Sequence[str], steps: Sequence[Steps], location: Location) -> list[Finding]:
    return one_finding(
        "DDP501",
        names,
        f"The gradients of {join_names(names)} are all_reduced only after the optimizer's step that uses them: every "
        "rank steps with its own.",
        location=location,
        evidence=[_DIVERGED],
        related={"optimizer steps": steps[0][0].location},
        fix="all_reduce every gradient before the optimizer's step, or wrap the module in DistributedDataParallel.",
    )


def judge_taken(calls: Sequence[Sequence[GradientsTaken]]) -> list[Finding]:
    """Detect wrapped parameters updated by unaveraged `torch.autograd.grad` gradients (DDP501).

    Parameters are equal on all ranks at the first call and diverge later, so nothing averages gradients or parameters.
    `calls` has those on one wrapper, by rank.
    """
    rows = list(zip(*calls, strict=False))
    sizes = {len(rank_calls) for rank_calls in calls}
    if len(rows) < _FEWEST_TAKEN or sizes != {len(rows)} or any(len({call.count for call in row}) > 1 for row in rows):
        return []
    if any(call.reductions or call.put_off for row in rows for call in row):
        return []  # the wrapper averages backward passes, now or later
    marks = zip(
        *(tuple(itertools.chain.from_iterable(call.marks for call in rank_calls)) for rank_calls in calls), strict=False
    )
    are_equal = [len(set(row)) == 1 for row in marks]
    names = [name for name in rows[0][0].parameters if len({call.parameters.get(name) for call in rows[0]}) == 1]
    diverged = [name for name in names if len({call.parameters.get(name) for call in rows[-1]}) > 1]
    unequal = [[name for name in diverged if len({call.parameters.get(name) for call in row}) > 1] for row in rows]
    if any(later and not before for before, later in itertools.pairwise(are_equal)) or not diverged:
        return []
    if any(before and not later for before, later in itertools.pairwise(unequal)):
        return []
    local = [row for row in rows if any(_differ([call.gradients.get(name, ()) for call in row]) for name in diverged)]
    known = [row for row in rows if row[0].gradients]
    if 2 * len(local) <= len(known):
        return []
    first = rows[0][0]
    return one_finding(
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


def judge_reduced_alike(steps: Sequence[Steps], line: Location | None = None) -> list[Finding]:
    """Detect gradients equal on every rank before each average by hand (DDP505)."""
    known = [step for step in steps if all(entry.given for entry in step)]
    inputs = [{entry.given for entry in step} for step in known]
    if len(known) < _FEWEST_TAKEN or max(map(len, inputs)) > 1 or len(set.union(*inputs)) < 2 or len(known[0]) < 2:
        return []
    return one_finding(
        "DDP505",
        ("gradients",),
        "Every rank has the same gradients even before they are averaged: the ranks use the same samples and the same "
        "random numbers, so together they do the work of one.",
        location=line or known[0][0].location,
        evidence=[f"their bits are equal on all ranks in all {len(known)} steps that were compared"],
    )


def judge_parts_reduced(steps: Sequence[Steps]) -> list[Finding]:
    """Detect all-reduced gradients of rank-local parameters (DDP521)."""
    known = [step for step in steps if all(entry.parts_reduced for entry in step)]
    if len(known) < 2 or len(known[0]) < 2:
        return []
    first = known[0][0]
    names = [*map(short, first.parts_reduced)]
    return one_finding(
        "DDP521",
        names,
        f"Each rank has its own {join_names(names)}, and the gradients are all_reduced over all ranks: each of these "
        "rank-local parts is trained with the gradients of the others.",
        location=first.parts_reduced_at or first.location,
        evidence=["they reach the loss through an all_to_all only, so each already has its gradient from all ranks"],
        related={"optimizer steps": first.location},
        fix="Reduce the gradients of replicas only. Rank-local parameters need no all_reduce: divide their gradients "
        "by the world size if those of the replicas are averaged.",
    )


def _differ(sketches: Sequence[Sequence[float]]) -> bool:
    return all(sketches) and not are_near(sketches)


def are_local(steps: Sequence[Steps]) -> bool:
    """Check if an optimizer holds only unwrapped parameters with rank-local gradients."""
    return not steps[0][0].held and _mostly_differ(steps)


def are_apart(optimizers: Sequence[Sequence[Steps]]) -> bool:
    """Check if each rank trains a separate model: different initial values and gradients."""
    known = [steps for steps in optimizers if steps]
    return bool(known) and all(are_local(steps) and not _params_equal(steps[0]) for steps in known)


def _params_equal(steps: Steps) -> bool:
    """Check if all unwrapped parameters are equal on all ranks."""
    return all(entry.alone == steps[0].alone for entry in steps)


def _unwrapped_finding(
    code: str, names: Sequence[str], text: str, steps: Sequence[Steps], evidence: str, fix: str, line: Location | None
) -> list[Finding]:
    finding = make_finding(code, names, text, location=steps[0][0].location, evidence=[evidence], fix=fix)
    return [finding.relocated(line, "optimizer steps")]


def _mostly_differ(steps: Sequence[Steps]) -> bool:
    """Check if gradients differ between ranks in most of the steps."""
    names = steps[0][0].alone
    differs = [any(gradients_differ(step, name) for name in names) for step in steps]
    return sum(differs) * 2 > len(steps)
