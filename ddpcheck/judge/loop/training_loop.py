"""DDP501, 502, 504, 505, 509, 510, 515, 517, 519: the training loop of a recipe."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from ddpcheck.findings.evidence.modules import WrappedModule
from ddpcheck.findings.evidence.steps import SYNC_SETTING, DdpStepEvidence, LocalStep, LoopEvent, SharedDraw
from ddpcheck.findings.report import Finding, Location, Severity
from ddpcheck.findings.wording import Names, counted, format_ranks, join_names, one_finding, plural_verb, unless_all
from ddpcheck.judge.gradients.reducer import BYPASSED
from ddpcheck.judge.replicas.descriptions import differing_names
from ddpcheck.stream.ledger import AROUND, Contribution, Ledger

_Ledgers = Sequence[tuple[DdpStepEvidence, Ledger]]
_Contributions = Sequence[tuple[DdpStepEvidence, Contribution]]

# Values and data


def judge_values_changed(start: Sequence[Mapping[str, int]], now: Sequence[Mapping[str, int]]) -> list[Finding]:
    """DDP515: parameters that `wrap` changed on some ranks after DDP synchronized them."""
    known = [name for name in differing_names(now) if all(name in values for values in start)]
    names = [name for name in known if len({values[name] for values in start}) == 1]
    if not names:
        return []
    changed = [rank for rank, before in enumerate(start) if any(before[name] != now[rank][name] for name in names)]
    return one_finding(
        "DDP515",
        names,
        f"The values of {join_names(names)} were changed on {format_ranks(changed)} after the wrapper had synchronised "
        "them; nothing makes the ranks equal again.",
        ranks=unless_all(changed, len(now)),
    )


def judge_samples(local: Sequence[LocalStep], *, gradients_differ: bool) -> list[Finding]:
    """DDP505 and 519: samples of a step on several ranks, or on no rank.

    DDP505 requires evidence in the gradients, since ranks may use the same samples differently. It goes before DDP519,
    which has the same shards as cause. `gradients_differ`: the average over ranks is not the gradient of the global
    batch.
    """
    step, rows = local[0].evidence.step, [item.sample_fingerprints for item in local]
    batch = Counter(local[0].global_sample_fingerprints)
    if len(local) < 2 or not batch or not all(rows):
        return []
    on_ranks = Counter(sample for samples in rows for sample in samples)
    repeated = {sample for sample, count in on_ranks.items() if 0 < batch[sample] < count}
    missing = sum((batch - on_ranks).values()) if on_ranks.keys() <= batch.keys() else 0  # else ranks create samples
    left_out = f"{missing} of {batch.total()} samples of the global batch are on no rank"
    gradients_alike = len({item.norm for item in local}) == 1 and local[0].norm > 0
    if repeated and (gradients_differ or gradients_alike):
        shared = []
        for place, item in enumerate(local):
            for other in local[:place]:
                if common := len(repeated & set(rows[place]) & set(other.sample_fingerprints)):
                    is_are = "is" if common == 1 else "are"
                    rank, other_rank = item.evidence.rank, other.evidence.rank
                    shared.append(f"{counted(common, 'sample')} on rank {rank} {is_are} on rank {other_rank} too")
        return one_finding(
            "DDP505",
            ("shard",),
            f"{len(repeated)} of the {batch.total()} samples of step {step} are on more than one rank, and count more "
            "than once in the average."
            if len(repeated) < len(set(rows[0]))
            else f"The ranks train on the same samples in step {step}, so together they do the work of fewer.",
            evidence=[*shared[:3], left_out if missing else ""],
        )
    if not missing or not gradients_differ:
        return []
    return one_finding(
        "DDP519",
        ("shard",),
        f"The shards leave samples out: {left_out} in step {step}.",
        evidence=[f"samples a rank: {', '.join(str(len(samples)) for samples in rows)}"],
    )


def judge_draws(draws: Sequence[Sequence[SharedDraw]]) -> list[Finding]:
    """DDP510: per-sample random numbers equal on all ranks; `draws` by rank, in order."""
    shared = [
        calls[0]
        for calls in zip(*draws, strict=False)
        if len({(call.operation, call.module, call.fingerprint) for call in calls}) == 1
    ]
    if not shared or len(draws) < 2:
        return []
    names = list(dict.fromkeys(call.module or "forward" for call in shared))
    return one_finding(
        "DDP510",
        names,
        f"Every rank draws the same random numbers in {join_names(names)}: a seed that is the same on all ranks "
        "is set in the forward pass.",
        location=next((call.location for call in shared if call.location), None),
        evidence=[f"{call.operation} gives the same values on every rank" for call in shared[:3]],
    )


# The steps


def judge_loop(evidence: Sequence[DdpStepEvidence], *, unequal: bool) -> list[Finding]:
    """DDP501, 502, 509 and 517: lost or unreduced gradients, by rank ledgers.

    DDP501, 509 and unreduced steps only if gradients are `unequal` between ranks, or not averaged.
    """
    ledgers = [(item, Ledger(_with_passes(item.events))) for item in evidence]
    findings = _judge_discarded(ledgers)
    if unequal:
        findings += _judge_unreduced(ledgers) + _judge_bypassed(ledgers) + _judge_pairing(ledgers)
    return findings or _judge_useless_no_sync(ledgers)


def _with_passes(events: Sequence[LoopEvent]) -> Sequence[LoopEvent]:
    """Return the events, with passes that an older version omitted under `no_sync`."""
    if [event.kind for event in events] == ["enter no_sync", "step"]:
        return events[0], LoopEvent("forward"), LoopEvent("backward"), events[1]
    return events


def _judge_discarded(ledgers: _Ledgers) -> list[Finding]:
    """DDP517: gradients zeroed before any optimizer step used them."""
    lost = [(item, contribution) for item, ledger in ledgers for contribution in ledger.lost]
    if not lost:
        return []
    first = lost[0][1]
    origin = [c for item, c in lost if item is lost[0][0] and c.ended == first.ended][-1].backward.location
    return one_finding(
        "DDP517",
        ("zero_grad",),
        f"zero_grad discards the gradients of {join_names(first.ended_by.discarded)} before any step has used them.",
        ranks=_ranks(lost, ledgers),
        steps=_steps(lost, ledgers),
        location=Location.parse(first.ended_by.location),
        evidence=[f"they come from the backward at {origin}"] if origin else [],
    )


BY_FLAG = "require_backward_grad_sync in forward decides if the backward pass is averaged"
"""Evidence of a DDP502 caused by a flag, not by `no_sync()`."""


def _judge_unreduced(ledgers: _Ledgers) -> list[Finding]:
    """DDP502: optimizer step on gradients added after the reduction, or never reduced."""
    used = [(item, c) for item, ledger in ledgers for c in ledger.used_unreduced if c.forward is not None]
    if not used:
        return []
    item, first = used[0]
    step, ledger = first.ended_by, next(ledger for other, ledger in ledgers if other is item)
    step_contributions = [c for c in ledger.contributions if c.ended == first.ended]
    unreduced = [c for c in step_contributions if not c.reduced]
    entered = next((event for event in item.events if event.kind == "enter no_sync"), None)
    if entered is not None and not any(event.synchronises for event in item.events):
        return one_finding(
            "DDP502",
            ("no_sync",),
            "Every forward of the step runs under no_sync, so its gradients are never averaged.",
            ranks=_ranks(used, ledgers),
            steps=_steps(used, ledgers),
            location=Location.parse(first.under or step.location),
        )
    called = unreduced[-1].under
    set_at = next((event.location for event in item.events if event.kind == SYNC_SETTING), "") if called is None else ""
    several = f"{len(unreduced)} backward passes" if len(unreduced) > 1 else "A backward pass"
    kind = "ones" if len(unreduced) > 1 else "one"
    at_step = f" at {step.location}" if step.location else ""
    return one_finding(
        "DDP502",
        ("no_sync",),
        f"{several} after the reduction of the step: the gradients of the last {kind} were never averaged, and every "
        "rank steps on its own."
        if len(unreduced) < len(step_contributions)
        else "No gradient of the step is averaged: every forward pass of it ran with synchronisation off.",
        ranks=_ranks(used, ledgers),
        location=Location.parse(set_at or called or step.location or unreduced[-1].backward.location),
        evidence=[
            BY_FLAG,
            *([f"the optimizer steps{at_step}"] if set_at and at_step else []),
        ]
        if called is None
        else [f"the last forward before the step{at_step} ran under the no_sync() at {called}"],
        fix="Have the forward of the last micro-batch before a step run outside of no_sync, with "
        "require_backward_grad_sync set to True before it."
        if called is None
        else "Have the forward of the last micro-batch before a step run outside of no_sync(): the condition at "
        f"{called} has to agree with that of the step{at_step}.",
    )


def _judge_bypassed(ledgers: _Ledgers) -> list[Finding]:
    """DDP501: optimizer step on gradients of a backward pass that bypassed the wrapper."""
    bypassed = [c for _, ledger in ledgers for c in ledger.used_unreduced if c.backward.kind in AROUND]
    if not bypassed:
        return []
    line, noticed = bypassed[0].backward.location, bypassed[0].ended_by.location
    inside_forward = bypassed[0].backward.kind == "backward inside"
    return one_finding(
        "DDP501",
        ("forward",),
        "Backward runs inside of the wrapper's forward, before DDP has prepared for it: nothing is averaged."
        if inside_forward
        else BYPASSED,
        location=Location.parse(line or noticed),
        related={"optimizer steps": Location.parse(noticed)},
        fix="Call backward when forward has returned; in a LightningModule with manual optimization, "
        "call self.manual_backward(loss) instead of loss.backward()."
        if inside_forward
        else "",
    )


def _judge_pairing(ledgers: _Ledgers) -> list[Finding]:
    """DDP509: backward pass of the wrapper's output after the end of the reduction."""
    unpaired = [(item, c) for item, ledger in ledgers for c in ledger.unpaired]
    if not unpaired:
        return []
    item, contribution = unpaired[0]
    done = "" if contribution.after is None else contribution.after.location
    after = [event.kind for event in item.events[: contribution.number + 1] if event.kind in ("forward", "backward")]
    return one_finding(
        "DDP509",
        ("backward",),
        "A second backward pass follows without its own forward: DDP averages in the first one after a forward, and "
        "the gradients that the second adds stay on their rank.",
        location=Location.parse(contribution.backward.location or done),
        evidence=[f"the step runs {', '.join(after)}", f"reduced: the backward at {done}" if done else ""],
    )


