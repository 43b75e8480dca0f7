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
    names = list(dict.fromkeys(name for of_rank in values for name in of_rank))
    return [name for name in names if not are_close([of_rank.get(name) for of_rank in values])]


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
    there = [one.gradients[name] for one in steps if name in one.gradients]
    return len(there) == len(steps) and not are_near(there)


def gradients_agree(steps: Steps, name: str) -> bool:
    """Check if an unwrapped parameter has the same nonzero gradient on all ranks."""
    there = [one.gradients[name] for one in steps if name in one.gradients]
    return len(there) == len(steps) and are_near(there) and any(there[0])


def are_near(sketches: Sequence[Sequence[float]]) -> bool:
    """Check if sketches are of the same gradient."""
    first, *others = sketches
    scale = max(math.hypot(*sketch) for sketch in sketches)
    return all(relative(math.dist(first, other), scale) <= _TOLERANCE for other in others)


def are_scaled(names: Sequence[str], one: Steps) -> list[str]:
    """Return parameters whose gradients differ only by the rank's usual factor."""
    sketches = {name: [each.gradients.get(name, ()) for each in one] for name in names}
    norms = {name: [math.hypot(*sketch) for sketch in of_ranks] for name, of_ranks in sketches.items()}
    factors = [[norm / of_ranks[0] for norm in of_ranks] for of_ranks in norms.values() if min(of_ranks) > LEAST]
    usual = [*map(median, zip(*factors, strict=True))]
    return [
        name
        for name, of_ranks in sketches.items()
        if usual and are_near([[x / factor for x in own] for own, factor in zip(of_ranks, usual, strict=True)])
    ]


def all_gradients_agree(steps: Steps) -> bool:
    """Check if all gradients of an optimizer step agree between ranks."""
    return bool(steps[0].norms or steps[0].gradients) and not any_gradient_differs(steps)


def any_gradient_differs(steps: Steps) -> bool:
    """Check if any gradient of an optimizer step differs between ranks."""
    named = any(gradients_differ(steps, name) for name in steps[0].alone)
    return named or bool(differing([one.norms for one in steps]))


# Words


def minority_of(values: Sequence[Mapping[str, float]], names: Sequence[str]) -> tuple[int, ...]:
    """Return the ranks that differ from most; empty for two ranks."""
    if len(values) < 3:
        return ()
    return minority_ranks([tuple(_rounded(of_rank.get(name)) for name in names) for of_rank in values])


