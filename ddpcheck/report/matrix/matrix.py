"""The result of `check_matrix`: one row a combination of DDP options, and advice; is saved as JSON and read again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ddpcheck.findings.errors import EXIT_CLEAN, EXIT_FINDINGS
from ddpcheck.findings.from_json import added, parse, read
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Document, Finding, ReportError, Severity, checked_version, without_rules_fix
from ddpcheck.findings.rules import RULES
from ddpcheck.report.matrix.option_sets import DdpOptions

Verdict = Literal["right", "lossy", "incomplete", "wrong", "stops", "skipped"]
"""What options do to a model.

`right`: all was compared, and nothing is at severity error. `lossy`: right up to what a communication hook rounds.
`incomplete`: the same, as far as it was compared, or but for what is ignored. `wrong`: trains to the end with a wrong
result. `stops`: DDP raises, hangs or aborts. `skipped`: the options cannot make a difference."""

_COUNTED = ("right", "lossy", "incomplete", "wrong", "stops")

LEAST_DIFFERENCE = 0.02
"""A step time within this share of the baseline's is no difference, however exactly it was measured."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """How long a training step takes beside one of the baseline row, measured in alternating pairs.

    Attributes:
        ratio: Median over the pairs of the row's time divided by the baseline's.
        low: Lower end of the 99 % interval of that median.
        high: Upper end.
        seconds: Median time of the row's steps, on the slowest rank.
        pairs: How many were timed.
    """

    ratio: float
    low: float
    high: float
    seconds: float
    pairs: int

    def differs(self, noise: float) -> bool:
        """The difference from the baseline is more than `noise`, and more than chance."""
        return abs(self.ratio - 1) > max(noise, LEAST_DIFFERENCE) and not self.low <= 1 <= self.high


@dataclass(frozen=True, slots=True)
class MatrixRow:
    """The model under one combination of options.

    Attributes:
        arguments: Of `DistributedDataParallel`, where they are not torch's defaults; without those that the matrix
            leaves as the recipe has them.
        hook: The communication hook of torch that is registered on top; empty for none.
        verdict: See `Verdict`.
        own: Whether these are the recipe's own options.
        baseline: Whether step times are relative to this row's.
        label: What to call the row where its options are not known; empty where they are.
        code: Of the finding that decides the verdict; empty where it is right or skipped.
        reason: Its message, or why the row was skipped or stops, or what was not compared or is ignored.
        error: The largest relative error of a gradient against the average of the ranks' own, where compared.
        step_time: None where it was not measured.
        findings: All findings under these options, worst first.
        failure: Set where the row could not be finished.
    """

    arguments: Mapping[str, Any]
    verdict: Verdict
    hook: str = ""
    own: bool = False
    baseline: bool = False
    label: str = ""
    code: str = ""
    reason: str = ""
    error: float | None = None
    step_time: StepTime | None = None
    findings: tuple[Finding, ...] = ()
    failure: ReportError | None = None

    @property
    def options(self) -> DdpOptions:
        """Arguments and hook together."""
        return DdpOptions(self.arguments, self.hook)

    @property
    def title(self) -> str:
        """Name of the row."""
        return self.label or str(self.options)

    @property
    def fine(self) -> bool:
        """A model can be trained like this, as far as that is known."""
        return self.verdict in ("right", "lossy", "incomplete")

    @property
    def what_to_do(self) -> str:
        """Fix of the finding that decides the verdict; empty where none does."""
        own = next((finding.what_to_do for finding in self.findings if finding.code == self.code), "")
        return own or (RULES[self.code].fix if self.code in RULES else "")

    def exit_code(self, fail_on: Severity | None = Severity.ERROR) -> int:
        """Exit code of a check under these options."""
        if self.failure is not None:
            return self.failure.exit_code
        bad = fail_on is not None and any(finding.severity.reaches(fail_on) for finding in self.findings)
        return EXIT_FINDINGS if bad else EXIT_CLEAN


AdviceKind = Literal["own", "needs", "fault", "wrong", "costs", "gains", "warns", "safe"]
"""`own`: the recipe's own options. `needs`: without which it is not right. `fault`: no option mends it. `wrong`: not
right with these. `costs`: right and slower, or needless. `gains`: right and faster. `warns`: right, with a warning that
the others do not have. `safe`: right, and no difference that could be measured."""


@dataclass(frozen=True, slots=True)
class Advice:
    """One sentence of advice, and what it is about."""

    kind: AdviceKind
    message: str


@dataclass(frozen=True, slots=True)
class Matrix(Document):
    """The result of trying DDP options on one target. A renderer needs nothing else.

    Attributes:
        target: What was checked, as the user spelled it.
        rows: The recipe's own options first; empty where the target could not be run at all.
        advice: What follows from the rows.
        environment: Versions and platform.
        world: World size, backend, device, steps, seed, timeout; `notes` holds sentences on how the rows were run.
        noise: How far the baseline's step time was from itself, as a share; None where none was measured.
        timing: Seconds by phase.
        error: Set when no row could be run, for a reason that has nothing to do with the options.
        tool: Name and version of the tool that wrote the matrix.
        command: The command line that made it; empty where none did.
    """

    target: str
    rows: tuple[MatrixRow, ...] = ()
    advice: tuple[Advice, ...] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)
    world: Mapping[str, Any] = field(default_factory=dict)
    noise: float | None = None
    timing: Mapping[str, float] = field(default_factory=dict)
    error: ReportError | None = None
    tool: Mapping[str, str] = field(default_factory=dict)
    command: str = added("")

    @property
    def own(self) -> MatrixRow | None:
        """The row with the recipe's own options."""
        return next((row for row in self.rows if row.own), None)

    @property
    def ok(self) -> bool:
        """The model is right under the recipe's own options."""
        return self.exit_code() == EXIT_CLEAN

    @property
    def summary(self) -> str:
        """The rows counted, in words."""
        counts = {name: sum(row.verdict == name for row in self.rows) for name in _COUNTED}
        said = ", ".join(f"{number} {name}" for name, number in counts.items() if number)
        return f"{sum(counts.values())} combinations of options: {said}" if said else "no combination could be run"

    def exit_code(self, fail_on: Severity | None = Severity.ERROR) -> int:
        """That of the recipe's own options; what other options do is advice."""
        if self.error is not None:
            return self.error.exit_code
        return EXIT_CLEAN if self.own is None else self.own.exit_code(fail_on)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as `to_json` writes it."""
        return {**Document.to_dict(self), "kind": "matrix"}

    @classmethod
    def from_json(cls, text: str) -> Matrix:
        """Read what `to_json` wrote.

        Raises:
            ValueError: `text` is not a matrix, or was written by a newer ddpcheck.
        """
        data = parse(text)
        if not isinstance(data, dict) or data.get("kind") != "matrix":
            raise ValueError("this JSON is not a matrix of ddpcheck: it has no kind 'matrix'")
        matrix = read(cls, checked_version(data, "matrix"))
        rows = (replace(row, findings=tuple(map(without_rules_fix, row.findings))) for row in matrix.rows)
        return replace(matrix, rows=tuple(rows))
