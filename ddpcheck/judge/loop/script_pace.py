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
    totals = {one.reductions for one in paces}
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
    paces: Sequence[WrapperPace], number: Callable[[PaceRun], int], what: str, message: str, severity: Severity | None
) -> list[Finding]:
    unusual: list[dict[int, int]] = []
    lines: list[Location | None] = []
    for pace in paces:
        counts: Counter[int] = Counter()
        taken: Counter[int] = Counter()
        for run, length in pace.lengths():
            counts[number(run)] += length
            taken[run.batches] += length
        ((turn, often),), ((batches, _),) = counts.most_common(1), taken.most_common(1)
        if not turn or often < _USUAL * pace.reductions:
            return []
        # a skipped backward pass takes one more batch, if there is a loader
        odd = [one for one in pace.lengths() if number(one[0]) > turn and (one[0].batches > batches or not batches)]
        more = {run.first + n: run for run, length in odd if number(run) % turn == 0 for n in range(length)}
        skipped = {step: number(run) // turn - 1 for step, run in more.items()}
        skipped |= {run.first: number(run) // turn for run in pace.runs[-1:] if run.first == pace.reductions}
        unusual.append({step: times for step, times in skipped.items() if 0 < times <= _MOST_LEFT_OUT})
        lines += [more[step].location for step in unusual[-1] if step in more]
    everywhere = set.intersection(*(set(of_rank.items()) for of_rank in unusual))
    own = [{step: n for step, n in of_rank.items() if (step, n) not in everywhere} for of_rank in unusual]
    if sum(map(bool, own)) < 2:
        return []  # a single rank is reported by its number of steps
    lines += [pace.runs[0].location for pace in paces]  # if all skips follow the last reduction
    line = next(filter(None, lines), None)
    return one_finding(
        "DDP508",
        ("backward",),
        message,
        location=line,
        evidence=[
            f"rank {rank}: {what} before reduction {', '.join(map(str, sorted(of_rank)[:4]))} (of "
            f"{paces[0].reductions})"
            for rank, of_rank in enumerate(own[:4])
            if of_rank
        ],
        severity=severity,
        fix="all_reduce the decision, so that each rank skips the step or none does; or multiply the loss by zero.",
    )


def judge_left(left: Sequence[GradientsLeft]) -> list[Finding]:
    """DDP520: stale gradients of earlier steps or another loss, on one rank."""
    for one in left:
        names = [*map(short, one.names)]
        of_them = f" of {join_names(names)}" if names else ""
        if one.own:
            message = (
                f"The gradients{of_them} are not zeroed after a step: each backward pass adds to those of all steps "
                "before, and the optimizer uses them again."
            )
            fix = (
                "Call optimizer.zero_grad() after each step, or before the first backward pass of the next one: it "
                "zeroes the gradients of all parameters that the optimizer holds."
            )
        else:
            message = (
                f"An optimizer steps on gradients{of_them} that another loss has left in .grad (the backward at "
                f"{one.made}): they are not zeroed before its own backward pass at {one.added}."
            )
            fix = (
                "Call zero_grad of this optimizer before the backward pass of the loss that it minimises, or freeze "
                "its parameters (requires_grad_(False)) while the other loss is differentiated."
            )
        return one_finding(
            "DDP520",
            names or ("zero_grad",),
            message,
            location=one.location if one.own else one.added,
            evidence=["in several steps, one after the other"],
            fix=fix,
        )
    return []


def judge_unheld(
    moved: Mapping[str, bool], held: Iterable[str], *, made: Location | None, in_vain: bool = False
) -> list[Finding]:
    """DDP504: wrapped parameters with gradients that no optimizer holds or updates."""
    held = set(held)
    left = [name for name, yes in moved.items() if not yes and name not in held]
    if (
        not left
        or not (held or (in_vain and len(left) == len(moved)))
        or any(not yes for name, yes in moved.items() if name in held)
    ):
        return []  # e.g. a learning rate of zero
    names = [name.partition("/")[2] or name for name in left]
    are, get = plural_verb("is", "are", names), plural_verb("it gets", "they get", names)
    return one_finding(
        "DDP504",
        names,
        f"{join_names(names)} {are} in no optimizer: {get} gradients in each step, which the ranks average, and never "
        f"{plural_verb('moves', 'move', names)}.",
        location=made,
        evidence=[
            f"{len(left)} of {counted(len(moved), 'parameter')} with gradients",
            "the optimizer's parameters have no gradient in any step: they are of another model" if not held else "",
        ],
        severity=Severity.WARNING,
    )


def judge_unmoved(steps: Sequence[Sequence[OptimizerStep]], moved: Mapping[str, bool]) -> list[Finding]:
    """DDP504: parameters that a custom optimizer holds and never updates."""
    if len(steps) < _FEWEST_UNMOVED or steps[0][0].options.get("module", "").startswith("torch."):
        return []
    first, options = steps[0][0], [of_ranks[0].options for of_ranks in steps]
    rates = {name for of_step in options for name in of_step if name.endswith(" lr")}
    given = Counter(name for of_ranks in steps for name in first.held if all(one.norms.get(name) for one in of_ranks))
    held = [name for name, times in given.items() if name in moved and times >= _FEWEST_UNMOVED]
    left = [short(name) for name in held if not moved[name]]
    if not left or len(left) == len(held) or any({of.get(name) for of in options} <= _ZERO for name in rates):
        return []
    kind = first.options.get("class", "the optimizer")
    return one_finding(
        "DDP504",
        left,
        f"{kind} holds {join_names(left)}, and never moves {plural_verb('it', 'them', left)}, although "
        f"{plural_verb('it gets', 'they get', left)} gradients in each step.",
        location=first.location,
        evidence=[f"{len(left)} of the {len(held)} parameters that it holds and that get gradients", "on every rank"],
        severity=Severity.WARNING,
        fix=f"If ranks share the work of {kind}, each parameter has to be updated on one rank, and the update has to "
        "reach all ranks: let every rank take its share by its rank, and wait for the last collective.",
    )