def _judge_useless_no_sync(ledgers: _Ledgers) -> list[Finding]:
    """DDP502: `no_sync` without effect, because it encloses no forward."""
    for _, ledger in ledgers:
        for event, message in (
            *((entry, "no_sync() is called and its context never entered") for entry in ledger.not_entered),
            *((entry, "no_sync encloses a backward pass and not its forward") for entry in ledger.around_backward),
        ):
            return one_finding(
                "DDP502",
                ("no_sync",),
                f"{message}, so it changes nothing.",
                location=Location.parse(event.location),
                evidence=["the gradients are right, and every micro-step pays for a reduction"],
                severity=Severity.WARNING,
            )
    return []


# The optimizer


def judge_optimizer(
    wrapped: Sequence[WrappedModule], evidence: Sequence[DdpStepEvidence], names: Names
) -> list[Finding]:
    """DDP504: parameters with gradients in every step that no optimizer holds or updates.

    Skips parameters that change: an optimizer may keep its own copies and write the values back.
    """

    def stays(name: str, item: DdpStepEvidence) -> bool:
        before, after = item.parameters_after_backward.get(name), item.parameters.get(name)
        return before is not None and before == after and bool(item.gradients.get(name, 0))

    unheld = [n for n in wrapped[0].not_in_optimizer if evidence and all(stays(n, item) for item in evidence)]
    if not unheld:
        return []
    foreign = wrapped[0].foreign_tensors
    is_in, moves = plural_verb("is in", "are in", unheld), plural_verb("moves", "move", unheld)
    return names.one_finding(
        "DDP504",
        unheld,
        f"{join_names(names.subjects(unheld))} {is_in} no group of the optimizer and never {moves}.",
        evidence=[f"the optimizer holds {foreign} tensors that are no parameters of the module"] if foreign else [],
        severity=Severity.ERROR if foreign else Severity.WARNING,
    )


def _ranks(contributions: _Contributions, ledgers: _Ledgers) -> tuple[int, ...]:
    return unless_all(sorted({item.rank for item, _ in contributions}), len({item.rank for item, _ in ledgers}))


def _steps(contributions: _Contributions, ledgers: _Ledgers) -> tuple[int, ...]:
    return unless_all(sorted({item.step for item, _ in contributions}), len({item.step for item, _ in ledgers}))
