"""DDP306 state-diverged: error, spreads, values_differ, at_step, keeps_results

Parameters, buffers or optimizer state differ between ranks after a step.

Why: Nothing makes the ranks equal again: DDP never broadcasts parameters after construction. From this step on, DDP
    averages the gradients of different models. A checkpoint keeps only rank 0's state. (PyTorch docs,
    DistributedDataParallel: parameters are never broadcast between processes.)
Fix: Make each step of the optimizer the same on every rank: draw its random numbers under one seed, give it the same
    state and options, and have a closure (LBFGS) return a loss that was reduced over the ranks.
Detected: After the optimizer's step, the ranks compare parameters and optimizer state, bit by bit. `ddpcheck run` also
    compares copies of the wrapped module outside the wrapper, such as an EMA. It also compares models that the training
    loop calls and does not change, such as a frozen teacher. Gradients that each rank scales by its own factor, and
    parameters that nothing averages in local SGD, are reported too.
Ignore: If ranks diverge on purpose between averages, as in local SGD. In this case, compare the ranks right after an
    average.
Line: The line that writes the parameters outside of the optimizer's step. If there is none, the step of the optimizer
    (`ddpcheck run`), or the line that creates the first parameter (`ddpcheck report`). For a copy, the line that writes
    it, else the line that makes it. For loaded state, the line that loads it.
Checks: report reducer; run replicas, optimizers; repro state
Repeats: Wrappers, ModelParts
Explains: DDP516 if only the loss; quietly DDP214 if of a copy
Example:
    if loss.item() < threshold:              # decided from local data: some ranks step, others do not
        optimizer.step()                     # right: all_reduce the decision first
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from ddpcheck.findings.evidence.replicas import EvalCall
from ddpcheck.findings.evidence.script import LocalModel
from ddpcheck.findings.evidence.steps import DdpStepEvidence, ShardedStep
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location, Severity
from ddpcheck.findings.wording import (
    format_by_rank,
    format_ranks,
    join_names,
    new_finding,
    plural,
    plural_verb,
    ranks_or_all,
)
from ddpcheck.rules.gradients.ddp310_gradient_changed_before_reduction import locate_step_in_backward
from ddpcheck.rules.replicas.changes import locate_values
from ddpcheck.rules.replicas.comparisons import divergence_finding
from ddpcheck.stream.entries import LocalSgdEnd
from ddpcheck.trace.check_context import group_by_step, worst_first
from ddpcheck.trace.gradients import ReducerFacts
from ddpcheck.trace.model_parts import MIN_PART_STEPS, NORM_TOLERANCE, gradient_factors, squared_norm
from ddpcheck.trace.optimizers import LOAD_EVERYWHERE, describe_loads, restored_on_some
from ddpcheck.trace.replicas import (
    Changes,
    Divergence,
    ReplicaFacts,
    WriteFacts,
    changes_of_kind,
    differing_names,
    steps_with_equal_end,
)
from ddpcheck.trace.script_facts import PartSteps
from ddpcheck.trace.unwrapped_params import (
    Steps,
    any_gradient_differs,
    format_norm,
    minority_of,
    names_differing,
    param_name,
)

GAP_FACTOR = 3
"""Averaging has stopped if the last average is more than this many of the longest gaps between averages ago."""

EQUAL_SCALE = 1e-4
"""Relative difference up to which factors of gradients, or norms of clipped gradients, count as equal."""

MIN_MARKS = 3
"""Recorded fingerprints of a rank that trains separately: one at the beginning, and after two steps."""


def explain_by_divergence(steps: Sequence[Steps], are_equal: Sequence[bool]) -> list[Finding]:
    """Detect periodically averaged parameters whose averaging stops (DDP306)."""
    equal_at = [index for index, is_equal in enumerate(are_equal) if is_equal]
    longest = max(later - before for before, later in itertools.pairwise([0, *equal_at]))
    last = steps[-1]
    names = [param_name(name) for name in last[0].local_params if len({entry.local_params[name] for entry in last}) > 1]
    if len(are_equal) - equal_at[-1] <= GAP_FACTOR * longest or not names:
        return []
    return new_finding(
        "DDP306",
        names,
        f"{join_names(names)} {plural_verb('was', 'were', names)} the same on every rank again after at most "
        f"{plural(longest, 'step')} of the optimizer, and {plural_verb('is', 'are', names)} not any more since "
        f"step {equal_at[-1]}.",
        location=last[0].location,
        evidence=[f"{plural(len(are_equal) - equal_at[-1], 'step')} went by since then"],
        fix="Average the parameters until the training ends. If ranks keep values of the last average, to "
        "start the next average from, update these on all ranks.",
    )


def judge_updates(facts: ReducerFacts) -> list[Finding]:
    """Report optimizer steps on shards that differ from the unsharded step (DDP306).

    Parameters count only if their update is computed from the local shard alone. In other updates, such as matrix
    orthogonalisation, rounding may be as large as the difference.
    """
    wrong = []
    for step, items in group_by_step(facts.evidence).items():
        sharded = [item for item in items if isinstance(item, ShardedStep)]
        local = frozenset.intersection(*(item.updated_per_shard for item in sharded)) if sharded else frozenset()
        wrong += [(step, bad) for item in sharded for bad in item.against_whole if bad.bad and bad.name in local]
    if not wrong:
        return []
    step = min(step for step, _ in wrong)
    by_name = {bad.name: bad for wrong_step, bad in wrong if wrong_step == step}
    names, worst = list(by_name), worst_first(by_name.values())[:3]
    updated_at = next(item.updated_at for item in facts.evidence if isinstance(item, ShardedStep))
    return facts.known.names.new_finding(
        "DDP306",
        names,
        f"The optimizer's step {step} on shards changes {plural(len(names), 'parameter')} differently from the "
        "same step on the whole parameters and gradients: each rank updates its shard without the others.",
        location=updated_at or facts.known.names.location(names),
        steps=ranks_or_all(sorted({step for step, _ in wrong}), facts.step_count),
        evidence=["errors are relative to the update of the whole parameter", *map(str, worst)],
        fix="Compute norms and means of the DTensor, or all_reduce those of the shards over the shard group.",
    )


def judge_shard_scales(steps: Sequence[Steps]) -> list[Finding]:
    """Report gradient shards that are scaled differently on each rank after reduction (DDP306)."""
    for by_rank in steps:
        scales = [[*step.shard_scales.values()] for step in by_rank]
        if not all(map(_is_uniform, scales)):
            continue
        known = [sum(rank_scales) / len(rank_scales) for rank_scales in scales]
        if max(known) - min(known) <= NORM_TOLERANCE * max(known):
            continue
        first = by_rank[0]
        return new_finding(
            "DDP306",
            ("gradients",),
            "The gradients of the shards are scaled after their reduction, by a different factor on each rank: it is "
            "computed from a shard, not from the whole.",
            steps=(first.count,),
            location=first.norm_at or first.location,
            related={"optimizer steps": first.location},
            evidence=[
                f"rank {rank}: the norm of its shards is {factor:.6g} times that of all shards"
                for rank, factor in enumerate(known[:4])
            ],
            fix="Compute the norm of the DTensors (clip_grad_norm_ does), or all_reduce the squares of the shards' "
            "norms over the ranks, before the root is taken.",
        )
    return []


def _is_uniform(scales: Sequence[float]) -> bool:
    return len(scales) > 1 and 0.0 < max(scales) < math.inf and max(scales) - min(scales) <= EQUAL_SCALE * max(scales)


def judge_optimizer_state(steps: Sequence[Steps]) -> list[Finding]:
    """DDP306: optimizer state (e.g. momentum) that differs although gradients are equal."""
    equal_step: int | None = None  # last step in which all ranks had equal state
    for rank_steps in steps:
        if any_gradient_differs(rank_steps):
            return []  # ranks train separately, and may average parameters
        states = [step.states for step in rank_steps]
        if any(set(state) != set(states[0]) for state in states) and all(state for state in states):
            continue  # sharded
        names = names_differing(states)
        if not names:
            equal_step = rank_steps[0].count if all(states) else equal_step
            continue
        keys = sorted({name.rpartition(": ")[2] for name in names})
        ranks = minority_of(states, names)
        orders = [step.ddp_params for step in rank_steps]
        reordered = len(set(orders)) > 1 and len({frozenset(order) for order in orders}) == 1
        restored = {} if reordered else restored_on_some(rank_steps)
        diverged_later = equal_step is not None and not reordered and not any(step.restored_at for step in rank_steps)
        return new_finding(
            "DDP306",
            keys,
            f"The optimizer's {join_names(keys)} {plural_verb('differs', 'differ', keys)} between ranks in its step "
            f"{rank_steps[0].count}, so equal gradients make the parameters diverge.",
            ranks=tuple(restored) or ranks,
            steps=(rank_steps[0].count,),
            location=next(iter(restored.values()), (reordered and rank_steps[0].built_at) or rank_steps[0].location),
            evidence=[
                describe_loads(restored) if restored else "",
                f"it did not differ in step {equal_step}: in a later step, the ranks used different gradients"
                if diverged_later
                else "",
                *(
                    f"the optimizer of rank {rank} holds {join_names([*map(param_name, order)])}, in this order"
                    for rank, order in enumerate(orders[:2] if reordered else ())
                ),
                *(
                    f"norm of {values}"
                    for values in format_by_rank(
                        {param_name(n): [format_norm(state.get(n), "no state") for state in states] for n in names[:3]}
                    )
                ),
            ],
            fix="Give the optimizer its parameters in the same order on every rank: its state is saved and loaded by "
            "their numbers."
            if reordered
            else "Average the gradients in every step, and wait for every asynchronous collective (work.wait()) before "
            "the optimizer steps."
            if diverged_later
            else LOAD_EVERYWHERE,
        )
    return []


def loaded_on_some_finding(
    rank_steps: Steps, restored: Mapping[int, Location], counts: Sequence[float]
) -> list[Finding]:
    first = rank_steps[0]
    return new_finding(
        "DDP306",
        ("state",),
        f"The optimizer's state is loaded on {format_ranks(restored)} only: the others continue with a different "
        "state for their shards of the same parameters.",
        ranks=tuple(restored),
        steps=(first.count,),
        location=next(iter(restored.values())),
        related={"optimizer steps": first.location},
        evidence=[
            describe_loads(restored),
            *(f"rank {rank}: {count:g} steps were counted before" for rank, count in enumerate(counts[:4])),
        ],
        fix=LOAD_EVERYWHERE.replace("from the same file", "for its own parts"),
    )


def judge_local_sgd(entries_by_rank: Sequence[Sequence[LocalSgdEnd]]) -> list[Finding]:
    """DDP306: ranks that train separately (post-local SGD) and never average parameters."""
    last = [entries[-1] for entries in entries_by_rank if entries]
    if len(last) < len(entries_by_rank) or any(len(entry.marks) < MIN_MARKS for entry in last):
        return []
    names = list(differing_names([entry.parameters for entry in last]))
    if not names or set.intersection(*(set(entry.marks[1:]) for entry in last)):
        return []
    count = min(len(entry.marks) for entry in last) - 1
    return new_finding("DDP306", names, describe_unaveraged(names, count, last[0].step, last[0].hook), fix=AVERAGE_FIX)


def reword_as_never_averaged(finding: Finding) -> Finding:
    """Reword a DDP208 as a DDP306: ranks diverged because no backward pass was averaged."""
    return replace(
        finding,
        code="DDP306",
        message="Parameters differ between ranks, and no backward pass has been averaged so far.",
        ranks=(),
        evidence=(
            "gradients are averaged if the wrapper is called outside of no_sync, and backward begins with its output",
            "under Lightning's manual optimization: if self.manual_backward(loss) is called, and not loss.backward()",
        ),
    )


def reword_at_unknown_step(finding: Finding, values: Sequence[DdpStepEvidence], step: int) -> Finding:
    """Reword a DDP306 of which only the state after `step` steps is known."""
    if finding.code != "DDP306":
        return finding
    diverged = differing_names([item.parameters for item in values])
    ranks = set(itertools.chain.from_iterable(diverged.values()))
    minority = len(values) > 2 and 2 * len(ranks) < len(values)
    differ = plural_verb("differs", "differ", finding.subjects)
    message = f"{join_names(finding.subjects)} {differ} between ranks after {plural(step, 'step')}."
    return replace(finding, message=message, steps=(), ranks=tuple(sorted(ranks)) if minority else ())


def judge_unequal_factors(steps: Sequence[PartSteps], ranks: Sequence[int]) -> list[Finding]:
    """DDP306: gradients of a split model that each rank scales by its local norm."""
    scaled = [(rank_steps, factors) for rank_steps in steps if (factors := gradient_factors(rank_steps)) is not None]
    if not scaled or 2 * len(scaled) <= len(steps):
        return []
    rank_steps, factors = scaled[0]
    first = rank_steps[0]
    return new_finding(
        "DDP306",
        ("gradients",),
        f"The gradients are scaled by a different factor on each of {format_ranks(ranks)}, which compute one model "
        "together: each factor is computed from the norm of the rank's own parts.",
        ranks=ranks,
        steps=(first.count,),
        location=first.norm_at or first.location,
        related={"optimizer steps": first.location},
        evidence=[
            f"rank {rank}: {factor:.6g} times those of rank {ranks[0]}"
            for rank, factor in zip(ranks, factors, strict=True)
        ],
        fix="all_reduce the squared norms of the sharded parameters over the tensor-parallel group, and count "
        "replicated ones once; or keep DTensors, for which clip_grad_norm_ computes the norm of the whole.",
    )


def judge_counted_norms(groups: Sequence[Sequence[PartSteps]], ranks: Sequence[Sequence[int]]) -> list[Finding]:
    """DDP306: gradients clipped by a norm that counts replicated parameters once per rank.

    Reported if this wrong norm equals the clipping limit in all clipped steps, but the norm of the whole model varies.
    """
    wrong, right = [], []
    size = len(ranks[0])
    for group_steps in zip(*groups, strict=False):
        names = {name for rank_steps in group_steps for step in rank_steps for name in step.norms}
        squares = [squared_norm(name, group_steps) for name in names]
        right.append(math.sqrt(sum(squares)))
        whole = {name for name in names if name not in group_steps[0][0].split}
        wrong.append(math.sqrt(sum(s * (size if name in whole else 1) for name, s in zip(names, squares, strict=True))))
    limit = max(wrong, default=0.0)
    clipped = [n for n, norm in enumerate(wrong) if limit - norm <= EQUAL_SCALE * limit]
    true = [right[n] for n in clipped]
    if (
        size < 2
        or not 0.0 < limit < math.inf
        or len(clipped) < MIN_PART_STEPS
        or max(true) - min(true) <= NORM_TOLERANCE * limit
    ):
        return []
    first = groups[0][0][0]
    return new_finding(
        "DDP306",
        ("gradients",),
        f"Gradients are clipped by a norm that counts each replicated parameter {size} times, once for each rank of "
        "tensor parallelism: it is not that of the model.",
        location=first.norm_at or first.location,
        evidence=[
            f"in {len(clipped)} steps that norm is {limit:.6g}, and that of the gradients from {min(true):.6g} to "
            f"{max(true):.6g}"
        ],
        related={"optimizer steps": first.location},
        fix="Add up the squared norms of sharded parameters over the tensor-parallel group, and count replicated ones "
        "once.",
    )


def judge_never_averaged(facts: ReplicaFacts) -> list[Finding]:
    """DDP306: post-local SGD trains ranks separately, and nothing averages the parameters.

    Not reported for optimizers outside torch.optim: they may average parameters after the steps of the check.
    """
    local_steps = {step: items for step, items in facts.by_step.items() if items[0].is_local_sgd}
    if not local_steps or not facts.known.plain_optimizer or steps_with_equal_end(local_steps):
        return []
    last = local_steps[max(local_steps)]
    names = list(differing_names([item.parameters for item in last]))
    return facts.known.names.new_finding(
        "DDP306",
        names,
        describe_unaveraged(names, len(local_steps), min(local_steps), facts.known.wrapper.comm_hook),
        steps=ranks_or_all(sorted(local_steps), len(facts.by_step)),
        fix=AVERAGE_FIX,
    )


AVERAGE_FIX = (
    "Call average_parameters of a PeriodicModelAverager after each step of the optimizer, or wrap the optimizer in "
    "PostLocalSGDOptimizer."
)


def describe_unaveraged(names: Sequence[str], steps: int, first: int, hook: str) -> str:
    """Describe parameters that differ after each of `steps` steps starting at `first`."""
    reason = f"{hook} averages gradients over fewer ranks" if hook else "no_sync leaves each rank its own gradients"
    return (
        f"{plural(len(names), 'parameter')} {plural_verb('differs', 'differ', names)} between ranks after each "
        f"of {plural(steps, 'step')} from step {first} on, in which {reason}: nothing averages the parameters."
    )


def unequal_weights_finding(
    use: EvalCall, ranks: Sequence[int], location: Location | None, evidence: Sequence[str]
) -> list[Finding]:
    weights = "the state loaded into it" if use.loaded else "the copy of the weights"
    return new_finding(
        "DDP306",
        (use.name,),
        f"{use.name} is evaluated with different weights on each rank: {weights} is not the same on every rank.",
        ranks=ranks,
        location=location,
        evidence=evidence,
        severity=Severity.WARNING,
        fix="Make the same change to the copy on every rank (all_reduce the condition), or broadcast it before "
        "evaluation.",
    )


def judge_diverged_state(facts: ReplicaFacts, divergence: Divergence) -> list[Finding]:
    """DDP306: parameters or optimizer state that diverge in a step with equal gradients."""
    names, reason = divergence.names, "changed in the forward pass, on each rank differently, and not by the optimizer"
    return divergence_finding(
        "DDP306",
        facts,
        divergence,
        f"{plural(len(names), 'parameter')} {plural_verb('differs', 'differ', names)} between ranks after the "
        f"optimizer's step {divergence.step}, although the gradients were equal.",
        reason if divergence.before_optimizer else "",
    )


def relocate(finding: Finding, changes: Changes, _wrapped_at: Location | None) -> Finding:
    """Relocate a finding to an optimizer step during backward, else to a parameter write."""
    if stepped := changes_of_kind(changes, "stepped"):
        return locate_step_in_backward(finding, stepped[0])
    return locate_values(finding, changes, after_forward=True)


def unequal_module_finding(state: LocalModel, ranks: Sequence[int], evidence: str) -> list[Finding]:
    """Report a frozen model (e.g. a teacher) in the loop that differs between ranks."""
    return new_finding(
        "DDP306",
        (state.name,),
        f"{state.name} ({state.kind}) is in no wrapper and in no optimizer, the training loop calls it, and its "
        "parameters are not the same on every rank.",
        ranks=ranks,
        steps=(state.count,),
        location=state.location,
        evidence=[evidence, "they do not change from step to step"],
        severity=Severity.WARNING,
        fix="Load the same state into it on every rank, construct it under one seed, or broadcast it from rank 0.",
    )


def diverged_copy_finding(
    state: LocalModel, ranks: Sequence[int], evidence: Sequence[str], written: WriteFacts
) -> list[Finding]:
    """Report a copy of the wrapped module (e.g. EMA) that differs between ranks."""
    location, how_written, writers = written
    return new_finding(
        "DDP306",
        (state.name,),
        f"{state.name}, a copy of a wrapped module's parameters or created like it, is not the same on every rank.",
        ranks=writers or ranks,
        steps=(state.count,),
        location=location or state.location,
        evidence=[*evidence, *how_written],
        severity=Severity.WARNING,
        fix="Make the copy after DistributedDataParallel has been constructed, and make the same change on every "
        "rank (all_reduce the condition). If it is not a copy, construct it under one seed, or load one state into "
        "it.",
    )
