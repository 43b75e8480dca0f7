"""Differences between a run on ranks and a run in a single process."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ddpcheck.findings.evidence.parity import NotReplayed, ParityEnded, ParityPass, ParityStep
from ddpcheck.findings.evidence.script import GradientsClipped, LossDifferentiated, OptimizerStep
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import group_by, join_names, plural
from ddpcheck.stream.rank_log import RankTrace
from ddpcheck.trace.factors import name_world_factor
from ddpcheck.trace.parity import EQUAL, MULTIPLE, Comparison, Quantity, saved_states, values_that_differ
from ddpcheck.trace.script_facts import entries_of
from ddpcheck.trace.shown_numbers import ShownPair, first_unequal, line_of_number, shown_numbers
from ddpcheck.trace.view import NotRecorded, View

_SLOWEST = 0.75  # smallest relative noise of times and throughputs
_FASTEST = 0.985  # largest relative noise of times and throughputs
_FACTOR_TOLERANCE = 1e-3  # relative tolerance of a factor
_FEWEST_FACTORS = 2
_NEAR_PEAK = 1e-2  # relative distance from the peak learning rate
_DECAY_TOLERANCE = 0.05  # fraction of the decay from the peak to the last rate
TRAINING_QUANTITIES = ("gradients", "clip", "update")
_MOST_MISSING = 0.75  # an epoch on ranks with a smaller fraction of the single process's samples lacks samples


@dataclass(frozen=True, slots=True)
class ParityDivergence:
    """First difference between the ranks and the single process, in quantities of one kind."""

    kind: str  # "gradients", "clip", "update", "steps", "shown", "saved", "schedule" or "samples"
    step: int  # number of preceding optimizer steps
    location: Location | None
    message: str  # description of the difference
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True)
class Parity(Comparison, View):
    """Comparison of the run on ranks with a single process on the same samples."""

    checks = ("parity",)

    @cached_property
    def shown(self) -> list[ShownPair]:
        """Numbers that both runs print, log or save, in order."""
        return shown_numbers(self)

    @cached_property
    def divergences(self) -> list[ParityDivergence]:
        """Differences between the runs; numbers after diverging gradients or updates are left out."""
        diverged = [*_gradient_divergences(self)]
        until = diverged[0].step if diverged else math.inf
        if updates := [*_update_divergences(self)]:
            diverged, until = updates, updates[0].step
        diverged += _schedule_divergences(self)
        diverged += _step_divergences(self) if self.has_same_samples else ()
        diverged += _sample_divergences(self)
        if self.has_same_samples and all(gradient.is_equal or gradient.differs for gradient in self.gradients):
            diverged += (divergence for divergence in _shown_divergences(self) if divergence.step < until)
            diverged += (divergence for divergence in _saved_divergences(self) if divergence.step < until)
        return diverged

    @property
    def is_equal(self) -> bool:
        """Check if both runs agree, so that no third run has to measure noise."""
        return _max_diff(self.gradients) <= EQUAL and not self.divergences

    @property
    def training_diverges(self) -> bool:
        """Check if gradients, clipping or updates differ between the runs.

        If so, a single process runs again with another rank number, to see if the script computes with the rank number.
        """
        return any(divergence.kind in TRAINING_QUANTITIES for divergence in self.divergences)

    def compared(self, check: str, findings: Sequence[Finding]) -> Iterator[str]:
        yield self.matches
        if reason := self.not_compared:
            raise NotRecorded(reason)

    @property
    def matches(self) -> str:
        """Describe what was compared and is equal."""
        equal = [quantity for quantity in self.gradients if quantity.is_equal]
        numbers = _evaluation_numbers(self) if self.has_same_samples else []
        shown = [number for number in numbers if number.quantity.is_equal]
        single_ends = entries_of(self.single, ParityEnded)
        undecided = [number for number in numbers if not number.is_local and _is_undecided(number.quantity)]
        messages = []
        if equal:
            steps, error = plural(len(equal), "step"), _max_diff(equal)
            messages.append(f"gradients of {steps} equal those of a single process within {error:.1g}")
        if shown:
            suffix = f" ({len(undecided)} not decided)" if undecided else ""
            messages.append(f"{plural(len(shown), 'shown number')} equal{suffix}")
        saves = saved_states(self.ranks[0]).keys() & saved_states(self.single).keys()
        if saves and not any(_saved_divergences(self)):
            messages.append(f"{plural(len(saves), 'saved state')} equal")
        batch = max((end.batch for rank in self.ranks for end in entries_of(rank, ParityEnded)), default=0)
        if messages and batch:
            messages.append(f"with batches of at most {batch} samples (--check-parity-batch)")
        scaled = sorted({name for end in single_ends for name in end.scaled_variables})
        if messages and scaled:
            messages.append(f"the single process has the batch size of all ranks in {join_names(scaled, most=3)}")
        if messages and any(end.splits_statistics for end in single_ends):
            messages.append("BatchNorm normalises the samples of each rank separately in both (DDP304)")
        return "; ".join(messages)

    @property
    def confirmed(self) -> dict[str, str]:
        """Map check lines to descriptions of equal quantities; {} unless everything is equal."""
        if self.not_compared or self.divergences:
            return {}
        steps, numbers = len(self.gradients), [number for number in _evaluation_numbers(self) if not number.is_local]
        result = {"loss": f"gradients of {plural(steps, 'step')} equal those of a single process"} if steps else {}
        if numbers and all(number.quantity.is_equal for number in numbers):
            result["evaluation"] = f"{plural(len(numbers), 'shown number')} equal to those of a single process"
        return result

    @property
    def not_compared(self) -> str:
        """Describe what was not compared, or return ''."""
        quantities = self.gradients
        unknown = [quantity for quantity in quantities if not quantity.differs and not quantity.is_equal]
        refused = dict.fromkeys(f"{entry.line} ({entry.why})" for entry in entries_of(self.single, NotReplayed))
        refused = {} if quantities and self.has_same_samples and not unknown else refused
        messages = [f"not given to the single process: {join_names([*refused], most=3)}"] if refused else []
        full = [end for rank in self.ranks for end in entries_of(rank, ParityEnded) if end.why_full]
        if full:
            first = min(full, key=lambda end: end.full_at)
            passes = plural(first.full_at, "backward pass")
            messages.append(f"samples are recorded for {passes} only: {first.why_full}")
        if self.has_other_model:
            messages.append("a single process has a different model: its parameters start with other values or shapes")
        elif self.computes_with_rank:
            messages.append("the script computes with the number of the rank")
        elif not self.has_same_samples:
            messages.append(f"from step {len(self.steps)} on, forward gets different samples in a single process")
        if unknown:
            noise = max(quantity.noise for quantity in unknown)
            messages.append(
                f"gradients of {plural(len(unknown), 'step')} not decided: "
                f"rounding and random numbers change them by {noise:.1g}"
            )
        evaluated = [shown for shown in self.shown if shown.entry.evaluates and not shown.is_local]
        decided = {shown.source for shown in evaluated if shown.quantity.differs or shown.quantity.is_equal}
        # undecided in every epoch
        numbers = [s.quantity for s in evaluated if s.source not in decided and _is_undecided(s.quantity)]
        if padded := [number for number in numbers if number.is_padded]:
            messages.append(
                f"{plural(len(padded), 'shown number')} not decided: evaluations on ranks repeat "
                f"{self.padding:.0%} of the samples"
            )
        numbers = [number for number in numbers if not number.is_padded]
        if numbers and self.has_same_samples:
            noise = max(number.noise for number in numbers)
            messages.append(f"{plural(len(numbers), 'shown number')} not decided: noise changes them by {noise:.1g}")
        if not messages and not quantities and not self.matches and not self.divergences:
            messages.append("no optimizer has stepped, and no number was shown after an evaluation")
        return "; ".join(messages)


def _gradient_divergences(parity: Parity) -> Iterator[ParityDivergence]:
    sizes = parity.gradients
    first = next((n for n, size in enumerate(sizes) if size.differs), None)
    if first is None:
        return
    rank_steps, single, _ = parity.steps[first]
    size = sizes[first]
    later = sizes[first:]
    factor = _format_factor([entry.ratio for entry in later[:8]], parity.world_size)
    when = "From optimizer step {} on"
    if not factor and (factor := parity.factor_of(rank_steps, single)):
        when = "In optimizer step {}"  # the step changes parameters, and thus later gradients
    relation = f"{size.difference:.2g} (relative) from"
    if factor:
        relation = f"{factor} of" if factor.startswith("1/") else f"{factor} times"
    message = f"{when.format(rank_steps[0].count)}, the gradients on {parity.world_size} ranks are {relation} "
    message += "those of a single process on the same samples."
    norms = ", ".join(f"{entry.ranks:.6g} and {entry.single:.6g}" for entry in later[:3])
    evidence = [f"norms of the gradients, on ranks and in a single process: {norms}"]
    if first:
        evidence.append(f"before, {plural(first, 'step')} had the same gradients within {_max_diff(sizes[:first]):.1g}")
    if parity.noise is not None:
        evidence.append(f"rounding, random numbers and another order of the samples change them by {size.noise:.1g}")
    clip, expected = rank_steps[0].clip, single.clip
    tolerance = max(EQUAL, MULTIPLE * size.noise)
    if clip and expected and clip[1] != expected[1] and math.isclose(clip[0], expected[0], rel_tol=tolerance):
        evidence.append(
            f"they are clipped to {clip[1]:.6g} and {expected[1]:.6g}; the norm before is {clip[0]:.6g} in both"
        )
        clips = [entry.location for entry in entries_of(parity.ranks[0], GradientsClipped)]
        yield ParityDivergence(
            "clip", single.count, next(iter(clips), rank_steps[0].location), message, tuple(evidence)
        )
        return
    location = _loss_line(parity.ranks[0], rank_steps[0]) or rank_steps[0].loss_at or rank_steps[0].location
    yield ParityDivergence("gradients", rank_steps[0].count, location, message, tuple(evidence))


def _update_divergences(parity: Parity) -> Iterator[ParityDivergence]:
    """Compare parameters of both runs after updates, until gradients or parameters differ."""
    steps = [*parity.steps, *parity.next_steps]
    triples = itertools.zip_longest(steps, parity.parameters, parity.gradients)
    for (rank_steps, single, _), quantity, gradient in triples:
        if quantity is None:  # sharded parameters
            return
        if quantity.differs:
            built = entries_of(parity.ranks[0], OptimizerStep)
            lines = (step.built_at for step in built if step.optimizer == single.optimizer and step.built_at)
            location = next(lines, rank_steps[0].location)
            names = parity.names_of(parity.ranks[0], single.optimizer)
            pairs = sorted(
                zip(rank_steps[0].values, single.values, names, strict=False), key=lambda pair: -abs(pair[0] - pair[1])
            )
            message = (
                f"Before optimizer step {single.count}, the parameters on {parity.world_size} ranks are "
                f"{quantity.difference:.2g} (relative) from those of a single process, after equal gradients."
            )
            evidence = [f"norm of {name}: {a:.6g} and {b:.6g}" for a, b, name in pairs[:3]]
            if parity.noise is not None:
                evidence.append(f"rounding and random numbers change them by {quantity.noise:.1g}")
            yield ParityDivergence("update", single.count, location, message, tuple(evidence))
        if quantity.differs or not (gradient is None or gradient.is_equal):
            return


def _max_diff(quantities: Sequence[Quantity]) -> float:
    return max((quantity.difference for quantity in quantities), default=0.0)


def _format_factor(ratios: Sequence[float], world_size: int) -> str:
    """Format the factor common to all ratios ("4", "1/4", "1.5"), or return ''."""

    def fits(factor: float) -> bool:
        return bool(ratios) and all(math.isclose(ratio, factor, rel_tol=_FACTOR_TOLERANCE) for ratio in ratios)

    if words := name_world_factor(world_size, fits):
        return words
    is_constant = ratios and not math.isclose(ratios[0], 1.0, rel_tol=_FACTOR_TOLERANCE) and fits(ratios[0])
    return f"{ratios[0]:.4g}" if is_constant else ""


def _loss_line(rank: RankTrace, step: ParityStep) -> Location | None:
    """Return the line that computes the loss in the step nearest to `step`."""
    losses = [loss for loss in entries_of(rank, LossDifferentiated) if loss.computed_at is not None]
    by_distance = sorted(losses, key=lambda loss: abs(loss.step - step.count))
    return by_distance[0].computed_at if by_distance else None


def _step_divergences(parity: Parity) -> Iterator[ParityDivergence]:
    """Compare the number of optimizer steps, if both runs completed."""
    ends = [end for rank in (parity.ranks[0], parity.single) for end in entries_of(rank, ParityEnded)]
    if len(ends) < 2 or any(end.why for end in ends):
        return
    on_ranks, single = (end.steps for end in ends)
    if single not in (on_ranks, on_ranks * parity.world_size):  # same total samples with per-rank batch size
        steps = entries_of(parity.ranks[0], ParityStep)
        location = steps[-1].location if steps else None
        if line := first_unequal(parity, range(min(on_ranks, single) + 1)):
            location = line[0]
        message = f"The ranks make {plural(on_ranks, 'optimizer step')}, a single process makes {single}."
        yield ParityDivergence("steps", min(on_ranks, single), location, message)


def _sample_divergences(parity: Parity) -> Iterator[ParityDivergence]:
    """Compare how many samples an epoch has, if data loaders ran to their end."""
    passes = [group_by(entries_of(rank, ParityPass), lambda entry: entry.loader) for rank in parity.ranks]
    for epoch in entries_of(parity.single, ParityPass):
        rank_passes = [entry for by_loader in passes for entry in by_loader.get(epoch.loader, ())]
        if len(rank_passes) < len(passes) or not all(entry.trains for entry in rank_passes):
            continue
        rows = sum(entry.rows for entry in rank_passes)
        if 0 < rows < _MOST_MISSING * epoch.num_samples:
            location = Location.parse(epoch.loader.split()[1].partition("#")[0])
            ranks, expected = parity.world_size, epoch.num_samples
            message = f"An epoch has {rows} samples on {ranks} ranks, and {expected} in a single process."
            yield ParityDivergence("samples", 0, location, message)
            return


def _schedule_divergences(parity: Parity) -> Iterator[ParityDivergence]:
    """Compare learning rates relative to their peaks, since scripts may scale all rates."""
    if any(end.steps_schedules for end in entries_of(parity.single, ParityEnded)):
        return  # a single process makes world-size times as many (smaller) steps, as the schedule expects
    by_optimizer = group_by(parity.steps, lambda step: step[1].optimizer)
    for number, steps in by_optimizer.items():
        lrs = [
            [max(s.rates, default=0.0) for s in (rank_steps[0], single, noise or single)]
            for rank_steps, single, noise in steps
        ]
        if len(lrs) < _FEWEST_FACTORS or not all(map(max, zip(*lrs, strict=True))):
            continue
        rank_lrs, single_lrs, noise_lrs = (list(column) for column in zip(*lrs, strict=True))
        if not _schedules_agree(single_lrs, noise_lrs):
            continue  # driven by a metric
        peaks, ends = (max(rank_lrs), max(single_lrs)), (rank_lrs[-1], single_lrs[-1])
        shares = [end / top for end, top in zip(ends, peaks, strict=True)]
        ends_agree = math.isclose(*shares, rel_tol=1e-2, abs_tol=1e-3) or _have_equal_minimum(peaks, ends)
        if ends_agree and _schedules_agree(rank_lrs, single_lrs):
            continue
        n = [math.isclose(a / peaks[0], b / peaks[1], rel_tol=1e-2) for a, b, _ in lrs].index(False)
        if ends_agree:
            when, shares = f"At step {n}", [rank_lrs[n] / peaks[0], single_lrs[n] / peaks[1]]
        else:
            when = f"After {plural(len(lrs), 'step')}"
        message = f"{when}, the learning rate on the ranks is at {shares[0]:.3g} of its highest value, and in a single "
        message += f"process at {shares[1]:.3g}."
        lines = [step.rate for step in entries_of(parity.ranks[0], OptimizerStep) if step.optimizer == number]
        location = next(filter(None, lines), None) or steps[n][0][0].location
        yield ParityDivergence("schedule", n, location, message)


def _schedules_agree(lrs: Sequence[float], others: Sequence[float]) -> bool:
    """Check if two schedules peak at most one step apart, and decay equally.

    Steps of the peaks are compared if both schedules rise. Rates before the peak are not compared: warmup may begin at
    the same rate for all world sizes.
    """
    peaks, ends = (max(lrs), max(others)), (lrs[-1], others[-1])
    high = [[rate >= (1 - _NEAR_PEAK) * top for rate in rates] for rates, top in zip((lrs, others), peaks, strict=True)]
    rises = [flags.index(True) for flags in high]
    if all(rises) and abs(rises[0] - rises[1]) > 1:
        return False
    if not all(end < (1 - _NEAR_PEAK) * top for end, top in zip(ends, peaks, strict=True)):
        return True
    falls = (
        [(rate - end) / (top - end) for rate in rates[max(rises) :]]
        for rates, top, end in zip((lrs, others), peaks, ends, strict=True)
    )
    return all(abs(a - b) <= _DECAY_TOLERANCE for a, b in zip(*falls, strict=True))


def _have_equal_minimum(peaks: Sequence[float], ends: Sequence[float]) -> bool:
    """Check if two schedules may decay to one `min_lr`, which scripts do not scale."""
    denominator = ends[0] + peaks[1] - ends[1] - peaks[0]
    return bool(denominator) and 0 <= (ends[0] * peaks[1] - ends[1] * peaks[0]) / denominator <= min(ends)


def _shown_divergences(parity: Parity) -> Iterator[ParityDivergence]:
    """Compare the numbers that both runs show.

    Numbers after evaluations have to be equal. Other numbers are reported only if the world size is the factor.
    """
    by_line = group_by(parity.shown, lambda item: (item.entry.location, item.index, item.entry.text))
    for (location, _, _), items in by_line.items():
        evaluated = [item for item in items if item.entry.evaluates and not item.entry.during and not item.is_local]
        differ = [item for item in items if item.quantity.differs]
        wrong = [item for item in evaluated if item.quantity.differs] or differ
        factor = _format_factor([item.quantity.ratio for item in wrong], parity.world_size)
        is_world_size = factor in (str(parity.world_size), f"1/{parity.world_size}")
        if wrong is differ and (len(wrong) < max(_FEWEST_FACTORS, len(items)) or not is_world_size):
            continue
        first = wrong[0]
        suffix = f" (factor {factor})" if is_world_size else ""
        number = first.text
        message = f"{number}, {first.entry.how} after {plural(first.entry.steps, 'step')}, "
        message += f"is {first.quantity.single:.6g} in a single process on the same samples{suffix}."
        pairs = ", ".join(f"{item.text} and {item.quantity.single:.6g}" for item in wrong[:3])
        evidence = [f"on ranks and in a single process: {pairs}"]
        if parity.noise is not None:
            evidence.append(
                f"rounding, random numbers and a different order of samples change it by {first.quantity.noise:.1g}"
            )
        steps = range(first.entry.steps, first.entry.steps + 1)
        line = first_unequal(parity, steps, first.quantity.difference)
        if line := line or line_of_number(parity.ranks[0], steps, number):
            evidence.append(
                f"{line[1]} of {line[0]} is the first number that differs; it is {first.entry.how} at {location}"
            )
            location = line[0]
        yield ParityDivergence("shown", first.entry.steps, location, message, tuple(evidence))


def _saved_divergences(parity: Parity) -> Iterator[ParityDivergence]:
    states, single_states = (saved_states(rank) for rank in (parity.ranks[0], parity.single))
    noise = saved_states(parity.noise) if parity.noise is not None else {}
    for key, state in states.items():
        if (single := single_states.get(key)) is None:
            continue
        missing = sorted(single.shapes.keys() - state.shapes.keys())
        shapes = sorted(n for n in state.shapes.keys() & single.shapes.keys() if state.shapes[n] != single.shapes[n])
        values = [name for name in values_that_differ(state, single, noise.get(key)) if name not in shapes]
        if missing or shapes or values:
            names = missing or shapes or values
            kind = "missing" if missing else "different shapes" if shapes else "different values"
            text = f"The ranks save a state that differs from a single process: {join_names(names, most=3)} ({kind})."
            detail = [f"{n}: {state.shapes[n]} and {single.shapes[n]}" for n in shapes[:3]]
            detail += [f"norm of {n}: {state.norms[n][0]:.6g} and {single.norms[n][0]:.6g}" for n in values[:3]]
            line = first_unequal(parity, range(state.steps + 1))
            yield ParityDivergence("saved", state.steps, line[0] if line else state.location, text, tuple(detail))
            return


def _is_undecided(quantity: Quantity) -> bool:
    """Check if a number (not a time) is too noisy to compare."""
    return not quantity.differs and not quantity.is_equal and not _SLOWEST < quantity.noise < _FASTEST


def _evaluation_numbers(parity: Parity) -> list[ShownPair]:
    """Return decimal numbers shown after an evaluation, except saved numbers."""
    shown = (number for number in parity.shown if number.entry.evaluates and number.entry.how != "saved")
    return [number for number in shown if "." in number.text]
