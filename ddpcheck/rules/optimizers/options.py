"""Judges of options, state, pace and metrics of optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import group_by_value, make_finding
from ddpcheck.rules.gradients.ddp508_step_skipped_on_a_rank import judge_schedule_steps
from ddpcheck.rules.gradients.ddp521_shard_as_whole import state_of_one_rank
from ddpcheck.rules.replicas.comparisons import judge_options
from ddpcheck.rules.replicas.ddp306_state_diverged import loaded_on_some_finding
from ddpcheck.trace.optimizers import LOAD_EVERYWHERE, describe_loads, restored_on_some
from ddpcheck.trace.unwrapped_params import Steps, are_local


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
            return judge_schedule_steps(rank_steps)
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
        restored = restored_on_some(rank_steps)
        line = next(iter(restored.values()), line)
        evidence = (*finding.evidence, *((describe_loads(restored),) if restored else ()))
        ranks, fix = tuple(restored) or finding.ranks, LOAD_EVERYWHERE if restored else finding.fix
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


def _rate_line(rank_steps: Steps) -> Location | None:
    """Return the line that sets the rate, or steps the schedule if unequal."""
    schedules = [step.schedule for step in rank_steps if step.schedule is not None]
    if len({schedule.steps for schedule in schedules}) > 1:
        return max(schedules, key=lambda schedule: schedule.steps).location
    return rank_steps[0].rate


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
        if restored := restored_on_some(rank_steps):
            if parted or not all(states):
                return loaded_on_some_finding(
                    rank_steps, restored, [max(count.values(), default=0.0) for count in counts]
                )
            continue
        message = f"load_state_dict is called there, on every rank; it steps at {first.location}"
        if findings := state_of_one_rank(states, loaded[0], [message], [first.count]):
            return findings
    return []
