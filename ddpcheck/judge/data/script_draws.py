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
    draws = [{before: after for loader in loaders for before, after in loader.draws.items()} for loaders in passes]
    shared = set.intersection(*map(set, draws))
    orders = {tuple(loaders[0].indices) for loaders in passes}
    loader = next((loader for loader in passes[-1] if shared & loader.draws.keys()), passes[-1][0])
    equal = all(len({states[state] for states in draws}) == 1 for state in shared)
    batches = [state for loader in passes[-1] for state in loader.held if state in shared]
    local = bool(batches) and shared <= set(batches)
    several = len(shared) >= _FEWEST_DRAWS or (local and equal and len(batches) >= _FEWEST_DRAWS)  # workers have copies
    if len(passes) < 2 or not several or (same_data and len(orders) < 2):
        return []
    suffix = ", in workers" if loader.workers else ""
    when = "before and after" if equal else "before"
    fix = "Seed with seed + rank before the loop over the data, after the model has been constructed"
    if loader.workers and loader.worker_seed < 0:
        fix = "In worker_init_fn, seed each worker from its loader seed and the rank"
    elif loader.workers:
        fix += "; or give the loader a generator that is seeded with seed + rank"
    if loader.restored_by:
        fix = f"Give {loader.restored_by} a state that this rank itself has saved, or seed with seed + rank after it"
    if local:
        fix = "Seed the generator with seed + rank" + (
            ", and again in each worker, with torch.initial_seed() in worker_init_fn" if loader.workers else ""
        )
    return finding_on_loader(
        "DDP510",
        loader,
        f"The dataset draws random numbers for its samples{suffix}, and every rank draws the same ones.",
        line=(loader.held_at if local else loader.seeded) or loader.location,
        evidence=[
            f"{when} the batches that were looked at, {len(batches) or len(shared)} of "
            f"{max(len(batches), *map(len, draws))} states of "
            f"{'random generators that the dataset holds' if local else 'global random generators'} are equal on all "
            "ranks",
            *([f"worker 0 has the seed {loader.worker_seed} on every rank"] * (loader.worker_seed >= 0 and not local)),
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
    compared = _compared(inputs)
    if len(draws) < 2 or not compared or not (loads_others or any(map(_all_differ, compared))):
        return []
    rows = {len(call.samples) for steps in compared for step in steps for call in step}
    sizes = {size for steps in compared for step in steps for call in step for _, size in call.parts}
    shared = shared_draws(draws)
    for_samples = [
        draw
        for draw in shared
        if (draw.kind == "noise" and not draw.in_forward and _is_for(draw.count, rows | sizes))
        or (draw.kind == "choice" and draw.in_forward and draw.count in rows)
    ]
    passed = any(_all_differ(steps) and _share_a_part(steps, len(steps)) for steps in compared)
    if passed:  # e.g. diffusion timesteps
        for_samples += [draw for draw in shared if draw.generator == "cuda" or draw.count >= min(rows)]
    lines = [draw.location for draw in for_samples]
    repeated = [draw for draw in for_samples if len({o.step for o in for_samples if o.location == draw.location}) > 1]
    if len({draw.step for draw in repeated}) < _FEWEST:
        return []
    draw = repeated[0]
    unique_lines = [str(line) for line in dict.fromkeys(lines) if line is not None]
    return one_finding(
        "DDP510",
        ("training step",),
        "The training step draws random numbers for its samples, and every rank draws the same ones for different "
        f"samples, in {counted(len({draw.step for draw in repeated}), 'step')} that were looked at.",
        location=draw.seeded or draw.location or compared[0][0][0].location,
        evidence=[
            "before and after these draws the random generators have the same state on every rank",
            f"they are drawn at {', '.join(unique_lines[:3])}" if unique_lines else "",
            f"{draw.restored_by} has restored the same state of the generator ({draw.generator}) on every rank"
            if draw.restored_by
            else f"the generator ({draw.generator}) was last seeded at {draw.seeded}" * (draw.seeded is not None),
        ],
        fix=_FIX
        if not draw.restored_by
        else f"Give {draw.restored_by} a state that this rank itself has saved, or seed with seed + rank after it.",
    )


def judge_added_noise(draws: Sequence[Sequence[StepDraw]], inputs: Sequence[Sequence[Inputs]]) -> list[Finding]:
    """DDP510: equal noise added to the different samples of each rank, from any generator.

    Noise computed from the samples is no more alike between ranks than between steps.
    """
    for steps in _compared(inputs):
        noise = [[call.added for call in step] for step in steps if all(call.added for call in step)]
        if len(inputs) < 2 or len(noise) < _FEWEST_ADDED or not _all_differ(steps):
            continue
        similarity = min(_cosine(vector, vectors[0]) for vectors in noise for vector in vectors[1:])
        pairs = [(a, b) for number, step in enumerate(noise) for prior in noise[:number] for a in step for b in prior]
        if similarity < _ALIKE or max(_cosine(*pair) for pair in pairs) > min(similarity, _ALIKE):
            continue
        line = line_of_selection([[draw for draw in rank_draws if not draw.in_forward] for rank_draws in draws])
        line = line or steps[0][0].location
        return one_finding(
            "DDP510",
            ("training step",),
            "The training step adds random numbers to its samples, and every rank adds the same ones to different "
            f"samples, in {counted(len(noise), 'step')} that were looked at.",
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
    by_pass = [{(loss.step, loss.number): loss for loss in rank_losses if loss.wrappers} for rank_losses in losses]
    common = sorted(set.intersection(*map(set, by_pass))) if len(by_pass) > 1 else []
    passes = [tuple(rank_losses[key] for rank_losses in by_pass) for key in common]
    if len({len(loss.targets) for step_losses in passes for loss in step_losses}) > 1:
        return []
    for steps in _compared(inputs) if passes else ():
        rows = {len(call.samples) for step in steps for call in step}
        elements = {size for step in steps for call in step for _, size in call.parts}
        part = _share_a_part(steps, _FEWEST_TARGETS) and any(len({call.samples for call in step}) > 1 for step in steps)
        for index in range(len(passes[0][0].targets)) if part or _all_differ(steps) else ():
            targets = [[loss.targets[index] for loss in step_losses] for step_losses in passes]
            first = [group[0] for group in targets]
            usable = [
                target for target in first if target.bits and (target.rows in rows or target.elements in elements)
            ]
            if any(len({target.digest for target in group}) > 1 for group in targets) or not all(t.bits for t in first):
                continue
            if 2 * len(usable) < len(first):  # few steps have a shorter last batch of an epoch
                continue
            distinct = {target.digest: target.bits for target in usable}
            if len(distinct) < (_FEWEST_TARGETS if part else max(len(usable), _FEWEST_TARGETS)):
                continue
            if sum(distinct.values()) < _FEWEST_BITS:
                continue
            loss_at, forward = passes[0][0].made or passes[0][0].location, steps[0][0].location
            noise = usable[0].rows < usable[0].elements and usable[0].elements in elements  # as in diffusion training
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
                location=line_of_selection(draws) or loss_at or forward,
                evidence=["the targets are bit-identical on all ranks, and change from step to step"],
                related={"loss computed": loss_at, "forward called": forward},
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
        for index, batch in enumerate(evaluated.get(ahead, ())):
            drawn.setdefault(tuple(sorted(batch.samples)), (ahead, index))
    samples = {rank: {call.step: tuple(sorted(call.samples)) for call in calls} for rank, calls in inputs.items()}
    for rank, batches in samples.items() if drawn else ():
        seen = {step: drawn[batch] for step, batch in batches.items() if batch in drawn}
        ahead = next((ahead for ahead, _ in seen.values()), rank)
        order = {step: i for step, (r, i) in seen.items() if r == ahead and batches[step] != samples[ahead].get(step)}
        in_order = all(a < b for a, b in itertools.pairwise(order.values()))
        if ahead == rank or len(order) < _FEWEST_AGAIN or not in_order:
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
                f"rank {ahead} has evaluated on the samples of rank {rank} in {format_steps(order)}, in the same order"
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
    samples = {rank: {call.step: tuple(sorted(call.samples)) for call in calls} for rank, calls in inputs.items()}
    if len({batch for batches in samples.values() for batch in batches.values()}) <= len(samples) + 1:
        return []
    for (rank, batches), (ahead, ahead_batches) in itertools.permutations(samples.items(), 2):
        for lag in range(1, _MOST_BEHIND + 1):
            steps = [step for step in batches if step + lag in ahead_batches]
            if len(steps) >= _FEWEST_BEHIND and all(batches[step] == ahead_batches[step + lag] for step in steps):
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


def _seed_of_both(draws: Sequence[StepDraw], other_draws: Sequence[StepDraw]) -> Location | None:
    """Return the seed or draw line of a generator state common to both ranks."""
    states = {(draw.generator, draw.before) for draw in other_draws if draw.generator and draw.kind != "noise"}
    shared = (draw for draw in draws if draw.kind != "noise" and (draw.generator, draw.before) in states)
    return next((line for draw in shared if (line := draw.seeded or draw.location) is not None), None)


def _cosine(a: Sequence[float], b: Sequence[float]) -> float:
    if len(a) != len(b):
        return 0.0
    return sum(x * y for x, y in zip(a, b, strict=True)) / max(math.hypot(*a) * math.hypot(*b), 1e-300)


def shared_draws(draws: Sequence[Sequence[StepDraw]]) -> list[StepDraw]:
    """Return draws that every rank made from the same global generator state."""
    keys = [{_key(draw) for draw in rank_draws if draw.generator} for rank_draws in draws]
    common = set.intersection(*keys) if keys else set()
    return [draw for draw in draws[-1] if _key(draw) in common] if draws else []


def line_of_selection(draws: Sequence[Sequence[StepDraw]]) -> Location | None:
    """Return the seed or draw line that makes all ranks draw equal samples."""
    choices = [draw for draw in shared_draws(draws) if draw.count > 1 or draw.generator == "cuda"]
    choices.sort(key=lambda draw: ("choice", "any", "noise").index(draw.kind))
    local = [draw for rank_draws in draws for draw in rank_draws if not draw.generator]
    steps = Counter(line for line, _ in {(draw.location, draw.step) for draw in local})
    local.sort(key=lambda d: (("choice", "any", "noise").index(d.kind), -steps[d.location]))  # most steps first
    lines = [draw.seeded or draw.location for draw in choices] + [draw.location for draw in local]
    return next((line for line in lines if line is not None), None)


def _key(draw: StepDraw) -> tuple[object, ...]:
    return draw.step, draw.generator, draw.kind, draw.before, draw.after, draw.location


def _compared(inputs: Sequence[Sequence[Inputs]]) -> list[list[tuple[Inputs, ...]]]:
    """Return by wrapper the inputs of all ranks in the same step."""
    by_key = [{(call.wrapper, call.step): call for call in calls if len(call.samples) > 1} for calls in inputs]
    common = sorted(set.intersection(*map(set, by_key))) if by_key else []
    wrappers = dict.fromkeys(wrapper for wrapper, _ in common)
    return [[tuple(calls[key] for calls in by_key) for key in common if key[0] == w] for w in wrappers]


def _all_differ(steps: Sequence[Sequence[Inputs]]) -> bool:
    return len(steps) >= _FEWEST and all(
        len({tuple(sorted(call.samples)) for call in step}) == len(step) for step in steps
    )


def _share_a_part(steps: Sequence[Sequence[Inputs]], distinct: int) -> bool:
    """Return True if an input tensor is equal on all ranks and varies enough."""
    count = min((len(call.parts) for step in steps for call in step), default=0)
    return len(steps) >= _FEWEST and any(
        all(len({call.parts[index] for call in step}) == 1 for step in steps)
        and len({step[0].parts[index] for step in steps}) >= distinct
        and all(step[0].parts[index][1] >= len(step[0].samples) for step in steps)
        for index in range(count)
    )


def _is_for(count: int, sizes: set[int]) -> bool:
    """Return True if `count` random numbers match the elements of a tensor."""
    with_block = {size + _BLOCK for size in sizes if size > _BLOCK and size % _BLOCK}
    return count > 1 and count % _KEYS in {size % _KEYS for size in sizes | with_block}
