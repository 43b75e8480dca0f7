"""DDP223, 306, 309, 504, 507, 508, 517, 518, 521: optimizers of a script and their inputs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from ddpcheck.findings.evidence.script import GradientsZeroed, MetricUsed, OptimizerEnd, ReducedInPlace
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location, Severity
from ddpcheck.findings.wording import (
    format_ranks,
    group_by_value,
    join_names,
    make_finding,
    one_finding,
    plural_verb,
    told_by_rank,
)
from ddpcheck.judge.gradients.script_alone import (
    Steps,
    any_gradient_differs,
    are_local,
    differing,
    minority_of,
    short,
    spelled,
)
from ddpcheck.judge.gradients.sharded import state_of_one_rank
from ddpcheck.judge.gradients.single_process import FIX_OF_SUM
from ddpcheck.judge.replicas.descriptions import judge_options

_FEWEST_STEPS = 8  # of an endless schedule; steps made at once count as one
_FEWEST_TURNS = 3  # of a schedule that reaches its end
_ABOUT = 0.1
_OF_SCHEDULES, _OF_CALLBACKS = 1e-6, 1e-4  # relative tolerance of equal metrics
_LOAD_EVERYWHERE = "Load the optimizer's state on every rank, from the same file, or begin with the same one on each."


def judge_optimizer_options(steps: Sequence[Steps]) -> list[Finding]:
    """DDP223 or 507: options that differ between ranks, at the first such step.

    Skips optimizers of parameters that ranks train separately, and steps with unequal numbers of averaged backward
    passes (DDP508), in which a schedule has different rates.
    """
    if steps and are_local(steps):
        return []
    for number, of_ranks in enumerate(steps):
        if len({one.reductions for one in of_ranks}) > 1:
            continue
        found = judge_options("DDP223", _without_ranks([one.options for one in of_ranks]), "The optimizer")
        if not found:
            continue
        finding, first = found[0], of_ranks[0]
        if number and first.reductions < 0 and len({one.collectives for one in of_ranks}) > 1:
            return _out_of_step(of_ranks)
        was_alike = bool(number or (first.made_with and len({one.made_with for one in of_ranks}) == 1))
        if was_alike and all(name.endswith((" lr", " initial_lr")) for name in finding.subjects):
            finding = make_finding(
                "DDP507",
                finding.subjects,
                f"The learning rate was the same on every rank until it differs in step {first.count} of the "
                "optimizer.",
                ranks=finding.ranks,
                evidence=finding.evidence,
            )
        made = _rate_line(of_ranks) if finding.code == "DDP507" else first.made
        restored = _restored_on_some(of_ranks)
        made = next(iter(restored.values()), made)
        evidence = (*finding.evidence, *((_loaded_on(restored),) if restored else ()))
        ranks, fix = tuple(restored) or finding.ranks, _LOAD_EVERYWHERE if restored else finding.fix
        paces = [one.schedule.steps for one in of_ranks if one.schedule is not None]
        if finding.code == "DDP507" and len(set(paces)) > 1:
            fix = "Step the schedule as often on every rank."
            evidence = (*evidence, f"steps of the schedule so far: {'; '.join(group_by_value(paces))}")
        finding = replace(finding, ranks=ranks, steps=(first.count,), location=first.location)
        return [replace(finding, evidence=evidence, fix=fix).relocated(made, "optimizer steps")]
    return []


def _without_ranks(options: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Drop options whose value is the rank itself."""
    numbers = {name for name in options[0] if all(of.get(name) == str(rank) for rank, of in enumerate(options))}
    return [{name: value for name, value in of.items() if name not in numbers} for of in options]


def _restored_on_some(of_ranks: Steps) -> dict[int, Location]:
    """Return the line that loaded optimizer state, by rank; {} if on all ranks."""
    restored = {rank: one.restored_at for rank, one in enumerate(of_ranks) if one.restored_at is not None}
    return restored if len(restored) < len(of_ranks) else {}


def _loaded_on(restored: Iterable[int]) -> str:
    return f"load_state_dict is called there, on {format_ranks(restored)} only"


def judge_parts(first: Steps) -> list[Finding]:
    """DDP223: optimizers with different parameters on ranks, after the parameters have diverged.

    A manually sharded optimizer also holds different parameters, but sends the updated parameters to the other ranks.
    """
    held = [{"its parameters": ", ".join(sorted(map(short, one.held)))} for one in first]
    if not all(one.held for one in first):
        return []
    return [replace(one, location=first[0].made) for one in judge_options("DDP223", held, "The optimizer")]


