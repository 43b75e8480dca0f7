"""Order of judges of losses: the first with findings explains the scale of gradients."""

from __future__ import annotations

from collections.abc import Sequence

from ddpcheck.findings.report import Finding
from ddpcheck.rules.loss.ddp303_scaled_gradient import explain_by_scale, judge_gathered_loss
from ddpcheck.rules.loss.ddp305_loss_normalisation import judge_counts, judge_rank_weights, judge_targets_of_ranks
from ddpcheck.rules.loss.ddp309_collective_without_gradient import judge_gathers, judge_local_parts
from ddpcheck.rules.loss.ddp514_accumulation_scale import judge_accumulated, judge_targets_of_micro_batches
from ddpcheck.rules.registry import rule
from ddpcheck.stream.rank_report import MicroBatch
from ddpcheck.trace.losses import Losses, unequal_targets


@rule
def judge_losses(losses: Losses) -> list[Finding]:
    """Report a loss of wrong scale, and gathered features used as constants (DDP309)."""
    return _explain_scale(losses) + judge_gathers(losses)


def _explain_scale(losses: Losses) -> list[Finding]:
    for passes in losses.passes:
        if scaled := explain_by_scale(passes, losses):
            return [] if losses.are_rescaled else scaled
        if unequal := judge_counts(passes) or judge_rank_weights(passes):
            return unequal
    return judge_accumulated(losses.by_rank) or judge_local_parts(losses) or judge_gathered_loss(losses)


def judge_target_weights(ranks: Sequence[Sequence[MicroBatch]]) -> list[Finding]:
    """Report targets that the loss weights unequally, by rank or micro-batch (DDP305, 514)."""
    unequal = unequal_targets(ranks)
    return judge_targets_of_ranks(unequal) or judge_targets_of_micro_batches(unequal) if unequal else []
