"""Result of a check: a `Report` with `Finding` values, and its JSON round trip."""

from __future__ import annotations

import dataclasses
import html
import importlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ddpcheck.findings.errors import EXIT_CLEAN, EXIT_FINDINGS, EXIT_HANG, FindingsError
from ddpcheck.findings.figures import (
    CollectiveTimeline,
    ModuleEntry,
    ParameterPath,
    ParityCurve,
    SourceExcerpt,
    excerpts_of,
)
from ddpcheck.findings.figures import Location as Location
from ddpcheck.findings.figures import RelatedLocation as RelatedLocation
from ddpcheck.findings.from_json import added, build, parse
from ddpcheck.findings.replace import replace
from ddpcheck.findings.rules import RULES, is_selected
from ddpcheck.findings.rules import Severity as Severity

SCHEMA_VERSION = 1
_BLIND_TOLERANCE = 0.5  # a tolerance of this value or more detects nothing: the smallest measured fault has this size


@dataclass(frozen=True, slots=True)
class Finding:
    """One defect: a root cause, with its consequences as evidence.

    Attributes:
        code: Code of the rule, for example "DDP101".
        subjects: Fully qualified names (parameters, buffers, modules, options), sorted by the detector.
        message: One sentence that describes the defect, without markup or trailing newline.
        severity: Severity of the rule, unless the detector overrides it.
        ranks: Affected ranks; empty means every rank.
        steps: Affected steps, counted from 0; empty means every step, or before the first.
        location: Line to edit, if known.
        evidence: One fact per entry: numbers, lines, consequences.
        fix: Advice for this case; if empty, the advice of the rule.
        related: Other lines: where the defect was noticed, where a layer is constructed, where the loop is.
        path: Path of one parameter, as an example for all subjects, to its end; None if unknown.
        tags: Internal labels that decide which finding causes another: words of a detector, and codes of findings
            reported together. Not in the JSON.
    """

    code: str
    subjects: tuple[str, ...]
    message: str
    severity: Severity
    ranks: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    location: Location | None = None
    evidence: tuple[str, ...] = ()
    fix: str = ""
    related: tuple[RelatedLocation, ...] = added(())
    path: ParameterPath | None = field(default=None, metadata={"added": True})
    tags: tuple[str, ...] = field(default=(), repr=False, compare=False, metadata={"added": True})

    def sort_key(self) -> tuple[Any, ...]:
        """Return the sort key: worst severity first, then code and subjects."""
        return (self.severity.rank, self.code, self.subjects, self.ranks, self.steps, self.message)

    @property
    def places(self) -> tuple[Location, ...]:
        """All lines of the finding, without duplicates.

        In order: the line that caused a cut, the end of the path, the line of the finding, related lines.
        """
        path = self.path
        path_locations = () if path is None else (path.begins_at, path.steps[-1].location if path.steps else None)
        locations = (*path_locations, self.location, *(entry.location for entry in self.related))
        return tuple(dict.fromkeys(location for location in locations if location is not None))

    def relocated(self, location: Location | None, role: str = "noticed") -> Finding:
        """Return the finding moved to `location`; the old line becomes a related location."""
        if location in (None, self.location):
            return self
        old = () if self.location is None else (RelatedLocation(role, self.location),)
        others = tuple(entry for entry in self.related if entry.location not in (location, self.location))
        return replace(self, location=location, related=(*old, *others))

    @property
    def what_to_do(self) -> str:
        """Advice of the finding (`fix`), else of the rule; empty for an unknown code."""
        rule = RULES.get(self.code)
        return self.fix or (rule.fix if rule is not None else "")

    @property
    def headline(self) -> str:
        """Code, rule name, subjects and message on one line."""
        suffix = f" and {len(self.subjects) - 3} more" if len(self.subjects) > 3 else ""
        title = (self.code, getattr(RULES.get(self.code), "name", ""), ", ".join(self.subjects[:3]) + suffix)
        return " ".join(f"{' '.join(filter(None, title))}: {self.message}".split())


@dataclass(frozen=True, slots=True)
class AcceptedFinding:
    """Finding that is shown but not counted.

    Attributes:
        finding: The finding.
        by: Suppression in the configuration or in a source comment, or a baseline with the same finding.
        reason: Why the finding is not counted.
    """

    finding: Finding
    by: Literal["suppression", "baseline"]
    reason: str


