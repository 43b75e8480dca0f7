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
    for number, rank_steps in enumerate(steps):
        if len({step.reductions for step in rank_steps}) > 1:
            continue
        findings = judge_options("DDP223", _without_ranks([step.options for step in rank_steps]), "The optimizer")
        if not findings:
            continue
        finding, first = findings[0], rank_steps[0]
        if number and first.reductions < 0 and len({step.collectives for step in rank_steps}) > 1:
            return _out_of_step(rank_steps)
        was_alike = bool(number or (first.made_with and len({step.made_with for step in rank_steps}) == 1))
        if was_alike and all(name.endswith((" lr", " initial_lr")) for name in finding.subjects):
            finding = make_finding(
                "DDP507",
                finding.subjects,
                f"The learning rate was the same on every rank until it differs in step {first.count} of the "
                "optimizer.",
                ranks=finding.ranks,
                evidence=finding.evidence,
            )
        line = _rate_line(rank_steps) if finding.code == "DDP507" else first.made
        restored = _restored_on_some(rank_steps)
        line = next(iter(restored.values()), line)
        evidence = (*finding.evidence, *((_loaded_on(restored),) if restored else ()))
        ranks, fix = tuple(restored) or finding.ranks, _LOAD_EVERYWHERE if restored else finding.fix
        paces = [step.schedule.steps for step in rank_steps if step.schedule is not None]
        if finding.code == "DDP507" and len(set(paces)) > 1:
            fix = "Step the schedule as often on every rank."
            evidence = (*evidence, f"steps of the schedule so far: {'; '.join(group_by_value(paces))}")
        finding = replace(finding, ranks=ranks, steps=(first.count,), location=first.location)
        return [replace(finding, evidence=evidence, fix=fix).relocated(line, "optimizer steps")]
    return []


