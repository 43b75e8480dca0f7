"""DDP508 step-skipped-on-a-rank: error, uneven_steps

A rank skips a backward pass or an optimizer step that the others make.

Why: One rank skips a step (NaN, out of memory). From then on, its gradients are silently averaged with those of a
    different step on the other ranks. At the end, one rank has no steps left and the job hangs.
Fix: all_reduce the decision, so that all ranks skip the step or none does.
Detected: ddpcheck compares how many backward passes and optimizer steps each rank makes between two averages of
    gradients, and reports differences. `ddpcheck run` also compares the numbers of forward passes and batches. If a
    rank takes more batches than usual before an average, it has skipped a backward pass. Such skips are reported if
    at least two ranks skip different passes. If the numbers vary much, or more than three passes in a row are
    skipped, nothing is reported.
Ignore: If a rank skips a step on purpose and its parameters are synchronised afterwards.
Line: The only line that can skip the backward pass or the step, such as an `if` or `continue`. If several can: the
    call that some ranks skip, so the optimizer's step or the backward pass.
Checks: report reducer; run loop, optimizers; repro state
Explains: DDP306; quietly DDP214 if of a copy
Reports: NVIDIA-NeMo/Automodel#2468 ecmwf/WeatherGenerator#2718 pytorch/pytorch#64636
Example:
    if torch.isfinite(loss):                 # right: all_reduce the decision first
        optimizer.step()
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from ddpcheck.findings.evidence.loop import PaceRun, WrapperPace
from ddpcheck.findings.evidence.script import OptimizerEnd
from ddpcheck.findings.program_blocks import Block
from ddpcheck.findings.report import Finding, Location, Severity
from ddpcheck.findings.wording import format_ranks, group_by_value, new_finding, plural, plural_verb
from ddpcheck.rules.registry import rule
from ddpcheck.rules.replicas.comparisons import IN_STEP, divergence_finding
from ddpcheck.stream.entries import Backward
from ddpcheck.trace.loop import Loop
from ddpcheck.trace.positions import EndingFacts, Position, describe_ranks, describe_skipping_block, op_name
from ddpcheck.trace.replicas import Divergence, ReplicaFacts
from ddpcheck.trace.unwrapped_params import Steps

MIN_USUAL_SHARE = 0.8
"""Least share of reductions with the usual number of passes before them: without it, no skip is recognised."""

MAX_SKIPPED_IN_A_ROW = 3
"""Most iterations in a row that count as skipped: more may be another part of the program, such as a warm-up."""


def fewer_backwards_finding(
    facts: EndingFacts, loop: Block, ranks: Sequence[int], times: int, stayer: Position
) -> list[Finding]:
    """DDP508: fewer backward passes than iterations, in a loop that cannot end early.

    `stayer` is a rank that called the collective of the loop more often than `ranks`, which called it `times` times.
    """
    assert loop.times is not None and stayer.call is not None
    blocks = [
        block
        for block in facts.enclosing(stayer.lines, "branch", "rest", "try")
        if block.path == loop.path and loop.first < block.first and block.last <= loop.last
    ]
    where = Location(blocks[-1].path, blocks[-1].line) if len(blocks) == 1 else None
    return new_finding(
        "DDP508",
        ("backward",),
        f"{format_ranks(ranks).capitalize()} {plural_verb('calls', 'call', ranks)} {op_name(stayer.call)} in {times} "
        f"of the {loop.times:.0f} passes of the loop at {loop.head}, the others in more passes: "
        f"{describe_ranks(facts, ranks)}.",
        ranks=ranks,
        location=where or Location.parse(stayer.lines[0]),
        evidence=[*map(describe_skipping_block, blocks), *facts.states],
    )


def skipped_pass_finding(
    facts: EndingFacts,
    last_done: str,
    ranks: Sequence[int],
    others: Sequence[int],
    skipped: Backward,
    block: Block | None,
    evidence: Sequence[str],
) -> list[Finding]:
    """DDP508: forward or backward pass that `ranks` skip, and `others` do not.

    `last_done`: "batch" if `ranks` skipped the forward pass too, "forward" if `ranks` skipped the backward pass only.
    """
    line = skipped.line if last_done == "batch" else skipped.call.location
    words = "the backward pass" if last_done == "forward" else "the forward pass"
    if skipped.loader >= 0:
        words += f" of batch {skipped.batch[1]}"
    elif last_done == "forward":
        words += f" of forward pass {skipped.forward}"
    block_words = f" (`{block.word}` at {block.head})" if block is not None else ""
    return new_finding(
        "DDP508",
        ("backward",),
        f"{format_ranks(ranks).capitalize()} skipped {words}{f' at {line}' if line else ''}{block_words}; "
        f"{format_ranks(others)} did not. The ranks are then out of step: {describe_ranks(facts, ranks)}, "
        f"{describe_ranks(facts, others)}.",
        ranks=ranks,
        location=Location.parse(line) if block is None else Location(block.path, block.line),
        evidence=[*evidence, *facts.states],
    )


def judge_schedule_steps(rank_steps: Steps) -> list[Finding]:
    return new_finding(
        "DDP508",
        ("step",),
        f"The ranks are not in the same step: before step {rank_steps[0].count} of the optimizer they have reached "
        "different numbers of collectives, and its options are already those of a different step.",
        location=rank_steps[0].location,
        evidence=[f"collectives of all ranks: {v}" for v in group_by_value([step.collectives for step in rank_steps])],
        fix="Leave the loop, or skip its body, on all ranks or on none: all_reduce the decision.",
    )


def skipped_steps_finding(
    rank_steps: Steps, ranks: Sequence[int], action: str, label: str, counts: Sequence[int]
) -> list[Finding]:
    """DDP508: optimizer steps that `ranks` skip, at the skipping line if unique, else `step()`."""
    step, lines = rank_steps[0].location, rank_steps[0].left_out_at
    reasons = [f"{line} may leave it out" for line in lines]
    if len(lines) == 1:
        reasons = [f"this line decides if the step at {step} is made"]
    return new_finding(
        "DDP508",
        ("step",),
        f"{format_ranks(ranks).capitalize()} {action}",
        ranks=ranks,
        location=lines[0] if len(lines) == 1 else step,
        evidence=[*(f"{label}: {text}" for text in group_by_value(counts)), *reasons],
    )


def shift_finding(
    paces: Sequence[WrapperPace], count: Callable[[PaceRun], int], label: str, message: str, severity: Severity | None
) -> list[Finding]:
    unusual: list[dict[int, int]] = []
    lines: list[Location | None] = []
    for pace in paces:
        counts: Counter[int] = Counter()
        batch_counts: Counter[int] = Counter()
        for run, length in pace.lengths():
            counts[count(run)] += length
            batch_counts[run.batches] += length
        ((turn, usual),), ((batches, _),) = counts.most_common(1), batch_counts.most_common(1)
        if not turn or usual < MIN_USUAL_SHARE * pace.reductions:
            return []
        # a skipped backward pass takes one more batch, if there is a loader
        odd = [item for item in pace.lengths() if count(item[0]) > turn and (item[0].batches > batches or not batches)]
        extra = {run.first + n: run for run, length in odd if count(run) % turn == 0 for n in range(length)}
        skipped = {step: count(run) // turn - 1 for step, run in extra.items()}
        skipped |= {run.first: count(run) // turn for run in pace.runs[-1:] if run.first == pace.reductions}
        unusual.append({step: times for step, times in skipped.items() if 0 < times <= MAX_SKIPPED_IN_A_ROW})
        lines += [extra[step].location for step in unusual[-1] if step in extra]
    common_skips = set.intersection(*(set(skips.items()) for skips in unusual))
    rank_skips = [{step: n for step, n in skips.items() if (step, n) not in common_skips} for skips in unusual]
    if sum(map(bool, rank_skips)) < 2:
        return []  # a single rank is reported by its number of steps
    lines += [pace.runs[0].location for pace in paces]  # if all skips follow the last reduction
    line = next(filter(None, lines), None)
    return new_finding(
        "DDP508",
        ("backward",),
        message,
        location=line,
        evidence=[
            f"rank {rank}: {label} before reduction {', '.join(map(str, sorted(skips)[:4]))} (of {paces[0].reductions})"
            for rank, skips in enumerate(rank_skips[:4])
            if skips
        ],
        severity=severity,
        fix="all_reduce the decision, so that each rank skips the step or none does; or multiply the loss by zero.",
    )


@rule
def judge_wrapper_paces(loop: Loop) -> list[Finding]:
    """Report skipped backward passes or batches of the first wrapper that has any (DDP508)."""
    return next(filter(None, map(judge_shifts, loop.paces)), [])


def judge_shifts(paces: Sequence[WrapperPace]) -> list[Finding]:
    """DDP508: ranks that skip different backward passes or batches, so reductions mix steps."""
    totals = {pace.reductions for pace in paces}
    if len(paces) < 2 or len(totals) > 1:
        return []  # reported as a hang or a failure
    return shift_finding(
        paces,
        lambda run: run.forwards,
        "forward passes without a backward",
        "The ranks skip the backward pass of different steps: from then on a reduction averages gradients of different "
        "steps.",
        None,
    ) or shift_finding(
        paces,
        lambda run: run.batches,
        "batches that are passed over",
        "The ranks pass over different batches: from then on a reduction averages gradients of batches that are not at "
        "the same place in the epoch.",
        Severity.WARNING,
    )


def judge_pace(steps: Sequence[Steps], ends: Sequence[OptimizerEnd]) -> list[Finding]:
    """DDP508: ranks with unequal numbers of optimizer steps for the same averaged backward passes."""
    for rank_steps in steps:
        reductions = [step.reductions for step in rank_steps]
        if min(reductions) >= 0 and len(set(reductions)) > 1:
            ranks = [rank for rank, count in enumerate(reductions) if count > min(reductions)]
            message = f"{plural_verb('skips', 'skip', ranks)} optimizer steps that the others make."
            label = f"averaged backward passes until step {rank_steps[0].count}"
            return skipped_steps_finding(rank_steps, ranks, message, label, reductions)
    counts, all_reductions = [end.count for end in ends], {end.reductions for end in ends}
    is_known = bool(steps) and len(ends) == len(steps[0]) and len(all_reductions) == 1 and min(all_reductions) > 0
    if not is_known or len(set(counts)) == 1:
        return []
    ranks = [rank for rank, count in enumerate(counts) if count < max(counts)]
    message = f"{plural_verb('has', 'have', ranks)} made fewer optimizer steps than the others from the same averaged "
    return skipped_steps_finding(steps[-1], ranks, f"{message}backward passes.", "optimizer steps", counts)


def judge_skipped_update(facts: ReplicaFacts, divergence: Divergence) -> list[Finding]:
    """DDP508: parameters diverge because some ranks skipped the optimizer's step."""
    ranks, names = divergence.skipped_ranks, divergence.names
    if not ranks:
        return []
    return divergence_finding(
        "DDP508",
        facts,
        divergence,
        f"{format_ranks(ranks)} skipped the optimizer's step {divergence.step} that the others made: "
        f"{plural(len(names), 'parameter')} {plural_verb('differs', 'differ', names)} from there on.",
        f"did not change on {format_ranks(ranks)}, where the optimizer's step was skipped",
        ranks=ranks,
        tags=(IN_STEP,),
    )
