"""Losses of the ranks: terms, scale and counts of targets."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Self

from ddpcheck.findings.evidence.gradients import LEAST, LossTerm, relative
from ddpcheck.findings.evidence.loop import GatheredConstant, ModuleChanged, OwnRowsReinserted
from ddpcheck.findings.evidence.script import LossDifferentiated, OptimizerStep, ScaledTerm
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import group_by, plural
from ddpcheck.stream.rank_log import RankTrace
from ddpcheck.stream.rank_report import MicroBatch
from ddpcheck.trace.captured import compare_with_average
from ddpcheck.trace.factors import SCALE_TOLERANCE, is_near
from ddpcheck.trace.replicas import aligned
from ddpcheck.trace.script_facts import ScriptFacts, WrapperTrace, entries_of, steps_with_reductions
from ddpcheck.trace.view import NotRecorded, View

LossesByRank = Sequence[Sequence[LossDifferentiated]]  # in order of time
Passes = Sequence[Sequence[LossDifferentiated]]  # backward passes, each by rank

BY_NORMALISATION = "by normalisation"
"""Tag of a DDP304 on samples coupled by a normalisation layer."""

FEWEST_PASSES = 3  # backward passes, or optimizer steps, to compare
SCALE_FREE = (  # optimizers invariant to gradient scale
    *("Adam", "NAdam", "RAdam", "Rprop", "Lion", "Adafactor", "Adagrad", "Adadelta", "RMSprop", "LAMB", "Lamb", "Muon"),
)

MIN_GATHERS = 2  # steps that gather features
_LOSS_DIFFERENCE = 0.1  # relative difference of gradients of different losses
_SKETCH_TOLERANCE = 0.3  # tolerance of a sketched norm ratio, as a power of the world size


@dataclass(frozen=True)
class Losses(View):
    """Losses that a script differentiates, and features gathered from other ranks; sequences by rank.

    If several ranks compute one model together, only one rank of each model is included.
    """

    checks = ("loss",)
    by_rank: LossesByRank
    parts: Sequence[Sequence[OwnRowsReinserted]] = ()
    constants: Sequence[Sequence[GatheredConstant]] = ()
    ranks_per_model: int = 1
    is_for_sums: bool = False  # if a wrapper sums gradients, as the scale of its loss requires
    scale_matters: bool = True  # unless the steps of all optimizers are invariant to the scale of gradients
    are_rescaled: bool = False  # if steps multiply averaged gradients by the world size or its inverse

    @classmethod
    def from_facts(cls, facts: ScriptFacts) -> Self:
        ranks = facts.training_groups[0] if facts.model_groups else facts.ranks
        classes = [step.options.get("class", "") for step in entries_of(facts.ranks[0], OptimizerStep)]
        return cls(
            [
                [loss for loss in losses if not any(0 < abs(term.factor) <= LEAST for term in loss.terms)]
                for losses in (entries_of(rank, LossDifferentiated) for rank in ranks)
            ],
            [entries_of(rank, OwnRowsReinserted) for rank in ranks],
            facts.events(GatheredConstant),
            len(next(iter(facts.model_groups), (0,))),
            any(map(scales_loss_for_sums, facts.wrappers)),
            not all(name.startswith(SCALE_FREE) for name in classes),
            _rescales_gradients(facts.ranks[0]),
        )

    @cached_property
    def passes(self) -> list[Passes]:
        """Backward passes that DDP averages, grouped by line; groups with few passes are omitted."""
        indexed = [{(loss.step, loss.number): loss for loss in losses if loss.wrappers} for losses in self.by_rank]
        by_line = group_by(aligned(indexed), lambda losses: tuple(loss.location for loss in losses)).values()
        return [passes for passes in by_line if len(passes) >= FEWEST_PASSES]

    def is_partial(self, passes: Passes) -> bool:
        """Check if each rank computes only part of the gradient of a global loss."""
        steps = [{part.step for part in rank_parts} for rank_parts in self.parts]
        return any(
            loss.step in rank_steps for by_rank in passes for loss, rank_steps in zip(by_rank, steps, strict=False)
        )

    @cached_property
    def local_parts(self) -> list[list[OwnRowsReinserted]]:
        """Losses on gathered features whose gradients reach only the rank's own features, by step."""
        indexed = [{part.step: part for part in reversed(rank_parts)} for rank_parts in self.parts]
        steps = aligned(indexed) if len(indexed) > 1 else []
        steps = [by_rank for by_rank in steps if all(any(part.full_gradient) for part in by_rank)]
        all_parts = [*itertools.chain(*steps)]
        unscaled = all(abs(part.factor - 1) < SCALE_TOLERANCE for part in all_parts)
        return steps if len(steps) >= MIN_GATHERS and unscaled and len({p.by_function for p in all_parts}) == 1 else []

    @property
    def gathered_gradients_differ(self) -> bool:
        """Check if ranks compute different losses, as gradients of gathered features show."""
        return min(_distances(self.local_parts)) > _LOSS_DIFFERENCE

    @property
    def local_parts_lack_factor(self) -> bool:
        """Check if DDP averages partial gradients of one global loss, instead of summing them.

        The loss then lacks the world size as a factor, which matters if optimizer steps depend on the scale of
        gradients, or if the loss also uses the rank's own features directly.
        """
        steps = {by_rank[0].step for by_rank in self.local_parts}
        terms = [term for losses in self.by_rank for loss in losses if loss.step in steps for term in loss.terms]
        is_mixed = self.uses_features_directly
        if max(_distances(self.local_parts)) > SCALE_TOLERANCE or not (self.scale_matters or is_mixed) or not terms:
            return False
        return all(
            (is_mixed or (term.kind == "mean" and abs(term.factor) < 1 + SCALE_TOLERANCE))
            and len(self.parts) not in term.multipliers
            for term in terms
        )

    @property
    def uses_features_directly(self) -> bool:
        """Check if losses on gathered features also use the rank's own features before gathering."""
        return all(part.uses_own_rows for by_rank in self.local_parts for part in by_rank)

    def compared(self, check: str, findings: Sequence[Finding]) -> Iterator[str]:
        averaged = [[loss for loss in rank_losses if loss.terms and loss.wrappers] for rank_losses in self.by_rank]
        passes = min(map(len, averaged))
        if passes < FEWEST_PASSES:
            return
        summary = "the loss is a sum over the samples of a rank, which DDP averages; not compared with a single process"
        if not all(term.kind == "sum" and abs(term.factor) == 1 for loss in averaged[0] for term in loss.terms):
            summary = f"no fault in the scale and normalisation of the loss, in {plural(passes, 'backward pass')}"
            yield f"{summary}; not compared with a single process"
        elif self.is_for_sums:
            yield summary
        else:
            raise NotRecorded(summary)


