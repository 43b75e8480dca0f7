"""DDP5xx that a recipe can show: what the loop around the wrapper does, and the data and optimizer that it is given.

Pure functions from evidence to findings. This module is light: it never imports torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ddpcheck.findings.evidence.modules import WrappedModule
from ddpcheck.findings.evidence.steps import DdpStepEvidence, LocalStep, LoopEvent, SharedDraw
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.severity import Severity
from ddpcheck.findings.wording import Names, format_ranks, join_names, make_finding, unless_all

# Values and data


def judge_values_changed(wrapped: Sequence[WrappedModule]) -> list[Finding]:
    """DDP515: parameters that DDP had made equal, and that `wrap` changed on some ranks after that."""
    names = [
        name
        for name in wrapped[0].parameters
        if all(name in item.parameters and name in item.parameters_at_construction for item in wrapped)
        and len({item.parameters_at_construction[name] for item in wrapped}) == 1
        and len({item.parameters[name] for item in wrapped}) > 1
    ]
    if not names:
        return []
    changed = [
        r
        for r, item in enumerate(wrapped)
        if any(item.parameters[n] != item.parameters_at_construction[n] for n in names)
    ]
    return [
        make_finding(
            "DDP515",
            names,
            f"The values of {join_names(names)} were changed on {format_ranks(changed)} after the wrapper "
            "had synchronised "
            "them; nothing brings the ranks together again.",
            ranks=unless_all(changed, len(wrapped)),
        )
    ]


def judge_samples(local: Sequence[LocalStep], *, differs: bool) -> list[Finding]:
    """DDP505 and 519: samples that several ranks train on, and samples that none does, in one step.

    Args:
        local: What the ranks saw.
        differs: Whether the ranks' average is another gradient than the global batch's. Where it is not, ranks that
            hold the same samples may well do different things with them.
    """
    rows = [item.sample_fingerprints for item in local]
    whole = Counter(local[0].global_sample_fingerprints)
    if len(local) < 2 or not whole or not all(rows):
        return []
    held = Counter(row for of_rank in rows for row in of_rank)
    again = {row for row, count in held.items() if row in whole and count > whole[row]}
    alike = len({item.norm for item in local}) == 1 and local[0].norm > 0
    missing = sum((whole - held).values())
    known = all(row in whole for row in held)
    step = local[0].evidence.step
    size = sum(whole.values())
    left_out = f"{missing} of {size} samples of the global batch are on no rank"
    if again and (differs or alike):
        facts = []
        for rank, of_rank in enumerate(rows):
            for before in range(rank):
                common = len(again & set(of_rank) & set(rows[before]))
                if common:
                    noun, verb = ("samples", "are") if common > 1 else ("sample", "is")
                    facts.append(f"{common} {noun} on rank {rank} {verb} on rank {before} too")
        return [
            make_finding(
                "DDP505",
                ("shard",),
                f"{len(again)} of the {size} samples of step {step} are on more than one rank, and count more than "
                "once in the average."
                if len(again) < len(set(rows[0]))
                else f"The ranks train on the same samples in step {step}, so together they do the work of fewer.",
                evidence=[*facts[:3], *([left_out] if missing and known else [])],
            )
        ]
    if missing and known and differs:
        return [
            make_finding(
                "DDP519",
                ("shard",),
                f"The shards leave samples out: {left_out} in step {step}.",
                evidence=[f"samples a rank: {', '.join(str(len(of_rank)) for of_rank in rows)}"],
            )
        ]
    return []


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
    seeds = next((call.location for call in shared if call.location), None)
    return [
        make_finding(
            "DDP510",
            names,
            f"Every rank draws the same random numbers in {join_names(names)}: a seed that is the same on "
            "all ranks is set "
            "in the forward pass.",
            location=seeds,
            evidence=[f"{call.operation} gives the same values on every rank" for call in shared[:3]],
        )
    ]


# The steps


def judge_loop(evidence: Sequence[DdpStepEvidence], *, unequal: bool) -> list[Finding]:
    """DDP502, 509 and 517: how forwards, backwards, `no_sync` and `zero_grad` follow each other under the wrapper.

    Args:
        evidence: Of every rank and step.
        unequal: Whether gradients differ between ranks, or are not their average.
    """
    findings = []
    for judge in (_judge_discarded, _judge_unsynchronised, _judge_pairing) if unequal else (_judge_discarded,):
        found = judge(evidence)
        if found is not None:
            findings.append(found)
    if not findings and (found := _judge_useless_no_sync(evidence)) is not None:
        findings.append(found)
    return findings


def _judge_discarded(evidence: Sequence[DdpStepEvidence]) -> Finding | None:
    thrown = [(item, event) for item in evidence for event in item.events if event.discarded]
    if not thrown:
        return None
    item, event = thrown[0]
    steps = sorted({item.step for item, _ in thrown})
    made = _last([e for e in item.events[: item.events.index(event)] if e.kind == "backward"])
    return make_finding(
        "DDP517",
        ("zero_grad",),
        f"zero_grad throws away the gradients of {join_names(event.discarded)} before any step has used them.",
        ranks=_some(sorted({item.rank for item, _ in thrown}), evidence),
        steps=unless_all(steps, len({item.step for item in evidence})),
        location=Location.parse(event.location),
        evidence=[f"they come from the backward at {made.location}"] if made is not None and made.location else [],
    )


def _judge_unsynchronised(evidence: Sequence[DdpStepEvidence]) -> Finding | None:
    return _judge_never_synchronised(evidence) or _judge_last_unsynchronised(evidence)


def _judge_last_unsynchronised(evidence: Sequence[DdpStepEvidence]) -> Finding | None:
    """A step on what backward passes have added after the reduction, or without any."""
    found = [(item, *place) for item in evidence if (place := _unreduced_at_step(item.events)) is not None]
    if not found:
        return None
    item, reduced, passes, step = found[0]
    several = f"{passes} backward passes" if passes > 1 else "A backward pass"
    kind = "ones" if passes > 1 else "one"
    return make_finding(
        "DDP502",
        ("no_sync",),
        f"{several} after the reduction of the step: what the last {kind} added was never averaged, and every rank "
        "steps on its own."
        if reduced
        else "No gradient of the step is averaged: DDP was not to synchronise after any of its forward passes.",
        ranks=_some(sorted({item.rank for item, *_ in found}), evidence),
        location=Location.parse(step.location) or Location.parse(item.events[item.events.index(step) - 1].location),
        evidence=["whether a backward pass is averaged was decided in its forward, by require_backward_grad_sync"],
        fix="Have the forward of the last micro-batch before a step run outside of no_sync, with "
        "require_backward_grad_sync set to True before it.",
    )


def _unreduced_at_step(events: Sequence[LoopEvent]) -> tuple[bool, int, LoopEvent] | None:
    """The first step on gradients not averaged: whether others of it were, how many passes were not, and the step."""
    ready = reduced = waiting = False
    passes = 0
    for event in events:
        if event.kind == "forward":
            ready, waiting = ready or event.synchronises, waiting or not event.synchronises
        elif event.kind == "backward":
            if ready:
                ready, reduced, passes = False, True, 0
            elif waiting:
                passes += 1
            waiting = False
        elif event.kind == "step":
            if passes:
                return reduced, passes, event
            ready = reduced = waiting = False
    return None


def _judge_never_synchronised(evidence: Sequence[DdpStepEvidence]) -> Finding | None:
    mute = [
        item
        for item in evidence
        if any(event.kind == "enter no_sync" for event in item.events)
        and not any(event.synchronises for event in item.events if event.kind == "forward")
    ]
    if not mute:
        return None
    steps = sorted({item.step for item in mute})
    entered = next(event for event in mute[0].events if event.kind == "enter no_sync")
    return make_finding(
        "DDP502",
        ("no_sync",),
        "Every forward of the step runs under no_sync, so its gradients are never averaged.",
        ranks=_some(sorted({item.rank for item in mute}), evidence),
        steps=unless_all(steps, len({item.step for item in evidence})),
        location=Location.parse(entered.location),
    )


def _judge_pairing(evidence: Sequence[DdpStepEvidence]) -> Finding | None:
    """A backward pass of the wrapper's output after the one that ended the reduction."""
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
                return make_finding(
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
    return None


def _judge_useless_no_sync(evidence: Sequence[DdpStepEvidence]) -> Finding | None:
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
    return None


def _useless(event: LoopEvent, message: str) -> Finding:
    return make_finding(
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

    An optimizer may keep copies of its own and write them back: what moves is not told.
    """
    lacking = [
        name
        for name in wrapped[0].not_in_optimizer
        if evidence
        and all(
            name in item.parameters_after_backward and item.parameters_after_backward[name] == item.parameters.get(name)
            for item in evidence
        )
        and all(item.gradients.get(name, 0) for item in evidence)
    ]
    if not lacking:
        return []
    strange = wrapped[0].foreign_tensors
    some = f"{join_names(names.subjects(lacking))} {'are' if len(lacking) > 1 else 'is'} in no group of the optimizer"
    return [
        make_finding(
            "DDP504",
            names.subjects(lacking),
            f"{some} and never moves." if len(lacking) == 1 else f"{some} and never move.",
            location=names.location(lacking),
            evidence=[f"the optimizer holds {strange} tensors that are no parameters of the module"] if strange else [],
            severity=Severity.ERROR if strange else Severity.WARNING,
        )
    ]


def _last(events: Sequence[LoopEvent]) -> LoopEvent | None:
    return events[-1] if events else None


def _some(ranks: Sequence[int], evidence: Sequence[DdpStepEvidence]) -> tuple[int, ...]:
    return unless_all(ranks, len({item.rank for item in evidence}))
