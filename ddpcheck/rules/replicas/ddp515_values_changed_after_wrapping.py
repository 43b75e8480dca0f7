"""DDP515 values-changed-after-wrapping: error, values_differ

Something other than the optimizer changed parameter values after wrapping, on some ranks.

Why: DDP broadcasts only at construction. If rank 0 alone loads a checkpoint, or re-initialises, prunes or averages
    weights, only rank 0 changes. (PyTorch docs, DistributedDataParallel: parameters are never broadcast after
    construction.)
Fix: Make the change on every rank from the same data, or broadcast the parameters after it.
Detected: ddpcheck computes checksums of the parameters when the wrapper is constructed. The ranks compare checksums
    before the first forward pass and in later steps. Under fully_shard, `ddpcheck run` records the lines that write
    parameters before the first forward pass. It reports lines that only some ranks have reached.
Ignore: If the values are restored before the optimizer steps, as in sharpness-aware minimisation.
Line: The line that changes the values after wrapping. If there is none, the line that wraps the module.
Checks: report wrapping, reducer; run loop; repro state
Explains: DDP208 DDP301 DDP302 DDP303 DDP304 DDP305 DDP312 DDP306; DDP516 if only the loss; quietly DDP214 if of a
    copy
Example:
    ddp = DistributedDataParallel(model)
    if dist.get_rank() == 0:
        model.load_state_dict(checkpoint)    # right: load before wrapping, or on every rank
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import format_ranks, join_names, new_finding, plural, plural_verb, ranks_or_all
from ddpcheck.rules.gradients.ddp310_gradient_changed_before_reduction import locate_step_in_backward
from ddpcheck.rules.replicas.changes import locate_values
from ddpcheck.rules.replicas.comparisons import IN_STEP, divergence_finding
from ddpcheck.trace.replicas import VALUE_CHANGES, Changes, Divergence, ReplicaFacts, changes_of_kind, differing_names


def judge_values_changed(start: Sequence[Mapping[str, int]], current: Sequence[Mapping[str, int]]) -> list[Finding]:
    """DDP515: parameters that some ranks changed after DDP had synchronized them."""
    known = [name for name in differing_names(current) if all(name in values for values in start)]
    names = [name for name in known if len({values[name] for values in start}) == 1]
    if not names:
        return []
    changed = [rank for rank, before in enumerate(start) if any(before[name] != current[rank][name] for name in names)]
    return new_finding(
        "DDP515",
        names,
        f"The values of {join_names(names)} were changed on {format_ranks(changed)} after the wrapper had synchronised "
        "them; nothing makes the ranks equal again.",
        ranks=ranks_or_all(changed, len(current)),
        tags=(IN_STEP,),
    )


def judge_parameters_before_optimizer(facts: ReplicaFacts) -> list[Finding]:
    """DDP515: parameters that differ between ranks before the optimizer's first step."""
    first, known = min(facts.by_step), facts.known
    mismatches = differing_names([item.parameters_before_optimizer for item in facts.by_step[first]])
    names = [name for name in mismatches if name not in known.differing_at_start]
    if not names:
        return []
    return known.names.new_finding(
        "DDP515",
        names,
        f"The forward or backward pass of step {first} sets {join_names(known.names.subjects(names))} to "
        "values that differ between ranks; DDP broadcasts parameters when it is constructed and never again.",
        steps=ranks_or_all((first,), len(facts.by_step)),
        evidence=["equal on all ranks after wrapping, different before the optimizer's step"],
        tags=(IN_STEP,),
    )


def judge_local_writes(changes: Changes, kept: Sequence[Mapping[str, int]]) -> list[Finding]:
    """DDP515: shards written before the first forward pass on some ranks only.

    Each rank has a different shard, so ranks cannot compare their values. `kept`: by rank, the parameters whose values
    have not changed since `fully_shard`.
    """
    early = [
        (rank, change)
        for rank, rank_changes in enumerate(changes)
        for change in rank_changes
        if change.what in VALUE_CHANGES and not change.forwards and change.names
    ]
    ranks: dict[str, set[int]] = {}
    for rank, change in early:
        for name in change.names:
            ranks.setdefault(name, set()).add(rank)
    names = [*ranks]
    writers = sorted(ranks[names[0]]) if names else []
    others_kept = [values for rank, values in enumerate(kept) if rank not in writers]
    have_same_writers = writers and all(sorted(ranks[name]) == writers for name in names)
    if not have_same_writers or not others_kept or any(name not in values for values in others_kept for name in names):
        return []
    first = early[0][1]
    return new_finding(
        "DDP515",
        names,
        f"{join_names(names)} {plural_verb('is', 'are', names)} written after fully_shard on {format_ranks(writers)} "
        "only, which has only its own shard: the other shards keep their previous values.",
        ranks=writers,
        location=first.location,
        evidence=[f"{first.how} writes the shards there, before the first forward pass"],
        fix="Write shards on every rank; or initialise the model before fully_shard.",
    )


def judge_changed_in_step(facts: ReplicaFacts, divergence: Divergence) -> list[Finding]:
    """DDP515: parameters that diverge because some ranks changed them before the optimizer's step."""
    ranks = divergence.changed_ranks
    if not ranks:
        return []
    return divergence_finding(
        "DDP515",
        facts,
        divergence,
        f"The values of {plural(len(divergence.names), 'parameter')} were changed on {format_ranks(ranks)} in "
        f"step {divergence.step}, by something else than the optimizer.",
        f"changed on {format_ranks(ranks)} alone, before the optimizer's step",
        ranks=ranks,
        tags=(IN_STEP,),
    )


def relocate(finding: Finding, changes: Changes, wrapped_at: Location | None) -> Finding:
    """Relocate a finding to the line that changes the values, else to `wrapped_at`."""
    if stepped := changes_of_kind(changes, "stepped"):
        return locate_step_in_backward(finding, stepped[0])
    moved = locate_values(finding, changes, after_forward=False)
    return replace(finding, location=wrapped_at) if moved is finding else moved
