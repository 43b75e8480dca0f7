"""The result of a check: `Finding` values in a `Report`, which goes to JSON and comes back the same."""

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
from ddpcheck.findings.from_json import added, parse, read
from ddpcheck.findings.replace import replace
from ddpcheck.findings.rules import RULES
from ddpcheck.findings.rules.rule import Severity as Severity

SCHEMA_VERSION = 1
_UNTOLD = 0.5  # a tolerance from which on a comparison tells nothing: the smallest fault that was measured is as large


@dataclass(frozen=True, slots=True)
class Finding:
    """One defect: a root cause, with its consequences as evidence.

    Attributes:
        code: Key into the rule table, for example "DDP101".
        subjects: Fully qualified names (parameters, buffers, modules, options), sorted by the detector.
        message: One sentence that says what is wrong, without markup or trailing newline.
        severity: Usually the rule's; a detector may choose another where the circumstances do.
        ranks: The ranks concerned; empty means every rank.
        steps: The steps concerned, counted from 0; empty means every step, or before the first.
        location: The line to edit, when known.
        evidence: One fact a line: numbers, places, consequences.
        fix: What to do, in this case; the rule's advice when empty.
        related: Other lines: where it was noticed, where a layer is made, where the loop is.
        path: Of a parameter, which stands for all subjects, to where it ends; None where it is not known.
        tags: Beyond the code, for code that decides which finding causes which: words of a detector, and the codes of
            findings that came with this one. Not in the JSON.
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
        """Worst first, then by code and subject, so that reports are stable."""
        return (self.severity.rank, self.code, self.subjects, self.ranks, self.steps, self.message)

    @property
    def places(self) -> tuple[Location, ...]:
        """The lines that it names, each once.

        They are where what cut its path begins, where the path ends, the line of the finding itself, and related ones.
        """
        path = self.path
        of_path = () if path is None else (path.begins_at, path.steps[-1].location if path.steps else None)
        places = (*of_path, self.location, *(one.location for one in self.related))
        return tuple(dict.fromkeys(place for place in places if place is not None))

    def relocated(self, location: Location | None, role: str = "noticed") -> Finding:
        """The finding at another line, if that is known; its own line becomes a related location."""
        if location in (None, self.location):
            return self
        own = () if self.location is None else (RelatedLocation(role, self.location),)
        others = tuple(one for one in self.related if one.location not in (location, self.location))
        return replace(self, location=location, related=(*own, *others))

    @property
    def what_to_do(self) -> str:
        """The finding's own `fix`, else that of its rule; empty for a code that this ddpcheck does not know."""
        rule = RULES.get(self.code)
        return self.fix or (rule.fix if rule is not None else "")

    @property
    def headline(self) -> str:
        """Its code, name and subjects, and what it says, on one line."""
        more = f" and {len(self.subjects) - 3} more" if len(self.subjects) > 3 else ""
        named = (self.code, getattr(RULES.get(self.code), "name", ""), ", ".join(self.subjects[:3]) + more)
        return " ".join(f"{' '.join(filter(None, named))}: {self.message}".split())


@dataclass(frozen=True, slots=True)
class AcceptedFinding:
    """A finding that is shown and does not count.

    Attributes:
        finding: What was found.
        by: A suppression of the configuration, or a baseline that knows it.
        reason: Why it does not count.
    """

    finding: Finding
    by: Literal["suppression", "baseline"]
    reason: str


CheckStatus = Literal["passed", "warned", "failed", "ignored", "skipped", "error"]
"""How a check ended.

`passed`: all was compared, and held. `warned`, `failed`: something did not hold, a finding says what. `ignored`: the
same, and no finding on it counts: ignored, not selected, suppressed or known. `skipped`: not all was compared.
`error`: it stopped here."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check of a report.

    Attributes:
        name: Of the check.
        status: How it ended.
        seconds: How long it took.
        detail: What was compared and held, or what did not hold, or why it was not compared.
        asked: Whether any of its rules is selected, and not ignored.
    """

    name: str
    status: CheckStatus
    seconds: float = 0.0
    detail: str = ""
    asked: bool = added(True)


