"""Result of `check_matrix`: one row per combination of DDP options, and advice.

Advice says which options a model needs, which are safe, wrong, or cost time for nothing: a pure function of the rows.
Rows of variant steps (compiled, or in micro-batches) are pure functions of the ranks' results from `matrix_phases`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from msgspec import Struct

from ddpcheck.findings.errors import EXIT_CLEAN, EXIT_FINDINGS
from ddpcheck.findings.evidence.gradients import Difference
from ddpcheck.findings.from_json import added, parse, read
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Document, Finding, ReportError, Severity, checked_version, without_rules_fix
from ddpcheck.findings.rules import RULES
from ddpcheck.findings.wording import join_names
from ddpcheck.report.matrix.option_sets import DEFAULTS, FIND_UNUSED, DDPOptions

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
        ratio: Median over the pairs of the row's time divided by the baseline's.
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
        """Return True if the difference from the baseline exceeds `noise` and chance."""
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
        """Arguments and hook together."""
        return DDPOptions(self.arguments, self.hook)

    @property
    def title(self) -> str:
        """Name of the row."""
        return self.label or str(self.options)

    @property
    def fine(self) -> bool:
        """Return True if the model trains correctly, as far as compared."""
        return self.verdict in ("right", "lossy", "incomplete")

    @property
    def what_to_do(self) -> str:
        """Fix of the finding that decides the verdict; empty if none does."""
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
    """One sentence of advice, and its kind."""

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
        noise: Relative deviation of the baseline's step time from itself; None if not measured.
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
        """Return the exit code of the recipe's own options; other rows are advice."""
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
        matrix = read(cls, checked_version(data, "matrix"))
        rows = (replace(row, findings=tuple(map(without_rules_fix, row.findings))) for row in matrix.rows)
        return replace(matrix, rows=tuple(rows))


_NEEDLESS = "DDP109"
_NEVER_TRAINED = ("DDP101", "DDP102")


def advise(rows: Sequence[MatrixRow], *, noise: float | None = None) -> tuple[Advice, ...]:
    """Return advice on the rows, most important first; `noise` as in `Matrix`."""
    rows = [row for row in rows if row.own or not row.label]  # sharded rows have none of these options
    own_row = next((row for row in rows if row.own), None)
    if own_row is None:
        return ()
    advice = [_on_own(own_row)] if own_row.verdict != "skipped" else []
    noise = noise or 0.0
    tried = [row for row in rows if row.verdict != "skipped"]
    fine = [row for row in tried if row.fine]
    defaults = next((row for row in tried if not row.label and row.options == DEFAULTS), None)
    if not fine:
        advice += _on_fault(tried, own_row)
    elif defaults is not None and not defaults.fine:
        advice += _on_needs(defaults, fine, said=defaults.own)
    if fine:
        advice += _on_wrong(tried, fine)
        advice += _on_fine(fine, noise)
    return tuple(advice)


def _on_own(own: MatrixRow) -> Advice:
    setup = "as the recipe wraps it" if own.label else f"with the recipe's own options ({own.options})"
    if own.verdict == "incomplete":
        return Advice("own", f"Nothing is wrong with the model {setup}, but {own.reason}.")
    if own.fine:
        rounding = f", up to the rounding of its hook ({own.error:.1e})" if own.verdict == "lossy" and own.error else ""
        return Advice("own", f"The model is right {setup}{rounding}.")
    verb = "stops" if own.verdict == "stops" else "trains to the end and is wrong"
    return Advice("own", f"The model {verb} {setup}: {_because(own)}")


def _because(row: MatrixRow) -> str:
    text = " ".join(filter(None, (row.code, row.reason)))
    return text if text.endswith(".") else f"{text}."


def _on_fault(tried: Sequence[MatrixRow], own: MatrixRow) -> Iterator[Advice]:
    if len(tried) > 1:
        codes = join_names(list(dict.fromkeys(row.code for row in tried if row.code)), most=5)
        kind = f"is not mended by any option ({codes} under all of them)" if codes else "is under all options"
        fix = f" {own.what_to_do}" if own.what_to_do else ""
        yield Advice("fault", f"The fault {kind}.{fix}")


