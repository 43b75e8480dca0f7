"""DDP4xx: what the ranks' logs of collectives and the way they failed say of where they fell out of step.

This module is light: it never imports torch.
"""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Collection, Iterator, Sequence

from ddpcheck.findings.errors import EmptyShardError, RankError, RankFailure
from ddpcheck.findings.evidence.collectives import Call, ReductionInput
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.rules import RULES
from ddpcheck.findings.severity import Severity
from ddpcheck.findings.stacks import is_waiting
from ddpcheck.findings.wording import agreeing, format_ranks, minority_ranks, phrase, plural_verb, unless_all


def judge_collectives(logs: Sequence[Sequence[Call]], at_work: Collection[int] = ()) -> list[Finding]:
    """At most one finding a process group: the first place at which the ranks' collectives do not match (DDP403).

    Args:
        logs: The calls of each rank.
        at_work: Ranks that are neither finished nor in a collective, and so may still come to the next one.
    """
    findings = []
    groups = {call.group: call.members for log in logs for call in log}
    for group, members in sorted(groups.items()):
        ranks = [rank for rank in members if rank < len(logs)]
        sequences = [[call for call in logs[rank] if call.group == group] for rank in ranks]
        place = _first_mismatch(sequences)
        if place is None:
            continue
        found = [sequence[place] if place < len(sequence) else None for sequence in sequences]
        calls = [call for call in found if call is not None]
        absent = [rank for rank, call in zip(ranks, found, strict=True) if call is None]
        if absent and len({_signature(call) for call in calls}) == 1 and set(absent) <= set(at_work):
            continue
        if absent:
            odd = tuple(absent)
            there = [rank for rank in ranks if rank not in absent]
            message = f"{format_ranks(there).capitalize()} called {calls[0]}, and {format_ranks(absent)} never did."
        else:
            odd = tuple(ranks[index] for index in minority_ranks([_signature(call) for call in calls]))
            message = f"Collective number {place} of the ranks does not match."
        findings.append(
            Finding(
                code="DDP403",
                subjects=tuple(sorted({call.operation for call in calls})),
                message=message,
                severity=RULES["DDP403"].severity,
                ranks=odd,
                location=Location.parse(calls[0].location),
                evidence=tuple(
                    f"rank {rank}, collective number {place}: {call if call is not None else 'none'}"
                    + (f", in {call.place}" if call is not None and call.place else "")
                    for rank, call in zip(ranks, found, strict=True)
                ),
            )
        )
    return findings


def _signature(call: Call) -> tuple[str, str]:
    return (call.operation, call.payload)


def _first_mismatch(sequences: Sequence[Sequence[Call]]) -> int | None:
    for place in range(max(map(len, sequences), default=0)):
        signatures = {_signature(sequence[place]) if place < len(sequence) else None for sequence in sequences}
        if len(signatures) > 1:
            return place
    return None


def judge_packing(sent: Sequence[Sequence[ReductionInput]]) -> list[Finding]:
    """DDP407: reductions into which ranks put the same numbers in another order, although they had the same samples.

    Args:
        sent: What each rank sent then, in order (`ddpcheck.gather.phases.shards`); what follows a difference in the
            operations is not compared.
    """
    findings: dict[str, Finding] = {}
    for number, calls in enumerate(zip(*sent, strict=False)):
        if len({call.operation for call in calls}) > 1:
            break
        values = [call.values for call in calls]
        if not _is_reordered(values):
            continue
        odd = minority_ranks(values)
        usual = next(of_rank for rank, of_rank in enumerate(values) if rank not in odd)
        place = next(i for i, value in enumerate(values[odd[0]]) if value != usual[i])
        call = calls[odd[0]]
        findings.setdefault(
            call.location or str(number),
            Finding(
                code="DDP407",
                subjects=(call.operation,),
                message=(
                    f"{format_ranks(odd).capitalize()} {plural_verb('puts', 'put', odd)} what goes into "
                    f"{call.operation}"
                    f"{f' at {call.location}' if call.location else ''} together in another order than the rest."
                ),
                severity=RULES["DDP407"].severity,
                ranks=odd,
                location=Location.parse(call.location),
                evidence=(
                    "given the same samples and random numbers, every rank sends the same "
                    f"{len(usual)} numbers, and {format_ranks(odd)} in another order",
                    f"element {place}: {usual[place]:.6g}; on {format_ranks(odd[:1])}: {values[odd[0]][place]:.6g}, "
                    f"which is element {usual.index(values[odd[0]][place])} elsewhere",
                ),
            ),
        )
    return list(findings.values())


