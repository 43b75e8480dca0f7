"""DDP507 learning-rate: error

The learning rate differs between ranks, or its schedule makes world_size steps at a time.

Why: The gradients are equal but the updates are not, so parameters diverge from this step on. The usual cause is a
    scheduler that steps on a local metric (ReduceLROnPlateau). (PyTorch docs, DistributedDataParallel: all processes
    must make the same parameter updates.)
Fix: Feed schedulers with values that all ranks share: all_reduce the metric first.
Detected: `ddpcheck run` compares the learning rates at each optimizer step. DDP507 is reported if they are equal at
    first and differ later. A schedule that makes world_size steps at a time instead of one is reported as a warning.
    This is reported only if the schedule ends too early, or if the code calls step() world_size times.
Ignore: If ranks use different rates on purpose.
Line: The line that loads the optimizer's state, if only some ranks load it; else the call that steps the schedule;
    else the line that sets the rate. For a schedule that a library steps: the line that constructs the schedule.
Checks: run optimizers; repro options
Explains: DDP306
Example:
    schedule = ReduceLROnPlateau(optimizer)
    schedule.step(loss)                      # the loss of this rank's samples; right: all_reduce it first
"""

from __future__ import annotations

from collections.abc import Sequence

from ddpcheck.findings.evidence.script import OptimizerEnd
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Severity
from ddpcheck.findings.wording import group_by_value, make_finding, new_finding
from ddpcheck.trace.optimizers import locate_options
from ddpcheck.trace.unwrapped_params import Steps

FEWEST_STEPS = 8  # schedule steps until the pace of an endless schedule is judged; steps made at once count as one
FEWEST_TURNS = 3  # groups of schedule steps until a schedule that reaches its end is judged
PACE_TOLERANCE = 0.1  # relative distance of an end of the schedule from 1/world_size of the training


def explain_by_schedule(rank_steps: Steps, options: Finding) -> list[Finding]:
    """DDP507: learning rates that were equal on all ranks, and differ in this step."""
    schedules = [step.schedule for step in rank_steps if step.schedule is not None]
    paces = [schedule.steps for schedule in schedules]
    finding = make_finding(
        "DDP507",
        options.subjects,
        f"The learning rate was the same on every rank until it differs in step {rank_steps[0].count} of the "
        "optimizer.",
        ranks=options.ranks,
        evidence=options.evidence,
    )
    if len(set(paces)) < 2:
        return [locate_options(finding, rank_steps, rank_steps[0].rate)]
    finding = locate_options(finding, rank_steps, max(schedules, key=lambda schedule: schedule.steps).location)
    evidence = (*finding.evidence, f"steps of the schedule so far: {'; '.join(group_by_value(paces))}")
    return [replace(finding, evidence=evidence, fix="Step the schedule as often on every rank.")]


def judge_schedule(ends: Sequence[OptimizerEnd], world_size: int) -> list[Finding]:
    """DDP507: schedule that is stepped world_size times instead of once, and ends early.

    Some schedules are sized for the steps of all ranks. A finding requires that the rate reached its end or minimum
    after 1/world_size of the training, or that the source calls step() world_size times and no attribute of the
    schedule is the world size or the number of steps of all ranks.
    """
    schedules = [end.schedule for end in ends if end.schedule is not None]
    if world_size < 2 or len(schedules) < max(1, len(ends)):
        return []
    first = schedules[0]
    in_turns = all(s.turns and abs(s.steps - world_size * s.turns) <= world_size for s in schedules)
    ended = any(abs(world_size * end / first.steps - 1) <= PACE_TOLERANCE for end in first.ends if first.steps)
    sized_for_all = any(n == world_size or abs(n / first.steps - 1) <= PACE_TOLERANCE for n in first.numbers)
    endless = first.by_world and not sized_for_all and first.turns >= FEWEST_STEPS
    if not in_turns or first.turns < FEWEST_TURNS or not (ended or endless):
        return []
    return new_finding(
        "DDP507",
        ("learning rate",),
        f"The learning rate schedule makes {world_size} steps, one for each rank, instead of one: "
        + (f"it ends after 1/{world_size} of the training." if ended else f"it is {world_size} times too fast."),
        location=first.built_at if first.by_package else first.location,
        evidence=[
            f"{first.steps} steps of the schedule in {first.turns} groups, {ends[0].count} steps of the optimizer"
        ],
        severity=Severity.WARNING,
        fix="Step the schedule once after each optimizer step, not world_size times. If a framework does that "
        "(accelerate without split_batches), give the schedule the number of steps of all ranks together.",
    )
