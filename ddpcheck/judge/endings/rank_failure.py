"""DDP305 and 401 to 405: root causes of failed or hung ranks."""

from __future__ import annotations

import math
import signal
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from ddpcheck.findings.errors import EmptyShardError, NonFiniteLossError, RankFailure
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location, Severity
from ddpcheck.findings.stacks import is_waiting
from ddpcheck.findings.wording import (
    agreeing,
    format_ranks,
    group_by,
    one_finding,
    phrase,
    plural_verb,
    unless_all,
)
from ddpcheck.judge.endings.collective_order import judge_partings
from ddpcheck.judge.endings.wrapper_errors import SENTENCES
from ddpcheck.judge.judge_context import first_explanation


@dataclass(frozen=True, slots=True)
class FailureFacts:
    """Failures and collective logs of a failed run."""

    failures: Sequence[RankFailure]  # in order of time
    logs: Sequence[Sequence[Call]]  # collectives of each rank up to the failure
    world_size: int
    finished: Collection[int]  # ranks that had finished

    @property
    def ended(self) -> list[RankFailure]:
        """Failures of ranks that raised, exited or died, in order of time."""
        return [failure for failure in self.failures if failure.kind in ("raised", "exited", "died")]

    @property
    def stuck(self) -> list[RankFailure]:
        """Failures of ranks that were still running."""
        return [failure for failure in self.failures if failure.kind == "stuck"]

    @property
    def evidence(self) -> list[str]:
        """Lines on the failure of each rank; equal failures share a line unless stuck."""
        groups = group_by(self.failures, lambda f: (describe_failure(f), f.rank if f.kind == "stuck" else None))
        ranks_by_text = [(text, [failure.rank for failure in failures]) for (text, _), failures in groups.items()]
        lines = [f"{format_ranks(ranks)}: {agreeing(text, ranks)}" for text, ranks in ranks_by_text]
        return lines + ([f"{format_ranks(self.finished)}: had finished"] if self.finished else [])


def judge_failure(
    failures: Sequence[RankFailure], logs: Sequence[Sequence[Call]], world_size: int, finished: Collection[int] = ()
) -> list[Finding]:
    """Return the root cause of a failed run (DDP401 to DDP404); see `FailureFacts`."""
    return first_explanation(EXPLANATIONS, FailureFacts(failures, logs, world_size, finished)) if failures else []


def explain_by_collectives(facts: FailureFacts) -> list[Finding]:
    """DDP403: collectives or call sites that do not match between ranks.

    Runs first, since ranks with mismatched collectives hang or fail with a communication error. Any other exception is
    a separate cause: the rank that raised never reached the next collective.
    """
    at_work = {failure.rank for failure in facts.stuck if not failure.collective}
    mismatch = judge_partings(facts.logs, at_work)
    if not mismatch or (facts.ended and not _is_of_backend(facts.ended[0])):
        return []
    return [replace(mismatch[0], evidence=(*mismatch[0].evidence, *facts.evidence))]


def explain_by_hang(facts: FailureFacts) -> list[Finding]:
    """DDP402: hang without a failed rank; blames ranks that do not wait for others."""
    stuck = facts.stuck
    if facts.ended:
        return []
    busy = [f for f in stuck if not is_waiting(f)] or [f for f in stuck if not f.collective]
    lead = (busy or stuck or list(facts.failures))[0]
    ranks = format_ranks(failure.rank for failure in stuck)
    return one_finding(
        "DDP402",
        (lead.place or "run",),
        f"{ranks.capitalize()} did not finish {lead.place or 'the run'}: {_all_or_one(stuck, lead)}.",
        ranks=unless_all([failure.rank for failure in busy or stuck], facts.world_size),
        location=Location.parse(lead.location),
        evidence=[*facts.evidence, *_stack_lines(stuck)],
        fix=_fix_of_hang(stuck, lead),
    )


