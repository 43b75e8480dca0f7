"""Looking at reports in tests."""

import json
from collections.abc import Sequence
from typing import Any

from ddpcheck.findings.report import Finding, Report
from ddpcheck.findings.rules import Severity


def shown(report: Report) -> str:
    """What a reader of a failed test wants to see."""
    lines = [f"{f.code} {f.severity.value} {f.subjects} ranks {f.ranks}: {f.message}" for f in report.findings]
    lines += [f"{c.name}: {c.status} {c.detail}" for c in report.checks]
    return "\n".join([report.status, *lines, str(report.error)])


def only(findings: Sequence[Finding]) -> Finding:
    """The one finding that there is."""
    assert len(findings) == 1, findings
    return findings[0]


def codes(findings: Sequence[Finding]) -> list[str]:
    return [finding.code for finding in findings]


def assert_says(findings: Sequence[Finding], words: str) -> None:
    """Assert that the only finding has all words between " ... ", and none behind "not "; no words: no finding.

    "at train.py:3" alone is its location.
    """
    assert len(findings) == bool(words), findings
    for finding in findings:
        head = f"{finding.code} {finding.severity.value} {finding.subjects} of ranks {finding.ranks}"
        text = f"{head} at {finding.location} in steps {finding.steps}: {finding.message}"
        text = " | ".join((text, *finding.evidence, *map(str, finding.related), finding.what_to_do))
        for part in words.split(" ... "):
            if part.startswith("at ") and " " not in part[3:]:
                assert part == f"at {finding.location}", text
            else:
                assert (part.removeprefix("not ") in text) != part.startswith("not "), (part, text)


REFERENCES = {"reducer": "local", "parity": "single-process"}


def contradictions(report: Report) -> list[str]:
    """Where a line, the summary or the status of a report says something else than the rest of it."""
    found = []
    for check in report.checks:
        line = f"{check.name} is {check.status} ({check.detail})"
        entries = [entry for entry in report.parity if entry.reference == REFERENCES.get(check.name)]
        beyond = [entry for entry in entries if not entry.relative_error <= entry.tolerance]
        told = [entry for entry in entries if entry.reference_norm or entry.absolute_error]
        if beyond and check.status not in ("warned", "failed", "ignored", "error"):
            found.append(f"{line}, and {len(beyond)} gradients are beyond their tolerance")
        if check.status == "passed" and check.name in REFERENCES:
            number = int(check.detail.partition(" ")[0])
            steps = {entry.step for entry in entries}
            compared = (
                told
                if "equal each other" in check.detail
                else [e for e in told if e.tolerance < 0.5 or e.relative_error <= 0.01]
            )
            if number != len(compared) or len(steps) != report.world["steps"]:
                found.append(f"{line}, and {len(told)} gradients were compared in steps {sorted(steps)}")
        if check.status in ("warned", "failed") and not report.findings:
            found.append(f"{line}, and there is no finding")
        if not check.detail:
            found.append(f"{line} without a word")
        if check.status == "error" and report.error is None:
            found.append(f"{line}, and nothing has stopped")
    statuses = {check.status for check in report.checks if check.asked}
    if report.status == "clean" and (statuses != {"passed"} or report.ignored or report.findings):
        found.append(f"clean, with checks that are {statuses}, and {report.ignored} ignored")
    if report.error is None and ("no findings" in report.summary or report.summary == "clean") == bool(report.findings):
        found.append(f"{report.summary!r} with {len(report.findings)} findings")
    if report.error is None and report.exit_code() != int(bool(report.at_or_above(Severity.ERROR))):
        found.append(f"exit code {report.exit_code()}")
    return found


def assert_healthy(report: Report) -> None:
    assert contradictions(report) == [], shown(report)
    assert report.error is None, shown(report)
    assert report.at_or_above(Severity.WARNING) == (), shown(report)
    assert {check.status for check in report.checks} == {"passed"}, shown(report)


def comparable(report: Report) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(report.to_json())
    del data["timing"]
    for item in data["checks"]:
        del item["seconds"]
    return data
