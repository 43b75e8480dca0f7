"""DDP401, 402, 404 and 405, and 403 as their cause: why ranks failed or did not finish.

Pure functions from `findings.errors.RankError` and the ranks' logs of collectives to findings.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ddpcheck.findings.errors import EmptyShardError, RankError, RankFailure
from ddpcheck.findings.evidence.collectives import Call
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.severity import Severity
from ddpcheck.findings.stacks import is_waiting
from ddpcheck.findings.wording import agreeing, format_ranks, make_finding, phrase, plural_verb, unless_all
from ddpcheck.judge.collective_order import judge_collectives
from ddpcheck.judge.judge_context import first_explanation


@dataclass(frozen=True, slots=True)
class FailureFacts:
    """The facts on a world that failed.

    Attributes:
        error: What the world raised.
        logs: The collectives of each rank until then.
        world_size: The number of ranks.
    """

    error: RankError
    logs: Sequence[Sequence[Call]]
    world_size: int

    @property
    def ended(self) -> list[RankFailure]:
        """The failures of ranks that ended by themselves, in order of time."""
        return [failure for failure in self.error.failures if failure.kind in ("raised", "exited", "died")]

    @property
    def stuck(self) -> list[RankFailure]:
        """The ranks that were still at work."""
        return [failure for failure in self.error.failures if failure.kind == "stuck"]

    @property
    def evidence(self) -> list[str]:
        """Each rank's failure; the same of several ranks once, unless they are stuck."""
        groups: dict[tuple[str, int | None], list[int]] = {}
        for failure in self.error.failures:
            alone = failure.rank if failure.kind == "stuck" else None
            groups.setdefault((_describe(failure), alone), []).append(failure.rank)
        lines = [f"{format_ranks(ranks)}: {agreeing(text, ranks)}" for (text, _), ranks in groups.items()]
        return lines + ([f"{format_ranks(self.error.results)}: had finished"] if self.error.results else [])


def judge_failure(error: RankError, logs: Sequence[Sequence[Call]], world_size: int) -> list[Finding]:
    """The finding behind a world that failed: DDP401 to DDP404, the root cause only.

    Args:
        error: What the world raised.
        logs: The collectives of each rank until then.
        world_size: The number of ranks.
    """
    return first_explanation(EXPLANATIONS, FailureFacts(error, logs, world_size)) if error.failures else []


def explain_by_collectives(facts: FailureFacts) -> list[Finding]:
    """DDP403: the collectives of the ranks do not match.

    First, since ranks that call different collectives hang, or fail with an error of communication. Any other exception
    is a cause of its own: the rank that raised never came to the next collective.
    """
    at_work = {failure.rank for failure in facts.stuck if not failure.collective}
    mismatch = judge_collectives(facts.logs, at_work)
    if not mismatch or (facts.ended and not _is_of_communication(facts.ended[0].message)):
        return []
    return [replace(mismatch[0], evidence=(*mismatch[0].evidence, *facts.evidence))]


def explain_by_hang(facts: FailureFacts) -> list[Finding]:
    """DDP402: no rank has failed, and some did not finish; those are at fault that do not wait for others.

    Before exceptions, which there are none of then.
    """
    stuck = facts.stuck
    if facts.ended:
        return []
    busy = [f for f in stuck if not is_waiting(f)] or [f for f in stuck if not f.collective]
    lead = (busy or stuck or list(facts.error.failures))[0]
    ranks = format_ranks(failure.rank for failure in stuck)
    return [
        make_finding(
            "DDP402",
            (lead.place or "run",),
            f"{ranks.capitalize()} did not finish {lead.place or 'the run'}: {_describe(lead)}.",
            ranks=unless_all([failure.rank for failure in busy or stuck], facts.world_size),
            location=Location.parse(lead.location),
            evidence=[*facts.evidence, *_stack_lines(stuck)],
            fix=_fix_of_hang(stuck, lead),
        )
    ]


def explain_by_first_failure(facts: FailureFacts) -> list[Finding]:
    """DDP401 or 404: the first rank that raised or died, and all that failed in the same way. Last."""
    first = facts.ended[0]
    same = tuple(failure.rank for failure in facts.ended if (failure.kind, failure.type) == (first.kind, first.type))
    died = first.kind != "raised"
    if len(same) == facts.world_size > 1:
        text = f"Every rank {phrase(first)}"
    else:
        text = f"{format_ranks(same).capitalize()} {agreeing(phrase(first), same)}"
    evidence = facts.evidence
    return [
        make_finding(
            "DDP404" if died else "DDP401",
            (first.place or "run",),
            f"{text.rstrip('.')}{f', in {first.place}' if first.place else ''}.",
            severity=Severity.ERROR,
            ranks=unless_all(same, facts.world_size),
            location=Location.parse(first.location),
            evidence=[*(evidence if len(evidence) > 1 else []), *_stack_lines([first] if died else [])],
            fix=_FIX_OF_DEATH.get(first.exit_code or 0, "") if died else "",
        )
    ]


EXPLANATIONS = (explain_by_collectives, explain_by_hang, explain_by_first_failure)
"""In the order in which they are asked; each says in its docstring why it stands where it does."""

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
    """The advice on ranks that did not finish; empty, for that of the rule, where each of them waits for others."""
    busy = [failure.rank for failure in stuck if not is_waiting(failure)]
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
        f"The others wait for {format_ranks(busy)}: end the loop or the wait at that place, and come to the collective "
        f"that the others are in; if it is only slow, {longer}."
    )


def judge_empty_shards(error: RankError, world_size: int) -> list[Finding]:
    """DDP405: ranks failed because they had no samples in a step in which others had some."""
    empty = {f.rank: f for f in error.failures if isinstance(f.exception, EmptyShardError)}
    if not empty or len(empty) == world_size:
        return []
    step = min(f.exception.step for f in empty.values() if isinstance(f.exception, EmptyShardError))
    ranks = sorted(empty)
    return [
        make_finding(
            "DDP405",
            (f"step {step}",),
            f"{format_ranks(ranks).capitalize()} {plural_verb('has', 'have', ranks)} no samples in step {step}, and "
            f"the others have: in a training loop {plural_verb('it leaves', 'they leave', ranks)}, and the others "
            f"wait in backward for {plural_verb('its', 'their', ranks)} gradients.",
            ranks=ranks,
            steps=(step,),
            location=Location.parse(empty[ranks[0]].location),
            evidence=[f"rank {rank}: {empty[rank].exception}" for rank in ranks],
        )
    ]


_COMMUNICATION_WORDS = ("gloo", "connection", "nccl", "timed out", "processgroup", "sigabrt", "abort", "op.preamble")


def _is_of_communication(message: str) -> bool:
    """Whether an error is how a backend fails when its peers do something else (gloo raises or aborts, nccl waits)."""
    return any(word in message.lower() for word in _COMMUNICATION_WORDS)


def _describe(failure: RankFailure) -> str:
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
