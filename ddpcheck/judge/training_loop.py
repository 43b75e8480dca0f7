"""DDP502 to 519: the loop around the wrapper, and its data and optimizer, as far as a recipe can show them.

Pure functions from `findings.evidence.steps` (gathered by `gather.phases` and `gather.ddp.loop_events`) to findings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from ddpcheck.findings.evidence.modules import WrappedModule
from ddpcheck.findings.evidence.steps import DdpStepEvidence, LocalStep, LoopEvent, SharedDraw
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.severity import Severity
from ddpcheck.findings.wording import Names, counted, format_ranks, join_names, one_finding, plural_verb, unless_all
from ddpcheck.judge.replicas import differing_names

# Values and data


def judge_values_changed(start: Sequence[Mapping[str, int]], now: Sequence[Mapping[str, int]]) -> list[Finding]:
    """DDP515: parameters that DDP had made equal, and that `wrap` changed on some ranks after that.

    Args:
        start: By rank, fingerprints when DDP had been constructed; empty for another wrapper.
        now: Since then.
    """
    known = [name for name in differing_names(now) if all(name in of_rank for of_rank in start)]
    names = [name for name in known if len({of_rank[name] for of_rank in start}) == 1]
    if not names:
        return []
    changed = [rank for rank, before in enumerate(start) if any(before[name] != now[rank][name] for name in names)]
    return one_finding(
        "DDP515",
        names,
        f"The values of {join_names(names)} were changed on {format_ranks(changed)} after the wrapper had "
        "synchronised them; nothing brings the ranks together again.",
        ranks=unless_all(changed, len(now)),
    )


def judge_samples(local: Sequence[LocalStep], *, gradients_differ: bool) -> list[Finding]:
    """DDP505 and 519: samples that several ranks train on, and samples that none does, in one step.

    DDP505 only where gradients show it, since ranks may well do different things with the same samples; and before
    DDP519, which is the other side of the same shards. `gradients_differ` says that the ranks' average is another
    gradient than the global batch's.
    """
    step, rows = local[0].evidence.step, [item.sample_fingerprints for item in local]
    batch = Counter(local[0].global_sample_fingerprints)
    if len(local) < 2 or not batch or not all(rows):
        return []
    on_ranks = Counter(sample for samples in rows for sample in samples)
    repeated = {sample for sample, count in on_ranks.items() if 0 < batch[sample] < count}
    missing = sum((batch - on_ranks).values()) if on_ranks.keys() <= batch.keys() else 0  # unless ranks make others
    left_out = f"{missing} of {batch.total()} samples of the global batch are on no rank"
    gradients_alike = len({item.norm for item in local}) == 1 and local[0].norm > 0
    if repeated and (gradients_differ or gradients_alike):
        shared = []
        for rank, of_rank in enumerate(rows):
            for before in range(rank):
                if common := len(repeated & set(of_rank) & set(rows[before])):
                    is_are = "is" if common == 1 else "are"
                    shared.append(f"{counted(common, 'sample')} on rank {rank} {is_are} on rank {before} too")
        return one_finding(
            "DDP505",
            ("shard",),
            f"{len(repeated)} of the {batch.total()} samples of step {step} are on more than one rank, and count more "
            "than once in the average."
            if len(repeated) < len(set(rows[0]))
            else f"The ranks train on the same samples in step {step}, so together they do the work of fewer.",
            evidence=[*shared[:3], *([left_out] if missing else [])],
        )
    if not missing or not gradients_differ:
        return []
    return one_finding(
        "DDP519",
        ("shard",),
        f"The shards leave samples out: {left_out} in step {step}.",
        evidence=[f"samples a rank: {', '.join(str(len(of_rank)) for of_rank in rows)}"],
    )


def judge_draws(draws: Sequence[Sequence[SharedDraw]]) -> list[Finding]:
    """DDP510: random numbers for each sample, of which every rank drew the same (by rank, in order)."""
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
    """DDP502, 509 and 517: how forwards, backwards, `no_sync` and `zero_grad` follow each other under the wrapper.

    Some only where gradients are `unequal` on the ranks, or not their average.
    """
    found = _judge_discarded(evidence)
    if unequal:
        found += _judge_never_synchronised(evidence) or _judge_last_unsynchronised(evidence)
        found += _judge_pairing(evidence)
    return found or _judge_useless_no_sync(evidence)


def _judge_discarded(evidence: Sequence[DdpStepEvidence]) -> list[Finding]:
    """DDP517: gradients that are zeroed before an optimizer has used them."""
    discards = [(item, event) for item in evidence for event in item.events if event.discarded]
    if not discards:
        return []
    item, event = discards[0]
    backwards = [e for e in item.events[: item.events.index(event)] if e.kind == "backward"]
    made = backwards[-1].location if backwards else ""
    return one_finding(
        "DDP517",
        ("zero_grad",),
        f"zero_grad throws away the gradients of {join_names(event.discarded)} before any step has used them.",
        ranks=_ranks([item for item, _ in discards], evidence),
        steps=_steps([item for item, _ in discards], evidence),
        location=Location.parse(event.location),
        evidence=[f"they come from the backward at {made}"] if made else [],
    )


def _judge_last_unsynchronised(evidence: Sequence[DdpStepEvidence]) -> list[Finding]:
    """DDP502: a step on what backward passes have added after the reduction, or without any."""
    found = [(item, *place) for item in evidence if (place := _unreduced_at_step(item.events)) is not None]
    if not found:
        return []
    item, reduced, passes, step, called = found[0]
    several = f"{passes} backward passes" if passes > 1 else "A backward pass"
    kind = "ones" if passes > 1 else "one"
    where = Location.parse(step.location) or Location.parse(item.events[item.events.index(step) - 1].location)
    at_step = f" at {step.location}" if step.location else ""
    return one_finding(
        "DDP502",
        ("no_sync",),
        f"{several} after the reduction of the step: what the last {kind} added was never averaged, and every rank "
        "steps on its own."
        if reduced
        else "No gradient of the step is averaged: DDP was not to synchronise after any of its forward passes.",
        ranks=_ranks([item for item, *_ in found], evidence),
        location=where,
        evidence=["whether a backward pass is averaged was decided in its forward, by require_backward_grad_sync"]
        if called is None
        else [f"the last forward before the step{at_step} ran under the no_sync() at {called}"],
        fix="Have the forward of the last micro-batch before a step run outside of no_sync, with "
        "require_backward_grad_sync set to True before it."
        if called is None
        else "Have the forward of the last micro-batch before a step run outside of no_sync(): what decides on it at "
        f"{called} has to agree with what decides on the step{at_step}.",
    )


def _unreduced_at_step(events: Sequence[LoopEvent]) -> tuple[bool, int, LoopEvent, str | None] | None:
    """The first step on gradients not averaged.

    Whether others of it were, how many passes were not, the step, and the line of the `no_sync()` under which the last
    of these ran, where it was one.
    """
    ready = reduced = waiting = False
    passes, called = 0, ""
    inside: str | None = None
    under: str | None = None
    for event in events:
        if event.kind == "no_sync":
            called = event.location
        elif event.kind == "enter no_sync":
            inside = event.location or called or None
        elif event.kind == "leave no_sync":
            inside = None
        elif event.kind == "forward":
            ready, waiting = ready or event.synchronises, waiting or not event.synchronises
            under = None if event.synchronises else inside
        elif event.kind == "backward":
            if ready:
                ready, reduced, passes = False, True, 0
            elif waiting:
                passes += 1
            waiting = False
        elif event.kind == "step":
            if passes:
                return reduced, passes, event, under
            ready = reduced = waiting = False
    return None


def _judge_never_synchronised(evidence: Sequence[DdpStepEvidence]) -> list[Finding]:
    """DDP502: a step of which every forward runs under `no_sync`."""
    unsynchronised = [
        item
        for item in evidence
        if any(event.kind == "enter no_sync" for event in item.events)
        and not any(event.synchronises for event in item.events if event.kind == "forward")
    ]
    if not unsynchronised:
        return []
    events = unsynchronised[0].events
    entered = next(event for event in events if event.kind == "enter no_sync")
    steps = (event.location for event in events if event.kind == "step" and event.location)
    return one_finding(
        "DDP502",
        ("no_sync",),
        "Every forward of the step runs under no_sync, so its gradients are never averaged.",
        ranks=_ranks(unsynchronised, evidence),
        steps=_steps(unsynchronised, evidence),
        location=Location.parse(entered.location or next(steps, "")),
    )


def _judge_pairing(evidence: Sequence[DdpStepEvidence]) -> list[Finding]:
    """DDP509: a backward pass of the wrapper's output after the one that ended the reduction."""
    for item in evidence:
        ready, waiting, done = False, False, None
        for index, event in enumerate(item.events):
            if event.kind == "forward":
                ready, waiting = ready or event.synchronises, waiting or not event.synchronises
            elif event.kind == "backward" and ready:
                ready, waiting, done = False, False, event
            elif event.kind == "backward" and waiting:  # its forward was not to be synchronised
                waiting = False
            elif event.kind == "backward" and done is not None:
                after = [e.kind for e in item.events[: index + 1] if e.kind in ("forward", "backward")]
                return one_finding(
                    "DDP509",
                    ("backward",),
                    "A second backward pass follows without a forward of its own: the reduction ended with the first, "
                    "and what the second adds stays on its rank.",
                    location=Location.parse(event.location) or Location.parse(done.location),
                    evidence=[
                        f"the step runs {', '.join(after)}",
                        *([f"reduced: the backward at {done.location}"] if done.location else []),
                    ],
                )
    return []


