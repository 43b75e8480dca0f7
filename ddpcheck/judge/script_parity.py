"""DDP314: divergence of a script on several ranks from a single process."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ddpcheck.findings.evidence.parity import NotReplayed, ParityEnded, ParityStep, PassTaken
from ddpcheck.findings.evidence.script import GradientsClipped, LossDifferentiated, OptimizerStep
from ddpcheck.findings.report import Finding, Location, Severity
from ddpcheck.findings.wording import counted, group_by, join_names, one_finding
from ddpcheck.judge.parity_comparison import (
    EQUAL,
    MULTIPLE,
    Comparison,
    Quantity,
    Shown,
    first_unequal,
    gradients,
    line_of_number,
    parameters,
    saved_states,
    shown_numbers,
    values_that_differ,
)
from ddpcheck.judge.script_facts import entries_of
from ddpcheck.stream.rank_log import WatchedRank

_SLOWEST, _FASTEST = 0.75, 0.985  # relative noise of times and throughputs
_FACTOR = 1e-3  # relative tolerance of a factor
_FEWEST_FACTORS = 2
_NEAR_TOP = 1e-2  # relative distance from the peak learning rate
_NEAR_SHAPE = 0.05  # fraction of the decay from the peak to the last rate
_FIXES = {
    "gradients": "Check the divisor of the loss, and the values that it takes from other samples of its batch: each "
    "rank has only its own samples, and DDP averages the gradients of the ranks' losses.",
    "later gradients": "Check what the script changes after a step and computes the loss with, such as averages and "
    "queues: the first steps had equal gradients. Then check the loss itself: each rank has only its own "
    "samples, and DDP averages the gradients.",
    "clip": "Clip the averaged gradients by the limit of a single process, whatever the world size: DDP averages, and "
    "their norm does not grow with the number of ranks.",
    "update": "Check the options of the optimizer, and what changes parameters between steps: neither may depend on "
    "the world size, except a learning rate that is scaled on purpose.",
    "saved": "Make the saved state independent of the number of ranks: gather what each rank has a part of "
    "(dist.all_gather), and update averages and counters by the steps and samples of all ranks.",
    "schedule": "Give the schedule the number of steps that the ranks make, and step it once for each of them.",
    "steps": "Let the ranks decide together, by the value of a single process, such as the mean over all samples.",
    "samples": "Split the samples of an epoch between the ranks once: by the sampler, or by the dataset.",
}
_TRAINING = ("gradients", "clip", "update")
_MOST_MISSING = 0.75  # fraction of the single process's samples


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference in one kind of quantity."""

    kind: str  # "gradients", "clip", "update", "steps", "shown", "saved", "schedule" or "samples"
    step: int  # number of preceding optimizer steps
    location: Location | None
    said: str  # description of the difference
    evidence: tuple[str, ...] = ()


def divergences(comparison: Comparison) -> list[Divergence]:
    """Return all divergences except consequences of diverging gradients or updates."""
    found = [*_of_gradients(comparison)]
    until = found[0].step if found else math.inf
    if updates := [*_of_updates(comparison)]:
        found, until = updates, updates[0].step
    found += (one for one in _of_schedules(comparison))
    found += (one for one in _of_steps(comparison) if comparison.has_same_samples)
    found += _of_samples(comparison)
    if comparison.has_same_samples and all(one.is_equal or one.differs for one in gradients(comparison)):
        found += (one for one in _of_shown(comparison) if one.step < until)
        found += (one for one in _of_saved(comparison) if one.step < until)
    return found


