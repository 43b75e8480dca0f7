"""Rows of `ddpcheck run`: judges of a script by check line.

Each row selects facts, calls judges, and describes the comparison. Evidence of a rule is in `findings.evidence`, under
the name of its recorder in `record`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from ddpcheck.findings.evidence import evaluation, loop, replicas, script
from ddpcheck.findings.evidence.gradients import LEAST
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import counted
from ddpcheck.judge.data import script_draws
from ddpcheck.judge.data.script_data import FEWEST_INPUTS, judge_inputs, judge_loaders
from ddpcheck.judge.data.script_files import judge_files, judge_shards_saved
from ddpcheck.judge.data.script_rows import OTHER_VALUES, deal_repeated, hold_own_parts
from ddpcheck.judge.data.script_tables import judge_tables
from ddpcheck.judge.evaluation.script_evaluation import evaluations_of, judge_evaluations
from ddpcheck.judge.evaluation.script_order import judge_sums_again, judge_targets
from ddpcheck.judge.evaluation.shown_numbers import trace_numbers
from ddpcheck.judge.gradients.script_alone import all_gradients_agree, judge_reduced_alike, judge_taken
from ddpcheck.judge.gradients.script_gathers import judge_gathers, judge_own_parts
from ddpcheck.judge.gradients.script_losses import FEWEST_PASSES, SCALE_FREE, judge_accumulated, judge_losses
from ddpcheck.judge.loop.script_compilations import judge_graphs, judge_recompilations, trained_functions
from ddpcheck.judge.loop.script_optimizers import judge_reduced_in_place, judge_zeroed
from ddpcheck.judge.loop.script_pace import judge_left, judge_shifts
from ddpcheck.judge.loop.script_works import judge_works
from ddpcheck.judge.loop.script_wrappers import are_rounded, sums_rightly
from ddpcheck.judge.optimizer_lines import (
    judge_all_clips,
    judge_all_of_optimizers,
    judge_metrics_used,
    judge_parameters_unheld,
    judge_states_of_optimizers,
)
from ddpcheck.judge.replicas.hand_split import compare_hand_split
from ddpcheck.judge.replicas.model_parts import compare_groups
from ddpcheck.judge.replicas.script_states import judge_loads, judge_states, judge_statistics, judge_uses
from ddpcheck.judge.script_facts import ScriptFacts, entries_of, used_by
from ddpcheck.judge.verdict import Row, Verdict, Verdicts
from ddpcheck.judge.wrapper_lines import PARTS, judge_all_of_wrappers, judge_constructions
from ddpcheck.stream.rank_log import WatchedRank

_NEAR = 0.3  # tolerance of a sketched norm ratio, as a power of the world size
_FEWEST_STEPS = 4  # enough steps to tell always from sometimes
_MOST_RUNS = 1024  # recording limit, reached only without a regular pace
_REPLICAS_PART = (
    *("DDP208", "DDP301", "DDP306", "DDP501", "DDP502", "DDP503", "DDP504", "DDP508", "DDP515", "DDP518"),
)


def _compared(found: Sequence[Finding], words: str, times: int) -> Verdict:
    """Return a verdict whose subject exists only if `times` is not zero."""
    return Verdict(found, words if times else "")


# The loop


def _loop(facts: ScriptFacts) -> Verdicts:
    zeroed = next(filter(None, map(judge_zeroed, facts.of(script.GradientsZeroed))), [])
    return {"loop": Verdict([*zeroed, *_judge_reduced(facts), *_judge_taken(facts), *_judge_pace(facts)])}


def _judge_reduced(facts: ScriptFacts) -> list[Finding]:
    steps = (one for of_rank in facts.of(script.OptimizerStep) for one in of_rank)
    accumulates = any(one.reductions > one.count + 1 for one in steps)
    return judge_reduced_in_place(facts.of(script.ReducedInPlace), world_size=facts.world_size, accumulates=accumulates)


def _judge_taken(facts: ScriptFacts) -> list[Finding]:
    taken = facts.of(loop.GradientsTaken)
    for number in sorted({one.wrapper for of_rank in taken for one in of_rank}):
        of_one = [[one for one in of_rank if one.wrapper == number] for of_rank in taken]
        if found := judge_taken([of_rank for of_rank in of_one if of_rank]):
            return found
    return []


def _judge_pace(facts: ScriptFacts) -> list[Finding]:
    """Judge steps that shift between ranks, and gradients that are reused."""
    for of_rank in facts.of(loop.GradientsLeft):
        if left := judge_left(of_rank):
            return left
    for wrapper in facts.wrappers:
        paces = [
            loop.WrapperPace(tuple(runs), rank.counts[wrapper.number][1])
            for rank, runs in zip(wrapper.ranks, wrapper.of(loop.PaceRun), strict=True)
            if 0 < len(runs) < _MOST_RUNS
        ]
        if len(paces) == len(wrapper.made.ranks) and (found := judge_shifts(paces)):
            return found
    return []


def _works(facts: ScriptFacts) -> Verdicts:
    found = judge_works(facts.of(loop.WorkDropped), facts.of(loop.WorkUsed), facts.of(loop.TensorOfWorkWritten))
    return {"collectives": Verdict(found)}


def _compilations(facts: ScriptFacts) -> Verdicts:
    functions = trained_functions(facts.of(loop.FunctionCompiled)) if _have_one_model(facts) else []
    what = f"no compilation that depends on the rank, in {counted(len(functions), 'function')}"
    return {"loop": _compared(judge_recompilations(functions), what, len(functions))}


def _graphs(facts: ScriptFacts) -> Verdicts:
    if not _have_one_model(facts) or facts.steps < _FEWEST_STEPS:
        return {}
    return {"loop": Verdict(judge_graphs(facts.of(loop.FunctionCompiled)))}


def _have_one_model(facts: ScriptFacts) -> bool:
    """Check if all ranks train one replicated model (no pipeline or tensor parallelism)."""
    return not facts.model_groups and any(len(one.made.ranks) == len(facts.ranks) for one in facts.wrappers)


# Losses


def _losses(facts: ScriptFacts) -> Verdicts:
    ranks = facts.training_groups[0] if facts.model_groups else facts.ranks
    losses = [[one for one in entries_of(rank, script.LossDifferentiated) if not _is_too_small(one)] for rank in ranks]
    parts = [entries_of(rank, loop.OwnPartPutBack) for rank in ranks]
    classes = [one.options.get("class", "") for one in entries_of(facts.ranks[0], script.OptimizerStep)]
    scale_matters = not all(name.startswith(SCALE_FREE) for name in classes)
    whole = [{one.step for one in of_rank} for of_rank in parts]
    together = len(next(iter(facts.model_groups), (0,)))
    summed = any(map(sums_rightly, facts.wrappers))
    found = judge_losses(losses, whole, together=together, summed=summed) or judge_accumulated(losses)
    found = found or judge_own_parts(parts, losses, scale_matters=scale_matters)
    found = [one for one in found if one.code != "DDP303" or not _are_scaled_back(facts.ranks[0])]
    found += judge_gathers(facts.of(loop.GatheredConstant))
    known = [[one for one in of_rank if one.terms and one.wrappers] for of_rank in losses]
    passes = min(map(len, known))
    is_sum = all(term.kind == "sum" and abs(term.factor) == 1 for one in known[0] for term in one.terms)
    what = f"no fault in the scale and normalisation of the loss, in {counted(passes, 'backward pass')}"
    what = "the loss is a sum over the samples of a rank, which DDP averages" if is_sum else what
    what = f"{what}; not compared with a single process" if passes >= FEWEST_PASSES else ""
    return {"loss": Verdict(found, "", what) if is_sum and not summed else Verdict(found, what)}


def _is_too_small(loss: script.LossDifferentiated) -> bool:
    return any(0 < abs(term.factor) <= LEAST for term in loss.terms)


def _are_scaled_back(rank: WatchedRank) -> bool:
    """Check if steps rescale averaged gradients by the world size or its inverse."""
    for step, left in used_by(rank, entries_of(rank, script.OptimizerStep)):
        there = math.hypot(*itertools.chain.from_iterable(left.averaged.values()))
        factor = math.hypot(*step.norms.values()) / there if there else 0.0
        if factor and abs(abs(math.log(factor, rank.started.world_size)) - 1) < _NEAR:
            return True
    return False


# Data, files and evaluation


def _data(facts: ScriptFacts) -> Verdicts:
    if facts.trains_apart:
        return {}
    passes, draws, inputs = facts.passes, facts.of(loop.StepDraw), facts.of(script.Inputs)
    found: list[Finding] = []
    for group in facts.training_groups:
        of_loaders = judge_loaders([rank.passes for rank in group], [rank.started.rank for rank in group])
        if _take_slices(group):  # every rank loads the whole batch
            of_loaders = [finding for finding in of_loaders if finding.code not in ("DDP505", "DDP519")]
        found += [finding for finding in of_loaders if finding not in found]
    orders = [tuple(tuple(one.indices) for one in of_rank if one.trains) for of_rank in passes]
    if facts.model_groups or facts.stages or facts.sample_groups:  # ranks that share a model share samples
        places = [place for place, rank in enumerate(facts.ranks) if rank in facts.training_groups[0]]
        draws, inputs = [draws[place] for place in places], [inputs[place] for place in places]
        orders = [orders[place] for place in places]
    others = len(set(orders)) == len(orders)  # loaders give ranks different samples
    of_draws = script_draws.judge_step_draws(draws, inputs, loads_others=others)
    of_draws = of_draws or script_draws.judge_added_noise(draws, inputs)
    found += of_draws
    if not of_draws and not any(finding.code == "DDP505" for finding in found):
        for wrapper in facts.wrappers:
            if facts.sample_groups:
                wrapper = replace(wrapper, ranks=[rank for rank in wrapper.ranks if rank in facts.training_groups[0]])
            by_number = {rank.started.rank: entries_of(rank, loop.StepDraw) for rank in wrapper.ranks}
            given = dict(zip(by_number, wrapper.of(script.Inputs), strict=True))
            evaluated = dict(zip(by_number, wrapper.of(script.Evaluated), strict=True))
            found += (
                judge_inputs(given, by_number)
                or script_draws.judge_streams(by_number, given, evaluated)
                or script_draws.judge_behind(given)
            )
    if not others and not facts.model_groups and not any(finding.code in ("DDP505", "DDP510") for finding in found):
        trained = [one for of_rank in passes for one in [one for one in of_rank if one.trains][:1]]
        if len(trained) < len(passes) or not (hold_own_parts(trained) or deal_repeated(trained)):
            found += script_draws.judge_same_targets(facts.of(script.LossDifferentiated), inputs, draws)
    by_hand = not facts.wrappers and not facts.model_groups and not facts.sample_groups
    if by_hand and not any(finding.code == "DDP505" for finding in found):
        line = script_draws.line_of_selection(draws)
        found += [finding for one in facts.optimizers for finding in judge_reduced_alike(one.steps, line)][:1]
    tables = facts.of(script.DerivedTable)
    if of_tables := judge_tables(tables, passes):
        found = [finding for finding in found if OTHER_VALUES not in finding.tags] + of_tables
    taken = [one for one in passes[0] if one.trains]
    what = {
        f"the samples of {counted(len(taken), 'pass')} over loaders": taken,
        f"the inputs of {counted(len(inputs[0]), 'forward pass')}": len(inputs[0]) >= FEWEST_INPUTS,
        counted(len(tables[0]), "table"): tables[0],
        "the gradients before they are averaged": by_hand
        and any(one.given for one in entries_of(facts.ranks[0], script.OptimizerStep)),
    }
    compared = ", ".join(words for words, there in what.items() if there)
    return {"data": Verdict(found, f"no fault in {compared}" if compared else "")}


def _take_slices(ranks: Sequence[WatchedRank]) -> bool:
    """Check if each rank's forward gets a slice of the loader's batches."""
    rows = [len(one.samples) for one in entries_of(ranks[0], script.Inputs)]
    sizes = [one.batch_size for one in ranks[0].passes if one.trains]
    return bool(rows and sizes) and 1 < max(rows) and max(rows) * len(ranks) <= max(sizes)


def _files(facts: ScriptFacts) -> Verdicts:
    uses = facts.of(script.FileUsed)
    paths = {one.path for of_rank in uses for one in of_rank}
    sizes = [item for of_rank in facts.of(script.FilesLeft) for one in of_rank for item in one.sizes.items()]
    empty = {path for path, _ in sizes} - {path for path, size in sizes if size}
    found = judge_files(uses, empty) + (judge_shards_saved(uses) if facts.ended else [])
    found += judge_loads(facts.of(replicas.NothingLoaded))
    return {"files": _compared(found, f"no fault in the uses of {counted(len(paths), 'file')}", len(paths))}


def _evaluation(facts: ScriptFacts) -> Verdicts:
    if facts.trains_apart:
        return {}
    passes, exchanged = facts.of(evaluation.EvaluationPass), facts.of(evaluation.ResultExchanged)
    shown, compared = facts.of(evaluation.MetricShown), facts.of(evaluation.RowsCompared)
    evaluations = evaluations_of(facts.passes, passes, exchanged, shown, compared)
    found = judge_evaluations(evaluations, facts.passes)
    found += judge_sums_again(facts.of(evaluation.SumsReduced))
    found += judge_targets(facts.of(evaluation.GatheredTargets), facts.of(script.LossDifferentiated))
    held, lacking = trace_numbers(evaluations, shown) if evaluations else ("", "")
    return {"evaluation": Verdict(found, held, "" if found else lacking)}


# State outside the wrappers


def _statistics(facts: ScriptFacts) -> Verdicts:
    return {"replicas": Verdict(judge_statistics(facts.of(replicas.RunningStatistic)))}


def _copies(facts: ScriptFacts) -> Verdicts:
    """Judge models outside the wrappers, unless wrapped parameters or gradients differ."""
    held = facts.of(script.StateHeld)
    whole = all(len(wrapper.made.ranks) == len(facts.ranks) for wrapper in facts.wrappers)
    if not whole or facts.model_groups:
        held = [[one for one in of_rank if not one.other] for of_rank in held]
    steps = [of_ranks for one in facts.optimizers for of_ranks in one.steps if of_ranks[0].held]
    uses = facts.of(replicas.StateUsed) if whole and all(map(all_gradients_agree, steps)) else []
    written = [[one for one in of_rank if one.wrapper == loop.OF_A_COPY] for of_rank in facts.of(loop.ModuleChanged)]
    found = judge_states(held, written) or judge_uses(uses, held, written)
    if found and found[0].code == "DDP306" and any(map(are_rounded, facts.wrappers)):  # copies inherit the rounding
        return {"replicas": Verdict(lacking=_ROUNDED)}
    return {"replicas": Verdict(found)}


_ROUNDED = "copies not compared: the parameters that are copied differ between ranks by rounding"


# The table

_OF_A_WATCH = (
    *("DDP101", "DDP102", "DDP103", "DDP104", "DDP105", "DDP106", "DDP107", "DDP108", "DDP109", "DDP111", "DDP112"),
    *("DDP201", "DDP202", "DDP203", "DDP204", "DDP205", "DDP206", "DDP207", "DDP208", "DDP209"),
    *("DDP211", "DDP212", "DDP213", "DDP214", "DDP215", "DDP216", "DDP221", "DDP222"),
    *("DDP301", "DDP302", "DDP303", "DDP305", "DDP306", "DDP310"),
    *("DDP501", "DDP502", "DDP503", "DDP508", "DDP509", "DDP513", "DDP514", "DDP515", "DDP517", "DDP521"),
)
_OF_OPTIMIZERS = (
    *("DDP111", "DDP208", "DDP223", "DDP301", "DDP303", "DDP305", "DDP306", "DDP501", "DDP503", "DDP504", "DDP507"),
    *("DDP508", "DDP521"),
)
_OF_MODULES = (
    *("DDP201", "DDP202", "DDP203", "DDP204", "DDP205", "DDP206", "DDP207", "DDP209"),
    *("DDP211", "DDP212", "DDP213", "DDP221"),
)

_OF_OTHER_MODULES = (*_OF_MODULES, "DDP101", "DDP102", "DDP103", "DDP104", "DDP105", "DDP222", "DDP511", "DDP513")
_OF_PARTS = ("DDP208", "DDP301", "DDP306", "DDP504", "DDP516")

ROWS: tuple[Row[ScriptFacts], ...] = (
    Row(judge_states_of_optimizers, ("optimizers",), ("DDP306",)),
    Row(_works, ("collectives",), ("DDP408",), over_ranks=False),
    Row(judge_constructions, ("replicas", "collectives"), (*_OF_MODULES, "DDP403")),
    Row(judge_all_of_wrappers, tuple(PARTS), _OF_A_WATCH, yields=("DDP306",), over_ranks=False),
    Row(compare_groups, ("replicas", "data"), _OF_PARTS, yields=_OF_PARTS),
    Row(compare_hand_split, ("replicas",), ("DDP301",), unless=("DDP301",)),
    Row(_losses, ("loss",), ("DDP303", "DDP305", "DDP309", "DDP514"), yields=("DDP305", "DDP514")),
    Row(judge_all_clips, ("optimizers",), ("DDP301", "DDP303", "DDP310"), yields=("DDP301",)),
    Row(judge_all_of_optimizers, ("optimizers",), _OF_OPTIMIZERS, yields=("DDP301", "DDP305")),
    Row(judge_metrics_used, ("optimizers",), ("DDP518",)),
    Row(_loop, ("loop",), ("DDP309", "DDP501", "DDP508", "DDP517", "DDP520")),
    Row(_compilations, ("loop",), ("DDP522",)),
    Row(_graphs, ("loop",), ("DDP522",), unless=_OF_OTHER_MODULES),
    Row(_data, ("data",), ("DDP505", "DDP506", "DDP510", "DDP516", "DDP519"), yields=("DDP505", "DDP516")),
    Row(_statistics, ("replicas",), ("DDP217",)),
    Row(_files, ("files",), ("DDP512", "DDP521", "DDP523")),
    Row(
        _evaluation,
        ("evaluation",),
        ("DDP516", "DDP801", "DDP802", "DDP803", "DDP804", "DDP805", "DDP806"),
    ),
    Row(judge_parameters_unheld, ("optimizers",), ("DDP504",), unless=("DDP504",)),
    Row(_copies, ("replicas",), ("DDP214", "DDP306"), unless=_REPLICAS_PART),
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