def _rescales_gradients(rank: RankTrace) -> bool:
    """Check if steps rescale averaged gradients by the world size or its inverse."""
    for step, replica in steps_with_reductions(rank, entries_of(rank, OptimizerStep)):
        averaged_norm = math.hypot(*itertools.chain.from_iterable(replica.averaged.values()))
        factor = math.hypot(*step.norms.values()) / averaged_norm if averaged_norm else 0.0
        if factor and abs(abs(math.log(factor, rank.started.world_size)) - 1) < _SKETCH_TOLERANCE:
            return True
    return False


def _distances(steps: Sequence[Sequence[OwnRowsReinserted]]) -> list[float]:
    """Return how far gradients of gathered features differ from rank 0's gradient, by step."""
    distances = []
    for first, *others in ([part.full_gradient for part in by_rank] for by_rank in steps):
        farthest = max(math.dist(first, grad) if len(first) == len(grad) else math.inf for grad in others)
        distances.append(relative(farthest, math.hypot(*first)))
    return distances


def scales_loss_for_sums(wrapper: WrapperTrace) -> bool:
    """Return True if a wrapper sums gradients, and its loss is scaled for sums.

    If the loss is unknown, for example compiled, return True if the script sets the divisor of the reduction.
    """
    steps = wrapper.compared.values()
    checks = [check for replicas in steps for rank_checks in compare_with_average(replicas) for check in rank_checks]
    wrong, size = [check for check in checks if check.bad], len(wrapper.ranks)
    if not wrong or any(abs(check.ratio - size) + check.residual > check.tolerance * size for check in wrong):
        return False
    if any(loss.terms for losses in wrapper.losses for loss in losses):
        return are_for_sums(wrapper.losses, wrapper.number)
    return any(change.what == "scale" for changes in wrapper.events(ModuleChanged) for change in changes)


