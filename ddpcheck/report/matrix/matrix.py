"""Result of `check_matrix`: one row per combination of DDP options, and advice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ddpcheck.findings.errors import EXIT_CLEAN, EXIT_FINDINGS
from ddpcheck.findings.from_json import added, build, parse
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Document, Finding, ReportError, Severity, checked_version, without_rules_fix
from ddpcheck.findings.rules import RULES
from ddpcheck.report.matrix.option_sets import DDPOptions

Verdict = Literal["right", "lossy", "incomplete", "wrong", "stops", "skipped"]
"""Effect of options on a model.

`right`: all was compared, without errors. `lossy`: right except for rounding by a communication hook. `incomplete`: no
errors reported, but not all was compared or errors are ignored. `wrong`: trains to the end with a wrong result.
`stops`: DDP raises, hangs or aborts. `skipped`: not judged, see `MatrixRow.reason`."""

_COUNTED = ("right", "lossy", "incomplete", "wrong", "stops")

LEAST_DIFFERENCE = 0.02
"""Relative difference in step time that is ignored, however precise the measurement."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Step time relative to the baseline row, measured in alternating pairs.

    Attributes:
        ratio: Median over the pairs of the row's time divided by the baseline row's time.
        low: Lower end of the 99 % interval of the median.
        high: Upper end of the interval.
        seconds: Median time of the row's steps, on the slowest rank.
        pairs: Number of timed pairs.
    """

    ratio: float
    low: float
    high: float
    seconds: float
    pairs: int

    def differs(self, noise: float) -> bool:
        """Return True if the difference from the baseline exceeds `noise` and is statistically significant."""
        return abs(self.ratio - 1) > max(noise, LEAST_DIFFERENCE) and not self.low <= 1 <= self.high


@dataclass(frozen=True, slots=True)
class MatrixRow:
    """Result for a model under one combination of options.

    Attributes:
        arguments: `DistributedDataParallel` arguments that differ from torch's defaults, without arguments that the
            matrix leaves as in the recipe.
        hook: Communication hook of torch that is registered in addition; empty for none.
        verdict: See `Verdict`.
        own: True for the recipe's own options.
        baseline: True if step times are relative to this row.
        label: Title of a row with unknown options; empty if the options are known.
        code: Code of the finding that decides the verdict; empty if right or skipped.
        reason: Message of that finding, or why the row was skipped, stopped or not fully compared.
        error: Largest relative gradient error against the average of the ranks' own gradients, if compared.
        step_time: None if not measured.
        findings: All findings under these options, worst first.
        failure: Error if the row could not be finished.
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
    def options(self) -> DDPOptions:
        """DDP arguments and communication hook of the row, as one object."""
        return DDPOptions(self.arguments, self.hook)

    @property
    def title(self) -> str:
        """Text that names the row: its options, or `label` if they are unknown."""
        return self.label or str(self.options)

    @property
    def fine(self) -> bool:
        """Return True if the model trains correctly, as far as compared."""
        return self.verdict in ("right", "lossy", "incomplete")

    @property
    def what_to_do(self) -> str:
        """Fix of the finding that decides the verdict; empty if no finding decides it."""
        fix = next((finding.what_to_do for finding in self.findings if finding.code == self.code), "")
        return fix or (RULES[self.code].fix if self.code in RULES else "")

    def exit_code(self, fail_on: Severity | None = Severity.ERROR) -> int:
        """Return the exit code of a check under these options."""
        if self.failure is not None:
            return self.failure.exit_code
        fails = fail_on is not None and any(finding.severity.reaches(fail_on) for finding in self.findings)
        return EXIT_FINDINGS if fails else EXIT_CLEAN


AdviceKind = Literal["own", "needs", "fault", "wrong", "costs", "gains", "warns", "safe", "lossy"]
"""Kind of advice. `own`: on the recipe's own options. `needs`: required options. `fault`: no options are right.
`wrong`: options that fail. `costs`: right, but slower or needless. `gains`: right and faster. `warns`: right, with a
further warning. `safe`: right, without a measurable difference. `lossy`: safe, except for a hook's rounding."""


@dataclass(frozen=True, slots=True)
class Advice:
    """One sentence of advice on DDP options, and its kind (`AdviceKind`)."""

    kind: AdviceKind
    message: str


@dataclass(frozen=True, slots=True)
class Matrix(Document):
    """Result of trying DDP options on one target, complete for rendering.

    Attributes:
        target: Target as the user spelled it.
        rows: Rows, the recipe's own options first; empty if the target could not be run at all.
        advice: Advice that follows from the rows.
        environment: Versions and platform.
        world: World size, backend, device, steps, seed, timeout; `notes` has sentences on how the rows were run.
        noise: Relative difference in step time if the baseline is compared with itself; None if not measured.
        timing: Seconds by phase.
        error: Set if no row could be run, for a reason independent of the options.
        tool: Name and version of the tool that wrote the matrix.
        command: Command line that made the matrix; empty if none.
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
        """Row with the recipe's own options."""
        return next((row for row in self.rows if row.own), None)

    @property
    def ok(self) -> bool:
        """Return True if the model is right under the recipe's own options."""
        return self.exit_code() == EXIT_CLEAN

    @property
    def summary(self) -> str:
        """Number of rows by verdict, in words."""
        counts = {name: sum(row.verdict == name for row in self.rows) for name in _COUNTED}
        text = ", ".join(f"{number} {name}" for name, number in counts.items() if number)
        skipped = len(self.rows) - sum(counts.values())
        ran = f"{sum(counts.values())} combinations of options: {text}"
        return f"{ran}{f', and {skipped} not run' if skipped else ''}" if text else "no combination could be run"

    def exit_code(self, fail_on: Severity | None = Severity.ERROR) -> int:
        """Return the exit code under the recipe's own options; other rows are only advice."""
        if self.error is not None:
            return self.error.exit_code
        return EXIT_CLEAN if self.own is None else self.own.exit_code(fail_on)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, as written by `to_json`."""
        return {**Document.to_dict(self), "kind": "matrix"}

    @classmethod
    def from_json(cls, text: str) -> Matrix:
        """Read a matrix written by `to_json`.

        Raises:
            ValueError: `text` is not a matrix, or was written by a newer ddpcheck.
        """
        data = parse(text)
        if not isinstance(data, dict) or data.get("kind") != "matrix":
            raise ValueError("this JSON is not a matrix of ddpcheck: it has no kind 'matrix'")
        matrix = build(cls, checked_version(data, "matrix"))
        rows = (replace(row, findings=tuple(map(without_rules_fix, row.findings))) for row in matrix.rows)
        return replace(matrix, rows=tuple(rows))