@dataclass(frozen=True, slots=True)
class ParityEntry:
    """The difference of one gradient from one reference in one step.

    Attributes:
        step: Counted from 0.
        parameter: Fully qualified name.
        reference: "local" (the same shards without the reducer) or "single-process" (the global batch).
        relative_error: Frobenius norm of the difference, relative to the reference's scale.
        tolerance: What `relative_error` may be.
        absolute_error: Frobenius norm of the difference.
        reference_norm: Of the reference.
        elements: How many there are.
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
        """Whether the error is more than it may be; NaN is."""
        return not self.relative_error <= self.tolerance

    @property
    def tells(self) -> bool:
        """Whether the tolerance is so small that a gradient within it is known to be near its reference."""
        return self.tolerance < _UNTOLD

    @property
    def excess(self) -> float:
        """The error as a multiple of its tolerance; infinite for NaN."""
        if math.isnan(self.relative_error):
            return math.inf
        return self.relative_error / self.tolerance if self.tolerance > 0 else self.relative_error


@dataclass(frozen=True, slots=True)
class ReportError:
    """Why a report is not complete.

    Attributes:
        message: One sentence: what, where, what to do.
        exit_code: 3 when the target failed for a reason of its own, 4 after a hang.
        detail: The target's own traceback or output; may be empty.
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
    """Base of results that go to JSON and come back the same."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as `to_json` writes it."""
        return {"schema_version": SCHEMA_VERSION, **_plain(self)}

    def to_json(self, *, indent: int | None = 2) -> str:
        """The result as JSON; only the values under `seconds` and `timing` differ between two equal runs."""
        return json.dumps(
            self.to_dict(), indent=indent, sort_keys=True, ensure_ascii=False, allow_nan=False, default=str
        )


def _plain(value: Any) -> Any:
    """A value as JSON has it; a finding with the name of its rule and what to do."""
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if not dataclasses.is_dataclass(value):
        return value.value if isinstance(value, Severity) else value
    data = {one.name: _plain(getattr(value, one.name)) for one in dataclasses.fields(value)}
    if isinstance(value, Finding):
        rule = RULES.get(value.code)  # of a report that a newer version wrote there may be none
        del data["tags"]
        data.update(name=rule.name if rule is not None else "", fix=value.what_to_do)
    return data


