"""Registry of judges: the type of a judge's argument is the view it needs.

@rule
def judge_learning_rates(optimizers: Optimizers) -> Iterable[Finding]: ...
"""

from __future__ import annotations

import functools
import importlib
import inspect
import typing
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, TypeVar

from ddpcheck.findings.report import Finding
from ddpcheck.findings.rules import RULES
from ddpcheck.rules.verdict import Judged, Verdict, group_by_cause
from ddpcheck.trace.script_facts import ScriptFacts
from ddpcheck.trace.view import NotRecorded, View

_Item = TypeVar("_Item")
_Judge = TypeVar("_Judge", bound=Callable[..., Iterable[Finding]])
_judges: dict[type[View], list[Callable[..., Iterable[Finding]]]] = {}
judges_of_others: list[tuple[type[View], Callable[..., Any]]] = []  # with their views (`rules.others`)


def rule(judge: _Judge) -> _Judge:
    """Register a judge under the view that is the type of its argument."""
    views = [typing.get_type_hints(judge).get(name) for name in inspect.signature(judge).parameters]
    if len(views) != 1 or not isinstance(views[0], type) or not issubclass(views[0], View):
        raise TypeError(f"{judge.__name__} must have one argument, whose type is a view")
    if judge.__module__.startswith(f"{__package__}."):
        _judges.setdefault(views[0], []).append(judge)
    else:
        judges_of_others.append((views[0], judge))
    return judge


@functools.cache
def import_rules() -> None:
    """Import the files of all rules, which registers their judges."""
    for file in sorted(Path(__file__).parent.glob("*/[!_]*.py")):
        importlib.import_module(f"{__package__}.{file.parent.name}.{file.stem}")


def judge_all(facts: ScriptFacts, views: Iterable[type[View]], excluded_checks: Collection[str] = ()) -> Judged:
    """Run the judges of views in order, except for check lines in `excluded_checks`.

    An earlier view is more specific: later views in `Rule.repeats` do not report the same defect again.
    """
    findings: list[tuple[str, Finding]] = []
    verdicts: dict[str, list[Verdict]] = {}
    errors: dict[str, Exception] = {}
    reported: list[tuple[str, Finding]] = []
    for view_type in views:
        repeats = {code for code, rule in RULES.items() if view_type.__name__ in rule.repeats}
        dropped = set() if repeats.isdisjoint(finding.code for _, finding in findings) else repeats
        try:
            view = view_type.from_facts(facts)
            view_verdicts = {} if view is None else verdicts_of(view)
        except Exception as error:
            errors |= dict.fromkeys(view_type.checks, error)
            continue
        for check, verdict in view_verdicts.items():
            if check not in excluded_checks:
                verdicts.setdefault(check, []).append(verdict)
                findings += ((check, finding) for finding in verdict.findings if finding.code not in dropped)
                reported += ((check, finding) for finding in verdict.findings if finding.code in dropped)
    return group_by_cause(findings, verdicts, errors, reported)


def verdicts_of(view: View) -> dict[str, Verdict]:
    """Return a view's verdict for each check line, with the reasons of `NotRecorded` exceptions."""
    import_rules()
    findings: list[Finding] = []
    reasons = {check: [""] for check in view.checks}
    for judge in _judges.get(type(view), ()):
        judged, why = collect_until_not_recorded(judge, view)
        findings += judged
        reasons[view.checks[-1]].append(why)
    verdicts = {}
    for check in view.checks:
        matches, why = collect_until_not_recorded(view.compared, check, findings)
        not_compared = "; ".join(dict.fromkeys(filter(None, [*reasons[check], why])))
        verdicts[check] = Verdict([f for f in findings if view.check_of(f) == check], "; ".join(matches), not_compared)
    return verdicts


def collect_until_not_recorded(items: Callable[..., Iterable[_Item]], *args: Any) -> tuple[list[_Item], str]:
    """Collect items until `NotRecorded` is raised; also return its reason, or ''."""
    collected = []
    try:
        for item in items(*args):
            collected.append(item)
    except NotRecorded as error:
        return collected, str(error)
    return collected, ""


def judge_view(view: View) -> list[Finding]:
    """Return the findings of all judges of a view."""
    return [finding for verdict in verdicts_of(view).values() for finding in verdict.findings]