def explain_by_first_failure(facts: FailureFacts) -> list[Finding]:
    """DDP401 or 404: first rank that raised or died, and similar failures. Runs last."""
    first = facts.ended[0]
    ranks = tuple(failure.rank for failure in facts.ended if (failure.kind, failure.type) == (first.kind, first.type))
    died = first.kind != "raised"
    outcome = phrase(first)
    if len({phrase(failure) for failure in facts.ended if failure.rank in ranks}) > 1:  # messages differ between ranks
        kind, colon, words = outcome.partition(":")
        outcome = f"{kind}; on rank {first.rank}:{words}" if colon else outcome
    if len(ranks) == facts.world_size > 1:
        text = f"Every rank {outcome}"
    else:
        text = f"{format_ranks(ranks).capitalize()} {agreeing(outcome, ranks)}"
    evidence = facts.evidence
    others = [failure for failure in facts.failures if failure.rank not in ranks]
    return one_finding(
        "DDP404" if died else "DDP401",
        (first.place or "run",),
        f"{text.rstrip('.')}{f', in {first.place}' if first.place else ''}.",
        severity=Severity.ERROR,
        ranks=unless_all(ranks, facts.world_size),
        location=Location.parse(first.location),
        evidence=[
            first.noticed,
            *(evidence if len(evidence) > 1 else []),
            *_stack_lines([first] if died else []),
        ],
        fix=_fix_of_death(first) if died else _fix_of_exception(facts, others),
        tags=(OF_A_CUT_FILE,)
        if first.type.rpartition(".")[2] in _OF_CUT_FILES or _OF_CUT_ARCHIVES in first.message
        else (),
    )


OF_A_CUT_FILE = "of a cut file"
"""Tag of a finding whose exception is typical of a truncated file."""

_OF_CUT_FILES = ("EOFError", "UnpicklingError", "BadZipFile", "JSONDecodeError")
_OF_CUT_ARCHIVES = "PytorchStreamReader"  # RuntimeError on a truncated torch.save file

EXPLANATIONS = (explain_by_collectives, explain_by_hang, explain_by_first_failure)
"""Explanations in order; the first with findings is reported."""

_FIX_OF_DEATH = {  # by exit code; negative for signals
    -signal.SIGSEGV: (
        "Check the C or C++ code that the line calls (an extension, a custom kernel, a library whose version differs "
        "from the one that it was built for), and call it with this rank's data in a separate process."
    ),
    -signal.SIGABRT: (
        "Read the last output of the rank: C or C++ code aborted and says why. If the backend aborted "
        "(gloo::EnforceNotMet), ranks have sent each other tensors that do not match."
    ),
    -signal.SIGTERM: (
        "Find out what sent the signal to this process alone: a scheduler (preemption, a limit), a `kill`, or the "
        "script itself. To end a job, signal the launcher, which ends all ranks."
    ),
    -signal.SIGKILL: (
        "Use less memory (a smaller batch, fewer ranks, --world-size 2) if the machine ran out of it: the kernel's log "
        "(dmesg) says so. If it did not, find out what sent the signal."
    ),
}


def _fix_of_death(failure: RankFailure) -> str:
    """Return the fix for a dead rank, or '' for the rule's default."""
    if failure.location and (failure.exit_code or 0) > 0:
        return "Raise an exception, which is shown, instead of exiting without a message (sys.exit, os._exit)."
    if failure.exit_code == -signal.SIGSEGV and not failure.location:
        return ""  # no line is known
    return _FIX_OF_DEATH.get(failure.exit_code or 0, "")


def _fix_of_exception(facts: FailureFacts, others: Sequence[RankFailure]) -> str:
    """Return the fix for an exception, or '' for the rule's default."""
    if facts.finished and all(map(follows_from_another_rank, facts.failures)):
        return (
            f"The line that raised was still waiting for a call of {format_ranks(facts.finished)}, which had ended the "
            "script: find the call that is missing there. Let every send have its recv, and every rank make the same "
            "calls."
        )
    return "" if others else "Fix the exception shown."


_BEFORE_THE_FIRST_STEP = ("starting up", "loading the target", "building the model")


def _fix_of_hang(stuck: Sequence[RankFailure], lead: RankFailure) -> str:
    """Return the fix for a hang, or '' if all ranks wait."""
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
        f"The others wait for {format_ranks(busy)}: end the loop or the wait at that place, and reach the collective "
        f"that the others are in; if it is only slow, {longer}."
    )


