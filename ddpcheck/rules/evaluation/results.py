"""Judges of evaluation passes and gathered results."""

from __future__ import annotations

from collections.abc import Sequence

from ddpcheck.findings.evidence.evaluation import GatheredTargets, SumsReduced
from ddpcheck.findings.evidence.script import LossDifferentiated
from ddpcheck.findings.report import Finding
from ddpcheck.rules.evaluation.ddp804_targets_without_offset import wrong_targets_finding
from ddpcheck.rules.evaluation.ddp806_sum_reduced_again import repeated_sum_finding

_MIN_EQUAL = 4.0  # largest ratio between the amounts of two batches


def judge_sums_again(reduced: Sequence[Sequence[SumsReduced]]) -> list[Finding]:
    """DDP806: all_reduce of an earlier all_reduce result; one finding per line, `reduced` by rank.

    Each rank adds about the same amount since the last sum, while the sums grow by the world size or more: numbers that
    merely grow do not do both.
    """
    world_size, findings = len(reduced), []
    for first in reduced[0]:
        at_line = [sums for rank_sums in reduced for sums in rank_sums if sums.location == first.location]
        if len(at_line) == world_size and all(sums.left == first.left for sums in at_line):
            if any(all(_is_added(sums, number) for sums in at_line) for number in range(len(first.left[0]))):
                findings += repeated_sum_finding(first, world_size)
    return findings


def _is_added(sums: SumsReduced, number: int) -> bool:
    """Return True if each call adds a similar amount to the previous sum."""
    added = [inputs[number] - result[number] for inputs, result in zip(sums.given[1:], sums.left, strict=False)]
    return min(sums.left[0][number], *added) > 0 and max(added) <= _MIN_EQUAL * min(added)


def judge_targets(
    uses: Sequence[Sequence[GatheredTargets]], losses: Sequence[Sequence[LossDifferentiated]]
) -> list[Finding]:
    """DDP804: targets that index rows of another rank; arguments by rank, in order.

    Each rank has its own row offset among the classes, and the targets are equal on all ranks, or consecutive:
    on some ranks the targets index another rank's samples as positives. No fault if each rank puts its own rows first,
    or counts targets from the offset.
    """
    members = sorted({use.members for rank_uses in uses for use in rank_uses})
    for group in members:
        group_uses = [[use for use in uses[rank] if use.members == group] for rank in group if rank < len(uses)]
        if len(group_uses) < len(group):
            continue
        for step_uses in zip(*group_uses, strict=False):
            keys = {(use.step, use.location, use.rows, use.classes) for use in step_uses}
            comparable = len({use.targets for use in step_uses}) == 1 or all(
                # consecutive: an offset, maybe wrong
                max(use.targets) - min(use.targets) + 1 == len(use.targets) == use.rows
                for use in step_uses
            )
            if len(keys) > 1 or not comparable or len({use.own for use in step_uses}) < len(step_uses):
                continue
            wrong = [
                rank
                for rank, use in zip(group, step_uses, strict=True)
                if not any(use.own <= target < use.own + use.rows for target in use.targets)
            ]
            if wrong and len(wrong) < len(group):
                loss_lines = {loss.step: loss.made for loss in losses[group[0]] if loss.made is not None}
                return wrong_targets_finding(wrong, group, step_uses, loss_lines.get(step_uses[0].step))
    return []
