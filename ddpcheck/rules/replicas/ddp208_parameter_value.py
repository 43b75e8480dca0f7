"""DDP208 parameter-value: error, unless_split, values_differ, unequal_start, stops_run

The value of a parameter differs between ranks.

Why: DDP broadcasts rank 0's values once, when it is constructed, and never again. Values that differ after that stay
    different. Causes are init_sync=False, a checkpoint loaded on one rank, and re-initialisation after wrapping. The
    averaged gradient is then right for none of the models. (PyTorch docs, DistributedDataParallel: parameters are
    never broadcast between processes after construction.)
Fix: Construct the model under the same seed on every rank, let DDP synchronise (init_sync=True), and load values
    before wrapping.
Detected: Right after the wrapper is constructed, the ranks compare the values of their parameters, bit by bit. If a
    script averages gradients by hand, without a wrapper, `ddpcheck run` compares the initial values of these
    parameters. Under fully_shard, the ranks compare the values from before sharding.
Ignore: If the ranks train different models on purpose.
Line: The line that changes the values after wrapping, or that seeds the model differently on each rank. If there is
    none, the line that creates the first parameter.
Checks: report wrapping; run replicas, optimizers; repro parameters
Repeats: ModelParts
Explains: DDP301 DDP302 DDP303 DDP304 DDP305 DDP312 DDP306; DDP516 if only the loss; quietly DDP214 if of a copy
Example:
    torch.manual_seed(dist.get_rank())       # every rank starts from other weights
    model = DistributedDataParallel(Net(), init_sync=False)   # right: leave init_sync at True
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from ddpcheck.findings.evidence.replicas import ModelSplit
from ddpcheck.findings.evidence.script import OptimizerStep
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import format_ranks, group_by_value, join_names, minority_ranks, new_finding, plural_verb
from ddpcheck.rules.replicas.changes import locate_values
from ddpcheck.rules.replicas.comparisons import judge_initial_values
from ddpcheck.trace.replicas import differing_names, differing_values
from ddpcheck.trace.script_facts import PartSteps
from ddpcheck.trace.unwrapped_params import Steps, is_averaged, is_equal, param_name

judge_initial_parameters = partial(judge_initial_values, "DDP208")
relocate = partial(locate_values, after_forward=False)


def judge_values_before_sharding(before: Sequence[Mapping[str, int]], current: Mapping[str, int]) -> list[Finding]:
    """DDP208: parameters built with different values per rank before `fully_shard`."""
    mismatches = differing_values(before)
    remaining = {name: values for name, values in mismatches.items() if current.get(name) not in values}
    if not remaining:
        return []
    names = sorted(remaining)
    return new_finding(
        "DDP208",
        names,
        f"{join_names(names)} {plural_verb('does', 'do', names)} not have the same values on every rank before "
        f"fully_shard, which broadcasts nothing: {plural_verb('it is', 'they are', names)} put together from parts of "
        "different models.",
        ranks=sorted({rank for values in remaining.values() for rank in minority_ranks(values)}),
        fix="Build the model under the same seed and from the same checkpoint on every rank; or hand rank 0's values "
        "out after fully_shard (set_model_state_dict with broadcast_from_rank0).",
    )


def judge_values(steps: Sequence[PartSteps], ranks: Sequence[int], split: ModelSplit) -> list[Finding]:
    """DDP208: replicated parameters with unequal initial values on ranks that share a model."""
    names = list(differing_names([step.values for step in steps[0]])) if steps and not steps[0][0].count else []
    if not names:
        return []
    return new_finding(
        "DDP208",
        names,
        f"{join_names(names)} {plural_verb('begins', 'begin', names)} with different values on {format_ranks(ranks)}, "
        "which compute one model together (tensor parallelism): nothing makes replicated parameters the same.",
        ranks=ranks,
        location=split.location,
        evidence=["parallelize_module broadcasts rank 0's values of the modules in its plan, and no others"],
        fix="Seed the construction of the model equally on these ranks, or broadcast the parameters within their "
        "group.",
    )


def judge_never_equal(steps: Sequence[Steps]) -> list[Finding]:
    """DDP208: parameters that differ between ranks in every step, although gradients are averaged."""
    first = steps[0][0]
    unequal = [name for name in first.local_params if not any(is_equal(step, name) for step in steps)]
    averaged = [param_name(name) for name in unequal if is_averaged(steps, name)]
    if not averaged:
        return []
    line = first.broadcast_at or first.built_at
    return new_finding(
        "DDP208",
        averaged,
        f"{join_names(averaged)} {plural_verb('differs', 'differ', averaged)} between ranks from the first step, "
        "and the gradients are averaged: an average over different models is right for none of them.",
        location=line or first.location,
        related={"optimizer steps": first.location},
        evidence=["the gradients are the same on all ranks in every step that was compared, and the values in none"],
        fix="Broadcast the parameters from rank 0 before the first step, or seed their construction equally.",
    )


def locate_seed(finding: Finding, first: Sequence[OptimizerStep]) -> Finding:
    """Relocate DDP208 to the line that seeds the model differently per rank."""
    seeds = [step.seed for step in first]
    if finding.code != "DDP208" or None in seeds or len(set(seeds)) < 2 or first[0].seeded_at is None:
        return finding
    message = f"the model is created under a different seed on each rank: {'; '.join(group_by_value(seeds))}"
    moved = replace(finding, evidence=(*finding.evidence, message))
    return moved.relocated(first[0].seeded_at)


def advise_under_sharding(finding: Finding) -> Finding:
    """Replace the fix of a DDP208 on replicated shards by the fix for `fully_shard`."""
    if finding.code != "DDP208":
        return finding
    fix = (
        "fully_shard broadcasts nothing: give all replicas the same values before it, or hand rank 0's values out "
        "after it (set_model_state_dict with broadcast_from_rank0)."
    )
    return replace(finding, fix=fix)
