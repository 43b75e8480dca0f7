"""Verdicts of `ddpcheck run` on a script's optimizers, for the rows of `script_table`."""

from __future__ import annotations

from collections.abc import Sequence

from ddpcheck.findings.evidence.loop import GradientsChanged, ModuleChanged
from ddpcheck.findings.evidence.script import FileUsed, GradientsClipped, LossDifferentiated, MetricUsed, OptimizerStep
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import counted
from ddpcheck.judge.data.script_files import told_by_files
from ddpcheck.judge.gradients.hand_sums import judge_summed_again, judge_sums
from ddpcheck.judge.gradients.script_alone import (
    any_gradient_differs,
    are_local,
    differing,
    judge_alone,
    judge_parts_reduced,
    reduces_in_step,
)
from ddpcheck.judge.gradients.script_clips import (
    judge_changed,
    judge_clips,
    judge_rescaled,
    judge_scaled_by_hand,
    judge_step_gradients,
)
from ddpcheck.judge.gradients.sharded import judge_shard_scales
from ddpcheck.judge.loop.script_optimizers import (
    judge_metrics,
    judge_optimizer_options,
    judge_optimizer_state,
    judge_pace,
    judge_parts,
    judge_schedule,
    judge_shard_states,
    judge_stale,
)
from ddpcheck.judge.loop.script_pace import judge_unheld, judge_unmoved
from ddpcheck.judge.replicas.script_changes import at_the_seed
from ddpcheck.judge.script_facts import Optimizer, ScriptFacts, entries_of, first_steps, used_by
from ddpcheck.judge.verdict import Verdict, Verdicts


def judge_states_of_optimizers(facts: ScriptFacts) -> Verdicts:
    """Judge the parameters and state before each optimizer's steps."""
    found = [finding for one in facts.optimizers for finding in judge_optimizer_state(one.steps)]
    return {"optimizers": Verdict(told_by_files(found, facts.of(FileUsed)))}


def judge_all_of_optimizers(facts: ScriptFacts) -> Verdicts:
    """Judge options, pace, gradients and schedule of each optimizer."""
    found: list[Finding] = []
    known = facts.optimizers
    wrapped, clips, losses = bool(facts.wrappers), facts.of(GradientsClipped), facts.of(LossDifferentiated)
    held = {name for one in entries_of(facts.ranks[0], OptimizerStep) for name in one.held}
    sharded_at = next((one.made.location for one in facts.wrappers if one.made.context.sharded is not None), None)
    assigned = [one for one in entries_of(facts.ranks[0], ModuleChanged) if one.what == "module"]
    in_step = any(reduces_in_step(one.steps) for one in known)
    for one in known:
        of_one = judge_optimizer_options(one.steps) + judge_shard_scales(one.steps)
        of_one += judge_pace(one.steps, one.ends if facts.ended else ())  # a rank that raised has fewer steps
        of_one += judge_shard_states(one.steps)
        apart = bool(judge_optimizer_state(one.steps))
        of_one += [] if apart else judge_step_gradients(one.steps, clips)
        if not apart and not of_one:
            others = [other.steps for other in known if _are_of_same(one, other)]
            alone = (
                []
                if facts.model_groups
                else judge_scaled_by_hand(one.steps, clips)
                or judge_alone(
                    one.steps,
                    one.ends,
                    others,
                    wrapped=wrapped,
                    in_step=in_step,
                    sharded_at=sharded_at,
                    assigned=assigned,
                )
            )
            alone = [found if one.steps[0][0].broadcast_at else at_the_seed(found, one.steps[0]) for found in alone]
            of_one += alone or judge_sums(one.steps, losses)
        found += of_one + _with_model(judge_stale(one.steps, facts.moved, held), facts)
        found += judge_unmoved(one.steps, facts.moved) + judge_parts_reduced(one.steps)
        found += judge_schedule(one.ends, len(facts.ranks))
        found += judge_summed_again(one.steps, len(facts.ranks))
    firsts = [first_steps(rank) for rank in facts.ranks]
    if not found and len({len(of_rank) for of_rank in firsts}) == 1:  # parameters may differ between ranks
        for first in zip(*firsts, strict=True):
            found += judge_optimizer_options([first]) or (judge_parts(first) if facts.parameters_part else [])
    steps = sum(len(one.steps) for one in known)
    apart = any(any_gradient_differs(of_ranks) for one in known for of_ranks in one.steps)
    of_ddp = "options" if apart else "options, state and gradients"
    compared = "options, number of steps and scale of the shards' gradients" if facts.shards else of_ddp
    where = f"of {counted(len(known), 'optimizer')} match between ranks in {counted(steps, 'step')}"
    what = f"{compared} {where}" if steps else ""
    together = [of_ranks for one in known for of_ranks in one.steps if all(of.reductions >= 0 for of in of_ranks)]
    differ = sum(bool(differing([of.norms for of in of_ranks])) for of_ranks in together)
    lacking = f"gradients differ between ranks in {differ} of them" if differ else facts.why_unwatched
    return {"optimizers": Verdict(found, what, lacking)}


