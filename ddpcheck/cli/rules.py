"""`ddpcheck rules` and `ddpcheck explain`."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from dataclasses import asdict

from ddpcheck.cli.output import print_out, wrapped
from ddpcheck.findings.errors import EXIT_CLEAN
from ddpcheck.findings.report import SCHEMA_VERSION
from ddpcheck.findings.rules import (
    FAMILIES,
    RULES,
    Rule,
    address_of,
    causes_of,
    consequences_of,
    matching_rules,
    sections_of,
)
from ddpcheck.render import Medium
from ddpcheck.report.settings import load_third_party_rules


def run_explain(arguments: argparse.Namespace) -> int:
    """Print explanations of rules."""
    load_third_party_rules()
    rules = {rule.code: rule for pattern in arguments.rules for rule in matching_rules(pattern)}
    print_out("\n\n".join(_explanation(rule) for rule in rules.values()))
    return EXIT_CLEAN


def _explanation(rule: Rule) -> str:
    width = min(Medium.detect(sys.stdout).width or 100, 100)
    parts = [f"{rule.code} {rule.name} ({rule.severity.value})", "", wrapped(rule.summary, width, "")]
    for heading, text in sections_of(rule):
        parts += ["", heading, wrapped(f"  {text}", width)]
    if rule.example:
        parts += ["", "Example", textwrap.indent(rule.example.rstrip(), "  ")]
    if rule.reports:
        parts += ["", "Public reports", *(f"  {address_of(report)}" for report in rule.reports)]
    return "\n".join(parts)


_INTERNAL = ("repeats", "repro", "color")  # fields of a rule that are not written to JSON


def run_rules(arguments: argparse.Namespace) -> int:
    """Print a list of all rules."""
    load_third_party_rules()
    if arguments.format == "json":
        rules = [
            {name: value for name, value in asdict(rule).items() if not (isinstance(value, bool) or name in _INTERNAL)}
            | {"severity": rule.severity.value, "explains": consequences_of(rule), "explained_by": causes_of(rule)}
            for rule in RULES.values()
        ]
        print_out(json.dumps({"schema_version": SCHEMA_VERSION, "families": dict(FAMILIES), "rules": rules}, indent=2))
        return EXIT_CLEAN
    width = Medium.detect(sys.stdout).width
    lines: list[str] = []
    for prefix, family in FAMILIES.items():
        lines += ["", f"{prefix}xx {family}"] if lines else [f"{prefix}xx {family}"]
        for rule in RULES.values():
            if rule.code.startswith(prefix):
                title = f"  {rule.code} {rule.name:<34} {rule.severity.value:<8} "
                if width is None or width >= 2 * len(title):
                    lines.append(wrapped(title + rule.summary, width, " " * len(title)))
                else:
                    lines += [title.rstrip(), wrapped(f"    {rule.summary}", width, "    ")]
    print_out("\n".join([*lines, "", "More on one of them: ddpcheck explain CODE"]))
    return EXIT_CLEAN