CheckStatus = Literal["passed", "warned", "failed", "ignored", "skipped", "error"]
"""How a check ended.

`passed`: all was compared, and held. `warned`, `failed`: something did not hold, a finding says what. `ignored`: the
same, and no finding on it counts: ignored, not selected, suppressed or known. `skipped`: not all was compared.
`error`: the check stopped."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check of a report.

    Attributes:
        name: Name of the check.
        status: Outcome of the check.
        seconds: Duration of the check.
        detail: Compared values that matched, or the mismatch, or why nothing was compared.
        asked: True if any rule of the check is selected and not ignored.
    """

    name: str
    status: CheckStatus
    seconds: float = 0.0
    detail: str = ""
    asked: bool = added(True)


@dataclass(frozen=True, slots=True)
class ParityEntry:
    """Difference of one gradient from one reference in one step.

    Attributes:
        step: Index of the step, from 0.
        parameter: Fully qualified name.
        reference: "local" (the same shards without the reducer) or "single-process" (the global batch).
        relative_error: Frobenius norm of the difference, relative to the reference's scale.
        tolerance: Maximum allowed `relative_error`.
        absolute_error: Frobenius norm of the difference.
        reference_norm: Frobenius norm of the reference.
        elements: Number of elements of the gradient.
    """

    step: int
    parameter: str
    reference: str
    relative_error: float
    tolerance: float
    absolute_error: float = 0.0
    reference_norm: float = 0.0
    elements: int = 0

    @property
    def is_beyond(self) -> bool:
        """True if the error exceeds the tolerance, or is NaN."""
        return not self.relative_error <= self.tolerance

    @property
    def tells(self) -> bool:
        """True if the tolerance is small enough to detect a wrong gradient."""
        return self.tolerance < _BLIND_TOLERANCE

    @property
    def excess(self) -> float:
        """Error as a multiple of the tolerance; infinite for NaN."""
        if math.isnan(self.relative_error):
            return math.inf
        return self.relative_error / self.tolerance if self.tolerance > 0 else self.relative_error


@dataclass(frozen=True, slots=True)
class ReportError:
    """Error that stopped the checks.

    Attributes:
        message: One sentence: what, where, what to do.
        exit_code: 3 if the target failed, 4 after a hang.
        detail: Traceback or output of the target; may be empty.
    """

    message: str
    exit_code: int
    detail: str = ""


Status = Literal["clean", "findings", "incomplete", "ignored", "error", "hang"]
"""How a whole check ended.

`clean`: every check that was asked for was made, and held. `incomplete`: no findings, and some were not made.
`ignored`: no findings but those of rules that are ignored or not selected, and those that are `accepted`. `error`: the
checks could not be finished. `hang`: because ranks hung."""


class Document:
    """Base class of results with a JSON round trip."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, as written by `to_json`."""
        return {"schema_version": SCHEMA_VERSION, **_to_plain(self)}

    def to_json(self, *, indent: int | None = 2) -> str:
        """Return JSON; equal runs differ only under `seconds` and `timing`."""
        data = self.to_dict()
        return json.dumps(data, indent=indent, sort_keys=True, ensure_ascii=False, allow_nan=False, default=str)


def _to_plain(value: Any) -> Any:
    """Convert a value to JSON types; add rule name and advice to findings."""
    if isinstance(value, tuple | list):
        return [_to_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _to_plain(item) for key, item in value.items()}
    if not dataclasses.is_dataclass(value):
        return value.value if isinstance(value, Severity) else value
    data = {attribute.name: _to_plain(getattr(value, attribute.name)) for attribute in dataclasses.fields(value)}
    if isinstance(value, Finding):
        rule = RULES.get(value.code)  # None for a rule of a newer version
        del data["tags"]
        data.update(name=rule.name if rule is not None else "", fix=value.what_to_do)
    return data