def _is_ordinary(value: float) -> bool:
    """Whether a number may well be what a slot is filled with before a rank writes its own."""
    return value in (0.0, 1.0, -1.0) or not 1e-6 < abs(value) < 1e6


def _is_reordered(values: Sequence[tuple[float, ...]]) -> bool:
    """Whether these are the same numbers in several orders, and not those of each rank in slots of its own."""
    if len(set(values)) == 1 or len({len(of_rank) for of_rank in values}) > 1:
        return False
    if len({tuple(sorted(of_rank)) for of_rank in values}) > 1:
        return False
    moved = [at for at in zip(*values, strict=True) if len(set(at)) > 1]
    return not any(_is_ordinary(value) for at in moved for value in at)


def judge_failure(error: RankError, logs: Sequence[Sequence[Call]], world_size: int) -> list[Finding]:
    """The finding behind a world that failed: DDP401 to DDP404, the root cause only.

    Args:
        error: What the world raised.
        logs: The collectives of each rank until then.
        world_size: The number of ranks.
    """
    if not error.failures:
        return []
    blamed = [failure for failure in error.failures if failure.kind in ("raised", "exited", "died")]
    stuck = [failure for failure in error.failures if failure.kind == "stuck"]
    evidence = _told_once(error.failures)
    if error.results:
        evidence += (f"{format_ranks(list(error.results))}: had finished",)
    mismatch = judge_collectives(logs, at_work={failure.rank for failure in stuck if not failure.collective})
    first = blamed[0] if blamed else None
    if mismatch and (first is None or _is_of_communication(first.message)):
        finding = mismatch[0]
        return [_with_evidence(finding, evidence)]
    if first is None:
        ranks = tuple(failure.rank for failure in stuck)
        idle = [f for f in stuck if not is_waiting(f)] or [f for f in stuck if not f.collective]
        lead = (idle or stuck or list(error.failures))[0]
        at_fault = tuple(failure.rank for failure in idle or stuck)
        return [
            Finding(
                code="DDP402",
                subjects=(lead.place or "run",),
                message=f"{format_ranks(ranks).capitalize()} did not finish {lead.place or 'the run'}: {_tell(lead)}.",
                severity=RULES["DDP402"].severity,
                ranks=unless_all(at_fault, world_size),
                location=Location.parse(lead.location),
                evidence=evidence + tuple(_stack_lines(stuck)),
                fix=_fix_of_hang(stuck, lead),
            )
        ]
    same = tuple(f.rank for f in blamed if (f.kind, f.type) == (first.kind, first.type))
    ranks = () if len(same) == world_size else same
    code = "DDP401" if first.kind == "raised" else "DDP404"
    if not ranks and world_size > 1:
        said = f"Every rank {phrase(first)}"
    else:
        said = f"{format_ranks(same).capitalize()} {agreeing(phrase(first), same)}"
    return [
        Finding(
            code=code,
            subjects=(first.place or "run",),
            message=f"{said.rstrip('.')}{f', in {first.place}' if first.place else ''}.",
            severity=Severity.ERROR,
            ranks=ranks,
            location=Location.parse(first.location),
            evidence=(evidence if len(evidence) > 1 else ()) + tuple(_stack_lines([first] if code == "DDP404" else [])),
            fix=_FIX_OF_DEATH.get(first.exit_code or 0, "") if code == "DDP404" else "",
        )
    ]


