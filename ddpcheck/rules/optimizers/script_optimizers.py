"""Verdicts of `ddpcheck run` on a script's optimizers, for the rows of `script_table`."""

from __future__ import annotations

from ddpcheck.findings.evidence.loop import ModuleChanged
from ddpcheck.findings.evidence.script import FileUsed, GradientsClipped, LossDifferentiated, OptimizerStep
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import counted
from ddpcheck.rules.gradients.ddp301_not_synchronised import judge_scaled_by_hand, judge_step_gradients
from ddpcheck.rules.gradients.ddp508_step_skipped_on_a_rank import judge_pace
from ddpcheck.rules.gradients.ddp521_shard_as_whole import judge_parts_reduced
from ddpcheck.rules.gradients.unwrapped_params import judge_unsynchronized, reduces_in_step
from ddpcheck.rules.loss.ddp303_scaled_gradient import judge_summed_again, judge_sums
from ddpcheck.rules.optimizers.ddp223_optimizer_options import judge_parts
from ddpcheck.rules.optimizers.ddp504_stale_optimizer import judge_stale, judge_unchanged_params, with_model
from ddpcheck.rules.optimizers.ddp507_learning_rate import judge_schedule
from ddpcheck.rules.optimizers.options import judge_optimizer_options, judge_shard_states
from ddpcheck.rules.program.restored_state import locate_restored_file
from ddpcheck.rules.replicas.ddp208_parameter_value import locate_seed
from ddpcheck.rules.replicas.ddp306_state_diverged import judge_optimizer_state, judge_shard_scales
from ddpcheck.rules.verdict import Verdict, Verdicts
from ddpcheck.trace.script_facts import Optimizer, ScriptFacts, entries_of, first_steps
from ddpcheck.trace.unwrapped_params import any_gradient_differs, differing


def judge_states_of_optimizers(facts: ScriptFacts) -> Verdicts:
    """Judge the parameters and state before each optimizer's steps."""
    findings = [finding for opt in facts.optimizers for finding in judge_optimizer_state(opt.steps)]
    return {"optimizers": Verdict(locate_restored_file(findings, facts.of(FileUsed)))}


def judge_all_of_optimizers(facts: ScriptFacts) -> Verdicts:
    """Judge options, pace, gradients and schedule of each optimizer."""
    findings: list[Finding] = []
    optimizers = facts.optimizers
    wrapped, clips, losses = bool(facts.wrappers), facts.of(GradientsClipped), facts.of(LossDifferentiated)
    param_names = {name for step in entries_of(facts.ranks[0], OptimizerStep) for name in step.held}
    sharded_at = next((w.made.location for w in facts.wrappers if w.made.context.sharded is not None), None)
    assigned = [change for change in entries_of(facts.ranks[0], ModuleChanged) if change.what == "module"]
    in_step = any(reduces_in_step(opt.steps) for opt in optimizers)
    for opt in optimizers:
        new = judge_optimizer_options(opt.steps) + judge_shard_scales(opt.steps)
        new += judge_pace(opt.steps, opt.ends if facts.ended else ())  # a rank that raised has fewer steps
        new += judge_shard_states(opt.steps)
        state_differs = bool(judge_optimizer_state(opt.steps))
        new += [] if state_differs else judge_step_gradients(opt.steps, clips)
        if not state_differs and not new:
            other_steps = [other.steps for other in optimizers if _are_of_same(opt, other)]
            unwrapped = (
                []
                if facts.model_groups
                else judge_scaled_by_hand(opt.steps, clips)
                or judge_unsynchronized(
                    opt.steps,
                    opt.ends,
                    other_steps,
                    wrapped=wrapped,
                    in_step=in_step,
                    sharded_at=sharded_at,
                    assigned=assigned,
                )
            )
            unwrapped = [f if opt.steps[0][0].broadcast_at else locate_seed(f, opt.steps[0]) for f in unwrapped]
            new += unwrapped or judge_sums(opt.steps, losses)
        findings += new + with_model(judge_stale(opt.steps, facts.moved, param_names), facts)
        findings += judge_unchanged_params(opt.steps, facts.moved) + judge_parts_reduced(opt.steps)
        findings += judge_schedule(opt.ends, len(facts.ranks))
        findings += judge_summed_again(opt.steps, len(facts.ranks))
    firsts = [first_steps(rank) for rank in facts.ranks]
    if not findings and len({len(rank_steps) for rank_steps in firsts}) == 1:  # parameters may differ between ranks
        for first in zip(*firsts, strict=True):
            findings += judge_optimizer_options([first]) or (judge_parts(first) if facts.parameters_part else [])
    steps = [rank_steps for opt in optimizers for rank_steps in opt.steps]
    gradients_differ = any(map(any_gradient_differs, steps))
    of_ddp = "options" if gradients_differ else "options, state and gradients"
    compared = "options, number of steps and scale of the shards' gradients" if facts.shards else of_ddp
    scope = f"of {counted(len(optimizers), 'optimizer')} match between ranks in {counted(len(steps), 'step')}"
    passed = f"{compared} {scope}" if steps else ""
    averaged = [rank_steps for rank_steps in steps if all(step.reductions >= 0 for step in rank_steps)]
    differ = sum(bool(differing([step.norms for step in rank_steps])) for rank_steps in averaged)
    lacking = f"gradients differ between ranks in {differ} of them" if differ else facts.why_unwatched
    return {"optimizers": Verdict(findings, passed, lacking)}


def _are_of_same(opt: Optimizer, other: Optimizer) -> bool:
    """Check if two optimizers hold the same unwrapped parameters, by name."""
    return bool(opt.steps and other.steps) and opt.steps[0][0].alone.keys() == other.steps[0][0].alone.keys()
