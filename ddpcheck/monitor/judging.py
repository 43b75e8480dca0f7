"""From what the ranks of a watched loop have seen to findings: pure functions.

This module is light: it never imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ddpcheck.findings.evidence.modules import WrappedModule, WrapperFacts
from ddpcheck.findings.evidence.parameters import GradientState, PathEnd, StepEvidence
from ddpcheck.findings.evidence.steps import DdpStepEvidence, LoopEvent
from ddpcheck.findings.report import Finding
from ddpcheck.findings.severity import Severity
from ddpcheck.findings.wording import Names, format_steps, join_names, plural_verb
from ddpcheck.judge.judge_context import JudgeContext
from ddpcheck.judge.parameters import judge_parameters
from ddpcheck.judge.rank_configuration import judge_changes
from ddpcheck.judge.reducer import judge_reducer, judge_state
from ddpcheck.judge.replicas import differing_names, judge_descriptions, judge_values_after_wrapping
from ddpcheck.judge.training_loop import judge_loop, judge_values_changed
from ddpcheck.monitor.loss_normalisation import judge_normalisation
from ddpcheck.monitor.rank_report import RankReport, ReplicaState, is_look


@dataclass(frozen=True, slots=True)
class Watched:
    """What is known of a wrapper and its module from the start.

    Attributes:
        names: How to speak of parameters.
        wrapper: What the wrapper was told.
        trainable: The parameters that it synchronises, in their order.
        broadcasts_buffers: Whether it gives every rank rank 0's buffers before a forward.
        wrapper_class: What it is.
        began_alike: Whether parameters are known to have been the same on all ranks when it was constructed.
    """

    names: Names = field(default_factory=Names)
    wrapper: WrapperFacts = field(default_factory=WrapperFacts)
    trainable: tuple[str, ...] = ()
    broadcasts_buffers: bool = False
    wrapper_class: str = ""
    began_alike: bool = False


_MOST_STEPS = 8


def judge_accounts(accounts: Sequence[RankReport], watched: Watched, *, settled: bool) -> list[Finding]:
    """Findings on parameters, changes and the loop since the ranks last met.

    Args:
        accounts: Of every rank that answered.
        watched: What is known from the start.
        settled: Whether enough steps have been seen to judge what an option allows for.
    """
    if watched.wrapper.find_unused_parameters:  # what is frozen for a while (a GAN's other half) is unused to DDP
        accounts = [replace(one, changes={n: w for n, w in one.changes.items() if w != "frozen"}) for one in accounts]
    changed = {name for account in accounts for name in account.changes}
    evidence = _evidence(accounts, watched, changed, settled=settled)
    wrapper = watched.wrapper
    if accounts[0].step == 0:  # what DDP waits for after its first step under static_graph, it does not tolerate
        wrapper = replace(wrapper, static_graph=False)
    found = judge_parameters(evidence, wrapper, watched.names, ends_here=False)
    seen = tuple(sorted({step for account in accounts for step in account.absences}))
    findings = [
        replace(finding, steps=seen)
        if finding.code in _ABSENT and not finding.steps and not (watched.wrapper.tolerates_unused and settled)
        else finding
        for finding in found
        if settled or finding.code != "DDP109"
    ]
    if accounts[0].step < _FEW and not settled:
        findings = [_so_far(finding, seen) if finding.code == "DDP101" else finding for finding in findings]
    if changed:
        findings += judge_changes([account.changes for account in accounts])
    if any(account.events for account in accounts):
        loop = [DdpStepEvidence(account.rank, account.step, events=account.events) for account in accounts]
        findings += judge_loop(loop, unequal=True)
    return findings + judge_normalisation([account.micro_batches for account in accounts])


def judge_events(events: Sequence[LoopEvent]) -> list[Finding]:
    """Findings on what the loop did in one round in which gradients were averaged as they ought to be."""
    return judge_loop([DdpStepEvidence(0, 0, events=tuple(events))], unequal=False)


def judge_alone(watched: Watched, rank: int, step: int, *, forwards: int) -> list[Finding]:
    """DDP501 or 502, as one rank sees it: the optimizer steps, again and again, on gradients that nobody has averaged.

    Args:
        watched: What is known from the start.
        rank: This one.
        step: How many synchronised backward passes came before.
        forwards: How often the wrapper's forward ran in the last of these steps, each time under `no_sync`.
    """
    if forwards:
        return judge_loop([DdpStepEvidence(rank, step, events=(LoopEvent("enter no_sync"),))], unequal=True)
    known = JudgeContext(names=watched.names, wrapper=watched.wrapper, world_size=1)
    return judge_reducer([DdpStepEvidence(rank, step, wrapper_calls=0, inner_calls=1)], known)


_FEW = 4  # rounds after which what no forward pass has read may be taken for unused


def _so_far(finding: Finding, steps: Sequence[int]) -> Finding:
    """DDP101 where only few steps have been seen: a branch or an expert may be idle in them."""
    return replace(finding, message=f"{finding.message[:-1]} in {format_steps(steps or (0,))}.", fix=_IDLE)


_IDLE = (
    "If other steps read it (a branch, an expert that gets no sample), pass find_unused_parameters=True, or add 0.0 "
    "times its output where it is idle. If no step does, use it, remove it, or freeze it with requires_grad_(False) "
    "before wrapping."
)


_ABSENT = ("DDP101", "DDP102", "DDP103", "DDP104", "DDP105", "DDP513")


def _evidence(
    accounts: Sequence[RankReport], watched: Watched, changed: set[str], *, settled: bool
) -> list[StepEvidence]:
    """The accounts as the detectors of parameters know them: every rank in every step that tells something."""
    trainable = [name for name in watched.trainable if name not in changed]
    steps = sorted({step for account in accounts for step in account.absences})[:_MOST_STEPS]
    if watched.wrapper.tolerates_unused and settled:
        steps = [step for step in range(accounts[0].step + 1) if is_look(step)]
    elif steps and steps[0] > 0:
        steps.insert(0, steps[0] - 1)  # in which they took part
    evidence = []
    for account in accounts:
        known = {**dict.fromkeys(account.lost, "lost"), **dict.fromkeys(account.zero, "zero")}
        for index, step in enumerate(steps or [account.step]):
            missing = set(account.absences.get(step, ()))
            if watched.wrapper.tolerates_unused and settled:
                missing |= set(account.never) | set(account.sometimes if index == 0 else ())
            states: dict[str, GradientState] = {}
            for name in trainable:
                state = "missing" if name in missing else known.get(name, "contributes")
                states[name] = state  # type: ignore[assignment]
            ends = {name: account.ends.get(name, PathEnd("unknown")) for name in trainable if name in missing}
            evidence.append(
                StepEvidence(
                    rank=account.rank,
                    step=step,
                    states=states,
                    path_ends={**ends, **account.lost},
                    unregistered=account.unregistered,
                    arrivals=account.arrivals,
                    output_type=account.output_type,
                    reentrant=account.reentrant,
                )
            )
    return evidence


def judge_stock(
    stock: Sequence[ReplicaState], watched: Watched, step: int, *, after_backward: bool, first: bool
) -> list[Finding]:
    """Findings on what the ranks hold: DDP2xx, 301 to 303, 306, 214 and 215.

    Args:
        stock: Of every rank that answered.
        watched: What is known from the start.
        step: How many synchronised backward passes came before.
        after_backward: Whether another has just ended, and the optimizer has not stepped since.
        first: Whether the ranks had not been compared before.
    """
    values = [item.values for item in stock]
    known = JudgeContext(
        names=watched.names,
        wrapper=watched.wrapper,
        world_size=len(stock),
        broadcasts_buffers=watched.broadcasts_buffers,
        wrapper_class=watched.wrapper_class,
    )
    found = judge_descriptions([item.description for item in stock])
    gradients = judge_reducer(values, known)
    told = {subject for finding in found for subject in finding.subjects}
    if step == 0 and after_backward and watched.began_alike:
        start = _changed_before_forward(stock)
        told_early = {name for finding in start for name in finding.subjects}
        now = [{name: value for name, value in item.parameters.items() if name not in told_early} for item in values]
        changed = [  # forward or backward has changed them
            replace(item, parameters_before_optimizer=of_rank, parameters={})
            for item, of_rank in zip(values, now, strict=True)
        ]
        state = judge_state(changed, known, gradients_differ=True)
    elif step == 0:
        early = not after_backward and not watched.broadcasts_buffers  # then nothing has had a reason to part buffers
        start = judge_values_after_wrapping(
            [item.parameters for item in values], [item.buffers if early else {} for item in values]
        )
        start = [f if first or f.code != "DDP208" else replace(f, **_UNAVERAGED) for f in start]
        kept = [replace(item, parameters={}, buffers=item.buffers if after_backward else {}) for item in values]
        state = judge_state(kept, known, gradients_differ=True)
    else:  # what is there is what the optimizer's last step has left
        start = []
        state = judge_state([replace(item, step=step - 1) for item in values], known, gradients_differ=bool(gradients))
        state = [_apart(finding, values, step) if finding.code == "DDP306" else finding for finding in state]
    for finding in (*start, *gradients, *state):
        if not told.issuperset(finding.subjects):
            found.append(finding if finding.steps or finding.code in _STANDING else replace(finding, steps=(step,)))
    return found


def _changed_before_forward(stock: Sequence[ReplicaState]) -> list[Finding]:
    """DDP515 of values that ranks have changed between the wrapper's construction and its first forward."""
    wrapped = [
        WrappedModule(
            WrapperFacts(),
            {},
            {},
            item.at_first_forward,
            {},
            None,
            "",
            False,
            parameters_at_construction=item.constructed,
        )
        for item in stock
    ]
    return [
        replace(finding, evidence=("before the first forward: a checkpoint that was loaded there, say",))
        for finding in judge_values_changed(wrapped)
    ]


