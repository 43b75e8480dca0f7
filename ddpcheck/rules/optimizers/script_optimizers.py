"""Order of the judges of optimizers and of parameters that no wrapper averages."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ddpcheck.findings.evidence.loop import ModuleChanged
from ddpcheck.findings.evidence.script import (
    FileUsed,
    GradientsClipped,
    LossDifferentiated,
    OptimizerEnd,
    OptimizerStep,
)
from ddpcheck.findings.report import Finding, Location
from ddpcheck.rules.gradients.ddp301_not_synchronised import judge_scaled_by_hand, judge_step_gradients
from ddpcheck.rules.gradients.ddp501_forward_bypassed import explain_by_late_average, explain_by_no_average
from ddpcheck.rules.gradients.ddp508_step_skipped_on_a_rank import judge_pace
from ddpcheck.rules.gradients.ddp521_shard_as_whole import judge_equal_shard_state, judge_parts_reduced
from ddpcheck.rules.loss.ddp303_scaled_gradient import judge_second_sum, judge_sums
from ddpcheck.rules.optimizers.ddp223_optimizer_options import judge_optimizer_options, judge_params
from ddpcheck.rules.optimizers.ddp504_stale_optimizer import judge_foreign, judge_unchanged_params, name_wrapped_module
from ddpcheck.rules.optimizers.ddp507_learning_rate import judge_schedule
from ddpcheck.rules.parameters.ddp111_ignored_parameter import explain_by_missing_group
from ddpcheck.rules.program.restored_state import locate_restored_file
from ddpcheck.rules.registry import rule
from ddpcheck.rules.replicas.ddp208_parameter_value import judge_never_equal, locate_seed
from ddpcheck.rules.replicas.ddp306_state_diverged import (
    explain_by_divergence,
    judge_optimizer_state,
    judge_shard_scales,
    loaded_on_some_finding,
)
from ddpcheck.rules.replicas.ddp503_changed_after_wrapping import explain_by_addition
from ddpcheck.trace.optimizers import Optimizers, OptimizerStates, restored_on_some
from ddpcheck.trace.replicas import differing_values
from ddpcheck.trace.script_facts import Optimizer, ScriptFacts, entries_of
from ddpcheck.trace.unwrapped_params import (
    Steps,
    gradients_differ,
    gradients_mostly_differ,
    is_equal,
    param_name,
    params_equal,
)


@rule
def judge_states(states: OptimizerStates) -> list[Finding]:
    """Report optimizer state that differs between ranks, with the files that ranks loaded."""
    facts = states.facts
    findings = [finding for opt in facts.optimizers for finding in judge_optimizer_state(opt.steps)]
    return locate_restored_file(findings, facts.events(FileUsed))


@rule
def judge_optimizers(optimizers: Optimizers) -> list[Finding]:
    """Judge options, numbers of steps, gradients and schedule of each optimizer."""
    facts = optimizers.facts
    findings: list[Finding] = []
    clips = facts.events(GradientsClipped)
    param_names = {name for step in entries_of(facts.ranks[0], OptimizerStep) for name in step.ddp_params}
    for opt in facts.optimizers:
        new = judge_optimizer_options(opt.steps) + judge_shard_scales(opt.steps)
        new += judge_pace(opt.steps, opt.ends if facts.ended else ())  # a rank that raised has fewer steps
        new += judge_shard_states(opt.steps)
        state_differs = bool(judge_optimizer_state(opt.steps))
        new += [] if state_differs else judge_step_gradients(opt.steps, clips)
        if not state_differs and not new:
            new = _judge_unwrapped(opt, facts) or judge_sums(opt.steps, facts.events(LossDifferentiated))
        findings += new + name_wrapped_module(
            judge_foreign(opt.steps, facts.moved, param_names), facts.wrappers, facts.moved
        )
        findings += judge_unchanged_params(opt.steps, facts.moved) + judge_parts_reduced(opt.steps)
        findings += judge_schedule(opt.ends, len(facts.ranks))
        findings += judge_second_sum(opt.steps, len(facts.ranks))
    for first in () if findings else optimizers.first_steps:  # parameters may differ between ranks
        findings += judge_optimizer_options([first]) or (judge_params(first) if facts.has_differing_parameters else [])
    return findings


def _judge_unwrapped(opt: Optimizer, facts: ScriptFacts) -> list[Finding]:
    findings = [] if facts.model_groups else judge_scaled_by_hand(opt.steps, facts.events(GradientsClipped))
    if not facts.model_groups and not findings:
        names = opt.steps[0][0].local_params.keys() if opt.steps else None
        findings = judge_unsynchronized(
            opt.steps,
            opt.ends,
            [peer.steps for peer in facts.optimizers if peer.steps and peer.steps[0][0].local_params.keys() == names],
            wrapped=bool(facts.wrappers),
            in_step=any(reduces_in_step(optimizer.steps) for optimizer in facts.optimizers),
            sharded_at=next((w.made.location for w in facts.wrappers if w.made.context.sharded is not None), None),
            assigned=[change for change in entries_of(facts.ranks[0], ModuleChanged) if change.what == "module"],
        )
    return [f if opt.steps[0][0].broadcast_at else locate_seed(f, opt.steps[0]) for f in findings]


def judge_shard_states(steps: Sequence[Steps]) -> list[Finding]:
    """DDP306, DDP521: sharded optimizer state that only some ranks load, or one rank saved."""
    for rank_steps in steps:
        states, first = [step.shard_states for step in rank_steps], rank_steps[0]
        loaded = [step.restored_at for step in rank_steps]
        if not any(loaded) or not any(states):
            continue
        counts = [{name: size for name, size in state.items() if name.endswith(": step")} for state in states]
        if restored := restored_on_some(rank_steps):
            if differing_values(counts) or not all(states):
                return loaded_on_some_finding(rank_steps, restored, [max(c.values(), default=0.0) for c in counts])
            continue
        message = f"load_state_dict is called there, on every rank; it steps at {first.location}"
        if findings := judge_equal_shard_state(states, loaded[0], [message], [first.count]):
            return findings
    return []


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
    """Detect parameters trained on unaveraged gradients (DDP111, 208, 306, 501, 503).

    `others`: steps of all optimizers of the same parameters. `wrapped`: True if the script has a wrapper. `in_step`:
    True if an optimizer averages inside its step. `sharded_at`: line of `fully_shard`.
    """
    aligned = (
        step and all(entry.local_params.keys() == step[0].local_params.keys() for entry in step) for step in steps
    )
    if len(steps) < 2 or not all(aligned) or not steps[0][0].local_params:
        return []
    marks = [tuple(itertools.chain.from_iterable(step[r].marks for step in steps)) for r in range(len(steps[0]))]
    if len(ends) == len(marks):
        marks = [rank_marks + end.marks for rank_marks, end in zip(marks, ends, strict=True)]
    are_equal = [len(set(step_marks)) == 1 for step_marks in zip(*marks, strict=False)]
    if (False, True) in itertools.pairwise(are_equal):
        return explain_by_divergence(steps, are_equal)
    if any(params_equal(later[0]) and not params_equal(earlier[-1]) for earlier, later in itertools.pairwise(others)):
        return []  # averaged between the steps of two optimizers
    equal = {name: [is_equal(step, name) for step in steps] for name in steps[0][0].local_params}
    synced = {name for name, by_step in equal.items() if (False, True) in itertools.pairwise(by_step)}
    diverged = [name for name, by_step in equal.items() if by_step[0] and not by_step[-1] and name not in synced]
    local = [name for name in diverged if any(gradients_differ(step, name) for step in steps)]
    if not local or not gradients_mostly_differ(steps):
        return judge_never_equal(steps)
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
    """Return True if steps use local gradients, but change parameters equally on all ranks."""
    return len(steps) > 1 and any(
        all(is_equal(step, name) and gradients_differ(step, name) for step in steps)
        and steps[-1][0].local_params[name] != value
        for name, value in steps[0][0].local_params.items()
    )
