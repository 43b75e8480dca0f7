"""Findings on what a script does around its wrappers: data, optimizers, files; from the logs of all ranks.

This module is light: it never imports torch.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from ddpcheck.findings.evidence.changes import OF_A_COPY, ModuleChanged
from ddpcheck.findings.evidence.draws import StepDraw
from ddpcheck.findings.evidence.evaluation import (
    EvaluationPass,
    GatheredTargets,
    MetricShown,
    ResultExchanged,
    RowsCompared,
)
from ddpcheck.findings.evidence.gathers import GatheredConstant, OwnPartPutBack
from ddpcheck.findings.evidence.gradient_changes import GradientsChanged, GradientsTaken
from ddpcheck.findings.evidence.pace import GradientsLeft, PaceRun, WrapperPace
from ddpcheck.findings.evidence.running_statistics import RunningStatistic
from ddpcheck.findings.evidence.script import (
    DerivedTable,
    FileUsed,
    GradientsClipped,
    GradientsZeroed,
    Inputs,
    LossDifferentiated,
    MetricUsed,
    OptimizerEnd,
    OptimizerStep,
    ReducedInPlace,
    StateHeld,
)
from ddpcheck.findings.evidence.state_uses import StateUsed
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location
from ddpcheck.judge.script_alone import are_apart, are_local, judge_alone, judge_taken
from ddpcheck.judge.script_clips import judge_changed, judge_clips, judge_step_gradients
from ddpcheck.judge.script_data import judge_inputs, judge_loaders, judge_tables
from ddpcheck.judge.script_draws import judge_added_noise, judge_step_draws, line_of_selection
from ddpcheck.judge.script_evaluation import judge_evaluations
from ddpcheck.judge.script_files import judge_files
from ddpcheck.judge.script_gathers import judge_gathers
from ddpcheck.judge.script_gradients import all_gradients_agree
from ddpcheck.judge.script_losses import are_sums, judge_accumulated, judge_losses, judge_summed_again, judge_sums
from ddpcheck.judge.script_optimizers import (
    judge_metrics,
    judge_optimizer_options,
    judge_optimizer_state,
    judge_pace,
    judge_reduced_in_place,
    judge_schedule,
    judge_stale,
    judge_zeroed,
)
from ddpcheck.judge.script_pace import judge_left, judge_shifts, judge_unheld
from ddpcheck.judge.script_states import judge_states, judge_uses
from ddpcheck.judge.script_statistics import judge_statistics
from ddpcheck.judge.script_targets import judge_targets
from ddpcheck.stream.entries import ReplicaCaptured
from ddpcheck.stream.watched_rank import WatchedRank

_Kind = TypeVar("_Kind")
_NEAR = 0.3  # of a norm by a sketch, as a power of the world size
_MOST_RUNS = 1024  # as many are written down: without a regular pace
_Optimizer = tuple[list[list[OptimizerStep]], list[OptimizerEnd]]


def judge_program(ranks: Sequence[WatchedRank], *, ended: bool) -> list[Finding]:
    """The findings on the script as a whole; `ended`: every rank came to its end."""
    if len(ranks) < 2 or len(ranks) < ranks[0].started.world_size:
        return []  # of ranks on other machines there is no log here
    optimizers = list(_optimizers(ranks))
    apart = not any(rank.wrappers for rank in ranks) and are_apart([steps for steps, _ in optimizers])
    data = [] if apart else _judge_data(ranks)
    evaluated = [] if apart else _judge_evaluation(ranks)
    files = judge_files([_of(rank, FileUsed) for rank in ranks])
    statistics = judge_statistics([_of(rank, RunningStatistic) for rank in ranks])
    return [*_judge_optimizers(ranks, optimizers), *data, *statistics, *files, *evaluated]


def averages_by_hand(ranks: Sequence[WatchedRank], wrapper: int) -> bool:
    """Whether gradients of a wrapper that has averaged none are the same on all ranks, step after step."""
    steps = [
        of_ranks
        for of_optimizer, _ in _optimizers(ranks)
        for of_ranks in of_optimizer
        if any(name.startswith(f"{wrapper}/") for name in of_ranks[0].norms)
    ]
    never = all(one.reductions == 0 for of_ranks in steps for one in of_ranks)
    return len(steps) > 1 and never and all(all_gradients_agree(of_ranks) for of_ranks in steps)


def sums_over_ranks(ranks: Sequence[WatchedRank], wrapper: int) -> bool:
    """Whether the losses of a wrapper are sums over what all ranks have."""
    return are_sums([_of(rank, LossDifferentiated) for rank in ranks], wrapper)


def loss_line(ranks: Sequence[WatchedRank], wrapper: int) -> Location | None:
    """The line that makes the loss of which a wrapper averages the gradients, else that of its backward."""
    losses = [one for rank in ranks for one in _of(rank, LossDifferentiated) if wrapper in one.wrappers]
    return next((line for one in losses if (line := one.made or one.location)), None)


def judge_held_states(ranks: Sequence[WatchedRank]) -> list[Finding]:
    """The findings on models beside the wrappers: no cause if the wrapped modules themselves are apart."""
    if len(ranks) < 2 or len(ranks) < ranks[0].started.world_size:
        return []
    held = [_of(rank, StateHeld) for rank in ranks]
    whole = all(len(made.ranks) == len(ranks) for rank in ranks for made in rank.wrappers)
    steps = [of_ranks for of_one, _ in _optimizers(ranks) for of_ranks in of_one if of_ranks[0].held]
    uses = [_of(rank, StateUsed) for rank in ranks] if whole and all(map(all_gradients_agree, steps)) else []
    written = [[one for one in _of(rank, ModuleChanged) if one.wrapper == OF_A_COPY] for rank in ranks]
    return judge_states(held, written) or judge_uses(uses, held, written)


def optimizer_steps(ranks: Sequence[WatchedRank]) -> int:
    """How many steps all optimizers of the first rank have made, as far as they were written down."""
    for rank in ranks[:1]:
        last = {one.optimizer: one.count + 1 for one in _of(rank, OptimizerStep)}
        return sum((last | {one.optimizer: one.count for one in _of(rank, OptimizerEnd)}).values())
    return 0


def _judge_data(ranks: Sequence[WatchedRank]) -> list[Finding]:
    found: list[Finding] = []
    for group in _training_groups(ranks):
        of_loaders = judge_loaders([rank.passes for rank in group])
        if _take_slices(group):  # of a batch that all load
            of_loaders = [finding for finding in of_loaders if finding.code not in ("DDP505", "DDP519")]
        found += [finding for finding in of_loaders if finding not in found]
    draws, inputs = [_of(rank, StepDraw) for rank in ranks], [_of(rank, Inputs) for rank in ranks]
    orders = [tuple(tuple(one.indices) for one in rank.passes if one.trains) for rank in ranks]
    of_draws = judge_step_draws(draws, inputs, loads_others=len(set(orders)) == len(ranks))
    of_draws = of_draws or judge_added_noise(draws, inputs)
    found += of_draws
    if not of_draws and not any(finding.code == "DDP505" for finding in found):
        wrappers = {(number, made.ranks) for rank in ranks for number, made in enumerate(rank.wrappers)}
        for number, members in sorted(wrappers):
            theirs = [rank for rank in ranks if rank.started.rank in members]
            given = [[one for one in _of(rank, Inputs) if one.wrapper == number] for rank in theirs]
            found += judge_inputs(given, line_of_selection([_of(rank, StepDraw) for rank in theirs]))
    return found + judge_tables([_of(rank, DerivedTable) for rank in ranks], [rank.passes for rank in ranks])


def _judge_evaluation(ranks: Sequence[WatchedRank]) -> list[Finding]:
    found = judge_evaluations(
        [rank.passes for rank in ranks],
        [_of(rank, EvaluationPass) for rank in ranks],
        [_of(rank, ResultExchanged) for rank in ranks],
        [_of(rank, MetricShown) for rank in ranks],
        [_of(rank, RowsCompared) for rank in ranks],
    )
    losses = [_of(rank, LossDifferentiated) for rank in ranks]
    return found + judge_targets([_of(rank, GatheredTargets) for rank in ranks], losses)


def _training_groups(ranks: Sequence[WatchedRank]) -> list[list[WatchedRank]]:
    """The ranks that have samples of their own: not those that compute one replica together (tensor parallel)."""
    members = {made.ranks for rank in ranks for made in rank.wrappers}
    if not members or any(len(group) == len(ranks) for group in members):
        return [list(ranks)]
    return [[rank for rank in ranks if rank.started.rank in group] for group in sorted(members)]


def _take_slices(ranks: Sequence[WatchedRank]) -> bool:
    """Whether each rank's forward is given a part of the batches that the loader gives."""
    rows = [len(one.samples) for one in _of(ranks[0], Inputs)]
    sizes = [one.batch_size for one in ranks[0].passes if one.trains]
    return bool(rows and sizes) and 1 < max(rows) and max(rows) * len(ranks) <= max(sizes)