def _of_gradients(comparison: Comparison) -> Iterator[Divergence]:
    every = gradients(comparison)
    first = next((n for n, one in enumerate(every) if one.differs), None)
    if first is None:
        return
    of_ranks, alone, _ = comparison.steps()[first]
    one = every[first]
    later = every[first:]
    factor = _factor([other.ratio for other in later[:8]], comparison.world_size)
    when = "From optimizer step {} on"
    if not factor and (factor := comparison.factor_of(of_ranks, alone)):
        when = "In optimizer step {}"  # the step changes parameters, and thus later gradients
    how = f"{one.difference:.2g} (relative) from"
    if factor:
        how = f"{factor} of" if factor.startswith("1/") else f"{factor} times"
    said = f"{when.format(of_ranks[0].count)}, the gradients on {comparison.world_size} ranks are {how} "
    said += "those of a single process on the same samples."
    norms = ", ".join(f"{other.ranks:.6g} and {other.single:.6g}" for other in later[:3])
    evidence = [f"norms of the gradients, on ranks and in a single process: {norms}"]
    if first:
        evidence.append(f"before, {counted(first, 'step')} had the same gradients within {_largest(every[:first]):.1g}")
    if comparison.noise is not None:
        evidence.append(f"rounding, random numbers and another order of the samples change them by {one.noise:.1g}")
    mine, other = of_ranks[0].clip, alone.clip
    near = max(EQUAL, MULTIPLE * one.noise)
    if mine and other and mine[1] != other[1] and math.isclose(mine[0], other[0], rel_tol=near):
        evidence.append(
            f"they are clipped to {mine[1]:.6g} and {other[1]:.6g}; the norm before is {mine[0]:.6g} in both"
        )
        clips = [clip.location for clip in entries_of(comparison.ranks[0], GradientsClipped)]
        yield Divergence("clip", alone.count, next(iter(clips), of_ranks[0].location), said, tuple(evidence))
        return
    where = _loss_line(comparison.ranks[0], of_ranks[0]) or of_ranks[0].loss_at or of_ranks[0].location
    yield Divergence("gradients", of_ranks[0].count, where, said, tuple(evidence))


def _of_updates(comparison: Comparison) -> Iterator[Divergence]:
    """Compare the parameters after steps with equal gradients."""
    steps = [*comparison.steps(), *comparison.next_steps()]
    every = itertools.zip_longest(steps, parameters(comparison), gradients(comparison))
    for (of_ranks, alone, _), quantity, gradient in every:
        if quantity is None:  # sharded parameters
            return
        if quantity.differs:
            built = entries_of(comparison.ranks[0], OptimizerStep)
            lines = (step.made for step in built if step.optimizer == alone.optimizer and step.made)
            where = next(lines, of_ranks[0].location)
            names = comparison.names_of(comparison.ranks[0], alone.optimizer)
            pairs = sorted(
                zip(of_ranks[0].values, alone.values, names, strict=False), key=lambda pair: -abs(pair[0] - pair[1])
            )
            said = (
                f"Before optimizer step {alone.count}, the parameters on {comparison.world_size} ranks are "
                f"{quantity.difference:.2g} (relative) from those of a single process, after equal gradients."
            )
            evidence = [f"norm of {name}: {a:.6g} and {b:.6g}" for a, b, name in pairs[:3]]
            if comparison.noise is not None:
                evidence.append(f"rounding and random numbers change them by {quantity.noise:.1g}")
            yield Divergence("update", alone.count, where, said, tuple(evidence))
        if quantity.differs or not (gradient is None or gradient.is_equal):
            return


def _largest(every: Sequence[Quantity]) -> float:
    return max((one.difference for one in every), default=0.0)


def _factor(ratios: Sequence[float], world_size: int) -> str:
    """Return the common factor of all ratios in words, or ''."""
    for factor, words in ((world_size, str(world_size)), (1 / world_size, f"1/{world_size}")):
        if ratios and all(math.isclose(ratio, factor, rel_tol=_FACTOR) for ratio in ratios):
            return words
    if ratios and not math.isclose(ratios[0], 1.0, rel_tol=_FACTOR):
        if all(math.isclose(ratio, ratios[0], rel_tol=_FACTOR) for ratio in ratios):
            return f"{ratios[0]:.4g}"
    return ""