def _on_needs(defaults: MatrixRow, fine: Sequence[MatrixRow], *, said: bool) -> Iterator[Advice]:
    least = min(len(row.arguments) for row in fine)
    options = [str(row.options) for row in fine if len(row.arguments) == least and not row.hook and not row.label]
    if options:
        verb = "stops" if defaults.verdict == "stops" else "is wrong"
        reason = "." if said else f": without, it {verb}: {_because(defaults)}"
        choices = " or ".join(filter(None, (", ".join(options[:-1]), options[-1])))
        yield Advice("needs", f"It needs {choices}{reason}")
        if defaults.code in _NEVER_TRAINED:
            yield Advice(
                "needs", f"It avoids the error of DDP, but trains nothing more. To fix that: {defaults.what_to_do}"
            )


def _on_wrong(tried: Sequence[MatrixRow], fine: Sequence[MatrixRow]) -> Iterator[Advice]:
    """Yield advice on rows that fail although fewer options are right."""
    for row in tried:
        simpler = [candidate for candidate in fine if not candidate.label and _is_less(candidate, row)]
        if simpler and not (row.fine or row.label or row.own):
            nearest = max(simpler, key=lambda candidate: len(candidate.arguments))
            verb = "stops it" if row.verdict == "stops" else "is wrong for it"
            yield Advice("wrong", f"{_added(row, nearest)} {verb}: {_because(row)}")


def _is_less(less: MatrixRow, more: MatrixRow) -> bool:
    """Return True if the options of `less` are part of those of `more`."""
    within = all(more.arguments.get(name) == value for name, value in less.arguments.items())
    return within and less.hook in ("", more.hook) and less.options != more.options


def _on_fine(fine: Sequence[MatrixRow], noise: float) -> Iterator[Advice]:
    """Yield advice on options that cost, gain, warn, or make no measurable difference."""
    costs, gains, warns = [], [], []
    safe: list[str] = []
    lossy: list[str] = []
    expected = _warnings(fine[0])
    for row in fine:
        ratio, takes = _step_time(row, noise)
        rounds = f"rounds gradients by up to {row.error:.1e}" if row.verdict == "lossy" and row.error else ""
        right = "right in all that was compared" if row.verdict == "incomplete" else "right"
        warnings = {code: message for code, message in _warnings(row).items() if code not in expected}
        needless = any(finding.code == _NEEDLESS for finding in row.findings)
        if needless and (row.options == FIND_UNUSED or row.own):  # otherwise reported once, for the option by itself
            cost = f"; {takes} here" if ratio > 1 else ""
            costs.append(f"{row.title} is needless: every parameter contributes in every step on every rank{cost}.")
        elif ratio > 1 and not needless:
            costs.append(f"{row.title} is {right} and slower: {takes}.")
        elif ratio < 1:
            gains.append((ratio, f"{row.title} is faster{f' and {rounds}' if rounds else ''}: {takes}."))
        if row.own or row.baseline or needless:
            continue
        if warnings:
            words = " ".join(f"{code}: {message}" for code, message in warnings.items())
            warns.append(f"{row.title} is {right}, with a warning: {words}")
        elif ratio == 1:
            (lossy if rounds else safe).append(f"{row.title} ({rounds})" if rounds else row.title)
    yield from (Advice("costs", text) for text in costs)
    yield from (Advice("gains", text) for _, text in sorted(gains, key=lambda gain: gain[0]))
    yield from (Advice("warns", text) for text in warns)
    tail = ", and without a measurable difference in step time" if any(row.step_time for row in fine) else ""
    if safe:
        yield Advice("safe", f"Safe{tail}: {'; '.join(safe)}.")
    if lossy:
        yield Advice("lossy", f"Right except for rounding{tail}: {'; '.join(lossy)}.")