def are_for_sums(losses: LossesByRank, wrapper: int) -> bool:
    """Check if a wrapper's losses need gradients summed over ranks, not averaged.

    In this case each loss is a sum divided by a number equal on all ranks, or a mean divided by the world size.
    """
    own_losses = [o for entries in losses for o in entries if wrapper in o.wrappers or wrapper in o.late_wrappers]
    micro_batches = {loss.step: loss.number + 1 for loss in own_losses}  # by step
    terms: dict[tuple[int, int], list[ScaledTerm]] = {}
    for entry in own_losses:
        terms.setdefault((entry.step, entry.number), []).extend(entry.terms)
    passes = [(micro_batches[step], pass_terms) for (step, _), pass_terms in terms.items() if pass_terms]
    return bool(passes) and all(_is_for_sums(pass_terms, count * len(losses)) for count, pass_terms in passes)


def _is_for_sums(terms: Sequence[ScaledTerm], count: int) -> bool:
    """Check if a loss needs summed gradients; a step has `count` backward passes altogether."""
    is_uniform = len({round(term.factor, 9) for term in terms}) == 1
    return is_uniform and all(
        abs(term.factor) < 1 if term.kind == "sum" else abs(abs(term.factor) * count - 1) < SCALE_TOLERANCE
        for term in terms
    )


def divided_by(losses: Sequence[LossDifferentiated]) -> tuple[float, Location | None, bool] | None:
    """Return the all_reduce result that divides each sum in the loss, or None.

    The return value is (number, line of the all_reduce, True if some terms of the loss are means). A mean that is
    multiplied by the number that the rank passed to the all_reduce counts as a sum.
    """
    size = float(len(losses))
    if any(loss.has_hooks for loss in losses):
        return None
    for numbers in zip(*([n for n in loss.allreduce_inputs if not n.members] for loss in losses), strict=False):
        total = sum(number.value for number in numbers)
        terms = [
            (term, term.kind == "sum" or _contains_near(number.value, term.multipliers))
            for number, loss in zip(numbers, losses, strict=True)
            for term in loss.terms
            if term.factor
        ]
        sums = [term for term, is_sum in terms if is_sum]
        by_size = all(size in term.multipliers for term in sums) or any(size in term.divisors for term, _ in terms)
        if len({number.location for number in numbers}) > 1 or by_size or not all(map(_has_known_factor, sums)):
            continue
        if total > 1 and all(_contains_near(total, term.divisors) for term in sums):
            return total, numbers[0].location, len(sums) < len(terms)
    return None


def _contains_near(number: float, numbers: Sequence[float]) -> bool:
    return any(map(partial(is_near, number), numbers))


def _has_known_factor(term: ScaledTerm) -> bool:
    """Check if known multipliers and divisors explain the whole factor of a term."""
    factor = math.prod(term.multipliers) / (math.prod(term.divisors) or math.inf)
    return bool(term.divisors) and is_near(abs(factor), abs(term.factor))


def format_term(term: LossTerm, terms: Sequence[LossTerm]) -> str:
    """Format a loss term: "term 1 of 2 of the loss (ce at train.py:9)".

    Terms with the same name and line count as one term. A single term is formatted as "the loss".
    """
    labels = [(t.name, t.location) if t.name or t.location else index for index, t in enumerate(terms)]
    distinct = list(dict.fromkeys(labels))
    if term not in terms or len(distinct) == 1:
        return "the loss"
    source = " at ".join(text for text in (term.name, str(term.location or "")) if text)
    number = distinct.index(labels[list(terms).index(term)]) + 1
    return f"term {number} of {len(distinct)} of the loss{f' ({source})' if source else ''}"


def total_factor(term: ScaledTerm) -> float:
    """Return the total weight that the loss gives the elements of a term."""
    return term.factor * (term.count if term.kind == "sum" else 1)


_SAME_WEIGHT = 0.02  # relative rounding error of half precision
_SIMILAR_WEIGHT = 0.15  # relative difference between the number of targets that the loss divides by, and ddpcheck's
_LEAST_WEIGHT = 0.05  # smallest relevant relative error of a weight
_FEWEST_STEPS = 3  # consecutive steps that rule out chance


