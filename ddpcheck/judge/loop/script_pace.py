"""DDP504, 508, 520: steps that shift between ranks, stale gradients, parameters never updated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from ddpcheck.findings.evidence.loop import GradientsLeft, PaceRun, WrapperPace
from ddpcheck.findings.evidence.script import OptimizerStep
from ddpcheck.findings.report import Finding, Location, Severity
from ddpcheck.findings.wording import counted, join_names, one_finding, plural_verb
from ddpcheck.judge.gradients.script_alone import short

_USUAL = 0.8  # least share of reductions with the most common pace
_MOST_LEFT_OUT = 3  # consecutive skipped iterations
_FEWEST_UNMOVED = 3  # steps
_ZERO = {"0", "0.0", None}


def judge_shifts(paces: Sequence[WrapperPace]) -> list[Finding]:
    """DDP508: backward passes skipped in different steps per rank; reductions mix steps."""
    totals = {pace.reductions for pace in paces}
    if len(paces) < 2 or len(totals) > 1:
        return []  # reported as a hang or a failure
    return _shifts(
        paces,
        lambda run: run.forwards,
        "forward passes without a backward",
        "The ranks skip the backward pass of different steps: from then on a reduction averages gradients of different "
        "steps.",
        None,
    ) or _shifts(
        paces,
        lambda run: run.batches,
        "batches that are passed over",
        "The ranks pass over different batches: from then on a reduction averages gradients of batches that are not at "
        "the same place in the epoch.",
        Severity.WARNING,
    )


def _shifts(
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
        ((turn, often),), ((batches, _),) = counts.most_common(1), batch_counts.most_common(1)
        if not turn or often < _USUAL * pace.reductions:
            return []
        # a skipped backward pass takes one more batch, if there is a loader
        odd = [item for item in pace.lengths() if count(item[0]) > turn and (item[0].batches > batches or not batches)]
        extra = {run.first + n: run for run, length in odd if count(run) % turn == 0 for n in range(length)}
        skipped = {step: count(run) // turn - 1 for step, run in extra.items()}
        skipped |= {run.first: count(run) // turn for run in pace.runs[-1:] if run.first == pace.reductions}
        unusual.append({step: times for step, times in skipped.items() if 0 < times <= _MOST_LEFT_OUT})
        lines += [extra[step].location for step in unusual[-1] if step in extra]
    everywhere = set.intersection(*(set(skips.items()) for skips in unusual))
    rank_skips = [{step: n for step, n in skips.items() if (step, n) not in everywhere} for skips in unusual]
    if sum(map(bool, rank_skips)) < 2:
        return []  # a single rank is reported by its number of steps
    lines += [pace.runs[0].location for pace in paces]  # if all skips follow the last reduction
    line = next(filter(None, lines), None)
    return one_finding(
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


def judge_left(stale: Sequence[GradientsLeft]) -> list[Finding]:
    """DDP520: stale gradients of earlier steps or another loss, on one rank."""
    for entry in stale:
        names = [*map(short, entry.names)]
        suffix = f" of {join_names(names)}" if names else ""
        if entry.own:
            message = (
                f"The gradients{suffix} are not zeroed after a step: each backward pass adds to those of all steps "
                "before, and the optimizer uses them again."
            )
            fix = (
                "Call optimizer.zero_grad() after each step, or before the first backward pass of the next one: it "
                "zeroes the gradients of all parameters that the optimizer holds."
            )
        else:
            message = (
                f"An optimizer steps on gradients{suffix} that another loss has left in .grad (the backward at "
                f"{entry.made}): they are not zeroed before its own backward pass at {entry.added}."
            )
            fix = (
                "Call zero_grad of this optimizer before the backward pass of the loss that it minimises, or freeze "
                "its parameters (requires_grad_(False)) while the other loss is differentiated."
            )
        return one_finding(
            "DDP520",
            names or ("zero_grad",),
            message,
            location=entry.location if entry.own else entry.added,
            evidence=["in several steps, one after the other"],
            fix=fix,
        )
    return []


def judge_unheld(
    moved: Mapping[str, bool], params: Iterable[str], *, made: Location | None, in_vain: bool = False
) -> list[Finding]:
    """DDP504: wrapped parameters with gradients that no optimizer holds or updates."""
    params = set(params)
    unheld = [name for name, changes in moved.items() if not changes and name not in params]
    if (
        not unheld
        or not (params or (in_vain and len(unheld) == len(moved)))
        or any(not changes for name, changes in moved.items() if name in params)
    ):
        return []  # e.g. a learning rate of zero
    names = [name.partition("/")[2] or name for name in unheld]
    are, get = plural_verb("is", "are", names), plural_verb("it gets", "they get", names)
    return one_finding(
        "DDP504",
        names,
        f"{join_names(names)} {are} in no optimizer: {get} gradients in each step, which the ranks average, and never "
        f"{plural_verb('moves', 'move', names)}.",
        location=made,
        evidence=[
            f"{len(unheld)} of {counted(len(moved), 'parameter')} with gradients",
            "the optimizer's parameters have no gradient in any step: they are of another model" if not params else "",
        ],
        severity=Severity.WARNING,
    )


def judge_unmoved(steps: Sequence[Sequence[OptimizerStep]], moved: Mapping[str, bool]) -> list[Finding]:
    """DDP504: parameters that a custom optimizer holds and never updates."""
    if len(steps) < _FEWEST_UNMOVED or steps[0][0].options.get("module", "").startswith("torch."):
        return []
    first, options = steps[0][0], [rank_steps[0].options for rank_steps in steps]
    rates = {name for step_options in options for name in step_options if name.endswith(" lr")}
    counts = Counter(name for by_rank in steps for name in first.held if all(step.norms.get(name) for step in by_rank))
    names = [name for name, times in counts.items() if name in moved and times >= _FEWEST_UNMOVED]
    stuck = [short(name) for name in names if not moved[name]]
    if not stuck or len(stuck) == len(names) or any({opts.get(name) for opts in options} <= _ZERO for name in rates):
        return []
    kind = first.options.get("class", "the optimizer")
    return one_finding(
        "DDP504",
        stuck,
        f"{kind} holds {join_names(stuck)}, and never moves {plural_verb('it', 'them', stuck)}, although "
        f"{plural_verb('it gets', 'they get', stuck)} gradients in each step.",
        location=first.location,
        evidence=[f"{len(stuck)} of the {len(names)} parameters that it holds and that get gradients", "on every rank"],
        severity=Severity.WARNING,
        fix=f"If ranks share the work of {kind}, each parameter has to be updated on one rank, and the update has to "
        "reach all ranks: let every rank take its share by its rank, and wait for the last collective.",
    )