def _rounded(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"


def spelled(value: float | None, nothing: str = "no gradient") -> str:
    """Format a norm."""
    return nothing if value is None else f"{value:.6g}"


def short(name: str) -> str:
    """Strip the wrapper number from a parameter name."""
    return name.partition("/")[2] or name


_PARTED = "the values were the same on all ranks in the first step of the optimizer, and are not in the last"
_AS_LONG = 3
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
    of_ranks = [one for one in steps if one and all(each.alone.keys() == one[0].alone.keys() for each in one)]
    if len(of_ranks) < 2 or not of_ranks[0][0].alone or len(of_ranks) < len(steps):
        return []
    marks = [tuple(itertools.chain.from_iterable(one[rank].marks for one in of_ranks)) for rank in range(len(steps[0]))]
    if len(ends) == len(marks):
        marks = [of_rank + end.marks for of_rank, end in zip(marks, ends, strict=True)]
    together = [len(set(at)) == 1 for at in zip(*marks, strict=False)]
    if any(later and not before for before, later in itertools.pairwise(together)):
        return _parted_for_good(of_ranks, together)
    if any(_are_alike(later[0]) and not _are_alike(one[-1]) for one, later in itertools.pairwise(others)):
        return []  # averaged between the steps of two optimizers
    names = list(of_ranks[0][0].alone)

    def alike(one: Steps, name: str) -> bool:
        return len({each.alone[name] for each in one}) == 1

    began = [name for name in names if alike(of_ranks[0], name)]
    met = {name for name in names for one, later in itertools.pairwise(of_ranks) if _meets(name, one, later)}
    apart = [name for name in began if name not in met and not any(alike(one, name) for one in of_ranks[-1:])]
    local = [name for name in apart if any(gradients_differ(one, name) for one in of_ranks)]
    if local and _few_agree(of_ranks):
        later = all("/" in name for name in local)  # parameters of a wrapper
        local = [*map(short, local)]
        if late := next((at for one in of_ranks for each in one if (at := each.late_sum_at)), None):
            return _averaged_late(local, of_ranks, late)
        if sharded_at is not None:
            return _in_no_group(local, of_ranks, sharded_at, assigned)
        at = of_ranks[0][0].made
        how = f"{plural_verb('is', 'are', local)} averaged by nothing in this script"
        fix = "Wrap the module in DistributedDataParallel, or all_reduce every gradient before the step."
        if later:
            at = None
            how = f"{plural_verb('was', 'were', local)} added or unfrozen after wrapping"
            fix = "Finish the module first, wrap it last; wrap again after any such change."
        elif met:
            at = None
            how = f"{plural_verb('is', 'are', local)} never averaged, while the others are, after some steps"
            fix = "Average it with the others."
        elif wrapped:
            how = f"{plural_verb('is', 'are', local)} in no DistributedDataParallel"
            fix = "Put it into the wrapped module, or into a separate DistributedDataParallel."
        elif in_step:
            at = of_ranks[-1][0].reduced_at
            local = [name for name in local if all(gradients_differ(one, name) for one in of_ranks)] or local
            how = f"{plural_verb('is', 'are', local)} not reduced inside the optimizer's step, where others are"
            fix = "Have the step reduce every gradient, or average it before the step on all ranks."
        elif all(one.collectives > before.collectives for before, one in itertools.pairwise(of[0] for of in of_ranks)):
            at = of_ranks[-1][0].reduced_at
            # leave out averaged gradients that a clip with a local norm scaled
            local = [name for name in local if not all(name in are_scaled(local, one) for one in of_ranks)] or local
            how = (
                f"{plural_verb('has', 'have', local)} a different gradient on each rank after the collectives of a step"
            )
            fix = (
                "all_reduce every gradient, and change it afterwards in the same way on every rank, including random "
                "numbers."
            )
        return _alone(
            "DDP503" if later else "DDP501",
            local,
            f"{join_names(local)} {how}: every rank trains {plural_verb('it', 'them', local)} on its own gradients.",
            of_ranks,
            _PARTED,
            fix,
            at,
        )
    other = [name for name in names if name not in began and not any(alike(one, name) for one in of_ranks)]
    given = {name: [[each.gradients.get(name, ()) for each in one] for one in of_ranks] for name in other}
    averaged = [  # may be zero in the first step if a later layer is zero-initialized
        short(name)
        for name, of_steps in given.items()
        if all(all(there) and are_near(there) for there in of_steps) and any(any(there[0]) for there in of_steps)
    ]
    if averaged:
        return _alone(
            "DDP208",
            averaged,
            f"{join_names(averaged)} {plural_verb('differs', 'differ', averaged)} between ranks from the first step, "
            "and the gradients are averaged: an average over different models is right for none of them.",
            of_ranks,
            "the gradients are the same on all ranks in every step that was compared, and the values in none",
            "Broadcast the parameters from rank 0 before the first step, or seed their construction equally.",
            of_ranks[0][0].broadcast_at or of_ranks[0][0].made,
        )
    return []


def reduces_in_step(steps: Sequence[Steps]) -> bool:
    """Check if steps from rank-local gradients move a parameter equally on all ranks."""

    def alike(name: str) -> bool:
        return all(len({each.alone.get(name) for each in one}) == 1 for one in steps)

    return len(steps) > 1 and any(
        alike(name) and steps[-1][0].alone[name] != value and all(gradients_differ(one, name) for one in steps)
        for name, value in steps[0][0].alone.items()
    )


def _parted_for_good(steps: Sequence[Steps], together: Sequence[bool]) -> list[Finding]:
    """Detect periodically averaged parameters whose averaging stops (DDP306)."""
    met = [place for place, alike in enumerate(together) if alike]
    longest = max(later - before for before, later in itertools.pairwise([0, *met]))
    last = steps[-1]
    names = [short(name) for name in last[0].alone if len({one.alone[name] for one in last}) > 1]
    if len(together) - met[-1] <= _AS_LONG * longest or not names:
        return []
    return one_finding(
        "DDP306",
        names,
        f"{join_names(names)} {plural_verb('was', 'were', names)} the same on every rank again after at most "
        f"{counted(longest, 'step')} of the optimizer, and {plural_verb('is', 'are', names)} not any more since step "
        f"{met[-1]}.",
        location=last[0].location,
        evidence=[f"{counted(len(together) - met[-1], 'step')} went by since then"],
        fix="Average the parameters until the training ends. If ranks keep values of the last average, to "
        "start the next average from, update these on all ranks.",
    )


def _meets(name: str, before: Steps, later: Steps) -> bool:
    """Check if an unwrapped parameter goes from different to equal between two steps."""
    first, second = (len({each.alone[name] for each in one}) for one in (before, later))
    return second == 1 < first


def _in_no_group(
    names: Sequence[str], steps: Sequence[Steps], sharded_at: Location, assigned: Sequence[ModuleChanged]
) -> list[Finding]:
    theirs = [one for one in assigned if all(f".{name}".endswith(tuple(f".{n}" for n in one.names)) for name in names)]
    by = next((one for one in theirs if one.location is not None), None)
    assignment = "" if by is None else f"{by.how} is assigned there, and replaces a sharded module"
    return one_finding(
        "DDP111",
        names,
        f"{join_names(names)} {plural_verb('is', 'are', names)} trained, and no group of fully_shard holds "
        f"{plural_verb('it', 'them', names)}: every rank trains {plural_verb('it', 'them', names)} on its own "
        "gradients.",
        location=sharded_at if by is None else by.location,
        evidence=[assignment, _PARTED],
        related={"optimizer steps": steps[0][0].location},
        fix="Call fully_shard on the root module as well, last, and without these in ignored_params."
        if by is None
        else "Replace modules before fully_shard.",
    )


def _averaged_late(names: Sequence[str], steps: Sequence[Steps], late: Location) -> list[Finding]:
    return one_finding(
        "DDP501",
        names,
        f"The gradients of {join_names(names)} are all_reduced only after the optimizer's step that uses them: every "
        "rank steps with its own.",
        location=late,
        evidence=[_PARTED],
        related={"optimizer steps": steps[0][0].location},
        fix="all_reduce every gradient before the optimizer's step, or wrap the module in DistributedDataParallel.",
    )


def judge_taken(taken: Sequence[Sequence[GradientsTaken]]) -> list[Finding]:
    """Detect wrapped parameters updated by unaveraged `torch.autograd.grad` gradients (DDP501).

    Parameters are equal on all ranks at the first call and diverge later, so nothing averages gradients or parameters.
    `taken` has the calls on one wrapper, by rank.
    """
    at = list(zip(*taken, strict=False))
    lengths = {len(of_rank) for of_rank in taken}
    if len(at) < _FEWEST_TAKEN or lengths != {len(at)} or any(len({one.count for one in each}) > 1 for each in at):
        return []
    if any(one.reductions or one.put_off for each in at for one in each):
        return []  # the wrapper averages backward passes, now or later
    marks = zip(
        *(tuple(itertools.chain.from_iterable(one.marks for one in of_rank)) for of_rank in taken), strict=False
    )
    together = [len(set(each)) == 1 for each in marks]
    names = [name for name in at[0][0].parameters if len({one.parameters.get(name) for one in at[0]}) == 1]
    apart = [name for name in names if len({one.parameters.get(name) for one in at[-1]}) > 1]
    moved = [[name for name in apart if len({one.parameters.get(name) for one in each}) > 1] for each in at]
    if any(later and not before for before, later in itertools.pairwise(together)) or not apart:
        return []
    if any(before and not later for before, later in itertools.pairwise(moved)):
        return []
    own = [each for each in at if any(_differ([one.gradients.get(name, ()) for one in each]) for name in apart)]
    given = [each for each in at if each[0].gradients]
    if 2 * len(own) <= len(given):
        return []
    first = at[0][0]
    return one_finding(
        "DDP501",
        ("torch.autograd.grad",),
        "Gradients of the wrapped module are computed with torch.autograd.grad, and DDP averages those of backward() "
        f"only: every rank updates {join_names(apart)} by its own.",
        location=first.location,
        evidence=[
            "the values were the same on all ranks when the first gradients were taken, and are not any more",
            f"the gradients differ between ranks in {len(own)} of {len(given)} calls that were compared",
            "the wrapper has averaged no backward pass",
        ],
        fix="Call loss.backward(), whose gradients DDP averages into .grad; or all_reduce each gradient that "
        "torch.autograd.grad returns, and divide it by the world size, before it is used.",
    )


def judge_reduced_alike(steps: Sequence[Steps], line: Location | None = None) -> list[Finding]:
    """Detect gradients equal on every rank before each average by hand (DDP505)."""
    known = [of_ranks for of_ranks in steps if all(one.given for one in of_ranks)]
    given = [{one.given for one in of_ranks} for of_ranks in known]
    if len(known) < _FEWEST_TAKEN or max(map(len, given)) > 1 or len(set.union(*given)) < 2 or len(known[0]) < 2:
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
    known = [of_ranks for of_ranks in steps if all(one.parts_reduced for one in of_ranks)]
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
    return not steps[0][0].held and _few_agree(steps)


def are_apart(optimizers: Sequence[Sequence[Steps]]) -> bool:
    """Check if each rank trains a separate model: different initial values and gradients."""
    known = [steps for steps in optimizers if steps]
    return bool(known) and all(are_local(steps) and not _are_alike(steps[0]) for steps in known)


def _are_alike(steps: Steps) -> bool:
    """Check if all unwrapped parameters are equal on all ranks."""
    return all(one.alone == steps[0].alone for one in steps)


def _alone(
    code: str, names: Sequence[str], message: str, steps: Sequence[Steps], evidence: str, fix: str, at: Location | None
) -> list[Finding]:
    found = make_finding(code, names, message, location=steps[0][0].location, evidence=[evidence], fix=fix)
    return [found.relocated(at, "optimizer steps")]


def _few_agree(steps: Sequence[Steps]) -> bool:
    """Check if gradients differ between ranks in most of the steps."""
    names = steps[0][0].alone
    apart = [any(gradients_differ(one, name) for name in names) for one in steps]
    return sum(apart) * 2 > len(steps)