def _are_scaled_back(rank: WatchedRank) -> bool:
    """Whether steps use averaged gradients times the world size, or divided by it, as far as sketches tell."""
    averaged = {(one.wrapper, one.step + 1): one for one in _of(rank, ReplicaCaptured)}
    for step in _of(rank, OptimizerStep):
        numbers = {name.partition("/")[0] for name in step.norms}
        one = averaged.get((int(min(numbers)), step.reductions)) if len(numbers) == 1 else None
        if one is not None and one.averaged:
            there = math.hypot(*itertools.chain.from_iterable(one.averaged.values()))
            factor = math.hypot(*step.norms.values()) / there if there else 0.0
            if factor and abs(abs(math.log(factor, rank.started.world_size)) - 1) < _NEAR:
                return True
    return False


def _judge_optimizers(ranks: Sequence[WatchedRank], optimizers: Sequence[_Optimizer]) -> list[Finding]:
    local = {steps[0][0].optimizer for steps, _ in optimizers if steps and are_local(steps)}
    found = judge_metrics([[one for one in _of(rank, MetricUsed) if one.optimizer not in local] for rank in ranks])
    wrapped = any(rank.wrappers for rank in ranks)
    moved = _moved(ranks[0])
    held = {name for one in _of(ranks[0], OptimizerStep) for name in one.held}
    losses = [_of(rank, LossDifferentiated) for rank in ranks]
    clips = [_of(rank, GradientsClipped) for rank in ranks]
    found += judge_clips(clips, [steps for steps, _ in optimizers]) or judge_changed(
        [_of(rank, GradientsChanged) for rank in ranks]
    )
    for steps, ends in optimizers:
        others = [other for other, _ in optimizers if _are_of_same(steps, other)]
        of_one = judge_optimizer_options(steps) + judge_pace(steps, ends)
        of_one += judge_optimizer_state(steps) or judge_step_gradients(steps, clips)
        if not of_one:
            of_one += judge_alone(steps, ends, others, wrapped=wrapped) or judge_sums(steps, losses)
        found += of_one + judge_stale(steps, moved, held) + judge_schedule(ends, len(ranks))
        found += judge_summed_again(steps, len(ranks))
    if not found and len({len(_firsts(rank)) for rank in ranks}) == 1:  # ranks may have given them other parameters
        for first in zip(*map(_firsts, ranks), strict=True):
            found += judge_optimizer_options([first])
    found += _judge_taken(ranks)
    found += judge_gathers([_of(rank, GatheredConstant) for rank in ranks])
    whole = [{one.step for one in _of(rank, OwnPartPutBack)} for rank in ranks]
    of_losses = judge_losses(losses, whole) or judge_accumulated(losses)
    found += [one for one in of_losses if one.code != "DDP303" or not _are_scaled_back(ranks[0])]
    found += _judge_pace(ranks)
    if wrapped and not any(finding.code == "DDP504" for finding in found):
        every = [one for rank in ranks for one in _of(rank, OptimizerStep)]
        named = [name for one in every for name in (*one.held, *one.idle)]
        made = next((one.made for one in every if one.held), None)
        found += judge_unheld(moved, named, size=len(moved), made=made)
    for rank in ranks:
        accumulates = any(one.reductions > one.count + 1 for one in _of(rank, OptimizerStep))
        reduced = _of(rank, ReducedInPlace)
        of_rank = judge_zeroed(_of(rank, GradientsZeroed))
        of_rank += judge_reduced_in_place(reduced, world_size=rank.started.world_size, accumulates=accumulates)
        if of_rank:
            return found + of_rank
    return found


