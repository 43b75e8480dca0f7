"""Rows of `ddpcheck run`: judges of a script by check line.

Each row selects facts, calls judges, and describes the comparison. Evidence of a rule is in `findings.evidence`, under
the name of its recorder in `record`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from ddpcheck.findings.evidence import loop, replicas, script
from ddpcheck.findings.evidence.gradients import LEAST
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import counted
from ddpcheck.rules.collectives.async_handles import judge_async_handles
from ddpcheck.rules.gradients.wrapper_lines import PARTS, judge_all_of_wrappers, judge_constructions
from ddpcheck.rules.gradients.wrappers import are_rounded, sums_rightly
from ddpcheck.rules.loss.ddp309_collective_without_gradient import judge_gathers
from ddpcheck.rules.loss.ddp514_accumulation_scale import judge_accumulated
from ddpcheck.rules.loss.losses import judge_losses
from ddpcheck.rules.optimizers.script_optimizers import judge_all_clips
from ddpcheck.rules.registry import row_of
from ddpcheck.rules.replicas.copies import judge_states, judge_statistics, judge_uses
from ddpcheck.rules.replicas.model_parts import compare_groups, compare_hand_split
from ddpcheck.rules.verdict import Row, Verdict, Verdicts
from ddpcheck.stream.rank_log import WatchedRank
from ddpcheck.trace.compilation import Compilations
from ddpcheck.trace.data import Data
from ddpcheck.trace.evaluations import Evaluations
from ddpcheck.trace.loop import Loop
from ddpcheck.trace.losses import FEWEST_PASSES, SCALE_FREE, judge_own_parts
from ddpcheck.trace.optimizers import Metrics, OptimizedParameters, Optimizers, OptimizerStates
from ddpcheck.trace.program import Program
from ddpcheck.trace.script_facts import ScriptFacts, entries_of, used_by
from ddpcheck.trace.unwrapped_params import all_gradients_agree

_NEAR = 0.3  # tolerance of a sketched norm ratio, as a power of the world size


def _compared(findings: Sequence[Finding], words: str, times: int) -> Verdict:
    """Return a verdict whose subject exists only if `times` is not zero."""
    return Verdict(findings, words if times else "")


def _works(facts: ScriptFacts) -> Verdicts:
    findings = judge_async_handles(
        facts.of(loop.WorkDropped), facts.of(loop.WorkUsed), facts.of(loop.TensorOfWorkWritten)
    )
    return {"collectives": Verdict(findings)}


def _losses(facts: ScriptFacts) -> Verdicts:
    ranks = facts.training_groups[0] if facts.model_groups else facts.ranks
    losses = [[loss for loss in entries_of(rank, script.LossDifferentiated) if not _is_tiny(loss)] for rank in ranks]
    parts = [entries_of(rank, loop.OwnPartPutBack) for rank in ranks]
    classes = [step.options.get("class", "") for step in entries_of(facts.ranks[0], script.OptimizerStep)]
    scale_matters = not all(name.startswith(SCALE_FREE) for name in classes)
    whole_steps = [{part.step for part in rank_parts} for rank_parts in parts]
    ranks_per_model = len(next(iter(facts.model_groups), (0,)))
    summed = any(map(sums_rightly, facts.wrappers))
    findings = judge_losses(losses, whole_steps, together=ranks_per_model, summed=summed) or judge_accumulated(losses)
    findings = findings or judge_own_parts(parts, losses, scale_matters=scale_matters)
    findings = [finding for finding in findings if finding.code != "DDP303" or not _are_scaled_back(facts.ranks[0])]
    findings += judge_gathers(facts.of(loop.GatheredConstant))
    averaged = [[loss for loss in rank_losses if loss.terms and loss.wrappers] for rank_losses in losses]
    passes = min(map(len, averaged))
    is_sum = all(term.kind == "sum" and abs(term.factor) == 1 for loss in averaged[0] for term in loss.terms)
    summary = f"no fault in the scale and normalisation of the loss, in {counted(passes, 'backward pass')}"
    summary = "the loss is a sum over the samples of a rank, which DDP averages" if is_sum else summary
    summary = f"{summary}; not compared with a single process" if passes >= FEWEST_PASSES else ""
    return {"loss": Verdict(findings, "", summary) if is_sum and not summed else Verdict(findings, summary)}


def _is_tiny(loss: script.LossDifferentiated) -> bool:
    return any(0 < abs(term.factor) <= LEAST for term in loss.terms)


def _are_scaled_back(rank: WatchedRank) -> bool:
    """Check if steps rescale averaged gradients by the world size or its inverse."""
    for step, replica in used_by(rank, entries_of(rank, script.OptimizerStep)):
        averaged_norm = math.hypot(*itertools.chain.from_iterable(replica.averaged.values()))
        factor = math.hypot(*step.norms.values()) / averaged_norm if averaged_norm else 0.0
        if factor and abs(abs(math.log(factor, rank.started.world_size)) - 1) < _NEAR:
            return True
    return False


def _statistics(facts: ScriptFacts) -> Verdicts:
    return {"replicas": Verdict(judge_statistics(facts.of(replicas.RunningStatistic)))}


def _copies(facts: ScriptFacts) -> Verdicts:
    """Judge models outside the wrappers."""
    states = facts.of(script.StateHeld)
    whole = all(len(wrapper.made.ranks) == len(facts.ranks) for wrapper in facts.wrappers)
    if not whole or facts.model_groups:
        states = [[state for state in rank_states if not state.other] for rank_states in states]
    steps = [rank_steps for opt in facts.optimizers for rank_steps in opt.steps if rank_steps[0].held]
    uses = facts.of(replicas.StateUsed) if whole and all(map(all_gradients_agree, steps)) else []
    written = [[entry for entry in log if entry.wrapper == loop.OF_A_COPY] for log in facts.of(loop.ModuleChanged)]
    faults = judge_states(states, written) or judge_uses(uses, states, written)
    if faults and faults[0].code == "DDP306" and any(map(are_rounded, facts.wrappers)):  # copies inherit the rounding
        return {"replicas": Verdict(lacking=_ROUNDED)}
    return {"replicas": Verdict([replace(fault, tags=(*fault.tags, "of a copy")) for fault in faults])}


_ROUNDED = "copies not compared: the parameters that are copied differ between ranks by rounding"


ROWS: tuple[Row[ScriptFacts], ...] = (
    row_of(OptimizerStates),
    Row(_works, ("collectives",), over_ranks=False),
    Row(judge_constructions, ("replicas", "collectives")),
    Row(judge_all_of_wrappers, tuple(PARTS), over_ranks=False),
    Row(compare_groups, ("replicas", "data")),
    Row(compare_hand_split, ("replicas",)),
    Row(_losses, ("loss",)),
    Row(judge_all_clips, ("optimizers",)),
    row_of(Optimizers),
    row_of(Metrics),
    row_of(Loop),
    row_of(Compilations),
    row_of(Data),
    Row(_statistics, ("replicas",)),
    row_of(Program),
    row_of(Evaluations),
    row_of(OptimizedParameters),
    Row(_copies, ("replicas",)),
)
"""Rows in order of evaluation, most specific first."""


def rows_of(facts: ScriptFacts) -> list[Row[ScriptFacts]]:
    """Return the rows to run: `over_ranks` rows need logs of all ranks."""
    return [row for row in ROWS if facts.can_compare or not row.over_ranks]


HEADINGS = (
    *("parameters", "replicas", "reducer", "loop", "loss", "optimizers", "data", "files"),
    *("collectives", "evaluation", "parity"),
)
"""Headings of the check lines, in display order."""