@dataclass(frozen=True, slots=True, repr=False)
class Report(Document):
    """Result of checking one target; the only input of renderers.

    Attributes:
        target: The target, as spelled by the user.
        environment: Versions and platform.
        world: World size, backend, device, steps, seed, timeout; `notes` has sentences on how the check was run.
        checks: Checks in execution order.
        findings: Findings, worst first.
        ignored: Sorted codes of findings that are not shown, since the rule is ignored or not selected.
        parity: Gradient differences, sorted by step, reference and parameter.
        timing: Seconds by phase.
        error: Error that stopped the checks, or None.
        tool: Name and version of the tool that wrote the report.
        accepted: Findings that are not counted: suppressed with a reason, or known from a baseline.
        modules: Modules of the model in registration order; truncated for a large model.
        timelines: Last collectives of each process group, if ranks failed or diverged.
        curves: Metrics on the ranks and in a single process over time (`ddpcheck run --check-parity`).
        excerpts: Source around the lines of findings, as of the time of the report.
        command: Command line that made the report; may be empty.
    """

    target: str
    environment: Mapping[str, Any] = field(default_factory=dict)
    world: Mapping[str, Any] = field(default_factory=dict)
    checks: tuple[CheckResult, ...] = ()
    findings: tuple[Finding, ...] = ()
    ignored: tuple[str, ...] = added(())
    parity: tuple[ParityEntry, ...] = ()
    timing: Mapping[str, float] = field(default_factory=dict)
    error: ReportError | None = None
    tool: Mapping[str, str] = field(default_factory=dict)
    accepted: tuple[AcceptedFinding, ...] = added(())
    modules: tuple[ModuleEntry, ...] = added(())
    timelines: tuple[CollectiveTimeline, ...] = added(())
    curves: tuple[ParityCurve, ...] = added(())
    excerpts: tuple[SourceExcerpt, ...] = added(())
    command: str = added("")

    @property
    def status(self) -> Status:
        """Outcome of the whole check; `hang` or `error` if the checks were stopped."""
        if self.error is not None:
            return "hang" if self.error.exit_code == EXIT_HANG else "error"
        if self.findings:
            return "findings"
        if self.not_made:
            return "incomplete"
        return "ignored" if self.ignored or self.accepted else "clean"

    @property
    def not_made(self) -> tuple[str, ...]:
        """Names of selected checks that were skipped or stopped."""
        return tuple(check.name for check in self.checks if check.status in ("skipped", "error") and check.asked)

    @property
    def ok(self) -> bool:
        """True if the checks finished without errors; skipped checks show in `status`."""
        return self.exit_code() == EXIT_CLEAN

    @property
    def summary(self) -> str:
        """Status in words."""
        if self.error is not None and not self.findings:
            return self.status
        if self.status == "clean":
            return "clean"
        count_text = f"{len(self.findings) or 'no'} finding{'' if len(self.findings) == 1 else 's'}"
        separator = ", but " if self.not_made and not self.at_or_above(Severity.ERROR) else "; "
        stopped = [check.name for check in self.checks if check.status == "error" and "not watched" in check.detail]
        prefix = f"{', '.join(stopped)}: not watched to the end; " if stopped else ""
        return prefix + separator.join(filter(None, (count_text, self.shortfall)))

    @property
    def shortfall(self) -> str:
        """Checks that were not made and findings that are not counted, in words."""
        phrases = []
        if self.not_made and not self.at_or_above(Severity.ERROR):  # an error explains missing checks
            num_asked, verb = sum(check.asked for check in self.checks), "was" if len(self.not_made) == 1 else "were"
            phrases.append(f"{len(self.not_made)} of {num_asked} checks {verb} not made: {', '.join(self.not_made)}")
        suppressed = [entry.finding.code for entry in self.accepted if entry.by == "suppression"]
        known = [entry.finding.code for entry in self.accepted if entry.by == "baseline"]
        for reason, codes in (("ignored", self.ignored), ("suppressed", suppressed), ("known", known)):
            if codes:
                distinct = ", ".join(dict.fromkeys(codes))
                phrases.append(f"{len(codes)} finding{'' if len(codes) == 1 else 's'} {reason} ({distinct})")
        return "; ".join(phrases)

    def with_excerpts(self) -> Report:
        """Return a copy with source excerpts around the lines of findings and timelines."""
        locations = [location for finding in self.findings for location in finding.places]
        locations += [location for timeline in self.timelines for _, _, location in timeline.sides()]
        return replace(self, excerpts=excerpts_of(locations, folder_of(self.target)))

    def at_or_above(self, threshold: Severity) -> tuple[Finding, ...]:
        """Return the findings with severity `threshold` or worse."""
        return tuple(finding for finding in self.findings if finding.severity.reaches(threshold))

    def exit_code(self, fail_on: Severity | None = Severity.ERROR) -> int:
        """Return the exit code of the command; `fail_on=None` never fails for findings."""
        if self.error is not None:
            return self.error.exit_code
        return EXIT_FINDINGS if fail_on is not None and self.at_or_above(fail_on) else EXIT_CLEAN

    def raise_for_findings(self, fail_on: Severity = Severity.ERROR) -> None:
        """Raise an error for findings at or above `fail_on`, for tests.

        Raises:
            FindingsError: There is a finding at or above `fail_on`, or the checks could not be finished.
        """
        lines = [] if self.error is None else [self.error.message]
        for finding in self.at_or_above(fail_on):
            lines.append(finding.headline)
            lines.extend(f"  {fact}" for fact in finding.evidence)
        if lines:
            text = "\n".join(lines)
            raise FindingsError(f"ddpcheck on {self.target}: {text}", self.at_or_above(fail_on))

    def __repr__(self) -> str:
        codes = ", ".join(dict.fromkeys(finding.code for finding in self.findings))
        return f"<Report on {self.target}: {self.summary}{f' ({codes})' if codes else ''}>"

    def __str__(self) -> str:
        """Return the report as text, without colour."""
        return self._render("text").rstrip("\n")

    def _repr_html_(self) -> str:
        """Return the HTML page in an iframe, for notebooks."""
        page = self._render("html")
        return f'<iframe srcdoc="{html.escape(page)}" style="width: 100%; height: 40em; border: 0"></iframe>'

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write text, JSON, HTML, Markdown, SARIF or JUnit XML, by file extension.

        Raises:
            UsageError: The file extension is unknown.
            OSError: The file cannot be written.
        """
        form = importlib.import_module("ddpcheck.render").format_for(None, path=os.fspath(path))
        Path(path).write_text(self._render(form), encoding="utf-8", errors="backslashreplace")

    def _render(self, form: str) -> str:
        renderer = importlib.import_module("ddpcheck.render").renderer_for(form)  # imports this module
        return str(renderer.render(self))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, as written by `to_json`."""
        return {**Document.to_dict(self), "status": self.status}

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Read the output of `to_json`.

        Raises:
            ValueError: `text` is not a report, or was written by a newer ddpcheck.
        """
        report = build(cls, checked_version(parse(text), "report"))
        accepted = (replace(entry, finding=without_rules_fix(entry.finding)) for entry in report.accepted)
        findings = tuple(map(without_rules_fix, report.findings))
        return replace(report, findings=findings, accepted=tuple(accepted))


def folder_of(target: str) -> Path | None:
    """Return the folder of a target (script with arguments, or recipe in a file)."""
    candidates = [target.rpartition(":")[0], *(target[:end] for end, c in enumerate(target) if c == " "), target]
    return next((Path(path).parent for path in candidates if os.path.isfile(path)), None)


def checked_version(data: Any, what: str) -> dict[str, Any]:
    """Return parsed JSON `data` if this version can read it, or raise `ValueError`."""
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version is None:
        raise ValueError(f"this JSON is not a ddpcheck {what}: it has no schema_version")
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise ValueError(f"this {what} has schema_version {str(version)[:40]}; this ddpcheck reads {SCHEMA_VERSION}")
    notes = data["world"].get("notes") if isinstance(data.get("world"), dict) else None
    if not isinstance(notes, list | str | None) or not all(isinstance(note, str) for note in notes or ()):
        raise ValueError("world.notes must be a list of strings")
    result: dict[str, Any] = data
    return result


def without_rules_fix(value: Finding) -> Finding:
    """Return the finding without a `fix` that equals the advice of its rule."""
    rule = RULES.get(value.code)
    return replace(value, fix="") if rule is not None and value.fix == rule.fix else value


def select_findings(
    findings: Iterable[Finding], *, select: Sequence[str] = (), ignore: Sequence[str] = ()
) -> tuple[Finding, ...]:
    """Return the findings that match `select` (all if empty) and not `ignore`, sorted.

    A pattern is a code ("DDP101"), a code prefix ("DDP1") or a rule name ("unused-parameter"). If both match, the
    longer pattern wins: `--ignore DDP1 --select DDP101` keeps DDP101.
    """
    kept = (finding for finding in findings if is_selected(finding.code, select, ignore))
    return tuple(sorted(kept, key=Finding.sort_key))