def _are_of_same(one: Optimizer, other: Optimizer) -> bool:
    """Check if two optimizers hold the same unwrapped parameters, by name."""
    return bool(one.steps and other.steps) and one.steps[0][0].alone.keys() == other.steps[0][0].alone.keys()


def judge_all_clips(facts: ScriptFacts) -> Verdicts:
    """Judge changes to gradients between the average and the optimizer step."""
    clips, steps = facts.of(GradientsClipped), [one.steps for one in facts.optimizers]
    found = judge_clips(clips, steps) or judge_changed(facts.of(GradientsChanged))
    for of_ranks in () if found else steps:
        if all(len(of_step) == len(facts.ranks) for of_step in of_ranks):
            theirs = [(rank, [of_step[n] for of_step in of_ranks]) for n, rank in enumerate(facts.ranks)]
            used = [list(used_by(rank, of_rank)) for rank, of_rank in theirs]
            found += judge_rescaled(used, facts.of(LossDifferentiated), len(facts.ranks))
    return {"optimizers": Verdict(found)}


def judge_metrics_used(facts: ScriptFacts) -> Verdicts:
    """Judge metrics that drive learning rate schedules and callbacks."""
    local = {one.steps[0][0].optimizer for one in facts.optimizers if one.steps and are_local(one.steps)}
    used = [[one for one in of_rank if one.optimizer not in local] for of_rank in facts.of(MetricUsed)]
    return {"optimizers": Verdict(judge_metrics(used))}


def judge_parameters_unheld(facts: ScriptFacts) -> Verdicts:
    """Detect parameters that get gradients but belong to no optimizer."""
    if not facts.wrappers:
        return {}
    every = [one for of_rank in facts.of(OptimizerStep) for one in of_rank]
    named = [name for one in every for name in (*one.held, *one.idle)]
    made = next((one.made for one in every if one.held or not named), None)
    in_vain = bool(every) and not any(one.norms or one.gradients for one in every)
    found = judge_unheld(facts.moved, named, made=made, in_vain=in_vain)
    return {"optimizers": Verdict(_with_model(found, facts))}


def _with_model(found: Sequence[Finding], facts: ScriptFacts) -> list[Finding]:
    """Name the wrapped module in findings on parameters that never change."""
    told = []
    for finding in found:
        of_model = [
            f"of {one.made.module}, which is wrapped at {one.made.location}"
            for one in facts.wrappers
            if all(facts.moved.get(f"{one.number}/{name}") is False for name in finding.subjects)
        ]
        is_one_of_several = len(of_model) == 1 < len(facts.wrappers)
        told.append(replace(finding, evidence=(*of_model, *finding.evidence)) if is_one_of_several else finding)
    return told