def _apart(finding: Finding, values: Sequence[DdpStepEvidence], step: int) -> Finding:
    """DDP306 of ranks that have only been compared now: since when they differ, and why, is not known."""
    parted = differing_names([item.parameters for item in values])
    ranks = {rank for ranks in parted.values() for rank in ranks}
    told_apart = len(values) > 2 and 2 * len(ranks) < len(values)
    differ = plural_verb("differs", "differ", finding.subjects)
    message = f"{join_names(finding.subjects)} {differ} between ranks after {step} steps."
    return replace(finding, message=message, steps=(), ranks=tuple(sorted(ranks)) if told_apart else ())


_UNAVERAGED: dict[str, Any] = {
    "code": "DDP306",
    "message": "Parameters have come to differ between ranks, and no backward pass has been averaged so far.",
    "ranks": (),
    "evidence": (
        "gradients are averaged where the wrapper is called outside of no_sync, and backward begins with its output",
        "under Lightning's manual optimization: where self.manual_backward(loss) is called, and not loss.backward()",
    ),
}
_STANDING = ("DDP208", "DDP214", "DDP215", "DDP216", "DDP306")


def cause_of(finding: Finding) -> tuple[str, frozenset[str]]:
    """What tells one root cause from another: the code and the subjects, blocks of a list taken together.

    Which block of a list is left out changes from step to step (LayerDrop, experts), and is one cause.
    """
    subjects: Iterable[str] = finding.subjects
    if finding.code in ("DDP104", "DDP105", "DDP513"):
        subjects = (re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in subjects)
    return finding.code, frozenset(subjects)


_CONSEQUENCES = frozenset({"DDP208", "DDP301", "DDP302", "DDP303", "DDP306"})
_OF_THE_LOOP = frozenset({"DDP501", "DDP502", "DDP509"})


def follows_from(finding: Finding, told: Iterable[Finding]) -> bool:
    """Whether `finding` is what comes of another one: gradients and values that differ since they are not averaged."""
    if finding.code not in _CONSEQUENCES and finding.code != "DDP515":
        return False
    others = [other for other in told if other.code not in _CONSEQUENCES and other != finding]
    errors = [other for other in others if other.severity is Severity.ERROR]
    subjects = {subject for other in errors for subject in other.subjects}
    return subjects.issuperset(finding.subjects) or any(other.code in _OF_THE_LOOP for other in errors)


_SPREADING = frozenset({"DDP214", "DDP215", "DDP301", "DDP306", "DDP503"})


def goes_on(finding: Finding, told: Iterable[Finding]) -> bool:
    """Whether `finding` is one that has been told and has spread: more tensors differ for the same reason."""
    subjects = set(finding.subjects)
    return finding.code in _SPREADING and any(
        other.code == finding.code and subjects & set(other.subjects) for other in told
    )