def _step_time(row: MatrixRow, noise: float) -> tuple[float, str]:
    """Return the step time ratio (1 if not measurably different) and its description."""
    time = row.step_time
    if time is None or not time.differs(noise):
        return 1.0, ""
    return time.ratio, f"a step takes {time.ratio:.2f} times as long ({time.low:.2f} to {time.high:.2f})"


def _warnings(row: MatrixRow) -> dict[str, str]:
    return {finding.code: finding.message for finding in row.findings if finding.severity is Severity.WARNING}


def _added(row: MatrixRow, base: MatrixRow) -> str:
    extra = {name: value for name, value in row.arguments.items() if name not in base.arguments}
    parts = [f"{name}={value!r}" for name, value in extra.items()] + ([row.hook] if row.hook != base.hook else [])
    suffix = "" if base.options == DEFAULTS else f" on top of {base.options}"
    return f"{', '.join(parts) or row.title}{suffix}"


BACKEND = "aot_eager"
"""`torch.compile` backend without inductor, which needs a C++ compiler and is much slower."""

COMPILED = f'torch.compile(backend="{BACKEND}")'
MICRO_BATCHES = 2
UNSYNCED = f"{MICRO_BATCHES} micro-batches, no_sync in the first"
SYNCED = f"{MICRO_BATCHES} micro-batches, each synchronised"


class VariantFacts(Struct, frozen=True):
    """Facts of a rank before its compiled or micro-batched steps."""

    not_compiled: str = ""  # why the module cannot or need not be compiled; empty if it can
    not_split: str = ""  # why the batch cannot be split; empty if it can
    apart: tuple[Difference, ...] = ()  # gradients of the micro-batches compared with the whole batch


class VariantStep(Struct, frozen=True):
    """Compiled or micro-batched step of one rank, compared with the plain step."""

    gradients: Mapping[str, int]  # fingerprints of `.grad` by parameter name
    differences: tuple[Difference, ...] = ()  # gradient differences from the plain step
    drew: bool = False  # True if random numbers were drawn
    graphs: int = -1  # graphs compiled for the step; -1 if none expected, or unknown in this torch


def skipped(facts: Sequence[VariantFacts], title: str) -> str:
    """Return why any rank skips a variant; empty if none does."""
    reasons = (entry.not_compiled if title == COMPILED else entry.not_split for entry in facts)
    return next(filter(None, reasons), "")


def judged_parts(facts: Sequence[VariantFacts], options: DDPOptions, label: str) -> MatrixRow | None:
    """Return the row of micro-batches whose gradients differ even without DDP, else `None`."""
    if (worst := _worst([entry.apart for entry in facts])) is None:
        return None
    reason = (
        f"even without DDP, the gradients of {MICRO_BATCHES} micro-batches, whose losses are divided by "
        f"{MICRO_BATCHES}, differ from those of the whole batch ({worst}): the loss is not a mean over samples"
    )
    return MatrixRow(options.arguments, "wrong", hook=options.hook, label=label, code="DDP514", reason=reason)


def judged_step(steps: Sequence[VariantStep], options: DDPOptions, label: str) -> MatrixRow:
    """Return the row of a variant step that all ranks ran."""
    row = partial(MatrixRow, options.arguments, hook=options.hook, label=label)
    if any(step.graphs == 0 for step in steps):
        return row("incomplete", reason="torch.compile has compiled nothing of it")
    if any(step.gradients != steps[0].gradients for step in steps):
        return row("wrong", code="DDP301", reason="the gradients differ between ranks")
    error = max((difference.error for step in steps for difference in step.differences), default=None)
    worst = _worst([step.differences for step in steps])
    if worst is None:
        return row("right", error=error)
    if any(step.drew for step in steps):
        return row("incomplete", reason="its random numbers differ in micro-batches, so its gradients are not compared")
    reason = f"through the wrapper, these gradients differ from those of the whole batch ({worst})"
    return row("wrong", code="DDP302", reason=reason, error=error)


def _worst(differences: Sequence[Sequence[Difference]]) -> Difference | None:
    bad = [difference for items in differences for difference in items if difference.bad]
    return max(bad, key=lambda difference: difference.error, default=None)