def _loss_line(rank: WatchedRank, step: ParityStep) -> Location | None:
    """Return the line that computes the loss of the nearest step."""
    losses = [one for one in entries_of(rank, LossDifferentiated) if one.made is not None]
    near = sorted(losses, key=lambda one: abs(one.step - step.count))
    return near[0].made if near else None


def _of_steps(comparison: Comparison) -> Iterator[Divergence]:
    """Compare the number of optimizer steps, if both runs completed."""
    ends = [end for one in (comparison.ranks[0], comparison.single) for end in entries_of(one, ParityEnded)]
    if len(ends) < 2 or any(end.why for end in ends):
        return
    of_ranks, alone = (end.steps for end in ends)
    if alone not in (of_ranks, of_ranks * comparison.world_size):  # same total samples with per-rank batch size
        last = entries_of(comparison.ranks[0], ParityStep)
        where = last[-1].location if last else None
        if line := first_unequal(comparison, range(min(of_ranks, alone) + 1)):
            where = line[0]
        said = f"The ranks make {counted(of_ranks, 'optimizer step')}, a single process makes {alone}."
        yield Divergence("steps", min(of_ranks, alone), where, said)


def _of_samples(comparison: Comparison) -> Iterator[Divergence]:
    """Compare the number of samples of an epoch, if loaders were exhausted."""
    passes = [group_by(entries_of(rank, PassTaken), lambda one: one.loader) for rank in comparison.ranks]
    for alone in entries_of(comparison.single, PassTaken):
        of_ranks = [one for of_rank in passes for one in of_rank.get(alone.loader, ())]
        if len(of_ranks) < len(passes) or not all(one.trains for one in of_ranks):
            continue
        rows = sum(one.rows for one in of_ranks)
        if 0 < rows < _MOST_MISSING * alone.chosen:
            where = Location.parse(alone.loader.split()[1].partition("#")[0])
            said = (
                f"An epoch has {rows} samples on {comparison.world_size} ranks, and {alone.chosen} in a single process."
            )
            yield Divergence("samples", 0, where, said)
            return


def _of_schedules(comparison: Comparison) -> Iterator[Divergence]:
    """Compare learning rate schedules relative to the peak; constant factors are intended."""
    if any(end.steps_schedules for end in entries_of(comparison.single, ParityEnded)):
        return  # a single process makes world-size times as many (smaller) steps, as the schedule expects
    by_optimizer = group_by(comparison.steps(), lambda some: some[1].optimizer)
    for number, steps in by_optimizer.items():
        every = [
            [max(s.rates, default=0.0) for s in (of_ranks[0], single, noise or single)]
            for of_ranks, single, noise in steps
        ]
        if len(every) < _FEWEST_FACTORS or not all(map(max, zip(*every, strict=True))):
            continue
        of_ranks, alone, again = (list(column) for column in zip(*every, strict=True))
        if not _have_one_shape(alone, again):
            continue  # driven by a metric
        tops, ends = (max(of_ranks), max(alone)), (of_ranks[-1], alone[-1])
        shares = [end / top for end, top in zip(ends, tops, strict=True)]
        said = f"After {counted(len(every), 'step')}, the learning rate on the ranks is at {shares[0]:.3g} of its "
        said += f"highest value, and in a single process at {shares[1]:.3g}."
        apart = [not math.isclose(a / tops[0], b / tops[1], rel_tol=1e-2) for a, b, _ in every]
        if math.isclose(*shares, rel_tol=1e-2, abs_tol=1e-3) or _have_one_floor(tops, ends):
            if _have_one_shape(of_ranks, alone):
                continue
            at = apart.index(True)
            said = f"At step {at}, the learning rate on the ranks is at {of_ranks[at] / tops[0]:.3g} of its highest "
            said += f"value, and in a single process at {alone[at] / tops[1]:.3g}."
        at = apart.index(True)
        rates = [one.rate for one in entries_of(comparison.ranks[0], OptimizerStep) if one.optimizer == number]
        where = next(filter(None, rates), None) or steps[at][0][0].location
        yield Divergence("schedule", at, where, said)


