"""DDP223 optimizer-options: error, stops_run

The optimizer, its options or its parameter groups differ between ranks.

Why: DDP averages gradients and nothing else. The ranks stay equal only if every optimizer makes the same update from
    these gradients. With a different learning rate, momentum or order of groups, the ranks silently diverge from the
    first step. (PyTorch docs, DistributedDataParallel: all processes must make the same parameter updates.)
Fix: Construct the optimizer from the same options and the same order of parameters on every rank.
Detected: Before training and at the optimizer's steps, the ranks compare the class, the options and the parameter
    groups of the optimizer.
Ignore: If the optimizer holds parameters that only one rank trains.
Line: In `ddpcheck run`, the line that loads the optimizer's state, if only some ranks load it; else the line that
    constructs the optimizer. `ddpcheck report` names no line.
Checks: report wrapping; run optimizers; repro options
Explains: DDP306
Example:
    SGD(model.parameters(), lr=0.1 * (1 + dist.get_rank()))   # right: lr=0.1 on every rank
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding
from ddpcheck.rules.gradients.ddp508_step_skipped_on_a_rank import judge_schedule_steps
from ddpcheck.rules.optimizers.ddp507_learning_rate import explain_by_schedule
from ddpcheck.rules.replicas.comparisons import judge_options
from ddpcheck.trace.optimizers import locate_options
from ddpcheck.trace.unwrapped_params import Steps, are_local, param_name

OF_PARTS = "of parts"  # tag of optimizers that have different parameters, and no other difference


def judge_constructed_optimizers(options: Sequence[Mapping[str, str]]) -> list[Finding]:
    """DDP223: optimizers that are constructed differently on the ranks."""
    findings = judge_options("DDP223", options, "The optimizer")
    are_parts = all(subject.endswith(" parameters") for finding in findings for subject in finding.subjects)
    return [replace(finding, tags=(OF_PARTS,)) for finding in findings] if are_parts else findings


def judge_optimizer_options(steps: Sequence[Steps]) -> list[Finding]:
    """DDP223: options that differ between ranks; learning rates only if they were never equal.

    Skips optimizers of parameters that ranks train separately, and steps after unequal numbers of averaged backward
    passes: the ranks then differ in their learning rates because their schedules have made different numbers of steps.
    """
    for number, rank_steps in enumerate(() if steps and are_local(steps) else steps):
        first, options = rank_steps[0], _drop_rank_options([step.options for step in rank_steps])
        if len({step.reductions for step in rank_steps}) > 1:
            continue
        for finding in judge_options("DDP223", options, "The optimizer"):
            if number and first.reductions < 0 and len({step.collectives for step in rank_steps}) > 1:
                return judge_schedule_steps(rank_steps)
            was_equal = bool(number or (first.initial_rates and len({step.initial_rates for step in rank_steps}) == 1))
            if was_equal and all(name.endswith((" lr", " initial_lr")) for name in finding.subjects):
                return explain_by_schedule(rank_steps, finding)
            return [locate_options(finding, rank_steps, first.built_at)]
    return []


def _drop_rank_options(options: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Drop options whose value is the rank number on every rank: different on purpose."""
    numbers = {name for name in options[0] if all(opts.get(name) == str(rank) for rank, opts in enumerate(options))}
    return [{name: value for name, value in opts.items() if name not in numbers} for opts in options]


def judge_params(first: Steps) -> list[Finding]:
    """DDP223: optimizers that hold different parameters on each rank.

    Call only if parameters have diverged: a sharded optimizer, too, holds different parameters, but sends updates.
    """
    params = [{"its parameters": ", ".join(sorted(map(param_name, step.ddp_params)))} for step in first]
    if not all(step.ddp_params for step in first):
        return []
    return [replace(f, location=first[0].built_at) for f in judge_options("DDP223", params, "The optimizer")]
