"""Facts of ranks that failed: exceptions, signals and messages of torch."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddpcheck.findings.errors import RankFailure
from ddpcheck.findings.evidence.endings import Joining
from ddpcheck.findings.evidence.loop import ModuleChanged
from ddpcheck.findings.evidence.replicas import WrapperBegun
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.stacks import is_waiting
from ddpcheck.findings.wording import failure_text, format_ranks, group_by, new_finding, pluralize_verb, ranks_or_all
from ddpcheck.stream.entries import DDP_BACKWARD, DDP_FORWARD, WrapperMade
from ddpcheck.trace.check_context import JudgeContext
from ddpcheck.trace.positions import EndingFacts


def process_name(process: Joining) -> str:
    return f"rank {process.rank}" if process.rank >= 0 else f"process {process.pid}"


@dataclass(frozen=True, slots=True)
class EndedThread:
    """Thread, not the main thread, that ended with an exception."""

    name: str
    failure: RankFailure  # the exception, as a failure of the rank
    # call in which the main thread waits for a thread: "get() at train.py:25", or ""
    waits_in: str = ""


@dataclass(frozen=True, slots=True)
class FailureFacts:
    """Ranks of a failed or hung run: failures, collectives, threads and related records."""

    failures: Sequence[RankFailure] = ()  # of ranks that raised, exited, died or hung, in order of time
    logs: Sequence[Sequence[Call]] = ()  # collectives by rank, up to the failure
    finished: Collection[int] = ()  # ranks that had finished
    exit_code: int = 0  # of the whole script
    interrupted: bool = False  # True if a signal of a user or scheduler ended the script
    hang_seconds: float | None = None  # without progress; None if no hang was detected
    joining: Sequence[Joining] = ()  # processes in `init_process_group`, if ranks do not meet there
    threads: Sequence[EndedThread] = ()
    thread_calls: Sequence[str] = ()  # evidence: collectives in which other threads wait
    find_positions: Callable[[], EndingFacts] | None = None  # None for ranks of a check, which run no script
    constructing: Collection[int] = ()  # ranks in the constructor of a wrapper, which raises if replicas differ
    known: Sequence[Finding] = ()  # findings of other rules on errors that may stop a run
    # of the rank that failed first
    begun: Sequence[WrapperBegun] = ()
    replaced: Sequence[ModuleChanged] = ()  # assignments over shards
    sharded: Sequence[WrapperMade] = ()  # `fully_shard` modules
    clipped: Sequence[Sequence[str]] = ()  # names given to clip_grad_norm_: [shards, whole parameters]
    # program lines of each rank that was terminated while it ran, innermost first
    at_work: Mapping[int, Sequence[str]] = field(default_factory=dict)
    checkpoint: Location | None = None  # line that calls activation checkpointing, if any

    @property
    def first(self) -> RankFailure:
        return self.failures[0]

    @property
    def text(self) -> str:
        """Message and traceback of the first failure."""
        return f"{self.first.message}\n{self.first.traceback}"

    @property
    def ended(self) -> list[RankFailure]:
        """Failures of ranks that raised, exited or died, in order of time."""
        return [failure for failure in self.failures if failure.kind in ("raised", "exited", "died")]

    @property
    def stuck(self) -> list[RankFailure]:
        """Failures of ranks that were still running."""
        return [failure for failure in self.failures if failure.kind == "stuck"]

    @property
    def ranks(self) -> list[int]:
        """Ranks that raised the exception type of the first failure."""
        return sorted(f.rank for f in self.failures if f.type == self.first.type and f.kind == "raised")

    @property
    def evidence(self) -> list[str]:
        """One line for each distinct failure, and for each stuck rank."""
        groups = group_by(self.failures, lambda f: (describe_failure(f), f.rank if f.kind == "stuck" else None))
        ranks_by_text = [(text, [failure.rank for failure in failures]) for (text, _), failures in groups.items()]
        lines = [f"{format_ranks(ranks)}: {pluralize_verb(text, ranks)}" for text, ranks in ranks_by_text]
        return lines + ([f"{format_ranks(self.finished)}: had finished"] if self.finished else [])

    def new_finding(self, code: str, subjects: Sequence[str], message: str, **more: Any) -> list[Finding]:
        """Create a finding at the line of the first failure; `more` overrides fields."""
        first, ranks = self.first, ranks_or_all(self.ranks, len(self.logs))
        raised = Location.parse(first.location)
        defaults = {"ranks": ranks, "location": raised, "related": {"raised": raised}, "evidence": [first.message]}
        return new_finding(code, subjects, message, **{**defaults, **more})

    def new_ended_finding(self, code: str, **more: Any) -> list[Finding]:
        """Create a finding on the first failure, naming all ranks with an equal failure."""
        first = self.ended[0]
        equal_failures = [failure for failure in self.ended if (failure.kind, failure.type) == (first.kind, first.type)]
        ranks, outcome = [failure.rank for failure in equal_failures], failure_text(first)
        if any(failure_text(failure) != outcome for failure in equal_failures):  # messages differ between ranks
            kind, colon, words = outcome.partition(":")
            outcome = f"{kind}; on rank {first.rank}:{words}" if colon else outcome
        if len(ranks) == len(self.logs) > 1:
            text = f"Every rank {outcome}"
        else:
            text = f"{format_ranks(ranks).capitalize()} {pluralize_verb(outcome, ranks)}"
        evidence = [first.noticed, *(self.evidence if len(self.evidence) > 1 else [])]
        return new_finding(
            code,
            (first.place or "run",),
            f"{text.rstrip('.')}{f', in {first.place}' if first.place else ''}.",
            ranks=ranks_or_all(ranks, len(self.logs)),
            location=Location.parse(first.location),
            evidence=[*evidence, *(stack_lines([first]) if first.kind != "raised" else ())],
            **more,
        )


# Sentences of DDP and autograd: torch has no error codes.
MARKED_TWICE = "mark a variable ready only once"
UNDEFINED_GRADIENT = "gradient which is undefined, but still allreduced"
MODIFIED_IN_PLACE = "modified by an inplace operation"
NOT_FINISHED = "Expected to have finished reduction"
NOT_FINISHED_IN_LIGHTNING = "not used in producing the loss returned by training_step"
GRAPH_CHANGED = "training graph has changed in this iteration"
DDP_SENTENCES = (
    *(MARKED_TWICE, UNDEFINED_GRADIENT, MODIFIED_IN_PLACE, NOT_FINISHED, NOT_FINISHED_IN_LIGHTNING, GRAPH_CHANGED),
)
"""Parts of messages of DDP and autograd that may follow from a defect of another rule."""

_COMMUNICATION_WORDS = ("gloo", "connection", "nccl", "timed out", "processgroup", "sigabrt", "abort", "op.preamble")


def is_of_communication(message: str) -> bool:
    """Check if an error message is from the communication backend: gloo, NCCL, lost connections."""
    return any(word in message.lower() for word in _COMMUNICATION_WORDS)


def is_of_backend(failure: RankFailure) -> bool:
    """Return True if a rank failed in the communication backend, not in the script."""
    aborted_at_work = failure.kind == "died" and bool(failure.stack) and not is_waiting(failure)
    return not aborted_at_work and is_of_communication(f"{failure.message}\n{failure.traceback}")


def follows_from_another_rank(failure: RankFailure) -> bool:
    """Check if another rank may have caused the failure (wait, lost peer, DDP error)."""
    text = f"{failure.message}\n{failure.traceback}"
    return failure.kind == "stuck" or is_of_backend(failure) or any(sentence in text for sentence in DDP_SENTENCES)


def describe_failure(failure: RankFailure) -> str:
    """Describe the failure of a rank, or where a stuck rank still is."""
    if failure.kind != "stuck":
        return failure_text(failure)
    if failure.collective:
        return f"waits in {failure.collective}{f', in {failure.place}' if failure.place else ''}"
    where = f"in {failure.place}" if failure.place else "at work"
    return f"still {where}{f', at {failure.location}' if failure.location else ''}"


def stack_lines(failures: Sequence[RankFailure]) -> Iterator[str]:
    for failure in failures:
        for line in failure.stack.splitlines()[:8]:
            yield f"rank {failure.rank} stack: {line.strip()}"


def count_forwards(facts: FailureFacts) -> int:
    """Count DDP forward passes before the backward pass in which the first rank failed.

    Only consecutive forward passes at the end of the log count; the failed backward pass may follow.
    """
    calls = [call.operation for call in facts.logs[facts.first.rank]]
    calls = calls[:-1] if calls[-1:] == [DDP_BACKWARD] else calls
    return sum(1 for _ in itertools.takewhile(lambda operation: operation == DDP_FORWARD, reversed(calls)))


TIMEOUT_PATTERN = r"[Tt]imed out waiting (\d+) ?ms|Timeout\(ms\)=(\d+)|timed out after (\d+) ?ms"


@dataclass(frozen=True, slots=True)
class WrapperErrorFacts:
    """Failures of ranks in a wrapped step; the same step succeeds without the wrapper."""

    failures: Sequence[RankFailure]  # in order of time
    finished: Mapping[int, object]  # by rank, return values of the other ranks
    known: JudgeContext

    @property
    def text(self) -> str:
        """Message and traceback of the first failure, or '' if not an exception."""
        first = next(iter(self.failures), None)
        return f"{first.message}\n{first.traceback}" if first is not None and first.kind == "raised" else ""

    @property
    def raised_on(self) -> tuple[int, ...]:
        """Ranks that raised; () for all ranks."""
        raised = sorted(failure.rank for failure in self.failures if failure.kind == "raised")
        return ranks_or_all(raised, self.known.world_size)

    def new_finding(self, code: str, subjects: Sequence[str], message: str, **more: Any) -> list[Finding]:
        """Create a finding on the ranks that raised, with the first message as evidence."""
        return new_finding(code, subjects, message, ranks=self.raised_on, evidence=[self.failures[0].message], **more)

    def finding_of_error(self, code: str, message: str, *sentences: str) -> list[Finding]:
        """Create a finding on parameters named in the error, if any of `sentences` occurs."""
        if not any(sentence in self.text for sentence in sentences):
            return []
        subjects = self.known.names.subjects(parameters_in(self.text)) or ("backward",)
        return self.new_finding(code, subjects, f"{message}, in {self.failures[0].place or 'the step'}.")


def parameters_in(error: str) -> tuple[str, ...]:
    """Return the parameter names in an error message of DDP."""
    return tuple(dict.fromkeys(re.findall(r"parameter (?:name|at index \d+ with name) (\S+)", error)))