def _judge_useless_no_sync(evidence: Sequence[DdpStepEvidence]) -> list[Finding]:
    """DDP502: `no_sync` that changes nothing, since it encloses no forward."""
    for item in evidence:
        called = [event for event in item.events if event.kind == "no_sync"]
        entered = sum(event.kind == "enter no_sync" for event in item.events)
        if len(called) > entered:
            return _useless(called[0], "no_sync() is called and its context never entered, so it changes nothing.")
        inside: LoopEvent | None = None
        forwards, synchronising = 0, False
        for event in item.events:
            if event.kind == "enter no_sync":
                inside, forwards = event, 0
            elif event.kind == "leave no_sync":
                inside = None
            elif event.kind == "forward":
                forwards, synchronising = forwards + 1, event.synchronises
            elif event.kind == "backward" and inside is not None and not forwards and synchronising:
                return _useless(inside, "no_sync encloses a backward pass and not its forward, so it changes nothing.")
    return []


def _useless(event: LoopEvent, message: str) -> list[Finding]:
    return one_finding(
        "DDP502",
        ("no_sync",),
        message,
        location=Location.parse(event.location),
        evidence=["the gradients are right, and every micro-step pays for a reduction"],
        severity=Severity.WARNING,
    )


# The optimizer


def judge_optimizer(
    wrapped: Sequence[WrappedModule], evidence: Sequence[DdpStepEvidence], names: Names
) -> list[Finding]:
    """DDP504: parameters that get gradients in every step, and that no optimizer holds nor moves.

    A parameter that moves is none of them: an optimizer may keep copies of its own and write them back.
    """

    def stays(name: str, item: DdpStepEvidence) -> bool:
        before, after = item.parameters_after_backward.get(name), item.parameters.get(name)
        return before is not None and before == after and bool(item.gradients.get(name, 0))

    found = [n for n in wrapped[0].not_in_optimizer if evidence and all(stays(n, item) for item in evidence)]
    if not found:
        return []
    foreign = wrapped[0].foreign_tensors
    is_in, moves = plural_verb("is in", "are in", found), plural_verb("moves", "move", found)
    return names.one_finding(
        "DDP504",
        found,
        f"{join_names(names.subjects(found))} {is_in} no group of the optimizer and never {moves}.",
        evidence=[f"the optimizer holds {foreign} tensors that are no parameters of the module"] if foreign else [],
        severity=Severity.ERROR if foreign else Severity.WARNING,
    )


def _ranks(items: Sequence[DdpStepEvidence], evidence: Sequence[DdpStepEvidence]) -> tuple[int, ...]:
    return unless_all(sorted({item.rank for item in items}), len({item.rank for item in evidence}))


def _steps(items: Sequence[DdpStepEvidence], evidence: Sequence[DdpStepEvidence]) -> tuple[int, ...]:
    return unless_all(sorted({item.step for item in items}), len({item.step for item in evidence}))