def _without_ranks(options: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Drop options whose value is the rank itself."""
    numbers = {name for name in options[0] if all(opts.get(name) == str(rank) for rank, opts in enumerate(options))}
    return [{name: value for name, value in opts.items() if name not in numbers} for opts in options]


def _restored_on_some(rank_steps: Steps) -> dict[int, Location]:
    """Return the line that loaded optimizer state, by rank; {} if on all ranks."""
    restored = {rank: step.restored_at for rank, step in enumerate(rank_steps) if step.restored_at is not None}
    return restored if len(restored) < len(rank_steps) else {}


def _loaded_on(restored: Iterable[int]) -> str:
    return f"load_state_dict is called there, on {format_ranks(restored)} only"


def judge_parts(first: Steps) -> list[Finding]:
    """DDP223: optimizers with different parameters on ranks, after the parameters have diverged.

    A manually sharded optimizer also holds different parameters, but sends the updated parameters to the other ranks.
    """
    params = [{"its parameters": ", ".join(sorted(map(short, step.held)))} for step in first]
    if not all(step.held for step in first):
        return []
    return [replace(finding, location=first[0].made) for finding in judge_options("DDP223", params, "The optimizer")]


def _rate_line(rank_steps: Steps) -> Location | None:
    """Return the line that sets the rate, or steps the schedule if unequal."""
    schedules = [step.schedule for step in rank_steps if step.schedule is not None]
    if len({schedule.steps for schedule in schedules}) > 1:
        return max(schedules, key=lambda schedule: schedule.steps).location
    return rank_steps[0].rate


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
    in_turns = all(s.turns and abs(s.steps - world_size * s.turns) <= world_size for s in schedules)
    ended = any(abs(world_size * end / first.steps - 1) <= _ABOUT for end in first.ends if first.steps)
    sized_for_all = any(number == world_size or abs(number / first.steps - 1) <= _ABOUT for number in first.numbers)
    endless = first.by_world and not sized_for_all and first.turns >= _FEWEST_STEPS
    if not in_turns or first.turns < _FEWEST_TURNS or not (ended or endless):
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


def _out_of_step(rank_steps: Steps) -> list[Finding]:
    return one_finding(
        "DDP508",
        ("step",),
        f"The ranks are not in the same step: before step {rank_steps[0].count} of the optimizer they have reached "
        "different numbers of collectives, and its options are already those of a different step.",
        location=rank_steps[0].location,
        evidence=[f"collectives of all ranks: {v}" for v in group_by_value([step.collectives for step in rank_steps])],
        fix="Leave the loop, or skip its body, on all ranks or on none: all_reduce the decision.",
    )


def judge_pace(steps: Sequence[Steps], ends: Sequence[OptimizerEnd]) -> list[Finding]:
    """DDP508: unequal optimizer steps per averaged backward pass between ranks."""
    for rank_steps in steps:
        reductions = [step.reductions for step in rank_steps]
        if min(reductions) >= 0 and len(set(reductions)) > 1:
            ranks = [rank for rank, count in enumerate(reductions) if count > min(reductions)]
            message = f"{plural_verb('skips', 'skip', ranks)} optimizer steps that the others make."
            label = f"averaged backward passes until step {rank_steps[0].count}"
            return _left_out(rank_steps, ranks, message, [f"{label}: {text}" for text in group_by_value(reductions)])
    counts = [end.count for end in ends]
    if steps and len(ends) == len(steps[0]) and min(end.reductions for end in ends) > 0 and len(set(counts)) > 1:
        if len({end.reductions for end in ends}) == 1:
            ranks = [rank for rank, count in enumerate(counts) if count < max(counts)]
            message = f"{plural_verb('has', 'have', ranks)} made fewer optimizer steps than the others from the same "
            message += "averaged backward passes."
            return _left_out(steps[-1], ranks, message, [f"optimizer steps: {text}" for text in group_by_value(counts)])
    return []


def _left_out(rank_steps: Steps, ranks: Sequence[int], action: str, evidence: Sequence[str]) -> list[Finding]:
    """Create a DDP508 at the line that decides on the step, if unique."""
    step, lines = rank_steps[0].location, rank_steps[0].left_out_at
    decides = f"this line decides if the step at {step} is made"
    return one_finding(
        "DDP508",
        ("step",),
        f"{format_ranks(ranks).capitalize()} {action}",
        ranks=ranks,
        location=lines[0] if len(lines) == 1 else step,
        evidence=[*evidence, *([decides] if len(lines) == 1 else [f"{line} may leave it out" for line in lines])],
    )


def judge_optimizer_state(steps: Sequence[Steps]) -> list[Finding]:
    """DDP306: optimizer state (e.g. momentum) that differs although gradients are equal."""
    alike: int | None = None  # last step in which all ranks had equal state
    for rank_steps in steps:
        if any_gradient_differs(rank_steps):
            return []  # ranks train separately, and may average parameters
        states = [step.states for step in rank_steps]
        if any(set(state) != set(states[0]) for state in states) and all(state for state in states):
            continue  # sharded
        names = differing(states)
        if not names:
            alike = rank_steps[0].count if all(states) else alike
            continue
        keys = sorted({name.rpartition(": ")[2] for name in names})
        ranks = minority_of(states, names)
        orders = [step.held for step in rank_steps]
        reordered = len(set(orders)) > 1 and len({frozenset(order) for order in orders}) == 1
        restored = {} if reordered else _restored_on_some(rank_steps)
        between = alike is not None and not reordered and not any(step.restored_at for step in rank_steps)
        return one_finding(
            "DDP306",
            keys,
            f"The optimizer's {join_names(keys)} {plural_verb('differs', 'differ', keys)} between ranks in its step "
            f"{rank_steps[0].count}, so equal gradients make the parameters diverge.",
            ranks=tuple(restored) or ranks,
            steps=(rank_steps[0].count,),
            location=next(iter(restored.values()), (reordered and rank_steps[0].made) or rank_steps[0].location),
            evidence=[
                _loaded_on(restored) if restored else "",
                f"it did not differ in step {alike}: in a later step, the ranks used different gradients"
                if between
                else "",
                *(
                    f"the optimizer of rank {rank} holds {join_names([short(name) for name in order])}, in this order"
                    for rank, order in enumerate(orders[:2] if reordered else ())
                ),
                *(
                    f"norm of {values}"
                    for values in told_by_rank(
                        {short(n): [spelled(state.get(n), "no state") for state in states] for n in names[:3]}
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
    for rank_steps in steps:
        states, first = [step.shard_states for step in rank_steps], rank_steps[0]
        loaded = [step.restored_at for step in rank_steps]
        if not any(loaded) or not any(states):
            continue
        counts = [{name: size for name, size in state.items() if name.endswith(": step")} for state in states]
        common = set(counts[0]).intersection(*counts)
        parted = any(len({count[name] for count in counts}) > 1 for name in common)
        if restored := _restored_on_some(rank_steps):
            if parted or not all(states):
                return _loaded_on_some(rank_steps, restored, [max(count.values(), default=0.0) for count in counts])
            continue
        message = f"load_state_dict is called there, on every rank; it steps at {first.location}"
        if findings := state_of_one_rank(states, loaded[0], [message], [first.count]):
            return findings
    return []


def _loaded_on_some(rank_steps: Steps, restored: Mapping[int, Location], counts: Sequence[float]) -> list[Finding]:
    first = rank_steps[0]
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


def judge_stale(steps: Sequence[Steps], moved: Mapping[str, bool], param_names: set[str]) -> list[Finding]:
    """DDP504: optimizer of tensors in no module, and wrapped parameters never updated."""
    unknown = steps[-1][0].unknown if steps else ()
    idle = [name for name, changes in moved.items() if not changes and name not in param_names]
    if not unknown or not idle:
        return []
    return one_finding(
        "DDP504",
        [short(name) for name in idle],
        f"{join_names([short(name) for name in idle])} {plural_verb('is', 'are', idle)} in no optimizer and never "
        f"{plural_verb('moves', 'move', idle)}, and the optimizer holds {len(unknown)} tensors that no module has.",
        location=steps[0][0].made or steps[0][0].location,
        related={"optimizer steps": steps[0][0].location},
    )


def judge_metrics(metrics: Sequence[Sequence[MetricUsed]]) -> list[Finding]:
    """DDP518: schedule or callback with a per-rank metric; `metrics` by rank, in order."""
    findings_by_user: dict[str, list[Finding]] = {}
    for uses in zip(*metrics, strict=False):
        first, values = uses[0], [use.value for use in uses]
        if len({(use.user, use.metric, use.schedule, use.count) for use in uses}) > 1:
            break
        about = _OF_CALLBACKS if first.metric else _OF_SCHEDULES
        if not all(math.isclose(value, values[0], rel_tol=about, abs_tol=1e-12) for value in values):
            findings_by_user.setdefault(first.user, _own_metrics(uses))
    return [finding for findings in findings_by_user.values() for finding in findings]


def _own_metrics(uses: Sequence[MetricUsed]) -> list[Finding]:
    user, metric = uses[0].user, uses[0].metric
    return one_finding(
        "DDP518",
        (user, metric) if metric else (user,),
        f"{user} decides by {metric}, which on each rank is the metric of the rank's own samples only."
        if metric
        else "Each rank passes a metric of only its samples to the learning rate schedule, so the ranks lower the "
        "rate at different times.",
        location=uses[0].location,
        evidence=[f"rank {rank}: {use.value:.6g}" for rank, use in enumerate(uses[:4])],
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
    uses_by_rank: Sequence[Sequence[ReducedInPlace]], *, world_size: int, accumulates: bool
) -> list[Finding]:
    """DDP309: backward through a tensor that a collective has overwritten.

    A single logged number is harmless (unchanged gradient), unless divided by the world size; `accumulates`: the script
    may divide by its number of micro-batches. If all ranks compute the same from a sum (Barlow Twins loss), only a
    factor is wrong; from an average, nothing.
    """
    for index, use in ((index, use) for uses in uses_by_rank for index, use in enumerate(uses)):
        scaled = use.factor is not None and math.isclose(use.factor * world_size, 1.0, rel_tol=1e-5)
        if use.elements == 1 and (not scaled or accumulates):
            continue
        alike = bool(use.gradient) and {uses[index].gradient for uses in uses_by_rank if len(uses) > index} == {
            use.gradient
        }
        alike = alike and all(len(uses) > index for uses in uses_by_rank)
        severity, evidence, fix = None, [f"{use.elements} elements"], ""
        message = f"Backward passes through a tensor that {use.operation} has overwritten"
        if scaled:
            message = (
                f"The loss is reduced by {use.operation} and divided by the world size before backward: autograd sees "
                "the division only, and DDP averages again."
            )
            evidence = [f"the gradient of the reduced loss is {use.factor:.6g}"]
            fix = "Reduce a detached copy: logged = loss.detach().clone(); dist.all_reduce(logged)."
        elif alike and use.is_average:
            continue
        elif alike:
            severity = Severity.WARNING
            message += (
                ", and all ranks compute the same from it: DDP averages gradients that should be summed, so they are "
                f"1/{world_size} of the global batch's."
            )
            fix = FIX_OF_SUM
        else:
            message += ": values from the other ranks are constants for autograd."
        return one_finding(
            "DDP309", (use.operation,), message, location=use.location, evidence=evidence, fix=fix, severity=severity
        )
    return []
