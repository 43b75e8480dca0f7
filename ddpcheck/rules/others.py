"""Rules of users: modules whose docstring has rules, and which define judges (`docs/write-a-rule.md`)."""

from __future__ import annotations

import importlib
import importlib.util
import re
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.from_json import build
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Severity
from ddpcheck.findings.rules import FAMILIES, RULES, Rule, parse_rule
from ddpcheck.rules.registry import judges_of_others
from ddpcheck.trace.script_facts import ScriptFacts
from ddpcheck.trace.view import NotRecorded, View

_ANY_HEAD = re.compile(r"^(?=[A-Za-z]+[0-9]+ \S+:)", re.MULTILINE)
_HEAD = re.compile(r"([A-Z]+[0-9]{3}) [a-z][a-z0-9-]*: (error|warning|note)")
_JUDGE = re.compile(r"judge_([a-z]+[0-9]{3})(_\w+)?")
_FIELDS = ("Why", "Fix", "Detected", "Ignore")
_codes_by_file: dict[str, tuple[str, ...]] = {}  # codes of the rules of each loaded module


def load_rules(name: str) -> tuple[str, ...]:
    """Import a module, add its rules to `RULES` once, and return their codes.

    Raises:
        UsageError: The module cannot be imported, or a rule or a judge is malformed.
    """
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        raise UsageError(f"there is no module {name!r}")
    if spec.origin not in _codes_by_file:
        try:
            module = importlib.import_module(name)
        except Exception as error:
            raise UsageError(f"module {name!r} cannot be imported: {describe_exception(error, spec.origin)}") from error
        rules = parse_rules(name, module.__doc__ or "")
        views = _views_by_code(name, rules)
        for rule in rules:
            checks = {"run": tuple(sorted(check for view in views[rule.code] for check in view.checks))}
            RULES[rule.code] = replace(rule, checks=checks)
            FAMILIES[rule.code[:-2]] = f"rules of {name}"
        _codes_by_file[spec.origin] = tuple(views)
    return _codes_by_file[spec.origin]


def parse_rules(name: str, docstring: str) -> list[Rule]:
    """Parse the docstring of module `name`: one rule, or several.

    Raises:
        UsageError: A rule is malformed, or its code or name is in use.
    """
    rules: list[Rule] = []
    for text in filter(str.strip, _ANY_HEAD.split(docstring)) if docstring.strip() else [""]:
        head = text.strip().partition("\n")[0]
        match = _HEAD.fullmatch(head)
        if match is None:
            raise UsageError(f"the docstring of {name} has {head!r} in place of a line such as 'LAB001 name: warning'")
        if match[1].startswith("DDP"):
            raise UsageError(f"{match[1]} in {name}: codes that begin with DDP are those of ddpcheck")
        if missing := [field for field in _FIELDS if not re.search(rf"^{field}: *\S", text, re.MULTILINE)]:
            raise UsageError(f"{match[1]} in {name} has no {missing[0]!r}")
        if reserved := re.search("^(Checks|Explains):", text, re.MULTILINE):
            raise UsageError(f"{match[1]} in {name} has {reserved[1]!r}, which only rules of ddpcheck have")
        rule = parse_rule(text)
        if not rule.summary:
            raise UsageError(f"{rule.code} in {name} has no sentence on the defect below its first line")
        for known in (*RULES.values(), *rules):
            if known.code == rule.code or known.name == rule.name:
                raise UsageError(f"{rule.code} {rule.name} in {name}: there is a rule {known.code} {known.name}")
        rules.append(rule)
    return rules


def _views_by_code(name: str, rules: Iterable[Rule]) -> dict[str, set[type[View]]]:
    views: dict[str, set[type[View]]] = {rule.code: set() for rule in rules}
    for view, judge in judges_of_others:
        if judge.__module__ == name:
            if (code := code_in_name(judge)) not in views:
                raise UsageError(f"judge {judge.__name__} in {name} is not named by a rule, as in judge_lab001")
            views[code].add(view)
    if unjudged := [code for code in views if not views[code]]:
        raise UsageError(f"{name} has no function judge_{unjudged[0].lower()} decorated with @rule")
    return views


def code_in_name(judge: Callable[..., object]) -> str:
    """Return the rule code in the name of a judge, or ''."""
    match = _JUDGE.fullmatch(judge.__name__)
    return match[1].upper() if match else ""


def describe_exception(error: Exception, file: str) -> str:
    """Describe an exception with its last line in a file: "lab_rules.py:12 raised KeyError: 'x'"."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    text = f": {error}" if str(error) else ""
    return f"{Path(file).name}{f':{lines[-1]}' if lines else ''} raised {type(error).__name__}{text}"


def judge_third_party_rules(facts: ScriptFacts, severity: Severity) -> tuple[list[tuple[str, Finding]], list[str]]:
    """Return (check line, finding) pairs, and a note on each judge that raised.

    Args:
        facts: Logs of the ranks.
        severity: Highest severity that a finding may have; higher severities are lowered to it.
    """
    findings: list[tuple[str, Finding]] = []
    notes: list[str] = []
    for view_type, judge in judges_of_others:
        is_offered = facts.can_compare or not view_type.needs_all_ranks
        if code_in_name(judge) in RULES and is_offered and facts.unwatched.keys().isdisjoint(view_type.checks):
            try:
                view = view_type.from_facts(facts)
                judged = [] if view is None else judge_view(view, judge, severity)
                findings += [(view_type.check_of(finding), finding) for finding in judged]
            except Exception as error:
                is_bug = not isinstance(error, NotRecorded)
                reason = describe_exception(error, judge.__code__.co_filename) if is_bug else str(error)
                notes.append(f"{code_in_name(judge)} was not judged: {' '.join(reason.split())}")
    return findings, notes


def judge_view(view: View, judge: Callable[..., Iterable[Finding]], severity: Severity) -> list[Finding]:
    """Return a judge's findings, with severities lowered to `severity`; raise if findings are malformed."""
    findings = []
    for finding in judge(view):
        finding = build(Finding, msgspec.to_builtins(finding))
        if finding.code != code_in_name(judge):
            raise ValueError(f"{judge.__name__} returns a finding of {finding.code}")
        is_allowed = not finding.severity.reaches(severity)
        findings.append(replace(finding, severity=finding.severity if is_allowed else severity, tags=()))
    return findings
