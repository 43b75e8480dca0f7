"""DDP502 no-sync-misuse: error, needs_average, stops_run

no_sync is not entered, never left, or does not enclose the forward pass.

Why: no_sync takes effect in forward. Around backward alone, it changes nothing. If it is always entered, DDP never
    synchronises, and every rank trains its own model. If it is created but not entered, DDP synchronises in every
    micro-step. (PyTorch docs, DistributedDataParallel.no_sync: the forward pass should be inside.)
Fix: Run forward and backward of every micro-step except the last inside `with ddp.no_sync():`. Run the last or single
    micro-step outside.
Detected: ddpcheck records the order of no_sync, forward and backward passes, and optimizer steps. It reports a step
    in which no backward pass was averaged. It also reports a step that uses gradients which a backward pass has added
    to averaged ones. A no_sync without effect is reported as a warning.
Ignore: If you use local SGD: the ranks step separately on purpose, and average parameters occasionally.
Line: The innermost `if` around no_sync, if no loop is between them; else the call of no_sync,
    set_requires_gradient_sync or set_requires_all_reduce that switches the reduction off. If no such line is known:
    the optimizer's step.
Checks: report reducer; run loop; repro reduction
Explains: DDP301 DDP302; DDP306 DDP515 if an error; DDP508 if by steps; quietly DDP214 if of a copy
Reports: huggingface/accelerate#1726 NVlabs/stylegan2-ada-pytorch#233
Example:
    loss = ddp(x).sum()
    with ddp.no_sync():                      # no_sync takes effect in forward
        loss.backward()                      # right: with ddp.no_sync(): ddp(x).sum().backward()
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddpcheck.findings.evidence.steps import SYNC_SETTING, DdpStepEvidence, LoopEvent
from ddpcheck.findings.program_blocks import blocks_of_lines
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location, Severity
from ddpcheck.findings.wording import format_ranks, new_finding, plural, plural_verb, ranks_or_all
from ddpcheck.stream.entries import Backward
from ddpcheck.stream.ledger import Ledger
from ddpcheck.trace.gradients import Ledgers, ReducerFacts, ranks_and_steps
from ddpcheck.trace.positions import EndingFacts
from ddpcheck.trace.script_facts import ScriptFacts

BY_SYNC_FLAG = "require_backward_grad_sync in forward decides if the backward pass is averaged"
"""Evidence of a DDP502 caused by that flag, not by `no_sync()`."""

_SWITCHES = {
    "set_requires_gradient_sync": "no gradient of its module is reduced",
    "set_requires_all_reduce": "gradients are reduced within each shard group, and not between the replicas",
}


def judge_switched_off(evidence: Sequence[DdpStepEvidence]) -> list[Finding]:
    """Report optimizer steps that miss gradients because reduction is off (DDP502)."""
    unreduced = [(item, use) for item in evidence for use in Ledger(item.events).used_unreduced]
    if not unreduced:
        return []
    item, last = unreduced[-1]
    stepped_at = Location.parse(last.ended_by.location)
    call = _find_switch(item.events) or LoopEvent("set_requires_gradient_sync")
    kind, in_turn = call.kind, any(event.kind == call.kind and event.synchronises for event in item.events)
    message = f"{kind}(False) is in force in every backward pass, so {_SWITCHES[kind]}: those shards have no gradient, "
    message += "and the optimizer's steps do not change them."
    if in_turn:
        message = f"{kind}(False) is in force in the last backward pass of a step, so {_SWITCHES[kind]}, and the "
        message += "optimizer steps without its gradients."
    ranks = ranks_or_all(sorted({step.rank for step, _ in unreduced}), len(evidence))
    related = {"optimizer steps": stepped_at}
    return _switch_finding(
        call, message, ranks=ranks, location=Location.parse(call.location) or stepped_at, related=related
    )


def _switch_finding(call: LoopEvent, message: str, **more: Any) -> list[Finding]:
    fix = f"Call {call.kind}(True) before the last backward of a step, or leave it out."
    return new_finding("DDP502", (call.kind,), message, fix=fix, **more)


def explain_by_switches(facts: ReducerFacts) -> list[Finding]:
    """Report gradients that are unreduced because a call switched reduction off (DDP502).

    Runs first: unreduced gradients are neither equal on all ranks nor the average.
    """
    wrong = list(dict.fromkeys((*facts.not_synchronised, *facts.wrong)))
    call = _find_switch(facts.evidence[0].events)
    if not wrong or call is None:
        return []
    message = f"{call.kind}(False) is in force in every backward of a step, so {_SWITCHES[call.kind]}: those of "
    params = plural(len(facts.evidence[0].gradients), "parameter")
    message += f"{len(wrong)} of {params} are not the average of the ranks'."
    return _switch_finding(call, message, location=Location.parse(call.location))


def _find_switch(events: Sequence[LoopEvent]) -> LoopEvent | None:
    """Return the call of a method in `_SWITCHES` that left reduction off, if any."""
    last = {event.kind: event for event in events if event.kind in _SWITCHES}
    return next((event for event in last.values() if not event.synchronises), None)


def locate_condition(finding: Finding, facts: ScriptFacts) -> Finding:
    """Relocate a DDP502 to the `if` that directly encloses `no_sync`, if any."""
    if finding.code != "DDP502" or finding.severity is not Severity.ERROR or finding.location is None:
        return finding
    if finding.subjects != ("no_sync",) or BY_SYNC_FLAG in finding.evidence:
        return finding
    line = str(finding.location)
    kinds = ("branch", "loop", "function")
    blocks = [block for block in blocks_of_lines([line], source=facts.source)[line] if block.kind in kinds]
    decides = bool(blocks) and blocks[-1].kind == "branch"
    return replace(finding, location=Location(blocks[-1].path, blocks[-1].line)) if decides else finding


def judge_unreduced_steps(ledgers: Ledgers) -> list[Finding]:
    """DDP502: optimizer step on gradients added after the reduction, or never reduced."""
    used = [(item, c) for item, ledger in ledgers for c in ledger.used_unreduced if c.forward is not None]
    if not used:
        return []
    item, first = used[0]
    step, ledger = first.ended_by, next(ledger for evidence, ledger in ledgers if evidence is item)
    step_contributions = [c for c in ledger.contributions if c.ended == first.ended]
    unreduced = [c for c in step_contributions if not c.reduced]
    entered = next((event for event in item.events if event.kind == "enter no_sync"), None)
    if entered is not None and not any(event.synchronises for event in item.events):
        return new_finding(
            "DDP502",
            ("no_sync",),
            "Every forward of the step runs under no_sync, so its gradients are never averaged.",
            **ranks_and_steps(used, ledgers),
            location=Location.parse(first.no_sync_line or step.location),
        )
    called = unreduced[-1].no_sync_line
    set_at = next((event.location for event in item.events if event.kind == SYNC_SETTING), "") if called is None else ""
    several = f"{len(unreduced)} backward passes" if len(unreduced) > 1 else "A backward pass"
    kind = "ones" if len(unreduced) > 1 else "one"
    at_step = f" at {step.location}" if step.location else ""
    return new_finding(
        "DDP502",
        ("no_sync",),
        f"{several} after the reduction of the step: the gradients of the last {kind} were never averaged, and every "
        "rank steps on its own."
        if len(unreduced) < len(step_contributions)
        else "No gradient of the step is averaged: every forward pass of it ran with synchronisation off.",
        ranks=ranks_or_all(sorted({item.rank for item, _ in used}), len({item.rank for item, _ in ledgers})),
        location=Location.parse(set_at or called or step.location or unreduced[-1].backward.location),
        evidence=[BY_SYNC_FLAG, *([f"the optimizer steps{at_step}"] if set_at and at_step else [])]
        if called is None
        else [f"the last forward before the step{at_step} ran under the no_sync() at {called}"],
        fix="Have the forward of the last micro-batch before a step run outside of no_sync, with "
        "require_backward_grad_sync set to True before it."
        if called is None
        else "Have the forward of the last micro-batch before a step run outside of no_sync(): the condition at "
        f"{called} has to agree with that of the step{at_step}.",
    )


def judge_useless_no_sync(ledgers: Ledgers) -> list[Finding]:
    """DDP502: `no_sync` without effect, because it encloses no forward."""
    first = next((ledger for _, ledger in ledgers if ledger.not_entered or ledger.around_backward), None)
    if first is None:
        return []
    message = "no_sync() is called and its context never entered, so it changes nothing."
    if not first.not_entered:
        message = "no_sync encloses a backward pass and not its forward, so it changes nothing."
    return new_finding(
        "DDP502",
        ("no_sync",),
        message,
        location=Location.parse((*first.not_entered, *first.around_backward)[0].location),
        evidence=["the gradients are right, and every micro-step pays for a reduction"],
        severity=Severity.WARNING,
    )


def uneven_no_sync_finding(
    facts: EndingFacts, ranks: Sequence[int], others: Sequence[int], backward: Backward, evidence: Sequence[str]
) -> list[Finding]:
    """DDP502: micro-batch that only some ranks run under no_sync."""
    who, rest = format_ranks(ranks), format_ranks(others)
    batch = f"batch {backward.batch[1]}" if backward.loader >= 0 else f"forward pass {backward.forward}"
    return new_finding(
        "DDP502",
        ("no_sync",),
        f"{who.capitalize()} {plural_verb('runs', 'run', ranks)} {batch} under no_sync, and {rest} "
        f"{plural_verb('does', 'do', others)} not: {rest} {plural_verb('averages', 'average', others)} its gradients, "
        f"{who} {plural_verb('does', 'do', ranks)} not.",
        ranks=ranks,
        location=Location.parse(backward.line or backward.call.location),
        evidence=[*evidence, *facts.states],
        fix="Enter no_sync for the same micro-batches on every rank: decide it by the number of the step.",
    )
