"""A report as an HTML page: the verdict, the findings, and what they rest on.

This module is light: it never imports torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ddpcheck.findings.report import CheckResult, Report
from ddpcheck.findings.rules import RULES
from ddpcheck.findings.severity import Severity
from ddpcheck.findings.shortening import limited
from ddpcheck.findings.wording import counted
from ddpcheck.render import Medium
from ddpcheck.render.page.collective_tables import collectives
from ddpcheck.render.page.finding_parts import accepted, findings
from ddpcheck.render.page.frame import Content, Markup, code, folded, mark, page, table, tag
from ddpcheck.render.page.gradient_plot import gradients
from ddpcheck.render.page.module_tree import module_tree
from ddpcheck.report.matrix.matrix import Matrix

STATUS = {
    "passed": ("tick", "held", "ok"),
    "warned": ("~", "warning", "warning"),
    "failed": ("cross", "failed", "error"),
    "ignored": ("·", "ignored", "muted"),
    "skipped": ("-", "not made", "warning"),
    "error": ("!", "stopped", "error"),
}
_PHRASES = {"world_size": "ranks", "timeout": "timeout in seconds"}


class HtmlRenderer:
    """A page for a browser, which needs nothing beside it."""

    def __init__(self, medium: Medium) -> None:
        self._medium = medium

    def render(self, report: Report | Matrix) -> str:
        """The page; names and messages are escaped."""
        assert isinstance(report, Report)
        shown = limited(report)
        return page(report, [kicker(shown, "report"), _verdict(shown)], dict(_sections(shown)), self._medium)


def kicker(report: Report | Matrix, what: str) -> Content:
    """The lines above the verdict: the tool, the target, and how it was run."""
    tool = " ".join(filter(None, (report.tool.get("name", "ddpcheck"), report.tool.get("version", ""))))
    world = report.world
    size = world.get("world_size")
    facts = [counted(size, "rank")] if size else []
    facts += [str(world[key]) for key in ("backend", "device") if world.get(key)]
    facts += [counted(world["steps"], "step")] if world.get("steps") else []
    facts += [f"torch {report.environment['torch']}"] if "torch" in report.environment else []
    return [
        tag("p", f"{tool} · {what}", class_="kicker"),
        tag("h1", code(report.target)),
        tag("p", " · ".join(facts), class_="facts") if facts else None,
    ]


def _verdict(report: Report) -> Markup:
    """The status of the report, and why it is that."""
    counts = Counter(finding.severity for finding in report.findings)
    kinds = ", ".join(counted(counts[severity], severity.value) for severity in Severity if counts[severity])
    more: list[Content] = []
    if report.error is not None:
        class_, title = "error", "Hang" if report.status == "hang" else "Stopped"
        more.append(report.error.message)
    elif report.findings:
        worst = min(report.findings, key=lambda finding: finding.severity.rank).severity
        class_, title = worst.value, kinds
        if len(report.findings) == 1 and report.findings[0].code in RULES:
            title += f": {RULES[report.findings[0].code].name}"
    elif report.status == "clean":
        class_, title = "ok", "Clean"
        passed = sum(check.status == "passed" for check in report.checks)
        more.append(f"{counted(passed, 'check')} passed, no findings.")
    elif report.not_made:
        class_, title = "warning", "No findings, and not all was checked"
    else:
        class_, title = "ok", "No findings that count"
    if report.error is not None and kinds:
        title += f": {kinds}"
    first = min(report.findings, key=lambda finding: finding.sort_key(), default=None)
    if first is not None:
        more.append([first.message, " ", tag("a", f"{first.code}, and what to change", href="#finding-1")])
    if report.shortfall:
        more.append(f"{report.shortfall[:1].upper()}{report.shortfall[1:]}.")
    return tag("div", tag("strong", title), [tag("p", one) for one in more], class_=f"verdict {class_}", role="status")


def _sections(report: Report) -> Iterator[tuple[str, tuple[str, Content]]]:
    if report.findings:
        yield "findings", ("Findings", findings(report))
    if report.accepted:
        yield "accepted", ("Found, and not counted", accepted(report))
    if report.timelines:
        yield "collectives", ("Collectives of the ranks", collectives(report.timelines))
    if report.checks:
        yield "checks", ("What was compared, and what was not", _checks(report))
    if report.parity:
        yield "gradients", ("Gradients against their tolerance", gradients(report.parity))
    if report.modules:
        yield "modules", ("Modules", module_tree(report))
    yield "run", ("This run", about(report))
    yield "reading", ("How to read this page", _reading(report))


def _checks(report: Report) -> Content:
    timed = any(check.seconds for check in report.checks)
    headings = ["", "check", "what was compared and held, or what did not", *(["time"] if timed else [])]
    rows = [[*_check(check), *([_seconds(check)] if timed else [])] for check in report.checks]
    return table(headings, rows, f"The {counted(len(rows), 'check')} of this report", "stacks")


def _check(check: CheckResult) -> list[Content]:
    drawn, word, class_ = STATUS[check.status]
    asked = None if check.asked else tag("span", " (not asked for)", class_="muted")
    return [tag("span", mark(drawn), f" {word}", class_=f"status {class_}"), [check.name, asked], check.detail]


def _seconds(check: CheckResult) -> str:
    return f"{check.seconds:.2f} s" if check.status != "skipped" else ""


def about(report: Report | Matrix) -> Content:
    """Versions, options, notes, times, and the output of what has stopped the checks."""
    notes = report.world.get("notes") or ()
    world = {key: value for key, value in report.world.items() if key != "notes" and value is not None}
    facts: list[tuple[str, Content]] = [("target", code(report.target))]
    facts += [("command", code(report.command, 1000))] if report.command else []
    facts += [(_PHRASES.get(key, key.replace("_", " ")), str(value)) for key, value in world.items()]
    facts += [(key, str(value)) for key, value in sorted(report.environment.items()) if value is not None]
    facts += [("ddpcheck", report.tool.get("version", "unknown"))]
    if report.timing.get("total"):
        facts += [("time", f"{report.timing['total']:.2f} s")]
    parts: list[Content] = [tag("dl", [[tag("dt", key), tag("dd", value)] for key, value in facts], class_="facts")]
    if notes:
        lines = [notes] if isinstance(notes, str) else notes
        parts += [tag("h4", "Notes"), tag("ul", [tag("li", str(line)) for line in lines])]
    if report.error is not None and report.error.detail.strip():
        parts.append(folded("What stopped the checks", tag("pre", report.error.detail.rstrip()), is_open=True))
    return parts


_READING = (
    ("error", "training is wrong, or will stop"),
    ("warning", "fragile, slow, or probably not meant"),
    ("note", "good to know"),
)


def _reading(report: Report) -> Content:
    said: list[Content] = [[tag("span", word, class_=f"badge {word}"), f" {what}."] for word, what in _READING]
    first = report.findings[0].code if report.findings else "DDP103"
    said.append(
        [
            "A finding is one cause; what follows from it is its evidence. ",
            "Its code (",
            code(first),
            ") is the name of a rule: ",
            code(f"ddpcheck explain {first}"),
            " says more, and ",
            code("--ignore CODE"),
            " leaves it out.",
        ]
    )
    said.append("“held” is said of a comparison that was made and held; one that was not made says why.")
    if report.parity:
        said.append(
            "“local” gradients are the average of what each rank computes without the wrapper, “single-process” ones "
            "are those of the whole batch in one process. The tolerance is what rounding is measured to cost."
        )
    said.append(["The data of this page: ", code("ddpcheck render PAGE.html --format json"), "."])
    return tag("ul", [tag("li", one) for one in said])
