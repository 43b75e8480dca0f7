"""Selection of findings that count: rules, suppressions with a reason, and a baseline."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from fnmatch import fnmatchcase

from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.figures import excerpts_of
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import AcceptedFinding, Finding, Report, folder_of, select_findings
from ddpcheck.findings.rules import is_selected, matching_rules
from ddpcheck.findings.wording import join_names, plural

_COMMENT = re.compile(r"#\s*ddpcheck:\s*ignore\[(?P<codes>[^\]]*)\](?P<reason>.*)")
Mark = tuple[str, str, str]  # code, file and one subject of a finding


@dataclass(frozen=True, slots=True)
class Suppression:
    """Pattern for findings that are accepted with a reason, and not counted.

    Attributes:
        rule: Rule code, code prefix or rule name.
        reason: Reason, shown in each affected report.
        parameter: Pattern such as "aux.*" for the subjects of a finding: parameters, buffers, modules or options.
        target: Pattern for the target as spelled by the user, with or without ":attr" or script arguments.
        file: Pattern for the file of a finding, as shown in the report.
        code: Deprecated: another name of `rule`.
    """

    rule: str = ""
    reason: str = ""
    parameter: str = "*"
    target: str = "*"
    file: str = "*"
    code: InitVar[str] = ""

    def __post_init__(self, code: str) -> None:
        if code:
            warnings.warn("Suppression(code=) is deprecated: use rule=", DeprecationWarning, stacklevel=3)
            object.__setattr__(self, "rule", code)
        for name in ("rule", "reason", "parameter", "target", "file"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value.strip():
                raise UsageError(f"{name} of a suppression must be a text that is not empty, not {value!r}")
        matching_rules(self.rule)

    def __str__(self) -> str:
        pattern = f" for {self.parameter!r}" if self.parameter != "*" else ""
        return f"{self.rule}{pattern}{f' in {self.file!r}' if self.file != '*' else ''}"

    @property
    def codes(self) -> frozenset[str]:
        """Codes of the matching rules."""
        return frozenset(rule.code for rule in matching_rules(self.rule))

    def applies_to(self, target: str) -> bool:
        """Check if `target` matches the pattern."""
        path = target.split("::")[0].split(" ")[0].removeprefix("./")
        names = {target, path, path.rpartition(":")[0] or path}
        return any(fnmatchcase(name, self.target.removeprefix("./")) for name in names)

    def matched(self, finding: Finding) -> frozenset[str]:
        """Return the matching subjects; {""} if a finding without subjects matches."""
        path = finding.location.path if finding.location else ""
        if finding.code not in self.codes or not fnmatchcase(path, self.file):
            return frozenset()
        subjects = finding.subjects or ("",)
        return frozenset(subject for subject in subjects if fnmatchcase(subject, self.parameter))


@dataclass(frozen=True, slots=True)
class Selection:
    """Findings, split into counted, ignored and accepted."""

    kept: tuple[Finding, ...]  # findings that count
    ignored: tuple[str, ...] = ()  # codes of findings whose rules are ignored or not selected
    accepted: tuple[AcceptedFinding, ...] = ()  # findings that are suppressed, or known from the baseline
    loose: tuple[str, ...] = ()  # one sentence per suppression or source comment that suppressed no finding
    gone: tuple[str, ...] = ()  # sentences on a baseline of another target, and on baseline findings not found again

    def complete(self, report: Report) -> Report:
        """Return `report` with this selection's findings; note unused suppressions if all checks ran."""
        report = replace(report, findings=self.kept, ignored=self.ignored, accepted=self.accepted)
        if report.error is not None or report.not_made or not (self.loose or self.gone):
            return report
        notes = [*report.world.get("notes", ()), *self.loose, *self.gone]
        return replace(report, world={**report.world, "notes": notes})


