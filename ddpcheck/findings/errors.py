"""Exceptions of ddpcheck, with exit codes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

EXIT_CLEAN = 0
EXIT_FINDINGS = 1
EXIT_USAGE = 2
EXIT_TARGET = 3
EXIT_HANG = 4


class DDPCheckError(Exception):
    """Base class of ddpcheck errors, which the command line prints without a traceback.

    Attributes:
        exit_code: Exit code of the command line if the error is not caught.
        detail: Additional lines, such as the traceback of the target; may be empty.
    """

    exit_code = EXIT_USAGE

    def __init__(self, message: str, *, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail


class UsageError(DDPCheckError):
    """Invalid argument or option: world size 0, an unknown backend, a missing file."""


class WrongTypeError(UsageError, TypeError):
    """Argument of the wrong type, such as a module instead of a recipe."""


class ChoiceError(UsageError, ValueError):
    """Argument that is not a valid choice; the message lists the choices."""


class ConfigError(DDPCheckError):
    """Invalid value in the environment or in `[tool.ddpcheck]`."""


class BugError(DDPCheckError):
    """Bug in ddpcheck, not in the target; `detail` is the full traceback."""


class TargetError(DDPCheckError):
    """Failure of the user's target during import, construction or run."""

    exit_code = EXIT_TARGET


class OptionsDifferError(DDPCheckError):
    """Wrapper options that differ between ranks, so that DDP would raise, hang or abort."""

    exit_code = EXIT_FINDINGS

    def __init__(self, message: str, options: Sequence[Mapping[str, str]] = ()) -> None:
        super().__init__(message)
        self.options = tuple(options)  # in words by name, one mapping per rank


class EmptyShardError(TargetError):
    """Failure of the target on a rank that has no samples in the step."""

    def __init__(self, message: str, step: int = 0, *, detail: str = "") -> None:
        super().__init__(message, detail=detail)
        self.step = step  # index of the step, from 0


class NonFiniteLossError(TargetError):
    """NaN or infinite loss of a rank, so that gradients cannot be compared."""


class FindingsError(DDPCheckError, AssertionError):
    """Error for findings of a check; an `AssertionError`, so that tests fail.

    Attributes:
        findings: The `ddpcheck.Finding` objects that caused the error.
    """

    exit_code = EXIT_FINDINGS

    def __init__(self, message: str, findings: Sequence[Any] = (), *, detail: str = "") -> None:
        super().__init__(message, detail=detail)
        self.findings = tuple(findings)


FailureKind = Literal["raised", "died", "stuck", "fell", "exited"]


@dataclass(frozen=True, slots=True)
class RankFailure:
    """Failure of one rank of a world.

    Attributes:
        rank: The rank.
        kind: `raised` (an exception), `exited` (the user's code called `exit`), `died` (a signal, or an exit without
            a Python exception), `stuck` (still running at the deadline, or when another rank had failed), `fell`
            (failed only because another rank had, for example "connection closed by peer").
        message: One sentence.
        when: `time.monotonic()` at the failure, comparable between the ranks of one machine.
        type: Qualified class name of the exception, or "".
        traceback: Traceback of the exception as text, without frames of ddpcheck.
        exception: The exception if it could be sent, else `None`.
        place: Phase of the rank, such as `step 1: backward`; may be empty.
        collective: Collective in which the rank waits; "" if none is known.
        stack: Python stack of a stuck rank, most recent call first.
        location: Innermost line of the user's code, as "path:line"; may be empty.
        exit_code: Exit code of the process if ended; negative for a signal, as in `subprocess`.
        output: Last lines printed by the rank.
        bug: Request to report the failure if caused by a bug in ddpcheck, else "".
        noticed: In words: the worker or thread that raised the exception and the line that waited for it, or the
            exception that was being handled at the failure; "" for neither.
        cause: First exception of the chain, or "".
    """

    rank: int
    kind: FailureKind
    message: str
    when: float
    type: str = ""
    traceback: str = ""
    exception: BaseException | None = field(default=None, compare=False)
    place: str = ""
    collective: str = ""
    stack: str = ""
    location: str = ""
    exit_code: int | None = None
    output: str = ""
    bug: str = ""
    noticed: str = ""
    cause: str = ""


class RankError(DDPCheckError):
    """Failure of at least one rank of a world.

    `failures` has one entry for each rank that did not finish, earliest first; `results` has the return values of the
    other ranks, by rank.
    """

    exit_code = EXIT_TARGET

    def __init__(self, message: str, failures: Sequence[RankFailure] = (), *, detail: str = "") -> None:
        super().__init__(message, detail=detail)
        self.failures = tuple(failures)
        self.results: dict[int, object] = {}
        if self.failures and self.failures[0].bug:
            self.exit_code = EXIT_USAGE

    @property
    def first(self) -> RankFailure | None:
        """Earliest failure, or `None` if `failures` is empty."""
        return self.failures[0] if self.failures else None

    def raise_cause(self) -> None:
        """Raise the error of the first failure, if a `DDPCheckError` or ddpcheck bug."""
        if self.first is not None and isinstance(self.first.exception, DDPCheckError):
            raise self.first.exception from self
        if self.first is not None and self.first.bug:
            raise BugError(self.first.bug, detail=self.detail) from self


class HangError(RankError):
    """Timeout of a rank, or a provable wait for a rank that never arrives."""

    exit_code = EXIT_HANG


for _public in (DDPCheckError, UsageError, ConfigError, TargetError, FindingsError, RankError, HangError):
    _public.__module__ = "ddpcheck"
