"""DDP510 and 505: random numbers drawn identically on all ranks, in data loaders and training steps."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence

from ddpcheck.findings.evidence.loop import StepDraw
from ddpcheck.findings.evidence.script import Evaluated, Inputs, LoaderPass, LossDifferentiated
from ddpcheck.findings.report import Finding, Location, Severity
from ddpcheck.findings.wording import counted, format_steps, one_finding
from ddpcheck.judge.data.script_rows import finding_on_loader

_FEWEST_DRAWS = 2  # batches made with the same random numbers
_FEWEST = 2  # intervals between optimizer steps in which the same line draws
_KEYS = 624  # a count is known modulo this number
_BLOCK = 16  # `randn` redraws its last numbers in a block of this size
_MOST_BEHIND, _FEWEST_BEHIND = 8, 2  # steps
_FEWEST_AGAIN = 3  # steps on samples that another rank used before
_FEWEST_ADDED = 3  # steps with known additions to the samples
_FEWEST_TARGETS, _FEWEST_BITS = 3, 24.0  # steps with equal targets on every rank, and total bits, to rule out chance
_ALIKE = 0.6  # cosine of equal noise after subtracting the samples; near 0 for independent noise
_FIX = (
    "Seed with seed + rank before the training loop, after the model has been constructed; or draw from a generator of "
    "each rank's own: torch.Generator().manual_seed(seed + rank)."
)


def judge_shared_draws(passes: Sequence[Sequence[LoaderPass]], *, same_data: bool) -> list[Finding]:
    """DDP510: different samples that every rank makes with the same random numbers.

    `same_data`: an index is the same sample on every rank; otherwise equal indices may be of each rank's own part.
    """
    draws = [{before: after for one in of_rank for before, after in one.draws.items()} for of_rank in passes]
    shared = set.intersection(*map(set, draws))
    orders = {tuple(of_rank[0].indices) for of_rank in passes}
    one = next((one for one in passes[-1] if shared & one.draws.keys()), passes[-1][0])
    alike = all(len({of_rank[state] for of_rank in draws}) == 1 for state in shared)
    batches = [state for each in passes[-1] for state in each.held if state in shared]
    held = bool(batches) and shared <= set(batches)
    several = len(shared) >= _FEWEST_DRAWS or (held and alike and len(batches) >= _FEWEST_DRAWS)  # workers have copies
    if len(passes) < 2 or not several or (same_data and len(orders) < 2):
        return []
    where = ", in workers" if one.workers else ""
    when = "before and after" if alike else "before"
    fix = "Seed with seed + rank before the loop over the data, after the model has been constructed"
    if one.workers and one.worker_seed < 0:
        fix = "In worker_init_fn, seed each worker from its loader seed and the rank"
    elif one.workers:
        fix += "; or give the loader a generator that is seeded with seed + rank"
    if one.restored_by:
        fix = f"Give {one.restored_by} a state that this rank itself has saved, or seed with seed + rank after it"
    if held:
        fix = "Seed the generator with seed + rank" + (
            ", and again in each worker, with torch.initial_seed() in worker_init_fn" if one.workers else ""
        )
    return finding_on_loader(
        "DDP510",
        one,
        f"The dataset draws random numbers for its samples{where}, and every rank draws the same ones.",
        line=(one.held_at if held else one.seeded) or one.location,
        evidence=[
            f"{when} the batches that were looked at, {len(batches) or len(shared)} of "
            f"{max(len(batches), *map(len, draws))} states of "
            f"{'random generators that the dataset holds' if held else 'global random generators'} are equal on all "
            "ranks",
            *([f"worker 0 has the seed {one.worker_seed} on every rank"] * (one.worker_seed >= 0 and not held)),
        ],
        fix=f"{fix}.",
    )


def judge_step_draws(
    draws: Sequence[Sequence[StepDraw]], inputs: Sequence[Sequence[Inputs]], *, loads_others: bool = False
) -> list[Finding]:
    """DDP510: random numbers for samples that every rank draws equally in training steps.

    `draws` and `inputs` of all wrappers, by rank. `loads_others`: data loaders return different samples on the ranks.

    A draw is for the samples if its count equals the number of samples or of input elements; other draws are for the
    batch as a whole, the global batch, or weights. Integers drawn in forward are diffusion timesteps.
    """
    given = _compared(inputs)
    if len(draws) < 2 or not given or not (loads_others or any(map(_all_differ, given))):
        return []
    rows = {len(one.samples) for of_wrapper in given for of_ranks in of_wrapper for one in of_ranks}
    sizes = {size for of_wrapper in given for of_ranks in of_wrapper for one in of_ranks for _, size in one.parts}
    shared = shared_draws(draws)
    for_samples = [
        one
        for one in shared
        if (one.kind == "noise" and not one.in_forward and _is_for(one.count, rows | sizes))
        or (one.kind == "choice" and one.in_forward and one.count in rows)
    ]
    passed = any(_all_differ(steps) and _share_a_part(steps, len(steps)) for steps in given)
    if passed:  # e.g. diffusion timesteps
        for_samples += [one for one in shared if one.generator == "cuda" or one.count >= min(rows)]
    lines = [one.location for one in for_samples]
    repeated = [one for one in for_samples if len({o.step for o in for_samples if o.location == one.location}) > 1]
    if len({one.step for one in repeated}) < _FEWEST:
        return []
    one = repeated[0]
    places = [str(line) for line in dict.fromkeys(lines) if line is not None]
    return one_finding(
        "DDP510",
        ("training step",),
        "The training step draws random numbers for its samples, and every rank draws the same ones for different "
        f"samples, in {counted(len({other.step for other in repeated}), 'step')} that were looked at.",
        location=one.seeded or one.location or given[0][0][0].location,
        evidence=[
            "before and after these draws the random generators have the same state on every rank",
            f"they are drawn at {', '.join(places[:3])}" if places else "",
            f"{one.restored_by} has restored the same state of the generator ({one.generator}) on every rank"
            if one.restored_by
            else f"the generator ({one.generator}) was last seeded at {one.seeded}" * (one.seeded is not None),
        ],
        fix=_FIX
        if not one.restored_by
        else f"Give {one.restored_by} a state that this rank itself has saved, or seed with seed + rank after it.",
    )


def judge_added_noise(draws: Sequence[Sequence[StepDraw]], inputs: Sequence[Sequence[Inputs]]) -> list[Finding]:
    """DDP510: equal noise added to the different samples of each rank, from any generator.

    Noise computed from the samples is no more alike between ranks than between steps.
    """
    for steps in _compared(inputs):
        known = [[one.added for one in of_ranks] for of_ranks in steps if all(one.added for one in of_ranks)]
        if len(inputs) < 2 or len(known) < _FEWEST_ADDED or not _all_differ(steps):
            continue
        alike = min(_cosine(mine, of_ranks[0]) for of_ranks in known for mine in of_ranks[1:])
        pairs = [(a, b) for number, one in enumerate(known) for other in known[:number] for a in one for b in other]
        if alike < _ALIKE or max(_cosine(*pair) for pair in pairs) > min(alike, _ALIKE):
            continue
        line = line_of_selection([[one for one in of_rank if not one.in_forward] for of_rank in draws])
        line = line or steps[0][0].location
        return one_finding(
            "DDP510",
            ("training step",),
            "The training step adds random numbers to its samples, and every rank adds the same ones to different "
            f"samples, in {counted(len(known), 'step')} that were looked at.",
            location=line,
            evidence=[
                "the noise added to the batches of the loader is the same on every rank, and changes from step to step"
            ],
            related={"forward called": steps[0][0].location},
            fix=_FIX,
        )
    return []


def judge_same_targets(
    losses: Sequence[Sequence[LossDifferentiated]],
    inputs: Sequence[Sequence[Inputs]],
    draws: Sequence[Sequence[StepDraw]],
) -> list[Finding]:
    """DDP505: ranks with equal targets but different inputs in each compared step.

    The ranks augment the same samples differently, or draw the same noise (the targets) for different samples. Or one
    input tensor is equal on all ranks and others, e.g. a hidden state, are not. All arguments by rank.
    """
    by_pass = [{(one.step, one.number): one for one in of_rank if one.wrappers} for of_rank in losses]
    common = sorted(set.intersection(*map(set, by_pass))) if len(by_pass) > 1 else []
    passes = [tuple(of_rank[one] for of_rank in by_pass) for one in common]
    if len({len(one.targets) for of_ranks in passes for one in of_ranks}) > 1:
        return []
    for steps in _compared(inputs) if passes else ():
        rows = {len(one.samples) for of_ranks in steps for one in of_ranks}
        elements = {size for of_ranks in steps for one in of_ranks for _, size in one.parts}
        part = _share_a_part(steps, _FEWEST_TARGETS) and any(
            len({one.samples for one in of_ranks}) > 1 for of_ranks in steps
        )
        for place in range(len(passes[0][0].targets)) if part or _all_differ(steps) else ():
            targets = [[one.targets[place] for one in of_ranks] for of_ranks in passes]
            first = [of_ranks[0] for of_ranks in targets]
            told = [one for one in first if one.bits and (one.rows in rows or one.elements in elements)]
            if any(len({one.digest for one in of_ranks}) > 1 for of_ranks in targets) or not all(o.bits for o in first):
                continue
            if 2 * len(told) < len(first):  # few steps have a shorter last batch of an epoch
                continue
            distinct = {one.digest: one.bits for one in told}
            if len(distinct) < (_FEWEST_TARGETS if part else max(len(told), _FEWEST_TARGETS)):
                continue
            if sum(distinct.values()) < _FEWEST_BITS:
                continue
            loss, forward = passes[0][0].made or passes[0][0].location, steps[0][0].location
            noise = told[0].rows < told[0].elements and told[0].elements in elements  # as in diffusion training
            return one_finding(
                "DDP505",
                ("targets",),
                "The loss of every rank has the same targets in the same order, in all "
                f"{len(first)} steps that were compared, and forward is given "
                + (
                    "a tensor that is also the same on each rank: the ranks take the same samples."
                    if part and not noise
                    else "different inputs on each rank: "
                    + ("either the targets are the same noise on every rank, or " if noise else "")
                    + "the ranks take the same samples, and each augments them separately."
                ),
                location=line_of_selection(draws) or loss or forward,
                evidence=["the targets are bit-identical on all ranks, and change from step to step"],
                related={"loss computed": loss, "forward called": forward},
                severity=Severity.WARNING,
            )
    return []


def judge_streams(
    draws: Mapping[int, Sequence[StepDraw]],
    inputs: Mapping[int, Sequence[Inputs]],
    evaluated: Mapping[int, Sequence[Evaluated]],
) -> list[Finding]:
    """DDP505: a rank that trains on samples which another rank drew before for evaluation.

    All arguments by rank of a wrapper's group. Both ranks draw samples from the same random numbers; one drew more.
    """
    drawn: dict[tuple[int, ...], tuple[int, int]] = {}  # samples -> (first rank to evaluate them, position)
    for ahead in inputs:
        for place, one in enumerate(evaluated.get(ahead, ())):
            drawn.setdefault(tuple(sorted(one.samples)), (ahead, place))
    given = {rank: {one.step: tuple(sorted(one.samples)) for one in of_rank} for rank, of_rank in inputs.items()}
    for rank, own in given.items() if drawn else ():
        again = {step: drawn[one] for step, one in own.items() if one in drawn}
        ahead = next((ahead for ahead, _ in again.values()), rank)
        places = {step: at for step, (of, at) in again.items() if of == ahead and own[step] != given[ahead].get(step)}
        in_order = all(a < b for a, b in itertools.pairwise(places.values()))
        if ahead == rank or len(places) < _FEWEST_AGAIN or not in_order:
            continue
        line = _seed_of_both(draws.get(rank, ()), draws.get(ahead, ()))
        if line is None:
            continue
        return one_finding(
            "DDP505",
            ("forward",),
            f"Rank {rank} trains on samples that rank {ahead} has drawn before: both choose them by the same random "
            "numbers, and one rank has drawn more of these.",
            ranks=(rank,),
            location=line,
            evidence=[
                f"rank {ahead} has evaluated on the samples of rank {rank} in {format_steps(places)}, in the same order"
            ],
            related={"forward called": inputs[rank][0].location},
            fix="Seed the generator by which samples are chosen with seed + rank.",
        )
    return []


def judge_behind(inputs: Mapping[int, Sequence[Inputs]]) -> list[Finding]:
    """DDP505: a rank that gets another rank's samples a fixed number of steps apart.

    Ranks may take turns with as many batches as there are ranks, since every rank then sees every batch. `inputs`: by
    rank of a wrapper's group.
    """
    given = {rank: {one.step: tuple(sorted(one.samples)) for one in of_rank} for rank, of_rank in inputs.items()}
    if len({batch for own in given.values() for batch in own.values()}) <= len(given) + 1:
        return []
    for (rank, own), (ahead, other) in itertools.permutations(given.items(), 2):
        for lag in range(1, _MOST_BEHIND + 1):
            steps = [step for step in own if step + lag in other]
            if len(steps) >= _FEWEST_BEHIND and all(own[step] == other[step + lag] for step in steps):
                return one_finding(
                    "DDP505",
                    ("forward",),
                    f"Rank {rank} gets the samples that rank {ahead} gets {counted(lag, 'step')} later: the ranks "
                    "iterate over the same samples, one behind the other.",
                    location=inputs[rank][0].location,
                    severity=Severity.WARNING,
                    evidence=[f"in {format_steps(steps)}"],
                    fix="In each step, move every rank forward in the data by the global batch: batch size times "
                    "world size.",
                )
    return []


def _seed_of_both(own: Sequence[StepDraw], others: Sequence[StepDraw]) -> Location | None:
    """Return the seed or draw line of a generator state common to both ranks."""
    states = {(one.generator, one.before) for one in others if one.generator and one.kind != "noise"}
    shared = (one for one in own if one.kind != "noise" and (one.generator, one.before) in states)
    return next((line for one in shared if (line := one.seeded or one.location) is not None), None)


def _cosine(a: Sequence[float], b: Sequence[float]) -> float:
    if len(a) != len(b):
        return 0.0
    return sum(x * y for x, y in zip(a, b, strict=True)) / max(math.hypot(*a) * math.hypot(*b), 1e-300)


def shared_draws(draws: Sequence[Sequence[StepDraw]]) -> list[StepDraw]:
    """Return draws that every rank made from the same global generator state."""
    keys = [{_key(one) for one in of_rank if one.generator} for of_rank in draws]
    common = set.intersection(*keys) if keys else set()
    return [one for one in draws[-1] if _key(one) in common] if draws else []


def line_of_selection(draws: Sequence[Sequence[StepDraw]]) -> Location | None:
    """Return the seed or draw line that makes all ranks draw equal samples."""
    choices = [one for one in shared_draws(draws) if one.count > 1 or one.generator == "cuda"]
    choices.sort(key=lambda one: ("choice", "any", "noise").index(one.kind))
    own = [one for of_rank in draws for one in of_rank if not one.generator]
    steps = Counter(line for line, _ in {(one.location, one.step) for one in own})
    own.sort(key=lambda one: (("choice", "any", "noise").index(one.kind), -steps[one.location]))  # most steps first
    found = [one.seeded or one.location for one in choices] + [one.location for one in own]
    return next((line for line in found if line is not None), None)


def _key(one: StepDraw) -> tuple[object, ...]:
    return one.step, one.generator, one.kind, one.before, one.after, one.location


def _compared(inputs: Sequence[Sequence[Inputs]]) -> list[list[tuple[Inputs, ...]]]:
    """Return by wrapper the inputs of all ranks in the same step."""
    by_place = [{(one.wrapper, one.step): one for one in of_rank if len(one.samples) > 1} for of_rank in inputs]
    common = sorted(set.intersection(*map(set, by_place))) if by_place else []
    wrappers = dict.fromkeys(wrapper for wrapper, _ in common)
    return [[tuple(of_rank[place] for of_rank in by_place) for place in common if place[0] == w] for w in wrappers]


def _all_differ(steps: Sequence[Sequence[Inputs]]) -> bool:
    return len(steps) >= _FEWEST and all(
        len({tuple(sorted(one.samples)) for one in of_ranks}) == len(of_ranks) for of_ranks in steps
    )


def _share_a_part(steps: Sequence[Sequence[Inputs]], distinct: int) -> bool:
    """Return True if an input tensor is equal on all ranks and varies enough."""
    places = min((len(one.parts) for of_ranks in steps for one in of_ranks), default=0)
    return len(steps) >= _FEWEST and any(
        all(len({one.parts[place] for one in of_ranks}) == 1 for of_ranks in steps)
        and len({of_ranks[0].parts[place] for of_ranks in steps}) >= distinct
        and all(of_ranks[0].parts[place][1] >= len(of_ranks[0].samples) for of_ranks in steps)
        for place in range(places)
    )


def _is_for(count: int, sizes: set[int]) -> bool:
    """Return True if `count` random numbers match the elements of a tensor."""
    with_block = {size + _BLOCK for size in sizes if size > _BLOCK and size % _BLOCK}
    return count > 1 and count % _KEYS in {size % _KEYS for size in sizes | with_block}