def sort_out(
    findings: Sequence[Finding],
    target: str,
    *,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    suppress: Sequence[Suppression] = (),
    baseline: Report | None = None,
) -> Selection:
    """Split findings into counted, ignored and accepted.

    A finding is suppressed if suppressions of its code match every subject, or if its source line has a comment
    `# ddpcheck: ignore[CODE] reason`. A finding is known if the baseline has, for each of the subjects, a finding with
    the same code and file that is at least as severe.
    """
    chosen = select_findings(findings, select=select, ignore=ignore)
    rules = [rule for rule in suppress if rule.applies_to(target)]
    known = marks([*baseline.findings, *(item.finding for item in baseline.accepted)]) if baseline is not None else {}
    kept, accepted, useless = [], [], []
    for finding in chosen:
        reason, note = _reason_in_source(finding, target)
        useless.append(note)
        used = [rule for rule in rules if rule.matched(finding)]
        if used and frozenset[str]().union(*(rule.matched(finding) for rule in used)) >= set(finding.subjects or ("",)):
            reason = "; ".join(dict.fromkeys(rule.reason for rule in used))
        if reason:
            accepted.append(AcceptedFinding(finding, "suppression", reason))
        elif is_known(finding, known):
            accepted.append(AcceptedFinding(finding, "baseline", "in the baseline"))
        else:
            kept.append(finding)
    hidden = [finding.code for finding in findings if finding not in chosen]
    unmatched = _mismatches(baseline, findings, target, hidden) if baseline is not None else ()
    unused = (
        _note_on_suppression(rule, findings, kept)
        for rule in rules
        if all(is_selected(c, select, ignore) for c in rule.codes)
    )
    sentences = dict.fromkeys(filter(None, (*useless, *unused)))
    return Selection(tuple(kept), tuple(sorted(hidden)), tuple(accepted), tuple(sentences), tuple(unmatched))


def _reason_in_source(finding: Finding, target: str) -> tuple[str, str]:
    """Return (reason, "") of an ignore comment, or ("", why not applied)."""
    location = finding.location
    excerpt = next(iter(excerpts_of([location], folder_of(target))), None)
    comment = _COMMENT.search(excerpt.lines[location.line - excerpt.first]) if location and excerpt else None
    if comment is None:
        return "", ""
    patterns = [pattern.strip() for pattern in comment["codes"].split(",")]
    try:
        codes = {rule.code for pattern in patterns for rule in matching_rules(pattern)}
    except UsageError as error:
        return "", f"the comment at {location} is not applied: {error}"
    if finding.code not in codes:
        return "", f"the comment at {location} ignores {join_names(patterns)}, and the finding there is {finding.code}"
    if not comment["reason"].strip():
        return "", f"the comment at {location} is not applied: write the reason behind ignore[{comment['codes']}]"
    return comment["reason"].strip(), ""


def _note_on_suppression(suppression: Suppression, findings: Sequence[Finding], kept: Sequence[Finding]) -> str:
    """Return why a suppression had no effect, or "" if it suppressed a finding."""
    matched = [finding for finding in findings if suppression.matched(finding)]
    if not matched:
        return f"the suppression of {suppression} matched no finding of this check"
    if any(finding not in kept for finding in matched):
        return ""
    first = matched[0]
    unmatched = [subject for subject in first.subjects if subject not in suppression.matched(first)]
    return (
        f"the suppression of {suppression} does not match {join_names(unmatched)}, which {first.code} is about as "
        "well, so the finding counts"
    )


def finding_key(finding: Finding) -> tuple[str, str, tuple[str, ...]]:
    """Return code, file and subjects, which identify a finding even after unrelated edits."""
    return finding.code, finding.location.path if finding.location else "", finding.subjects


def marks(findings: Iterable[Finding]) -> dict[Mark, int]:
    """Map each mark (code, file, subject) of findings to its worst severity (0: error)."""
    worst_ranks: dict[Mark, int] = {}
    for finding in findings:
        code, path, subjects = finding_key(finding)
        for subject in subjects or ("",):
            mark = (code, path, subject)
            worst_ranks[mark] = min(worst_ranks.get(mark, finding.severity.rank), finding.severity.rank)
    return worst_ranks


def is_known(finding: Finding, known: Mapping[Mark, int]) -> bool:
    """Check if `known` has each (code, file, subject) of `finding`, at least as severe."""
    return all(known.get(mark, 99) <= rank for mark, rank in marks([finding]).items())


def _mismatches(baseline: Report, findings: Sequence[Finding], target: str, hidden: Sequence[str]) -> Iterable[str]:
    if baseline.target != target:
        yield f"the baseline was made of {baseline.target}"
    if fixed := not_found(baseline.findings, findings, hidden):
        listed = "; ".join(f"{finding.code} {join_names(finding.subjects)}".strip() for finding in fixed[:5])
        suffix = f" and {len(fixed) - 5} more" if len(fixed) > 5 else ""
        yield f"{plural(len(fixed), 'finding')} of the baseline not found any more: {listed}{suffix}"


def not_found(before: Sequence[Finding], now: Sequence[Finding], hidden: Sequence[str]) -> tuple[Finding, ...]:
    """Return findings of `before` without a (code, file, subject) in `now`; skip `hidden` codes."""
    current = marks(now)
    return tuple(old for old in before if old.code not in hidden and not any(mark in current for mark in marks([old])))
