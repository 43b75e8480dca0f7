"""Render a report as workflow commands of GitHub Actions, shown as annotations of lines."""

from __future__ import annotations

from collections.abc import Iterator

from ddpcheck.findings.report import Finding, Report, Severity
from ddpcheck.findings.wording import plural, printable, shorten
from ddpcheck.render import Renderer
from ddpcheck.render.parts import plain_facts, sorted_findings, title_of

MOST_OF_A_KIND = 10  # annotations per step shown by GitHub ("Workflow commands", in GitHub's documentation)
MOST_CHARACTERS = 300  # per annotation; the job summary has the rest
_COMMANDS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "notice"}


class GithubRenderer(Renderer):
    """Renderer of a GitHub annotation per finding, worst first, and of the summary."""

    def render(self, report: Report) -> str:
        return self.medium.fitted("\n".join(_lines(report)) + "\n")


def _lines(report: Report) -> Iterator[str]:
    remaining = dict.fromkeys(Severity, MOST_OF_A_KIND)
    if report.error is not None:
        remaining[Severity.ERROR] -= 1
        yield f"::error title=ddpcheck::{_data(report.error.message)}"
    for finding in sorted_findings(report):
        remaining[finding.severity] -= 1
        if remaining[finding.severity] >= 0:
            yield _annotation(finding)
    hidden = [(severity.value, -number) for severity, number in remaining.items() if number < 0]
    hidden_text = ", ".join(f"{plural(number, f'more {severity}')} not annotated" for severity, number in hidden)
    yield _data(f"ddpcheck: {'; '.join(filter(None, (report.summary, hidden_text)))}")


def _annotation(finding: Finding) -> str:
    location = {"file": finding.location.path, "line": str(finding.location.line)} if finding.location else {}
    attrs = {**location, "title": title_of(finding)}
    message, where, *rest = plain_facts(finding)
    text = shorten("\n".join((f"{message} ({where})", *rest)), MOST_CHARACTERS)
    properties = [f"{k}={_data(v).replace(':', '%3A').replace(',', '%2C')}" for k, v in attrs.items()]
    return f"::{_COMMANDS[finding.severity]} {','.join(properties)}::{_data(text)}"


def _data(text: str) -> str:
    """Escape text like the Actions toolkit, so that messages cannot inject commands."""
    return printable(text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A"))