def _have_one_shape(some: Sequence[float], others: Sequence[float]) -> bool:
    """Check if two rates peak in the same step (within one) and decay alike.

    Warm-ups may start at one rate for all world sizes, so a rate that never rises says nothing about the peak.
    """
    tops, ends = (max(some), max(others)), (some[-1], others[-1])
    high = [[rate >= (1 - _NEAR_TOP) * top for rate in every] for every, top in zip((some, others), tops, strict=True)]
    rises = [one.index(True) for one in high]
    if all(rises) and abs(rises[0] - rises[1]) > 1:
        return False
    if not all(end < (1 - _NEAR_TOP) * top for end, top in zip(ends, tops, strict=True)):
        return True
    falls = (
        [(rate - end) / (top - end) for rate in every[max(rises) :]]
        for every, top, end in zip((some, others), tops, ends, strict=True)
    )
    return all(abs(a - b) <= _NEAR_SHAPE for a, b in zip(*falls, strict=True))


def _have_one_floor(tops: Sequence[float], ends: Sequence[float]) -> bool:
    """Check if two rates decay toward one unscaled minimum (`min_lr`)."""
    apart = ends[0] + tops[1] - ends[1] - tops[0]
    return bool(apart) and 0 <= (ends[0] * tops[1] - ends[1] * tops[0]) / apart <= min(ends)


def _of_shown(comparison: Comparison) -> Iterator[Divergence]:
    """Compare numbers shown after evaluations; in training, only world size factors."""
    by_line = group_by(shown_numbers(comparison), lambda one: (one.entry.location, one.place, one.entry.text))
    for (where, place, _), every in by_line.items():
        evaluated = [one for one in every if one.entry.evaluates and not one.entry.during and not one.is_local]
        wrong = [one for one in evaluated if one.quantity.differs]
        if not wrong:
            rest = [one for one in every if one.quantity.differs]
            if len(rest) < max(_FEWEST_FACTORS, len(every)) or not _is_of_ranks(rest, comparison.world_size):
                continue
            wrong = rest
        first = wrong[0]
        factor = _factor([one.quantity.ratio for one in wrong], comparison.world_size)
        how = f" (factor {factor})" if factor in (str(comparison.world_size), f"1/{comparison.world_size}") else ""
        number = first.entry.numbers[place]
        said = (
            f"{number}, {first.entry.how} after {counted(first.entry.steps, 'step')}, is {first.quantity.single:.6g} "
        )
        said += f"in a single process on the same samples{how}."
        pairs = ", ".join(f"{one.entry.numbers[place]} and {one.quantity.single:.6g}" for one in wrong[:3])
        evidence = [f"on ranks and in a single process: {pairs}"]
        if comparison.noise is not None:
            evidence.append(
                f"rounding, random numbers and a different order of samples change it by {first.quantity.noise:.1g}"
            )
        at = range(first.entry.steps, first.entry.steps + 1)
        line = first_unequal(comparison, at, first.quantity.difference)
        if line := line or line_of_number(comparison.ranks[0], at, number):
            evidence.append(
                f"{line[1]} of {line[0]} is the first number that differs; it is {first.entry.how} at {where}"
            )
            where = line[0]
        yield Divergence("shown", first.entry.steps, where, said, tuple(evidence))


def _is_of_ranks(every: Sequence[Shown], world_size: int) -> bool:
    """Check if numbers differ by a factor of the world size, or its inverse."""
    return _factor([one.quantity.ratio for one in every], world_size) in (str(world_size), f"1/{world_size}")