def _rate_line(of_ranks: Steps) -> Location | None:
    """Return the line that sets the rate, or steps the schedule if unequal."""
    schedules = [one.schedule for one in of_ranks if one.schedule is not None]
    if len({schedule.steps for schedule in schedules}) > 1:
        return max(schedules, key=lambda schedule: schedule.steps).location
    return of_ranks[0].rate


def judge_schedule(ends: Sequence[OptimizerEnd], world_size: int) -> list[Finding]:
    """DDP507: schedule stepped world_size times at once, which ends too early.

    Some schedules are sized for the steps of all ranks. A finding requires that the rate reached its end or minimum at
    that part of the training, or that the source steps by the world size and no number of the schedule counts all
    ranks.
    """
    schedules = [end.schedule for end in ends if end.schedule is not None]
    if world_size < 2 or len(schedules) < max(1, len(ends)):
        return []
    first = schedules[0]
    each = all(one.turns and abs(one.steps - world_size * one.turns) <= world_size for one in schedules)
    ended = any(abs(world_size * end / first.steps - 1) <= _ABOUT for end in first.ends if first.steps)
    of_all = any(number == world_size or abs(number / first.steps - 1) <= _ABOUT for number in first.numbers)
    endless = first.by_world and not of_all and first.turns >= _FEWEST_STEPS
    if not each or first.turns < _FEWEST_TURNS or not (ended or endless):
        return []
    return one_finding(
        "DDP507",
        ("learning rate",),
        f"The learning rate schedule makes {world_size} steps, one for each rank, instead of one: "
        + (f"it ends after 1/{world_size} of the training." if ended else f"it is {world_size} times too fast."),
        location=first.made if first.by_package else first.location,
        evidence=[
            f"{first.steps} steps of the schedule in {first.turns} groups, {ends[0].count} steps of the optimizer"
        ],
        severity=Severity.WARNING,
        fix="Step the schedule once after each optimizer step, not world_size times. If a framework does that "
        "(accelerate without split_batches), give the schedule the number of steps of all ranks together.",
    )


def _out_of_step(of_ranks: Steps) -> list[Finding]:
    return one_finding(
        "DDP508",
        ("step",),
        f"The ranks are not in the same step: before step {of_ranks[0].count} of the optimizer they have reached "
        "different numbers of collectives, and its options are already those of a different step.",
        location=of_ranks[0].location,
        evidence=[f"collectives of all ranks: {one}" for one in group_by_value([one.collectives for one in of_ranks])],
        fix="Leave the loop, or skip its body, on all ranks or on none: all_reduce the decision.",
    )


def judge_pace(steps: Sequence[Steps], ends: Sequence[OptimizerEnd]) -> list[Finding]:
    """DDP508: unequal optimizer steps per averaged backward pass between ranks."""
    for of_ranks in steps:
        reductions = [one.reductions for one in of_ranks]
        if min(reductions) >= 0 and len(set(reductions)) > 1:
            ranks = [rank for rank, count in enumerate(reductions) if count > min(reductions)]
            what = f"{plural_verb('skips', 'skip', ranks)} optimizer steps that the others make."
            until = f"averaged backward passes until step {of_ranks[0].count}"
            return _left_out(of_ranks, ranks, what, [f"{until}: {one}" for one in group_by_value(reductions)])
    counts = [end.count for end in ends]
    if steps and len(ends) == len(steps[0]) and min(end.reductions for end in ends) > 0 and len(set(counts)) > 1:
        if len({end.reductions for end in ends}) == 1:
            ranks = [rank for rank, count in enumerate(counts) if count < max(counts)]
            what = f"{plural_verb('has', 'have', ranks)} made fewer optimizer steps than the others from the same "
            what += "averaged backward passes."
            return _left_out(steps[-1], ranks, what, [f"optimizer steps: {one}" for one in group_by_value(counts)])
    return []


def _left_out(of_ranks: Steps, ranks: Sequence[int], what: str, evidence: Sequence[str]) -> list[Finding]:
    """Create a DDP508 at the line that decides on the step, if unique."""
    step, lines = of_ranks[0].location, of_ranks[0].left_out_at
    decides = f"this line decides if the step at {step} is made"
    return one_finding(
        "DDP508",
        ("step",),
        f"{format_ranks(ranks).capitalize()} {what}",
        ranks=ranks,
        location=lines[0] if len(lines) == 1 else step,
        evidence=[*evidence, *([decides] if len(lines) == 1 else [f"{line} may leave it out" for line in lines])],
    )


