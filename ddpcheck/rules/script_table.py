"""Rows of `ddpcheck run`: judges of a script by check line.

Each row selects facts, calls judges, and describes the comparison. Evidence of a rule is in `findings.evidence`, under
the name of its recorder in `record`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ddpcheck.findings.evidence import loop, replicas, script
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import counted
from ddpcheck.rules.collectives.ddp408_result_not_awaited import judge_async_handles
from ddpcheck.rules.data.ddp505_duplicate_data import (
    judge_behind,
    judge_equal_gradients,
    judge_inputs,
    judge_same_targets,
    judge_streams,
)
from ddpcheck.rules.data.ddp510_shared_augmentation_seed import judge_added_noise, judge_step_draws
from ddpcheck.rules.data.ddp516_rank_dependent_program_data import judge_tables
from ddpcheck.rules.data.loaders import judge_loaders
from ddpcheck.rules.gradients.wrapper_lines import CHECKS, judge_all_of_wrappers, judge_constructions
from ddpcheck.rules.gradients.wrappers import are_rounded
from ddpcheck.rules.optimizers.ddp504_stale_optimizer import judge_parameters_unheld
from ddpcheck.rules.optimizers.script_optimizers import (
    judge_all_of_optimizers,
    judge_states_of_optimizers,
)
from ddpcheck.rules.program.ddp217_input_statistics import judge_statistics
from ddpcheck.rules.registry import row_of
from ddpcheck.rules.replicas.copies import judge_states, judge_uses
from ddpcheck.rules.replicas.model_parts import compare_groups, compare_hand_split
from ddpcheck.rules.verdict import Row, Verdict, Verdicts
from ddpcheck.stream.rank_log import WatchedRank
from ddpcheck.trace.compilation import Compilations
from ddpcheck.trace.data import FEWEST_INPUTS, OTHER_VALUES, deal_repeated, hold_own_parts, line_of_selection
from ddpcheck.trace.evaluations import Evaluations
from ddpcheck.trace.loop import GradientChanges, Loop
from ddpcheck.trace.losses import Losses
from ddpcheck.trace.optimizers import Metrics
from ddpcheck.trace.program import Program
from ddpcheck.trace.script_facts import ScriptFacts, entries_of
from ddpcheck.trace.unwrapped_params import all_gradients_agree


def _works(facts: ScriptFacts) -> Verdicts:
    findings = judge_async_handles(
        facts.of(loop.WorkDropped), facts.of(loop.WorkUsed), facts.of(loop.TensorOfWorkWritten)
    )
    return {"collectives": Verdict(findings)}


def _data(facts: ScriptFacts) -> Verdicts:
    if facts.trains_apart:
        return {}
    passes, draws, inputs = facts.passes, facts.of(loop.StepDraw), facts.of(script.Inputs)
    findings: list[Finding] = []
    for group in facts.training_groups:
        loader_findings = judge_loaders([rank.passes for rank in group], [rank.started.rank for rank in group])
        if _take_slices(group):  # every rank loads the whole batch
            loader_findings = [finding for finding in loader_findings if finding.code not in ("DDP505", "DDP519")]
        findings += [finding for finding in loader_findings if finding not in findings]
    orders = [tuple(tuple(entry.indices) for entry in rank_passes if entry.trains) for rank_passes in passes]
    if facts.model_groups or facts.stages or facts.sample_groups:  # ranks that share a model share samples
        places = [place for place, rank in enumerate(facts.ranks) if rank in facts.training_groups[0]]
        draws, inputs = [draws[place] for place in places], [inputs[place] for place in places]
        orders = [orders[place] for place in places]
    sharded = len(set(orders)) == len(orders)  # loaders give ranks different samples
    draw_findings = judge_step_draws(draws, inputs, loads_others=sharded)
    draw_findings = draw_findings or judge_added_noise(draws, inputs)
    findings += draw_findings
    if not draw_findings and not any(finding.code == "DDP505" for finding in findings):
        for wrapper in facts.wrappers:
            if facts.sample_groups:
                wrapper = replace(wrapper, ranks=[rank for rank in wrapper.ranks if rank in facts.training_groups[0]])
            by_number = {rank.started.rank: entries_of(rank, loop.StepDraw) for rank in wrapper.ranks}
            inputs_by_rank = dict(zip(by_number, wrapper.of(script.Inputs), strict=True))
            evaluated = dict(zip(by_number, wrapper.of(script.Evaluated), strict=True))
            findings += (
                judge_inputs(inputs_by_rank, by_number)
                or judge_streams(by_number, inputs_by_rank, evaluated)
                or judge_behind(inputs_by_rank)
            )
    if not sharded and not facts.model_groups and not any(finding.code in ("DDP505", "DDP510") for finding in findings):
        trained = [first for rank_passes in passes for first in [p for p in rank_passes if p.trains][:1]]
        if len(trained) < len(passes) or not (hold_own_parts(trained) or deal_repeated(trained)):
            findings += judge_same_targets(facts.of(script.LossDifferentiated), inputs, draws)
    by_hand = not facts.wrappers and not facts.model_groups and not facts.sample_groups
    if by_hand and not any(finding.code == "DDP505" for finding in findings):
        line = line_of_selection(draws)
        findings += [finding for opt in facts.optimizers for finding in judge_equal_gradients(opt.steps, line)][:1]
    tables = facts.of(script.DerivedTable)
    if table_findings := judge_tables(tables, passes):
        findings = [finding for finding in findings if OTHER_VALUES not in finding.tags] + table_findings
    loader_passes = [entry for entry in passes[0] if entry.trains]
    subjects = {
        f"the samples of {counted(len(loader_passes), 'pass')} over loaders": loader_passes,
        f"the inputs of {counted(len(inputs[0]), 'forward pass')}": len(inputs[0]) >= FEWEST_INPUTS,
        counted(len(tables[0]), "table"): tables[0],
        "the gradients before they are averaged": by_hand
        and any(step.given for step in entries_of(facts.ranks[0], script.OptimizerStep)),
    }
    compared = ", ".join(words for words, present in subjects.items() if present)
    return {"data": Verdict(findings, f"no fault in {compared}" if compared else "")}


def _take_slices(ranks: Sequence[WatchedRank]) -> bool:
    """Check if each rank's forward gets a slice of the loader's batches."""
    rows = [len(entry.samples) for entry in entries_of(ranks[0], script.Inputs)]
    sizes = [entry.batch_size for entry in ranks[0].passes if entry.trains]
    return bool(rows and sizes) and 1 < max(rows) and max(rows) * len(ranks) <= max(sizes)


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
    Row(judge_states_of_optimizers, ("optimizers",)),
    Row(_works, ("collectives",), over_ranks=False),
    Row(judge_constructions, ("replicas", "collectives")),
    Row(judge_all_of_wrappers, CHECKS, over_ranks=False),
    Row(compare_groups, ("replicas", "data")),
    Row(compare_hand_split, ("replicas",)),
    row_of(Losses),
    row_of(GradientChanges),
    Row(judge_all_of_optimizers, ("optimizers",)),
    row_of(Metrics),
    row_of(Loop),
    row_of(Compilations),
    Row(_data, ("data",)),
    Row(_statistics, ("replicas",)),
    row_of(Program),
    row_of(Evaluations),
    Row(judge_parameters_unheld, ("optimizers",)),
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