@dataclass(frozen=True, slots=True, repr=False)
class Report(Document):
    """The result of checking one target. A renderer needs nothing else.

    Attributes:
        target: What was checked, as the user spelled it.
        environment: Versions and platform.
        world: World size, backend, device, steps, seed, timeout; `notes` holds sentences on how the check was run.
        checks: In the order in which they ran.
        findings: Sorted, worst first.
        ignored: The codes of findings that are not shown, since their rules are ignored or not selected; sorted.
        parity: Sorted by step, reference and parameter.
        timing: Seconds by phase.
        error: Set when the checks could not be finished.
        tool: Name and version of the tool that wrote the report.
        accepted: Findings that do not count: suppressed with a reason, or known from a baseline.
        modules: Those of the model, in the order of registration; not all of a large one.
        timelines: The last collectives of each process group, where ranks have failed or parted.
        curves: Numbers on the ranks and in a single process over time, of `ddpcheck run --check-parity`.
        excerpts: The source around the lines that findings name, as it was when the report was made.
        command: The command line that made it; empty where none did.
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
        """`hang` or `error` when the checks could not be finished; `clean` only where nothing is left to say."""
        if self.error is not None:
            return "hang" if self.error.exit_code == EXIT_HANG else "error"
        if self.findings:
            return "findings"
        if self.not_made:
            return "incomplete"
        return "ignored" if self.ignored or self.accepted else "clean"

    @property
    def not_made(self) -> tuple[str, ...]:
        """The names of the checks that were asked for and could not be made, or not in every step."""
        return tuple(check.name for check in self.checks if check.status in ("skipped", "error") and check.asked)

    @property
    def ok(self) -> bool:
        """Whether the checks were finished and found no error; `status` says whether all of them could be made."""
        return self.exit_code() == EXIT_CLEAN

    @property
    def summary(self) -> str:
        """The status in words."""
        if self.error is not None and not self.findings:
            return self.status
        if self.status == "clean":
            return "clean"
        found = f"{len(self.findings) or 'no'} finding{'' if len(self.findings) == 1 else 's'}"
        between = ", but " if self.not_made and not self.at_or_above(Severity.ERROR) else "; "
        ended = [one.name for one in self.checks if one.status == "error" and "not watched" in one.detail]
        before = f"{', '.join(ended)}: not watched to the end; " if ended else ""
        return before + between.join(filter(None, (found, self.shortfall)))

    @property
    def shortfall(self) -> str:
        """Why a report without findings is not clean, in words. Checks were not made, or findings do not count."""
        words = []
        if self.not_made and not self.at_or_above(Severity.ERROR):  # which would be the reason
            asked, were = sum(check.asked for check in self.checks), "was" if len(self.not_made) == 1 else "were"
            words.append(f"{len(self.not_made)} of {asked} checks {were} not made: {', '.join(self.not_made)}")
        by = {
            kind: [one.finding.code for one in self.accepted if one.by == kind] for kind in ("suppression", "baseline")
        }
        left_out = {"ignored": self.ignored, "suppressed": by["suppression"], "known": by["baseline"]}
        for how, codes in left_out.items():
            if codes:
                which = ", ".join(dict.fromkeys(codes))
                words.append(f"{len(codes)} finding{'' if len(codes) == 1 else 's'} {how} ({which})")
        return "; ".join(words)

    def with_excerpts(self) -> Report:
        """The same with the lines around those that its findings name, of files that are there now."""
        places = [place for finding in self.findings for place in finding.places]
        places += [place for timeline in self.timelines for _, _, place in timeline.sides()]
        return replace(self, excerpts=excerpts_of(places, folder_of(self.target)))

    def at_or_above(self, threshold: Severity) -> tuple[Finding, ...]:
        """The findings that are as bad as `threshold` or worse."""
        return tuple(finding for finding in self.findings if finding.severity.reaches(threshold))

    def exit_code(self, fail_on: Severity | None = Severity.ERROR) -> int:
        """The exit code of a command that made this report; `fail_on=None` never fails for findings."""
        if self.error is not None:
            return self.error.exit_code
        return EXIT_FINDINGS if fail_on is not None and self.at_or_above(fail_on) else EXIT_CLEAN

    def raise_for_findings(self, fail_on: Severity = Severity.ERROR) -> None:
        """Raise when the report is not good enough for a test.

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
        codes = ", ".join(dict.fromkeys(one.code for one in self.findings))
        return f"<Report on {self.target}: {self.summary}{f' ({codes})' if codes else ''}>"

    def __str__(self) -> str:
        """The report as text, without colour."""
        return self._rendered("text").rstrip("\n")

    def _repr_html_(self) -> str:
        """The page, as a notebook shows it."""
        page = self._rendered("html")
        return f'<iframe srcdoc="{html.escape(page)}" style="width: 100%; height: 40em; border: 0"></iframe>'

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report to a file, in the format of its extension: text, JSON, HTML, Markdown, SARIF or JUnit XML.

        Raises:
            UsageError: The extension is of no format.
            OSError: The file cannot be written.
        """
        form = importlib.import_module("ddpcheck.render").format_for(None, path=os.fspath(path))
        Path(path).write_text(self._rendered(form), encoding="utf-8", errors="backslashreplace")

    def _rendered(self, form: str) -> str:
        renderer = importlib.import_module("ddpcheck.render").renderer_for(form)  # which imports this module
        return str(renderer.render(self))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as `to_json` writes it."""
        return {**Document.to_dict(self), "status": self.status}

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Read what `to_json` wrote.

        Raises:
            ValueError: `text` is not a report, or was written by a newer ddpcheck.
        """
        report = read(cls, checked_version(parse(text), "report"))
        accepted = (replace(one, finding=without_rules_fix(one.finding)) for one in report.accepted)
        findings = tuple(map(without_rules_fix, report.findings))
        return replace(report, findings=findings, accepted=tuple(accepted))


def folder_of(target: str) -> Path | None:
    """The folder of the file that a target names: a script with its arguments, or a recipe in a file."""
    ends = [target.rpartition(":")[0], *(target[:end] for end, c in enumerate(target) if c == " "), target]
    return next((Path(one).parent for one in ends if os.path.isfile(one)), None)


def checked_version(data: Any, what: str) -> dict[str, Any]:
    """`data`, which is an object that this ddpcheck can read.

    Raises:
        ValueError: It is not.
    """
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version is None:
        raise ValueError(f"this JSON is not a ddpcheck {what}: it has no schema_version")
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise ValueError(f"this {what} has schema_version {str(version)[:40]}; this ddpcheck reads {SCHEMA_VERSION}")
    notes = data["world"].get("notes") if isinstance(data.get("world"), dict) else None
    if not isinstance(notes, list | str | None) or not all(isinstance(note, str) for note in notes or ()):
        raise ValueError("world.notes must be a list of strings")
    made: dict[str, Any] = data
    return made


def without_rules_fix(value: Finding) -> Finding:
    """A finding that was read, without the advice that is its rule's."""
    rule = RULES.get(value.code)
    return replace(value, fix="") if rule is not None and value.fix == rule.fix else value


def select_findings(
    findings: Iterable[Finding], *, select: Sequence[str] = (), ignore: Sequence[str] = ()
) -> tuple[Finding, ...]:
    """The findings whose code or name matches `select` (all when empty) and does not match `ignore`, sorted.

    A pattern is a code ("DDP101"), a prefix of one ("DDP1") or a rule's name ("unused-parameter"). Where both
    match, the longer pattern wins, so that `--ignore DDP1 --select DDP101` keeps DDP101.
    """
    kept = (finding for finding in findings if is_selected(finding.code, select, ignore))
    return tuple(sorted(kept, key=Finding.sort_key))


def is_selected(code: str, select: Sequence[str] = (), ignore: Sequence[str] = ()) -> bool:
    """Whether `select_findings` keeps the findings of a rule."""

    def longest(patterns: Sequence[str]) -> int:
        name = RULES[code].name
        fits = [p for p in patterns if p.lower() == name or code.startswith(p.upper())]
        return max((len(code) if p.lower() == name else len(p) for p in fits), default=-1)

    return longest(select) > longest(ignore) if select else longest(ignore) < 0