_FIX_OF_DEATH = {  # by exit code; a signal's is negative
    -signal.SIGSEGV: (
        "Look at what the line that is shown calls in C or C++ (an extension, a kernel of one's own, a library of "
        "another version than it was built for), and call it with this rank's data in a process by itself."
    ),
    -signal.SIGABRT: (
        "Read the last output of the rank: C or C++ code gave up there and says why. Where it is the backend "
        "(gloo::EnforceNotMet), ranks have sent each other tensors that do not match."
    ),
    -signal.SIGKILL: (
        "Use less memory (a smaller batch, fewer ranks, --world-size 2), if that has run out: the kernel's log "
        "(dmesg) says so. Else find out who has sent the signal."
    ),
}


_BEFORE_THE_FIRST_STEP = ("starting up", "loading the target", "building the model")


def _fix_of_hang(stuck: Sequence[RankFailure], lead: RankFailure) -> str:
    """What to do about ranks that did not finish; empty where each of them waits for others, as the rule has it."""
    busy = tuple(failure.rank for failure in stuck if not is_waiting(failure))
    if not busy:
        return ""
    longer = "give it more time with --timeout"
    if lead.place in _BEFORE_THE_FIRST_STEP:
        return (
            f"If it is slow there, {longer}, and import modules that take long once with --preload; if it waits there "
            "for input, a lock or a download, take that out."
        )
    if len(busy) == len(stuck):
        return f"No rank waits for another: end the loop or the wait at that place, or, if it is only slow, {longer}."
    return (
        f"The others wait for {format_ranks(busy)}: end the loop or the wait at that place, and come to "
        "the collective that "
        f"the others are in; if it is only slow, {longer}."
    )


def _told_once(failures: Sequence[RankFailure]) -> tuple[str, ...]:
    """What happened to each rank; to those that did not get stuck, and that the same happened to, together."""
    groups: dict[tuple[str, int | None], list[int]] = {}
    for failure in failures:
        alone = failure.rank if failure.kind == "stuck" else None
        groups.setdefault((_tell(failure), alone), []).append(failure.rank)
    return tuple(f"{format_ranks(ranks)}: {agreeing(said, ranks)}" for (said, _), ranks in groups.items())


def _with_evidence(finding: Finding, more: tuple[str, ...]) -> Finding:
    return dataclasses.replace(finding, evidence=finding.evidence + more)


def judge_empty_shards(error: RankError, world_size: int) -> list[Finding]:
    """DDP405: ranks failed because they had no samples in a step in which others had some."""
    empty = {f.rank: f for f in error.failures if isinstance(f.exception, EmptyShardError)}
    if not empty or len(empty) == world_size:
        return []
    step = min(f.exception.step for f in empty.values() if isinstance(f.exception, EmptyShardError))
    ranks = tuple(sorted(empty))
    return [
        Finding(
            code="DDP405",
            subjects=(f"step {step}",),
            message=(
                f"{format_ranks(ranks).capitalize()} {plural_verb('has', 'have', ranks)} no samples in "
                f"step {step}, and the others "
                f"have: in a training loop {plural_verb('it leaves', 'they leave', ranks)}, and the others "
                "wait in backward "
                f"for {plural_verb('its', 'their', ranks)} gradients."
            ),
            severity=RULES["DDP405"].severity,
            ranks=ranks,
            steps=(step,),
            location=Location.parse(empty[ranks[0]].location),
            evidence=tuple(f"rank {rank}: {failure.exception}" for rank, failure in sorted(empty.items())),
        )
    ]


_COMMUNICATION_WORDS = ("gloo", "connection", "nccl", "timed out", "processgroup", "sigabrt", "abort", "op.preamble")


def _is_of_communication(message: str) -> bool:
    """Whether an error is how a backend fails when its peers do something else (gloo raises or aborts, nccl waits)."""
    return any(word in message.lower() for word in _COMMUNICATION_WORDS)


def _tell(failure: RankFailure) -> str:
    if failure.kind != "stuck":
        return phrase(failure)
    where = failure.place or "at work"
    if failure.collective:
        return f"waits in {failure.collective}, in {where}"
    return f"still in {where}{f', at {failure.location}' if failure.location else ''}"


def _stack_lines(failures: Sequence[RankFailure]) -> Iterator[str]:
    for failure in failures:
        for line in failure.stack.splitlines()[:8]:
            yield f"rank {failure.rank} stack: {line.strip()}"
