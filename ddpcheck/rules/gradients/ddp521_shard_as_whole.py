"""DDP521 shard-as-whole: error

A rank's shard of the parameters is used as the whole, or the whole as a shard.

Why: Under fully_shard, each parameter is a DTensor, and each rank holds one shard of it. state_dict() and to_local()
    return that shard. A file of rank 0 alone lacks the shards of the other ranks. If every rank loads this file, each
    parameter becomes one shard, repeated. The same happens if every rank draws the values of its shard from the same
    seed. Shapes agree, so no error is raised. (PyTorch docs, torch.distributed.checkpoint.state_dict.)
Fix: On all ranks, call get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)),
    and save the result on rank 0. Load it on all ranks with set_model_state_dict(...,
    options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)). Or let torch.distributed.checkpoint
    save all shards.
Detected: `ddpcheck run` reports torch.save of a model's shards if only some ranks save theirs. It compares the shards
    of the ranks in some steps and after torch.load. It reports equal shards on ranks that should hold different ones.
    If torch raises an error because whole tensors are loaded or copied into shards, the line is reported. `ddpcheck
    run` also reports a single norm over gradients of which some are shards and others are whole. It reports
    load_state_dict of an optimizer if every rank then has the same state for different shards. `ddpcheck report`
    reports such an optimizer state before the first step. Parameters that reach the loss only through an all_to_all
    (experts, embedding tables) belong to one rank each. An all_reduce of their gradients over all ranks is reported.
Ignore: If the file is for inspection only, or if shards are equal at the start on purpose, as in a model of identical
    blocks.
Line: The line that saves, loads or copies the values, or that takes the norm or reduces the gradients. If no line
    loads the equal shards: the call of fully_shard.
Checks: report reducer; run loop, optimizers, files
Example:
    fully_shard(model)
    if rank == 0:
        torch.save(model.state_dict(), path)     # right: get_model_state_dict(model, options=FULL), on every rank
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath

from ddpcheck.findings.evidence.script import FileUsed
from ddpcheck.findings.evidence.steps import DdpStepEvidence, ShardedStep
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import format_ranks, join_names, new_finding, plural, plural_verb
from ddpcheck.rules.registry import rule
from ddpcheck.stream.entries import ReplicaCaptured
from ddpcheck.trace.failures import FailureFacts
from ddpcheck.trace.program import Program
from ddpcheck.trace.unwrapped_params import Steps, param_name


@rule
def judge_shards_saved(program: Program) -> list[Finding]:
    """DDP521: a checkpoint with the shards of some ranks only."""
    saved = {rank: [use for use in rank_uses if use.shard is not None] for rank, rank_uses in enumerate(program.uses)}
    shards = [use for rank_uses in saved.values() for use in rank_uses]
    numbers = {use.shard[0] for use in shards if use.shard is not None}
    parts = max((use.shard[1] for use in shards if use.shard is not None), default=0)
    if not shards or len(numbers) == parts:
        return []
    program.require_end("saved shards")
    ranks = [rank for rank, rank_uses in saved.items() if rank_uses]
    first = shards[0]
    return new_finding(
        "DDP521",
        (PurePath(first.path).name,),
        f"{format_ranks(ranks).capitalize()} {plural_verb('saves', 'save', ranks)} its own shard of each parameter, "
        f"and no other rank saves its own: {len(numbers)} of {parts} parts of the model "
        f"{plural_verb('is', 'are', [*numbers])} in a file.",
        ranks=ranks,
        location=first.location,
        evidence=[f"the file is {first.path}"],
    )


def explain_mixed_norms(facts: FailureFacts) -> list[Finding]:
    """DDP521: one norm over sharded (DTensor) and whole gradients."""
    shards, whole = facts.clipped if len(facts.clipped) == 2 else ((), ())
    split, others = (f" ({join_names(names)})" if names else "" for names in (shards, whole))
    return facts.new_finding(
        "DDP521",
        shards or ("gradients",),
        f"One norm is computed over gradients that are split over the ranks{split}, which are DTensors, and over whole "
        f"gradients{others}, which are plain tensors.",
        fix="Take the norm of each kind by get_total_norm, that of the DTensors with .full_tensor(); put the two "
        "together (the root of the sum of their squares), and give that to clip_grads_with_norm_ for each kind.",
    )


def explain_full_state_into_shards(facts: FailureFacts, verb: str) -> list[Finding]:
    return facts.new_finding(
        "DDP521",
        ("parameters",),
        f"Whole tensors are {verb} parameters that fully_shard has sharded: each rank has a part of each (DTensor).",
        fix="Load whole values before fully_shard; or after it, on all ranks, by set_model_state_dict(model, values, "
        "options=StateDictOptions(full_state_dict=True)), with broadcast_from_rank0=True if only rank 0 has them. For "
        "a single parameter: distribute_tensor(value, parameter.device_mesh, parameter.placements).",
    )


def explain_mixed_state(facts: FailureFacts) -> list[Finding]:
    """DDP521: plain optimizer state of sharded (DTensor) parameters."""
    return facts.new_finding(
        "DDP521",
        ("state",),
        "The optimizer's state has plain tensors for parameters that are shards (DTensor): it belongs to whole "
        "parameters, or was created before fully_shard was called.",
        fix="Load the state of whole parameters on all ranks by set_optimizer_state_dict(model, optimizer, state, "
        "options=StateDictOptions(full_state_dict=True)) of torch.distributed.checkpoint.state_dict; and construct "
        "the optimizer after fully_shard.",
    )


def judge_parts_reduced(steps: Sequence[Steps]) -> list[Finding]:
    """Detect all-reduced gradients of rank-local parameters (DDP521)."""
    known = [step for step in steps if all(entry.own_reduced for entry in step)]
    if len(known) < 2 or len(known[0]) < 2:
        return []
    first = known[0][0]
    names = [*map(param_name, first.own_reduced)]
    return new_finding(
        "DDP521",
        names,
        f"Each rank has its own {join_names(names)}, and the gradients are all_reduced over all ranks: each of these "
        "rank-local parts is trained with the gradients of the others.",
        location=first.own_reduced_at or first.location,
        evidence=["they reach the loss through an all_to_all only, so each already has its gradient from all ranks"],
        related={"optimizer steps": first.location},
        fix="Reduce the gradients of replicas only. Rank-local parameters need no all_reduce: divide their gradients "
        "by the world size if those of the replicas are averaged.",
    )


def judge_equal_shard_state(
    states: Sequence[Mapping[str, float]], line: Location | None, evidence: Sequence[str], steps: Sequence[int] = (0,)
) -> list[Finding]:
    """Report equal optimizer state on all ranks for different shards (DDP521).

    `states`: norms of state tensors by rank. Norms differ between shards; step counters are ignored.
    """
    norms = [{name: norm for name, norm in state.items() if norm and not name.endswith(": step")} for state in states]
    if len(norms) < 2 or len(set(norms[0].values())) < 2 or any(state != norms[0] for state in norms):
        return []
    keys = sorted({name.rpartition(": ")[2] for name in norms[0]})
    return new_finding(
        "DDP521",
        keys,
        f"Every rank has the same {join_names(keys)} for its part of each of "
        f"{plural(len({name.rpartition(': ')[0] for name in norms[0]}), 'parameter')}, where each should have a "
        "different part: the optimizer's state is that of one rank.",
        steps=tuple(steps),
        location=line,
        evidence=evidence,
        fix="Save and load the state of every rank: by torch.distributed.checkpoint, with "
        "get_optimizer_state_dict and set_optimizer_state_dict; or in a file for each rank.",
    )


def judge_equal_shards(replicas: Sequence[ReplicaCaptured]) -> list[Finding]:
    """DDP521: equal shards on all ranks, where each should have a different part.

    Reported only if all shards with non-constant values are equal: zeros and ones are equal by design, and a single
    parameter may consist of equal blocks.
    """
    count = len({replica.shard for replica in replicas})
    names = list(dict.fromkeys(name for replica in replicas for name in replica.parts))
    values = [replica.state.values.parameters for replica in replicas]
    if count < 2 or not names or any(len({rank_values.get(name) for rank_values in values}) > 1 for name in names):
        return []
    return new_finding(
        "DDP521",
        names,
        f"Every rank has the same shard of {plural(len(names), 'parameter')}, where each should have a different "
        f"part: {plural_verb('it is', 'they are', names)} one part, {count} times.",
        steps=(replicas[0].step,),
        evidence=[
            "a file with the shards of one rank that every rank loads leaves them so, and so do values that each "
            "rank draws for its shards from the same seed"
        ],
    )


def locate_load(finding: Finding, uses: Sequence[Sequence[FileUsed]], wrapped_at: Location | None) -> Finding:
    """Relocate a DDP521 to the line that loads one file on all ranks."""
    if finding.code != "DDP521":
        return finding
    read = [{(use.path, use.location) for use in rank_uses if use.by_torch and not use.writes} for rank_uses in uses]
    common_loads = set.intersection(*read)
    if len({line for _, line in common_loads}) != 1:
        draw_fix = (
            "Initialise the parameters before fully_shard; or draw each whole parameter under one seed and take the "
            "rank's shard of it: distribute_tensor(values, parameter.device_mesh, parameter.placements). To draw only "
            "the shard, give each rank a different seed."
        )
        return replace(finding, location=wrapped_at, fix="" if any(read) else draw_fix)
    path, line = min(common_loads, key=str)
    note = f"every rank has loaded {PurePath(path).name} there"
    return replace(finding, location=line, evidence=(note, *finding.evidence))


def judge_loaded_state(evidence: Sequence[DdpStepEvidence]) -> list[Finding]:
    """Report one rank's optimizer state that a recipe loads on all ranks (DDP521)."""
    items = [item for item in evidence if isinstance(item, ShardedStep) and not item.step]
    return judge_equal_shard_state(
        [item.loaded for item in items],
        next((item.updated_at for item in items), None),
        ["the optimizer has it before the first step, on every rank"],
    )