def _all_or_one(stuck: Sequence[RankFailure], lead: RankFailure) -> str:
    """Describe what all stuck ranks do, or only `lead` if the ranks differ."""
    text = describe_failure(lead)
    if len(stuck) > 1 and all(describe_failure(failure) == text for failure in stuck):
        return f"all {agreeing(text, [failure.rank for failure in stuck])}"
    return f"rank {lead.rank} {text}" if len(stuck) > 1 else text


def judge_empty_shards(failures: Sequence[RankFailure], world_size: int) -> list[Finding]:
    """DDP405: ranks that failed because of an empty shard in a step."""
    empty = {f.rank: (f.exception, f.location) for f in failures if isinstance(f.exception, EmptyShardError)}
    if not empty or len(empty) == world_size:
        return []
    step = min(exception.step for exception, _ in empty.values())
    ranks = sorted(empty)
    return one_finding(
        "DDP405",
        (f"step {step}",),
        f"{format_ranks(ranks).capitalize()} {plural_verb('has', 'have', ranks)} no samples in step {step}, and "
        f"the others have: a training loop ends there on {plural_verb('this rank', 'these ranks', ranks)}, and the "
        f"others wait in backward for {plural_verb('its', 'their', ranks)} gradients.",
        ranks=ranks,
        steps=(step,),
        location=Location.parse(empty[ranks[0]][1]),
        evidence=[f"rank {rank}: {empty[rank][0]}" for rank in ranks],
    )


def judge_undefined_losses(
    failures: Sequence[RankFailure], batch_loss: float, step: int, world_size: int
) -> list[Finding]:
    """DDP305: non-finite loss on some ranks, although the whole-batch loss is finite."""
    undefined = {f.rank: f for f in failures if isinstance(f.exception, NonFiniteLossError)}
    if not undefined or len(undefined) == world_size or not math.isfinite(batch_loss):
        return []
    ranks = sorted(undefined)
    return one_finding(
        "DDP305",
        ("loss",),
        f"The loss is not finite on {format_ranks(ranks)} in step {step}; that of the whole batch is {batch_loss:.4g}. "
        f"The loss is a mean over elements of which {plural_verb('this rank has', 'these ranks have', ranks)} none, "
        "or a statistic of too few samples.",
        ranks=ranks,
        steps=(step,),
        location=Location.parse(undefined[ranks[0]].location),
        evidence=[f"rank {rank}: {failure.exception}" for rank, failure in sorted(undefined.items())],
        fix="Sum the local loss, all_reduce the count, and divide by count / world_size on every rank: a rank without "
        "an element that counts then adds 0.",
    )


_COMMUNICATION_WORDS = ("gloo", "connection", "nccl", "timed out", "processgroup", "sigabrt", "abort", "op.preamble")


def is_of_communication(message: str) -> bool:
    """Check for a backend error after peers diverged (gloo raises or aborts, nccl waits)."""
    return any(word in message.lower() for word in _COMMUNICATION_WORDS)


def _is_of_backend(failure: RankFailure) -> bool:
    """Return True if a rank failed inside the backend, not in its own code."""
    aborted_at_work = failure.kind == "died" and bool(failure.stack) and not is_waiting(failure)
    return not aborted_at_work and is_of_communication(f"{failure.message}\n{failure.traceback}")


def follows_from_another_rank(failure: RankFailure) -> bool:
    """Check for a secondary failure: a wait, a lost peer or a DDP error."""
    text = f"{failure.message}\n{failure.traceback}"
    return failure.kind == "stuck" or _is_of_backend(failure) or any(sentence in text for sentence in SENTENCES)


def describe_failure(failure: RankFailure) -> str:
    """Describe the failure of a rank, or its state when others failed."""
    if failure.kind != "stuck":
        return phrase(failure)
    if failure.collective:
        return f"waits in {failure.collective}{f', in {failure.place}' if failure.place else ''}"
    where = f"in {failure.place}" if failure.place else "at work"
    return f"still {where}{f', at {failure.location}' if failure.location else ''}"


def _stack_lines(failures: Sequence[RankFailure]) -> Iterator[str]:
    for failure in failures:
        for line in failure.stack.splitlines()[:8]:
            yield f"rank {failure.rank} stack: {line.strip()}"
