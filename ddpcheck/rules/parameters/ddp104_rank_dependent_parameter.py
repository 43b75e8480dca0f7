"""DDP104 rank-dependent-parameter: error, stops_ddp, no_gradient, conditional_use, stops_run, keeps_results

A parameter contributes to the loss on some ranks of a step and not on others.

Why: Ranks with the gradient start the all-reduce of its bucket, and ranks without the gradient never start it. The
    job then hangs until the process group's timeout (30 minutes by default, 10 with nccl). Or the ranks without the
    gradient raise at their next forward, while the others are stuck in backward. (PyTorch docs,
    DistributedDataParallel: all ranks must take part in every gradient synchronisation.)
Fix: Make the branch the same on every rank (decide it from the step or a shared seed, not from the rank or its data),
    add 0.0 * output.sum() of the branch not taken, or pass find_unused_parameters=True.
Detected: In each step, before the first all-reduce, the ranks compare which parameters backward will reach. A
    parameter is reported if backward will reach it on some ranks only. The finding appears before the job hangs.
Ignore: Never. With find_unused_parameters=True, DDP handles such parameters, and ddpcheck does not report them.
Line: The branch or operation at which the path from the parameter to the loss ends; else the line that constructs
    the parameter.
Checks: report parameters; run parameters; repro missing
Explains: DDP306 if same subjects; DDP301 DDP302 DDP303 DDP305; quietly DDP304 DDP312; quietly DDP516 if only the
    loss; quietly DDP522 if of graphs
Reports: lhotse-speech/lhotse#554
Color: #0072B2
Example:
    def forward(self, x):
        if dist.get_rank() == 0:             # or: if x.mean() > 0, which differs with the shard
            return self.left(x)
        return self.right(x)                 # right: self.left(x) + 0.0 * self.right(x), or one choice for all ranks
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import Names, format_ranks, format_steps, group_by, join_names, new_finding
from ddpcheck.trace.parameters import ConditionalUse, MissingOn


def judge_rank_dependence(use: ConditionalUse) -> list[Finding]:
    """DDP104: parameters that are missing on some but not all ranks in a step."""
    partial = [absence for absence in use.absences if len(absence.ranks) < use.facts.world_size]
    if not partial:
        return []
    step = min(min(absence.steps) for absence in partial)
    evidence = use.describe_absences()
    verb = "reduce" if use.facts.wrapper.sharded else "wait for"
    message = _describe_first([absence for absence in partial if step in absence.steps], step, use.facts.names, verb)
    if use.all_at_once:
        evidence = ["the loss depends on no parameter there, such as a constant for an empty batch"]
        message = (
            f"No parameter has a part in the loss of {format_ranks(partial[0].ranks)} in step {step}, while the "
            f"other ranks {verb} the gradients."
        )
    return use.new_finding("DDP104", message, evidence, sorted({rank for item in partial for rank in item.ranks}))


def _describe_first(absences: Sequence[MissingOn], step: int, names: Names, verb: str) -> str:
    """Describe the first step in which ranks disagree (`verb`: what the other ranks do)."""
    parts = [f"{join_names(names.subjects(a.names))} did not contribute on {format_ranks(a.ranks)}" for a in absences]
    if len(parts) == 1:
        return f"{parts[0]} in step {step}, while the other ranks {verb} the gradient."
    suffix = f" (and {len(parts) - 2} more)" if len(parts) > 2 else ""
    return f"In step {step} {parts[0]}, and {parts[1]}{suffix}: the ranks wait for each other's gradients."


def judge_skipped_reductions(absent: Mapping[tuple[int, int], frozenset[str]]) -> list[Finding]:
    """DDP104: ranks that skip all-reduces of different parameters (`absent`: by step and rank)."""
    for step, keys in group_by(sorted(absent), lambda key: key[0]).items():
        first = absent[keys[0]]
        odd = [key[1] for key in keys if absent[key] != first]
        if odd:
            return new_finding(
                "DDP104",
                sorted(frozenset.union(*(absent[key] for key in keys))),
                f"{format_ranks(odd)} and rank {keys[0][1]} leave out different parameters in {format_steps([step])}; "
                "one rank skips an all-reduce in which the other waits, if a bucket holds no other parameters",
            )
    return []
