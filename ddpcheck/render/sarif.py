"""Render a report as SARIF 2.1.0 (OASIS standard), for code scanning."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

from ddpcheck.findings.report import AcceptedFinding, Finding, Location, Report, Severity
from ddpcheck.findings.rules import RULES, sections_of
from ddpcheck.findings.selection import finding_key
from ddpcheck.findings.wording import PARAMETER_MADE, plural
from ddpcheck.render import Renderer
from ddpcheck.render.markdown import prose
from ddpcheck.render.parts import plain_facts, sorted_findings

MOST_RESULTS = 5000  # per run, shown by GitHub ("SARIF support for code scanning", in GitHub's documentation)
_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/os/schemas/sarif-schema-2.1.0.json"
_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "note"}
_ON_A_RANK = re.compile(r"^rank (\d+)\b.*?\bat (\S+\.py:\d+)")  # evidence with the line of a rank


class SarifRenderer(Renderer):
    """Renderer of one run: a result per finding, worst first, and notifications of errors.

    The JSON is ASCII, for any encoding of the medium.
    """

    def render(self, report: Report) -> str:
        accepted = {item.finding: item for item in report.accepted}
        findings = [*sorted_findings(report), *accepted]
        codes = sorted({finding.code for finding in findings})
        shown = findings[:MOST_RESULTS]
        version = {"version": report.tool["version"]} if report.tool.get("version") else {}
        driver = {"name": report.tool.get("name", "ddpcheck"), **version, "rules": [_rule(code) for code in codes]}
        run = {
            "tool": {"driver": driver},
            "invocations": [_invocation(report, len(findings) - len(shown))],
            "results": [
                _result(finding, codes.index(finding.code), report.target, accepted.get(finding)) for finding in shown
            ],
            "columnKind": "unicodeCodePoints",
        }
        return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2) + "\n"


def _rule(code: str) -> dict[str, Any]:
    rule = RULES.get(code)
    if rule is None:  # rule of a newer ddpcheck
        return {"id": code}
    return {
        "id": code,
        "name": rule.name,
        "shortDescription": {"text": rule.summary},
        "fullDescription": {"text": f"{rule.summary} {rule.why}"},
        "help": {
            "text": "\n\n".join(f"{heading}: {text}" for heading, text in sections_of(rule)),
            "markdown": "\n\n".join(f"**{heading}**\n\n{prose(text)}" for heading, text in sections_of(rule)),
        },
        "defaultConfiguration": {"level": _LEVELS[rule.severity]},
    }


def _invocation(report: Report, left_off: int) -> dict[str, Any]:
    notes = [] if report.error is None else [("error", report.error.message)]
    if report.shortfall:
        notes.append(("warning", report.shortfall))
    if left_off:
        notes.append(("warning", f"{plural(left_off, 'finding')} of the least severe are left off"))
    notifications = [{"level": level, "message": {"text": text}} for level, text in notes]
    return {"executionSuccessful": report.error is None, "toolExecutionNotifications": notifications}


def _result(finding: Finding, index: int, target: str, accepted: AcceptedFinding | None) -> dict[str, Any]:
    location = finding.location or Location(target.partition("::")[0].partition(" ")[0] or "unknown", 1)
    code, path, subjects = finding_key(finding)  # stable if lines or numbers change
    digest = hashlib.sha256(json.dumps([code, subjects, path]).encode()).hexdigest()
    result: dict[str, Any] = {
        "ruleId": finding.code,
        "ruleIndex": index,
        "level": _LEVELS[finding.severity],
        "message": {"text": "\n".join(filter(None, plain_facts(finding)))},
        "locations": [_location(location)],
        "partialFingerprints": {"ddpcheckFinding/v1": digest[:32]},
        "properties": {"subjects": list(finding.subjects), "ranks": list(finding.ranks), "steps": list(finding.steps)},
    }
    if finding.related:
        result["relatedLocations"] = [_location(entry.location, entry.role) for entry in finding.related]
    if flows := _rank_flows(finding.evidence) or _path_flow(finding):
        result["codeFlows"] = [{"threadFlows": flows}]
    if accepted is not None:  # "external" in SARIF: not in the source
        result["suppressions"] = [{"kind": "external", "justification": accepted.reason}]
    return result


def _location(location: Location, text: str = "") -> dict[str, Any]:
    path = PurePath(location.path)
    uri = path.as_uri() if path.is_absolute() else quote(path.as_posix())
    physical = {"artifactLocation": {"uri": uri}, "region": {"startLine": max(location.line, 1)}}
    return {"physicalLocation": physical, **({"message": {"text": text}} if text else {})}


def _path_flow(finding: Finding) -> list[dict[str, Any]]:
    """Return a SARIF thread flow along the autograd path of a missing parameter."""
    path = finding.path
    if path is None or not path.steps:
        return []
    construction_line = next((e.location for e in finding.related if e.role == PARAMETER_MADE), finding.location)
    path_lines = [(construction_line, path.parameter), *((step.location, step.operation) for step in path.steps)]
    path_lines.append((path.begins_at, f"{path.reason} begins here"))
    locations = [{"location": _location(location, text)} for location, text in path_lines if location is not None]
    return [{"id": f"from {path.parameter} to where its path ends", "locations": locations}] if locations else []


def _rank_flows(evidence: Sequence[str]) -> list[dict[str, Any]]:
    """Return one SARIF thread flow per rank that has a line in the evidence."""
    places: dict[str, list[dict[str, Any]]] = {}
    for fact in evidence:
        match = _ON_A_RANK.match(fact)
        if match and (location := Location.parse(match[2])):
            places.setdefault(f"rank {match[1]}", []).append({"location": _location(location, fact)})
    return [{"id": rank, "locations": locations} for rank, locations in places.items()]