def _judge_taken(ranks: Sequence[WatchedRank]) -> list[Finding]:
    taken = [_of(rank, GradientsTaken) for rank in ranks]
    for number in sorted({one.wrapper for of_rank in taken for one in of_rank}):
        of_one = [[one for one in of_rank if one.wrapper == number] for of_rank in taken]
        if found := judge_taken([of_rank for of_rank in of_one if of_rank]):
            return found
    return []


def _judge_pace(ranks: Sequence[WatchedRank]) -> list[Finding]:
    """The findings on steps that shift between ranks, and on gradients that are used again."""
    for rank in ranks:
        if left := judge_left(_of(rank, GradientsLeft)):
            return left
    for number, members in sorted(
        {(number, made.ranks) for rank in ranks for number, made in enumerate(rank.wrappers)}
    ):
        paces = []
        for rank in ranks:
            runs = tuple(one for one in _of(rank, PaceRun) if one.wrapper == number)
            if rank.started.rank in members and 0 < len(runs) < _MOST_RUNS:
                paces.append(WrapperPace(runs, rank.counts[number][1]))
        if len(paces) == len(members) and (found := judge_shifts(paces)):
            return found
    return []


def _firsts(rank: WatchedRank) -> list[OptimizerStep]:
    """The first step of each optimizer."""
    return [one for one in _of(rank, OptimizerStep) if not one.count]


