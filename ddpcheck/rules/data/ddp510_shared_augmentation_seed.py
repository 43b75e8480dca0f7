"""DDP510 shared-augmentation-seed: warning, keeps_gradients, keeps_results

Ranks draw the same random numbers for augmentation or dropout.

Why: With one seed for all ranks, each rank has the same crops, flips, noise and dropout masks. So the global batch
    has less variety than its size suggests.
Fix: Construct the model under the same seed on every rank, then seed with seed + rank, and set no seed in the forward
    pass.
Detected: When ranks draw random numbers for their samples, ddpcheck compares the states of their generators. It does
    so in the data loader and its workers, in the forward pass of a recipe, and for generators that a dataset or its
    transforms hold. DDP510 is reported if batches have different samples but the same random numbers. `ddpcheck run`
    also checks numbers that a training step draws before backward. These draws are checked only if they have one
    number for each sample, or for each element of an input of forward. `ddpcheck run` also reports noise added to a
    loader's batches if every rank adds the same noise. It does not report dropout and other noise within forward.
Ignore: If less variety is acceptable, or if the same noise is intended on every rank.
Line: The line that last seeded or restored the generator; else the line that draws. For a generator that the
    dataset holds: the line that assigns it. In `ddpcheck report`, the operation that draws.
Checks: report parity; run data; repro draws
Reports: huggingface/transformers#37932 huggingface/pytorch-image-models#1519
Example:
    def forward(self, x):
        torch.manual_seed(0)                 # right: seed once, before the first step, with seed + rank
        return self.head(self.dropout(x))
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ddpcheck.findings.evidence.loop import StepDraw
from ddpcheck.findings.evidence.script import Inputs
from ddpcheck.findings.evidence.steps import SharedDraw
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import join_names, new_finding, plural
from ddpcheck.trace.data import (
    MIN_DRAWS,
    Loader,
    all_inputs_differ,
    common_steps,
    finding_on_loader,
    line_of_selection,
    share_some_inputs,
    shared_draws,
)
from ddpcheck.trace.gradients import paired

FEWEST_DRAWS = 2  # batches made with the same random numbers
MT_STATE_SIZE = 624  # numbers of a Mersenne Twister state: a count of draws is known modulo this number
RANDN_BLOCK = 16  # `randn` redraws its last numbers in a block of this size
FEWEST_NOISE_STEPS = 3  # steps with known additions to the samples
MIN_NOISE_COSINE = 0.6  # cosine of equal noise after subtracting the samples; near 0 for independent noise
_FIX = (
    "Seed with seed + rank before the training loop, after the model has been constructed; or draw from a generator of "
    "each rank's own: torch.Generator().manual_seed(seed + rank)."
)
_FIX_OF_RESTORED = "Give {} a state that this rank itself has saved, or seed with seed + rank after it"


def judge_shared_draws(loader: Loader) -> list[Finding]:
    """DDP510: equal random numbers on all ranks, drawn by datasets for different samples."""
    draws = [{before: after for p in loaders for before, after in p.draws.items()} for loaders in loader.passes]
    shared, last = set.intersection(*map(set, draws)), loader.passes[-1]
    equal = all(len({states[state] for states in draws}) == 1 for state in shared)
    batches = [state for p in last for state in p.dataset_draws if state in shared]
    local = bool(batches) and shared <= set(batches)
    # workers have copies of a generator that the dataset holds
    several = len(shared) >= FEWEST_DRAWS or (local and equal and len(batches) >= FEWEST_DRAWS)
    are_same = loader.has_same_data and len({tuple(p.indices) for p in loader.first}) < 2
    if len(draws) < 2 or not several or are_same:
        return []
    p = next((p for p in last if shared & p.draws.keys()), last[0])
    fix = "Seed with seed + rank before the loop over the data, after the model has been constructed"
    if local:
        again = ", and again in each worker, with torch.initial_seed() in worker_init_fn" if p.workers else ""
        fix = f"Seed the generator with seed + rank{again}"
    elif p.restored_by:
        fix = _FIX_OF_RESTORED.format(p.restored_by)
    elif p.workers and p.worker_seed < 0:
        fix = "In worker_init_fn, seed each worker from its loader seed and the rank"
    elif p.workers:
        fix += "; or give the loader a generator that is seeded with seed + rank"
    generators = "random generators that the dataset holds" if local else "global random generators"
    return finding_on_loader(
        "DDP510",
        p,
        f"The dataset draws random numbers for its samples{', in workers' if p.workers else ''}, and every rank draws "
        "the same ones.",
        line=(p.generator_at if local else p.seeded_at) or p.location,
        evidence=[
            f"{'before and after' if equal else 'before'} the batches that were looked at, "
            f"{len(batches) or len(shared)} of {max(len(batches), *map(len, draws))} states of {generators} are equal "
            "on all ranks",
            f"worker 0 has the seed {p.worker_seed} on every rank" * (p.worker_seed >= 0 and not local),
        ],
        fix=f"{fix}.",
    )


def judge_step_draws(
    draws: Sequence[Sequence[StepDraw]], inputs: Sequence[Sequence[Inputs]], *, loads_others: bool = False
) -> list[Finding]:
    """DDP510: equal random numbers that all ranks draw in training steps for different samples.

    `draws` and `inputs` are by rank. `loads_others`: True if data loaders return different samples on the ranks.

    A draw is judged if it gives one number per sample or per input element, such as noise, or diffusion timesteps drawn
    in forward. Other draws are for the batch as a whole, the global batch, or weights.
    """
    compared = common_steps(inputs)
    if len(draws) < 2 or not compared or not (loads_others or any(map(all_inputs_differ, compared))):
        return []
    rows = {len(call.samples) for steps in compared for step in steps for call in step}
    sizes = {size for steps in compared for step in steps for call in step for _, size in call.parts}
    shared = shared_draws(draws)
    for_samples = [
        draw
        for draw in shared
        if (draw.kind == "noise" and not draw.in_forward and _may_fill_tensor(draw.count, rows | sizes))
        or (draw.kind == "choice" and draw.in_forward and draw.count in rows)
    ]
    passed = any(all_inputs_differ(steps) and share_some_inputs(steps, len(steps)) for steps in compared)
    if passed:  # e.g. diffusion timesteps
        for_samples += [draw for draw in shared if draw.generator == "cuda" or draw.count >= min(rows)]
    lines = [draw.location for draw in for_samples]
    repeated = [draw for draw in for_samples if len({o.step for o in for_samples if o.location == draw.location}) > 1]
    if len({draw.step for draw in repeated}) < MIN_DRAWS:
        return []
    draw = repeated[0]
    unique_lines = [str(line) for line in dict.fromkeys(lines) if line is not None]
    return new_finding(
        "DDP510",
        ("training step",),
        "The training step draws random numbers for its samples, and every rank draws the same ones for different "
        f"samples, in {plural(len({draw.step for draw in repeated}), 'step')} that were looked at.",
        location=draw.seeded_at or draw.location or compared[0][0][0].location,
        evidence=[
            "before and after these draws the random generators have the same state on every rank",
            f"they are drawn at {', '.join(unique_lines[:3])}" if unique_lines else "",
            f"{draw.restored_by} has restored the same state of the generator ({draw.generator}) on every rank"
            if draw.restored_by
            else f"the generator ({draw.generator}) was last seeded at {draw.seeded_at}" * (draw.seeded_at is not None),
        ],
        fix=f"{_FIX_OF_RESTORED.format(draw.restored_by)}." if draw.restored_by else _FIX,
    )


def judge_added_noise(draws: Sequence[Sequence[StepDraw]], inputs: Sequence[Sequence[Inputs]]) -> list[Finding]:
    """DDP510: equal noise added to the different samples of each rank, from any generator.

    Noise that is computed from the samples is not reported: it differs between ranks as much as between steps.
    """
    for steps in common_steps(inputs):
        noise = [[call.noise for call in step] for step in steps if all(call.noise for call in step)]
        if len(inputs) < 2 or len(noise) < FEWEST_NOISE_STEPS or not all_inputs_differ(steps):
            continue
        similarity = min(_cosine(vector, vectors[0]) for vectors in noise for vector in vectors[1:])
        pairs = [(a, b) for number, step in enumerate(noise) for prior in noise[:number] for a in step for b in prior]
        if similarity < MIN_NOISE_COSINE or max(_cosine(*pair) for pair in pairs) > min(similarity, MIN_NOISE_COSINE):
            continue
        line = line_of_selection([[draw for draw in rank_draws if not draw.in_forward] for rank_draws in draws])
        line = line or steps[0][0].location
        return new_finding(
            "DDP510",
            ("training step",),
            "The training step adds random numbers to its samples, and every rank adds the same ones to different "
            f"samples, in {plural(len(noise), 'step')} that were looked at.",
            location=line,
            evidence=[
                "the noise added to the batches of the loader is the same on every rank, and changes from step to step"
            ],
            related={"forward called": steps[0][0].location},
            fix=_FIX,
        )
    return []


def _cosine(a: Sequence[float], b: Sequence[float]) -> float:
    if len(a) != len(b):
        return 0.0
    return sum(x * y for x, y in zip(a, b, strict=True)) / max(math.hypot(*a) * math.hypot(*b), 1e-300)


def _may_fill_tensor(count: int, sizes: set[int]) -> bool:
    with_block = {size + RANDN_BLOCK for size in sizes if size > RANDN_BLOCK and size % RANDN_BLOCK}
    return count > 1 and count % MT_STATE_SIZE in {size % MT_STATE_SIZE for size in sizes | with_block}


def judge_forward_draws(draws: Sequence[Sequence[SharedDraw]]) -> list[Finding]:
    """DDP510: equal per-sample random numbers that all ranks draw in forward (`draws`: by rank)."""
    shared = [calls[0] for calls in paired(draws, lambda call: (call.operation, call.module, call.fingerprint))]
    if not shared or len(draws) < 2:
        return []
    names = list(dict.fromkeys(call.module or "forward" for call in shared))
    return new_finding(
        "DDP510",
        names,
        f"Every rank draws the same random numbers in {join_names(names)}: a seed that is the same on all ranks "
        "is set in the forward pass.",
        location=next((call.location for call in shared if call.location), None),
        evidence=[f"{call.operation} gives the same values on every rank" for call in shared[:3]],
    )
