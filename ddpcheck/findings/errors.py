"""The exceptions of ddpcheck, each with the exit code it stands for."""

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
    """Base of all errors that ddpcheck raises on purpose; shown as one sentence, without a traceback.

    Attributes:
        exit_code: What the command line exits with when nothing catches the error.
        detail: Lines for a reader who wants more (the target's own traceback, say); may be empty.
    """

    exit_code = EXIT_USAGE

    def __init__(self, message: str, *, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail


class UsageError(DDPCheckError):
    """A wrong argument or option: world size 0, an unknown backend, a file that is not there."""


class WrongTypeError(UsageError, TypeError):
    """An argument of a type that cannot be, such as a module where a recipe belongs."""


class ChoiceError(UsageError, ValueError):
    """An argument that is none of the choices; the message names them."""


class ConfigError(DDPCheckError):
    """A wrong value in the environment or in `[tool.ddpcheck]`."""


class BugError(DDPCheckError):
    """A bug of ddpcheck, which is not the target's fault; `detail` is the whole traceback."""


class TargetError(DDPCheckError):
    """The user's target could not be imported, built or run, for a reason of its own."""

    exit_code = EXIT_TARGET


class OptionsDifferError(DDPCheckError):
    """A rank constructs the wrapper with other options than another, and DDP would stop, hang or abort on it.

    Attributes:
        options: Of each rank, in words, by name.
    """

    exit_code = EXIT_FINDINGS

    def __init__(self, message: str, options: Sequence[Mapping[str, str]] = ()) -> None:
        super().__init__(message)
        self.options = tuple(options)


class EmptyShardError(TargetError):
    """The target failed on a rank that has no samples in this step, which the other ranks have.

    Attributes:
        step: Counted from 0.
    """

    def __init__(self, message: str, step: int = 0, *, detail: str = "") -> None:
        super().__init__(message, detail=detail)
        self.step = step


class NonFiniteLossError(TargetError):
    """The loss of a rank is NaN or infinite in a step, so that its gradients cannot be compared."""


class FindingsError(DDPCheckError, AssertionError):
    """Raised where there are findings; an `AssertionError`, so that a test fails instead of erring.

    Attributes:
        findings: Those for which it was raised, of `ddpcheck.Finding`.
    """

    exit_code = EXIT_FINDINGS

    def __init__(self, message: str, findings: Sequence[Any] = (), *, detail: str = "") -> None:
        super().__init__(message, detail=detail)
        self.findings = tuple(findings)


FailureKind = Literal["raised", "died", "stuck", "fell", "exited"]


@dataclass(frozen=True, slots=True)
class RankFailure:
    """The failure of one rank of a world.

    Attributes:
        rank: The rank.
        kind: `raised` (an exception), `exited` (the user's code called `exit`), `died` (a signal or an exit
            without an exception in Python), `stuck` (still at work when the deadline passed, or when another rank had
            failed), `fell` (failed only because another rank had, for example "connection closed by peer").
        message: One sentence.
        when: `time.monotonic()` at the failure, comparable between the ranks of one machine.
        type: Qualified name of the exception's class, empty when there was none.
        traceback: The traceback of the exception as text, without frames of ddpcheck.
        exception: The exception itself where it could be sent, else `None`.
        place: Where the rank was, such as `step 1: backward`; may be empty.
        collective: The collective that the rank waits in, empty when it waits in none that is known.
        stack: The Python stack of a stuck rank, most recent call first.
        location: The innermost line of the user's code, as "path:line"; may be empty.
        exit_code: Of the process, where it ended: negative for a signal, as in `subprocess`.
        output: The last lines that the rank printed.
        bug: The sentence that asks to report it, where it is a bug of ddpcheck that the rank has met; else empty.
        noticed: In which worker or thread it was raised and which line waited for that, or in the handling of which
            exception, in words; "" where it was none.
        cause: That exception, the first one of its chain; "" where there is none.
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
    """At least one rank of a world failed.

    The first failure by time is the headline; `failures` holds every rank that did not finish, in order of time, and
    `results` what the others returned, by rank.
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
        """The failure that came first, or `None` when no rank is to blame."""
        return self.failures[0] if self.failures else None

    def raise_cause(self) -> None:
        """Raise what came first instead of this, where that is an error that ddpcheck has raised, or a bug of it."""
        if self.first is not None and isinstance(self.first.exception, DDPCheckError):
            raise self.first.exception from self
        if self.first is not None and self.first.bug:
            raise BugError(self.first.bug, detail=self.detail) from self


class HangError(RankError):
    """A rank did not finish in time, or can be shown to wait for one that will never come."""

    exit_code = EXIT_HANG


for _public in (DDPCheckError, UsageError, ConfigError, TargetError, FindingsError, RankError, HangError):
    _public.__module__ = "ddpcheck"