def _of_saved(comparison: Comparison) -> Iterator[Divergence]:
    mine, theirs = (saved_states(one) for one in (comparison.ranks[0], comparison.single))
    noise = saved_states(comparison.noise) if comparison.noise is not None else {}
    for key, one in mine.items():
        if (other := theirs.get(key)) is None:
            continue
        missing = sorted(other.shapes.keys() - one.shapes.keys())
        shapes = sorted(
            name for name in one.shapes.keys() & other.shapes.keys() if one.shapes[name] != other.shapes[name]
        )
        values = [name for name in values_that_differ(one, other, noise.get(key)) if name not in shapes]
        if missing or shapes or values:
            what = missing or shapes or values
            how = "missing" if missing else "different shapes" if shapes else "different values"
            said = f"The ranks save a state that differs from a single process: {join_names(what, most=3)} ({how})."
            detail = [f"{n}: {one.shapes[n]} and {other.shapes[n]}" for n in shapes[:3]]
            detail += [f"norm of {n}: {one.norms[n][0]:.6g} and {other.norms[n][0]:.6g}" for n in values[:3]]
            line = first_unequal(comparison, range(one.steps + 1))
            yield Divergence("saved", one.steps, line[0] if line else one.location, said, tuple(detail))
            return


def is_equal(ranks: Sequence[WatchedRank], singles: Sequence[WatchedRank]) -> bool:
    """Check if the single process matches, so that no noise run is needed."""
    comparison = Comparison(ranks, singles[0])
    return _largest(gradients(comparison)) <= EQUAL and not divergences(comparison)


def depends_on_rank(ranks: Sequence[WatchedRank], singles: Sequence[WatchedRank], noise: Sequence[WatchedRank]) -> bool:
    """Check if training diverges, perhaps because the script uses the rank number."""
    comparison = Comparison(ranks, singles[0], next(iter(noise), None))
    return any(one.kind in _TRAINING for one in divergences(comparison))


def judge_parity(comparison: Comparison) -> list[Finding]:
    """Return at most one finding: the first divergence, with the rest as evidence."""
    found = divergences(comparison)
    if not found:
        return []
    first = min(found, key=lambda one: (one.kind not in _TRAINING, one.step))
    others = [one.said for one in found if one is not first]
    return one_finding(
        "DDP314",
        (first.kind,),
        first.said,
        location=first.location,
        evidence=[*first.evidence, *others[:4]],
        fix=_FIXES.get("later gradients" if first.kind == "gradients" and first.step else first.kind, ""),
        severity=Severity.ERROR if first.kind in (*_TRAINING, "steps", "schedule", "samples") else Severity.WARNING,
    )


_OF_EVALUATIONS = ("DDP801", "DDP802", "DDP803", "DDP805", "DDP806")
_OF_GRADIENTS = ("DDP1", "DDP30", "DDP506", "DDP514")  # cannot explain shown numbers if gradients are equal
# Rules that change no gradients or numbers if samples and random numbers are replayed.
_BESIDE = ("DDP4", "DDP6", "DDP7", "DDP510", "DDP512", "DDP520", "DDP522")


def codes_that_explain(found: Finding, others: Sequence[Finding]) -> list[str]:
    """Return rules that may explain the divergence; in training, no evaluation rules."""
    beside = (*_BESIDE, *(_OF_EVALUATIONS if found.severity is Severity.ERROR else _OF_GRADIENTS))
    known = {one.code for one in others if one.severity is not Severity.NOTE and not one.code.startswith(beside)}
    return sorted(known - {found.code})


def what_held(comparison: Comparison) -> str:
    """Describe what was compared and is equal."""
    every = [one for one in gradients(comparison) if one.is_equal]
    numbers = _evaluated(comparison) if comparison.has_same_samples else []
    shown = [one for one in numbers if one.quantity.is_equal]
    undecided = [one for one in numbers if not one.is_local and _is_undecided(one.quantity)]
    said = []
    if every:
        said.append(
            f"gradients of {counted(len(every), 'step')} equal those of a single process within {_largest(every):.1g}"
        )
    if shown:
        rest = f" ({len(undecided)} not decided)" if undecided else ""
        said.append(f"{counted(len(shown), 'shown number')} equal{rest}")
    saves = saved_states(comparison.ranks[0]).keys() & saved_states(comparison.single).keys()
    if saves and not any(_of_saved(comparison)):
        said.append(f"{counted(len(saves), 'saved state')} equal")
    batch = max((end.batch for rank in comparison.ranks for end in entries_of(rank, ParityEnded)), default=0)
    if said and batch:
        said.append(f"with batches of at most {batch} samples (--check-parity-batch)")
    scaled = {name for end in entries_of(comparison.single, ParityEnded) for name in end.scaled}
    if said and scaled:
        said.append(f"the single process has the batch size of all ranks in {join_names(sorted(scaled), most=3)}")
    if said and any(end.splits_statistics for end in entries_of(comparison.single, ParityEnded)):
        said.append("BatchNorm normalises the samples of each rank separately in both (DDP304)")
    return "; ".join(said)


