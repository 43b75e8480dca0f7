"""DDP501, 208: parameters that an optimizer holds and no wrapper does, and that ranks train apart from each other.

Pure functions from `findings.evidence.script` (gathered by `monitor.script`) to findings.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ddpcheck.findings.evidence.script import OptimizerEnd
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import join_names, one_finding, plural_verb
from ddpcheck.judge.script_gradients import Steps, are_near, gradients_differ


def judge_alone(
    steps: Sequence[Steps], ends: Sequence[OptimizerEnd], others: Sequence[Sequence[Steps]] = (), *, wrapped: bool
) -> list[Finding]:
    """DDP501 or 208: parameters in no wrapper that ranks train apart from each other.

    Args:
        steps: Of one optimizer.
        ends: Of this optimizer, by rank; as many as have come to their end.
        others: The optimizers of the same parameters, in the order in which they were made, this one too.
        wrapped: Whether the script has a wrapper at all.
    """
    of_ranks = [one for one in steps if one and all(each.alone.keys() == one[0].alone.keys() for each in one)]
    if len(of_ranks) < 2 or not of_ranks[0][0].alone or len(of_ranks) < len(steps):
        return []
    marks = [tuple(itertools.chain.from_iterable(one[rank].marks for one in of_ranks)) for rank in range(len(steps[0]))]
    if len(ends) == len(marks):
        marks = [of_rank + end.marks for of_rank, end in zip(marks, ends, strict=True)]
    together = [len(set(at)) == 1 for at in zip(*marks, strict=False)]
    if any(later and not before for before, later in itertools.pairwise(together)):
        return []  # averaged now and then
    if any(_are_alike(later[0]) and not _are_alike(one[-1]) for one, later in itertools.pairwise(others)):
        return []  # likewise, between two optimizers
    names = list(of_ranks[0][0].alone)

    def alike(one: Steps, name: str) -> bool:
        return len({each.alone[name] for each in one}) == 1

    began = [name for name in names if alike(of_ranks[0], name)]
    apart = [name for name in began if not any(alike(one, name) for one in of_ranks[-1:])]
    local = [name for name in apart if any(gradients_differ(one, name) for one in of_ranks)]
    if local and _few_agree(of_ranks):
        where = "is in no DistributedDataParallel" if wrapped else "is averaged by nothing in this script"
        return _alone(
            "DDP501",
            local,
            f"{join_names(local)} {where if len(local) == 1 else where.replace('is ', 'are ', 1)}: every rank trains "
            f"{plural_verb('it', 'them', local)} on its own gradients.",
            of_ranks,
            "the values were the same on all ranks in the first step of the optimizer, and are not in the last",
            "Put it into the module that is wrapped, or wrap it too."
            if wrapped
            else "Wrap the module in DistributedDataParallel, or all_reduce every gradient before the step.",
        )
    other = [name for name in names if name not in began and not any(alike(one, name) for one in of_ranks)]
    averaged = [name for name in other if all(_are_same_gradients(one, name) for one in of_ranks)]
    if averaged:
        return _alone(
            "DDP208",
            averaged,
            f"{join_names(averaged)} {plural_verb('differs', 'differ', averaged)} between ranks from the first step, "
            "and the gradients are averaged: they belong to no model.",
            of_ranks,
            "the gradients are the same on all ranks in every step that was compared, and the values in none",
            "Broadcast the parameters from rank 0 before the first step, or seed their construction equally.",
        )
    return []


def are_local(steps: Sequence[Steps]) -> bool:
    """Whether an optimizer holds nothing that is in a wrapper, and ranks give it gradients of their own."""
    return not steps[0][0].held and _few_agree(steps)


def are_apart(optimizers: Sequence[Sequence[Steps]]) -> bool:
    """Whether each rank trains a model of its own: other values from the start, and other gradients."""
    known = [steps for steps in optimizers if steps]
    return bool(known) and all(are_local(steps) and not _are_alike(steps[0]) for steps in known)


def _are_alike(steps: Steps) -> bool:
    """Whether all parameters in no wrapper have the same values on every rank."""
    return all(one.alone == steps[0].alone for one in steps)


def _alone(
    code: str, names: Sequence[str], message: str, steps: Sequence[Steps], evidence: str, fix: str
) -> list[Finding]:
    location = steps[0][0].location
    return one_finding(code, names, message, location=location, evidence=[evidence], fix=fix)


def _few_agree(steps: Sequence[Steps]) -> bool:
    """Whether gradients differ in most of the steps, and not in one that a script makes on purpose."""
    names = steps[0][0].alone
    apart = [any(gradients_differ(one, name) for name in names) for one in steps]
    return sum(apart) * 2 > len(steps)


def _are_same_gradients(steps: Steps, name: str) -> bool:
    there = [one.gradients[name] for one in steps if name in one.gradients]
    return len(there) == len(steps) and are_near(there) and any(there[0])
