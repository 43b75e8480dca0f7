"""Rows of `ddpcheck run`: the views of a script, in the order in which their judges run.

A view selects facts, and describes what was compared (`row_of`). Some rows are still functions of all facts.
"""

from __future__ import annotations

from ddpcheck.findings.evidence import loop, replicas, script
from ddpcheck.findings.replace import replace
from ddpcheck.findings.rules import RULES
from ddpcheck.rules.gradients.wrapper_lines import CHECKS, judge_all_of_wrappers, judge_constructions
from ddpcheck.rules.gradients.wrappers import are_rounded
from ddpcheck.rules.registry import row_of
from ddpcheck.rules.replicas.copies import judge_states, judge_uses
from ddpcheck.rules.replicas.model_parts import compare_groups, compare_hand_split
from ddpcheck.rules.verdict import Row, Verdict, Verdicts
from ddpcheck.trace.async_handles import AsyncHandles
from ddpcheck.trace.compilation import Compilations
from ddpcheck.trace.data import Data
from ddpcheck.trace.evaluations import Evaluations
from ddpcheck.trace.loop import GradientChanges, Loop
from ddpcheck.trace.losses import Losses
from ddpcheck.trace.optimizers import Metrics, OptimizedParameters, Optimizers, OptimizerStates
from ddpcheck.trace.program import Program, Statistics
from ddpcheck.trace.script_facts import ScriptFacts
from ddpcheck.trace.training import Training
from ddpcheck.trace.unwrapped_params import all_gradients_agree


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
    params_differ = bool(faults) and RULES[faults[0].code].values_differ
    if params_differ and any(map(are_rounded, facts.wrappers)):  # copies inherit the rounding
        return {"replicas": Verdict(lacking=_ROUNDED)}
    return {"replicas": Verdict([replace(fault, tags=(*fault.tags, "of a copy")) for fault in faults])}


_ROUNDED = "copies not compared: the parameters that are copied differ between ranks by rounding"

ROWS: tuple[Row[ScriptFacts], ...] = (
    row_of(OptimizerStates),
    row_of(AsyncHandles),
    Row(judge_constructions, ("replicas", "collectives")),
    Row(judge_all_of_wrappers, CHECKS, over_ranks=False),
    Row(compare_groups, ("replicas", "data")),
    Row(compare_hand_split, ("replicas",)),
    row_of(Losses),
    row_of(GradientChanges),
    row_of(Optimizers),
    row_of(Metrics),
    row_of(Loop),
    row_of(Training),
    row_of(Compilations),
    row_of(Data),
    row_of(Statistics),
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