def _is_undecided(number: Quantity) -> bool:
    """Check if a number is neither equal nor different, and not a time."""
    return not number.differs and not number.is_equal and not _SLOWEST < number.noise < _FASTEST


def _evaluated(comparison: Comparison) -> list[Shown]:
    """Return decimal numbers shown after an evaluation, except saved numbers."""
    shown = (one for one in shown_numbers(comparison) if one.entry.evaluates and one.entry.how != "saved")
    return [one for one in shown if "." in one.entry.numbers[one.place]]


def confirmed(comparison: Comparison) -> dict[str, str]:
    """Describe what the single process confirms, by check line; empty unless all matches."""
    if lacking(comparison) or divergences(comparison):
        return {}
    steps, numbers = len(gradients(comparison)), [one for one in _evaluated(comparison) if not one.is_local]
    found = {"loss": f"gradients of {counted(steps, 'step')} equal those of a single process"} if steps else {}
    if numbers and all(one.quantity.is_equal for one in numbers):
        found["evaluation"] = f"{counted(len(numbers), 'shown number')} equal to those of a single process"
    return found


def lacking(comparison: Comparison) -> str:
    """Describe what was not compared, or return ''."""
    every = gradients(comparison)
    unknown = [one for one in every if not one.differs and not one.is_equal]
    refused = dict.fromkeys(f"{one.line} ({one.why})" for one in entries_of(comparison.single, NotReplayed))
    refused = {} if every and comparison.has_same_samples and not unknown else refused
    said = [f"not given to the single process: {join_names([*refused], most=3)}"] if refused else []
    full = [end for rank in comparison.ranks for end in entries_of(rank, ParityEnded) if end.why_full]
    if full:
        first = min(full, key=lambda end: end.full_at)
        said.append(f"samples are recorded for {counted(first.full_at, 'backward pass')} only: {first.why_full}")
    if comparison.has_other_model:
        said.append("a single process has a different model: its parameters start with other values or shapes")
    elif comparison.computes_with_rank:
        said.append("the script computes with the number of the rank")
    elif not comparison.has_same_samples:
        said.append(f"from step {len(comparison.steps())} on, forward gets different samples in a single process")
    if unknown:
        noise = max(one.noise for one in unknown)
        said.append(
            f"gradients of {counted(len(unknown), 'step')} not decided: "
            f"rounding and random numbers change them by {noise:.1g}"
        )
    evaluated = [shown for shown in shown_numbers(comparison) if shown.entry.evaluates and not shown.is_local]
    decided = {shown.source for shown in evaluated if shown.quantity.differs or shown.quantity.is_equal}
    # undecided in every epoch
    numbers = [s.quantity for s in evaluated if s.source not in decided and _is_undecided(s.quantity)]
    if padded := [number for number in numbers if number.is_padded]:
        said.append(
            f"{counted(len(padded), 'shown number')} not decided: evaluations on ranks repeat {comparison.padding:.0%} "
            "of the samples"
        )
    numbers = [number for number in numbers if not number.is_padded]
    if numbers and comparison.has_same_samples:
        noise = max(number.noise for number in numbers)
        said.append(f"{counted(len(numbers), 'shown number')} not decided: noise changes them by {noise:.1g}")
    if not said and not every and not what_held(comparison) and not divergences(comparison):
        said.append("no optimizer has stepped, and no number was shown after an evaluation")
    return "; ".join(said)
