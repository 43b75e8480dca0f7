"""DDP804 targets-without-offset: error

Targets index rows gathered from all ranks, without the offset of the rank's own rows.

Why: In the result of all_gather, the rows of rank r begin at r * batch size. With targets arange(batch size) on every
    rank, all ranks except the first learn to match their samples with those of rank 0.
Fix: Add the offset: targets = torch.arange(len(x)) + rank * len(x).
Detected: In some steps, `ddpcheck run` checks cross entropies whose logits compare features with a gathered matrix
    (products, cosine similarity, torch.cdist). It finds the rank's own rows in the matrix. DDP804 is reported if
    three conditions hold. Each rank's rows begin at a different index. All ranks have the same targets, or the
    targets of each rank are consecutive numbers. At least one rank has no target among its own rows, and at least one
    other rank has such a target. Not covered: other losses, differences that the script computes itself, and rows
    that pass through a layer after the gather.
Ignore: If the positives of a rank are rows of another rank on purpose.
Line: The line of the cross entropy, else the line that computes the loss, else the call of all_gather.
Checks: run evaluation
Example:
    logits = features @ torch.cat(all_gather(features)).T
    loss = cross_entropy(logits, torch.arange(len(features)))  # right: + rank * len(features)
"""

from __future__ import annotations

from ddpcheck.findings.evidence.evaluation import GatheredTargets
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import format_ranks, new_finding
from ddpcheck.rules.registry import rule
from ddpcheck.trace.evaluations import Evaluations


@rule
def judge_targets(evaluations: Evaluations) -> list[Finding]:
    """DDP804: targets that index another rank's rows in a tensor of gathered rows.

    Reported if each rank's rows begin at a different class, targets are equal on all ranks or consecutive, and some
    ranks have no target among their own rows. Correct scripts put own rows first, or add an offset to the targets.
    """
    uses = evaluations.targets
    for group in sorted({use.members for rank_uses in uses for use in rank_uses}):
        group_uses = [[use for use in uses[rank] if use.members == group] for rank in group if rank < len(uses)]
        for step_uses in zip(*group_uses, strict=False) if len(group_uses) == len(group) else ():
            places = {(use.step, use.location, use.rows, use.classes) for use in step_uses}
            comparable = len({use.targets for use in step_uses}) == 1 or all(map(_are_consecutive, step_uses))
            if len(places) > 1 or not comparable or len({use.own for use in step_uses}) < len(step_uses):
                continue
            wrong = {
                rank: use
                for rank, use in zip(group, step_uses, strict=True)
                if not any(use.own <= target < use.own + use.rows for target in use.targets)
            }
            if wrong and len(wrong) < len(group):
                rank, use = next(iter(wrong.items()))
                first, last = min(use.targets), max(use.targets)
                loss_lines = {loss.step: loss.computed_at for loss in evaluations.losses[group[0]] if loss.computed_at}
                line = use.loss or loss_lines.get(use.step)
                return new_finding(
                    "DDP804",
                    ("cross_entropy",),
                    f"Of the {use.classes} rows that all_gather returns, those of rank {rank} begin at {use.own}, but "
                    f"the targets on {format_ranks(wrong)} are {first} to {last}: rows of another rank.",
                    ranks=[*wrong],
                    location=line or use.location,
                    evidence=[
                        f"gathered at {use.location}" if line and use.location else "",
                        *(
                            f"rank {rank}: its rows are {u.own} to {u.own + u.rows - 1}, its targets {first} to {last}"
                            for rank, u in list(zip(group, step_uses, strict=True))[:4]
                        ),
                    ],
                )
    return []


def _are_consecutive(use: GatheredTargets) -> bool:
    """Return True if targets are consecutive, like row numbers plus a (maybe wrong) offset."""
    return max(use.targets) - min(use.targets) + 1 == len(use.targets) == use.rows