def judge_optimizer_state(steps: Sequence[Steps]) -> list[Finding]:
    """DDP306: optimizer state (e.g. momentum) that differs although gradients are equal."""
    alike: int | None = None  # last step in which all ranks had equal state
    for of_ranks in steps:
        if any_gradient_differs(of_ranks):
            return []  # ranks train separately, and may average parameters
        states = [one.states for one in of_ranks]
        if any(set(one) != set(states[0]) for one in states) and all(one for one in states):
            continue  # sharded
        names = differing(states)
        if not names:
            alike = of_ranks[0].count if all(states) else alike
            continue
        keys = sorted({name.rpartition(": ")[2] for name in names})
        ranks = minority_of(states, names)
        orders = [one.held for one in of_ranks]
        reordered = len(set(orders)) > 1 and len({frozenset(one) for one in orders}) == 1
        restored = {} if reordered else _restored_on_some(of_ranks)
        between = alike is not None and not reordered and not any(one.restored_at for one in of_ranks)
        return one_finding(
            "DDP306",
            keys,
            f"The optimizer's {join_names(keys)} {plural_verb('differs', 'differ', keys)} between ranks in its step "
            f"{of_ranks[0].count}, so equal gradients make the parameters diverge.",
            ranks=tuple(restored) or ranks,
            steps=(of_ranks[0].count,),
            location=next(iter(restored.values()), (reordered and of_ranks[0].made) or of_ranks[0].location),
            evidence=[
                _loaded_on(restored) if restored else "",
                f"it did not differ in step {alike}: in a later step, the ranks used different gradients"
                if between
                else "",
                *(
                    f"the optimizer of rank {rank} holds {join_names([short(name) for name in one])}, in this order"
                    for rank, one in enumerate(orders[:2] if reordered else ())
                ),
                *(
                    f"norm of {values}"
                    for values in told_by_rank(
                        {short(n): [spelled(one.get(n), "no state") for one in states] for n in names[:3]}
                    )
                ),
            ],
            fix="Give the optimizer its parameters in the same order on every rank: its state is saved and loaded by "
            "their numbers."
            if reordered
            else "Average the gradients in every step, and wait for every asynchronous collective (work.wait()) before "
            "the optimizer steps."
            if between
            else _LOAD_EVERYWHERE,
        )
    return []


def judge_shard_states(steps: Sequence[Steps]) -> list[Finding]:
    """DDP306 and 521: sharded optimizer state loaded on, or from, some ranks only."""
    for of_ranks in steps:
        states, first = [one.shard_states for one in of_ranks], of_ranks[0]
        loaded = [one.restored_at for one in of_ranks]
        if not any(loaded) or not any(states):
            continue
        counts = [{name: size for name, size in one.items() if name.endswith(": step")} for one in states]
        common = set(counts[0]).intersection(*counts)
        parted = any(len({one[name] for one in counts}) > 1 for name in common)
        if restored := _restored_on_some(of_ranks):
            if parted or not all(states):
                return _loaded_on_some(of_ranks, restored, [max(one.values(), default=0.0) for one in counts])
            continue
        told = f"load_state_dict is called there, on every rank; it steps at {first.location}"
        if found := state_of_one_rank(states, loaded[0], [told], [first.count]):
            return found
    return []


def _loaded_on_some(of_ranks: Steps, restored: Mapping[int, Location], counts: Sequence[float]) -> list[Finding]:
    first = of_ranks[0]
    return one_finding(
        "DDP306",
        ("state",),
        f"The optimizer's state is loaded on {format_ranks(restored)} only: the others continue with a different "
        "state for their shards of the same parameters.",
        ranks=tuple(restored),
        steps=(first.count,),
        location=next(iter(restored.values())),
        related={"optimizer steps": first.location},
        evidence=[
            _loaded_on(restored),
            *(f"rank {rank}: {count:g} steps were counted before" for rank, count in enumerate(counts[:4])),
        ],
        fix=_LOAD_EVERYWHERE.replace("from the same file", "for its own parts"),
    )


