"""Render a report as JUnit XML."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from ddpcheck.findings.report import CheckResult, Finding, Report, Severity
from ddpcheck.findings.wording import join_names
from ddpcheck.render import Renderer
from ddpcheck.render.parts import plain_facts, sorted_findings, title_of, why_accepted, words

_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # section 2.2 of XML 1.0


class JunitRenderer(Renderer):
    """JUnit XML renderer: a test case per check and finding; warnings and notes pass.

    The XML is ASCII, for any encoding of the medium.
    """

    def render(self, report: Report) -> str:
        cases = [_case_of_check(report.target, check) for check in report.checks]
        cases += [_case_of_finding(report.target, finding) for finding in sorted_findings(report)]
        for accepted in report.accepted:  # skipped, with the reason
            reason = f"{why_accepted(accepted)}: {accepted.reason}"
            cases.append(_case_of_finding(report.target, accepted.finding, skipped=reason))
        if report.error is not None:
            case = _case(report.target, "the whole", 0.0)
            _child(case, "error", report.error.message, report.error.detail)
            cases.append(case)
        seconds = f"{sum(check.seconds for check in report.checks):.3f}"
        attributes = {"name": _clean(f"ddpcheck {report.target}"), "tests": str(len(cases)), "time": seconds}
        suites = ElementTree.Element("testsuites")
        suite = ElementTree.SubElement(suites, "testsuite", attributes)
        for kind, attribute in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
            suite.set(attribute, str(sum(case.find(kind) is not None for case in cases)))
        suite.extend(cases)
        ElementTree.indent(suites)
        text: bytes = ElementTree.tostring(suites, "us-ascii", xml_declaration=True)
        return text.decode() + "\n"


def _case_of_check(target: str, check: CheckResult) -> ElementTree.Element:
    case = _case(target, check.name, check.seconds)
    if check.status == "error":
        _child(case, "error", check.detail)
    elif check.status == "skipped":
        _child(case, "skipped", check.detail)
    elif check.detail:
        _child(case, "system-out", text=check.detail)  # failures are test cases of findings
    return case


def _case_of_finding(target: str, finding: Finding, skipped: str = "") -> ElementTree.Element:
    case = _case(target, words(title_of(finding), join_names(finding.subjects)))
    text = "\n".join(plain_facts(finding))
    if skipped:
        _child(case, "skipped", skipped, finding.message)
    elif finding.severity is Severity.ERROR:
        _child(case, "failure", finding.message, text).set("type", finding.code)
    else:
        _child(case, "system-out", text=f"{finding.severity.value}: {text}")
    return case


def _case(target: str, name: str, seconds: float = 0.0) -> ElementTree.Element:
    attributes = {"classname": _clean(f"ddpcheck {target}"), "name": _clean(name), "time": f"{seconds:.3f}"}
    return ElementTree.Element("testcase", attributes)


def _child(case: ElementTree.Element, kind: str, message: str = "", text: str = "") -> ElementTree.Element:
    child = ElementTree.SubElement(case, kind, {"message": _clean(message)} if message else {})
    child.text = _clean(text) or None
    return child


def _clean(text: str) -> str:
    """Escape characters that are invalid in XML, as Python does."""
    return _NOT_IN_XML.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