def _optimizers(ranks: Sequence[WatchedRank]) -> Iterator[_Optimizer]:
    """Each optimizer of the ranks that train with it together: its steps, each on all of these ranks, and its end.

    It is the same one where it first steps at the same line, with the same parameters.
    """
    known: dict[tuple[Any, ...], dict[int, list[OptimizerStep]]] = {}
    by_number = {rank.started.rank: rank for rank in ranks}
    for rank in ranks:
        times: Counter[tuple[Any, ...]] = Counter()  # that a script has made it anew, in each round say
        for first in _firsts(rank):
            numbers = {int(name.partition("/")[0]) for name in first.held}
            groups = {rank.wrappers[number].ranks for number in numbers}
            members = next(iter(groups)) if len(groups) == 1 else tuple(range(rank.started.world_size))
            same = [one for one in _of(rank, OptimizerStep) if one.optimizer == first.optimizer]
            key = (members, first.location, tuple(sorted((*first.held, *first.alone))))
            known.setdefault((*key, times[key]), {})[rank.started.rank] = same
            times[key] += 1
    for (members, *_), theirs in known.items():
        if len(theirs) == len(members):
            ends = [
                _with_reductions(end, same[-1], by_number[number])
                for number, same in theirs.items()
                for end in _of(by_number[number], OptimizerEnd)
                if end.optimizer == same[0].optimizer
            ]
            yield _in_step(list(theirs.values())), ends


def _with_reductions(end: OptimizerEnd, last: OptimizerStep, rank: WatchedRank) -> OptimizerEnd:
    """The end of an optimizer that was gone when the script ended, and its wrappers with it."""
    if end.reductions >= 0 or last.reductions < 0:
        return end
    numbers = {int(name.partition("/")[0]) for name in last.held}
    return replace(end, reductions=sum(rank.counts[number][1] for number in numbers))


def _are_of_same(steps: list[list[OptimizerStep]], other: list[list[OptimizerStep]]) -> bool:
    """Whether two optimizers are of the same parameters in no wrapper, by their names."""
    return bool(steps and other) and steps[0][0].alone.keys() == other[0][0].alone.keys()


def _in_step(by_rank: Sequence[Sequence[OptimizerStep]]) -> list[list[OptimizerStep]]:
    """The steps that every rank has written down, each on all ranks."""
    counts = [{one.count: one for one in of_rank} for of_rank in by_rank]
    common = set.intersection(*(set(of_rank) for of_rank in counts))
    return [[of_rank[count] for of_rank in counts] for count in sorted(common)]


def _moved(rank: WatchedRank) -> Mapping[str, bool]:
    """By name of a parameter that got gradients, whether its values have changed in the steps that were compared."""
    values: dict[str, set[int]] = {}
    times: dict[str, int] = {}
    for one in _of(rank, ReplicaCaptured):
        evidence = one.state.values
        for name, gradient in evidence.gradients.items():
            if gradient:
                key = f"{one.wrapper}/{name}"
                if not any(one.averaged.get(name, (1.0,))):
                    continue
                values.setdefault(key, set()).add(evidence.parameters.get(name, 0))
                times[key] = times.get(key, 0) + 1
    return {name: len(seen) > 1 for name, seen in values.items() if times[name] > 1}


def _of(rank: WatchedRank, kind: type[_Kind]) -> list[_Kind]:
    return [entry for entry in rank.entries if isinstance(entry, kind)]
