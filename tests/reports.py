"""Looking at reports in tests."""

import json
from typing import Any

from ddpcheck.findings import Report, Severity


def shown(report: Report) -> str:
    """What a reader of a failed test wants to see."""
    lines = [f"{f.code} {f.severity.value} {f.subjects} ranks {f.ranks}: {f.message}" for f in report.findings]
    lines += [f"{c.name}: {c.status} {c.detail}" for c in report.checks]
    return "\n".join([report.status, *lines, str(report.error)])


def assert_healthy(report: Report) -> None:
    assert report.error is None, shown(report)
    assert report.at_or_above(Severity.WARNING) == (), shown(report)
    assert {check.status for check in report.checks} == {"passed"}, shown(report)


def comparable(report: Report) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(report.to_json())
    del data["timing"]
    for item in data["checks"]:
        del item["seconds"]
    return data