@dataclass(frozen=True, slots=True)
class UnequalTargets:
    """Step whose targets have unequal weights, since micro-batches have unequal numbers of targets."""

    step: Sequence[tuple[MicroBatch, ...]]  # by rank
    is_in_rank: bool  # if micro-batches of a rank differ, not only ranks
    factor: float  # largest weight / smallest weight
    exact: bool  # if weights are inversely proportional to ddpcheck's counts of targets
    history: Sequence[Sequence[MicroBatch]] = ()  # all micro-batches of the same loss, by rank

    def describe(self) -> dict[str, Any]:
        """Return step, evidence and fix of a finding."""
        numbers = (
            f"rank {rank}: {', '.join(f'{item.counted:.0f}' for item in items)}" for rank, items in enumerate(self.step)
        )
        return {
            "steps": (min(item.step for items in self.step for item in items),),
            "evidence": (
                f"targets (such as tokens) by micro-batch: {'; '.join(numbers)}",
                f"a target counts up to {self.factor:.3g} times as much as another",
            ),
            "fix": "Sum the loss over the targets of a micro-batch, divide by their number in all micro-batches of all "
            "ranks that make the step, and multiply by the number of ranks, over which DDP averages. (In transformers: "
            "by num_items_in_batch, in a compute_loss_func or in the model, with average_tokens_across_devices.)",
        }


def unequal_targets(ranks: Sequence[Sequence[MicroBatch]]) -> UnequalTargets | None:
    """Return the first step in which targets have unequal weights, or None.

    One step is enough if weights are inversely proportional to target counts, and some targets are ignored. If the loss
    seems to count targets differently from ddpcheck, or only batch sizes differ (as in the last batch of an epoch),
    `_FEWEST_STEPS` steps have to agree. All ranks have to measure the same optimizer steps.
    """
    for head in dict.fromkeys(item.head for item in ranks[0]):
        history = [[item for item in items if item.head == head] for items in ranks]
        repeated = 0
        for index in sorted({item.index for item in history[0]}):
            step = [tuple(item for item in items if item.index == index) for items in history]
            unequal = _unequal_targets_in(step)
            repeated = repeated + 1 if unequal else 0
            if unequal and ((unequal.exact and not _only_sizes_differ(step)) or repeated == _FEWEST_STEPS):
                return replace(unequal, history=history)
    return None


def _unequal_targets_in(step: Sequence[tuple[MicroBatch, ...]]) -> UnequalTargets | None:
    """Return the step's unequal weights, if inversely proportional to numbers of targets."""
    counted = [(rank, item) for rank, items in enumerate(step) for item in items if item.counted]
    weights = [item.weight for _, item in counted]
    if len({rank for rank, _ in counted}) < len(step) or min(weights) <= 0:
        return None
    mean = sum(item.weight * item.counted for _, item in counted) / sum(item.counted for _, item in counted)
    if max(abs(weight / mean - 1) for weight in weights) < _LEAST_WEIGHT:
        return None
    groupings: list[tuple[bool, Callable[[tuple[int, MicroBatch]], Hashable]]] = [
        (False, lambda pair: pair[0]),
        (True, lambda pair: (pair[0], pair[1].position)),
        (True, lambda pair: pair[1].position),
    ]
    faults = []
    for is_in_rank, group_of in groupings:
        groups = [[item for _, item in group] for group in group_by(counted, group_of).values()]
        if max(_spread(item.weight for item in group) for group in groups) > _SAME_WEIGHT:
            continue
        for extra in (0, 1):  # a loss may count the first token of a sequence, which is never predicted
            sums = [sum(item.counted + extra * item.sequences for item in group) for group in groups]
            gap = _spread(group[0].weight * total for group, total in zip(groups, sums, strict=True))
            if gap <= max(_SAME_WEIGHT, min(_SIMILAR_WEIGHT, _spread(weights) / 3)):
                faults.append(UnequalTargets(step, is_in_rank, max(weights) / min(weights), exact=gap <= _SAME_WEIGHT))
    return max(faults, key=lambda fault: fault.exact, default=None)


def _spread(values: Iterable[float]) -> float:
    values = list(values)
    return max(values) / min(values) - 1


def _only_sizes_differ(step: Sequence[tuple[MicroBatch, ...]]) -> bool:
    """Check if only batch sizes differ: no target is ignored or padding."""
    return _spread(item.counted / item.rows for items in step for item in items if item.counted) <= _SAME_WEIGHT / 100