def judge_stale(steps: Sequence[Steps], moved: Mapping[str, bool], held: set[str]) -> list[Finding]:
    """DDP504: optimizer of tensors in no module, and wrapped parameters never updated."""
    unknown = steps[-1][0].unknown if steps else ()
    left = [name for name, yes in moved.items() if not yes and name not in held]
    if not unknown or not left:
        return []
    return one_finding(
        "DDP504",
        [short(name) for name in left],
        f"{join_names([short(name) for name in left])} {plural_verb('is', 'are', left)} in no optimizer and never "
        f"{plural_verb('moves', 'move', left)}, and the optimizer holds {len(unknown)} tensors that no module has.",
        location=steps[0][0].made or steps[0][0].location,
        related={"optimizer steps": steps[0][0].location},
    )


def judge_metrics(metrics: Sequence[Sequence[MetricUsed]]) -> list[Finding]:
    """DDP518: schedule or callback with a per-rank metric; `metrics` by rank, in order."""
    found: dict[str, list[Finding]] = {}
    for of_ranks in zip(*metrics, strict=False):
        first, values = of_ranks[0], [one.value for one in of_ranks]
        if len({(one.user, one.metric, one.schedule, one.count) for one in of_ranks}) > 1:
            break
        about = _OF_CALLBACKS if first.metric else _OF_SCHEDULES
        if not all(math.isclose(value, values[0], rel_tol=about, abs_tol=1e-12) for value in values):
            found.setdefault(first.user, _own_metrics(of_ranks))
    return [finding for findings in found.values() for finding in findings]


def _own_metrics(of_ranks: Sequence[MetricUsed]) -> list[Finding]:
    user, metric = of_ranks[0].user, of_ranks[0].metric
    return one_finding(
        "DDP518",
        (user, metric) if metric else (user,),
        f"{user} decides by {metric}, which on each rank is the metric of the rank's own samples only."
        if metric
        else "Each rank passes a metric of only its samples to the learning rate schedule, so the ranks lower the "
        "rate at different times.",
        location=of_ranks[0].location,
        evidence=[f"rank {rank}: {one.value:.6g}" for rank, one in enumerate(of_ranks[:4])],
        fix=f'Reduce the metric over the ranks: self.log("{metric}", ..., sync_dist=True); or log a metric of '
        "torchmetrics itself, which is computed over all ranks."
        if metric
        else "",
    )


def judge_zeroed(zeroed: Sequence[GradientsZeroed]) -> list[Finding]:
    """DDP517: gradients zeroed several times between two optimizer steps; of one rank."""
    if not zeroed:
        return []
    return one_finding(
        "DDP517",
        ("zero_grad",),
        f"zero_grad discards gradients that no step has used: it is called {zeroed[0].times} times before each "
        "optimizer step.",
        location=zeroed[0].location,
        evidence=["each time the gradients were not zero"],
    )


def judge_reduced_in_place(
    of_ranks: Sequence[Sequence[ReducedInPlace]], *, world_size: int, accumulates: bool
) -> list[Finding]:
    """DDP309: backward through a tensor that a collective has overwritten.

    A single logged number is harmless (unchanged gradient), unless divided by the world size; `accumulates`: the script
    may divide by its number of micro-batches. If all ranks compute the same from a sum (Barlow Twins loss), only a
    factor is wrong; from an average, nothing.
    """
    for place, one in ((place, one) for uses in of_ranks for place, one in enumerate(uses)):
        scaled = one.factor is not None and math.isclose(one.factor * world_size, 1.0, rel_tol=1e-5)
        if one.elements == 1 and (not scaled or accumulates):
            continue
        alike = bool(one.gradient) and {uses[place].gradient for uses in of_ranks if len(uses) > place} == {
            one.gradient
        }
        alike = alike and all(len(uses) > place for uses in of_ranks)
        severity, evidence, fix = None, [f"{one.elements} elements"], ""
        what = f"Backward passes through a tensor that {one.operation} has overwritten"
        if scaled:
            what = (
                f"The loss is reduced by {one.operation} and divided by the world size before backward: autograd sees "
                "the division only, and DDP averages again."
            )
            evidence = [f"the gradient of the reduced loss is {one.factor:.6g}"]
            fix = "Reduce a detached copy: logged = loss.detach().clone(); dist.all_reduce(logged)."
        elif alike and one.is_average:
            continue
        elif alike:
            severity = Severity.WARNING
            what += (
                ", and all ranks compute the same from it: DDP averages gradients that should be summed, so they are "
                f"1/{world_size} of the global batch's."
            )
            fix = FIX_OF_SUM
        else:
            what += ": values from the other ranks are constants for autograd."
        return one_finding(
            "DDP309", (one.operation,), what, location=one.location, evidence=evidence, fix=fix, severity=severity
        )
    return []
