"""Rule table: every defect by code, in order, in one file per family."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.rules import (
    buffers,
    data,
    environment,
    evaluation,
    gradients,
    parameters,
    ranks,
    running,
    training,
)
from ddpcheck.findings.rules.rule import Rule as Rule
from ddpcheck.findings.rules.rule import address_of as address_of

FAMILIES: Mapping[str, str] = {
    "DDP1": "parameters and the loss",
    "DDP2": "the same on every rank",
    "DDP3": "gradients",
    "DDP4": "running",
    "DDP5": "the training loop and its data",
    "DDP6": "environment",
    "DDP8": "evaluation",
}

_FILES = (buffers, data, environment, evaluation, gradients, parameters, ranks, running, training)
RULES: Mapping[str, Rule] = {
    rule.code: rule for rule in sorted((rule for file in _FILES for rule in file.RULES), key=lambda rule: rule.code)
}


def consequences_of(rule: Rule) -> list[str]:
    """The codes of its possible consequences."""
    return sorted({code for one in rule.explains for code in one.codes})


def causes_of(rule: Rule) -> list[str]:
    """The codes of its possible root causes."""
    return [one.code for one in RULES.values() if rule.code in consequences_of(one)]


def sections_of(rule: Rule) -> tuple[tuple[str, str], ...]:
    """The headings and texts on a rule that every output shows, in their order."""
    consequences, causes = ", ".join(consequences_of(rule)), ", ".join(causes_of(rule))
    as_evidence = "reported as evidence of this finding, not separately."
    instead = "If found, the cause is reported instead, with this finding as evidence."
    return (
        ("Why it matters", rule.why),
        ("Fix", rule.fix),
        ("How it is detected", rule.detected),
        ("When to ignore it", rule.ignore),
        *([("Possible consequences", f"{consequences}: {as_evidence}")] if consequences else ()),
        *([("Possible root causes", f"{causes}. {instead}")] if causes else ()),
    )


def find_rule(text: str) -> Rule:
    """The rule with the code (in any case) or the name `text`.

    Raises:
        UsageError: There is none; the message names those that come close.
    """
    wanted = text.strip()
    rule = RULES.get(wanted.upper()) or next((rule for rule in RULES.values() if rule.name == wanted.lower()), None)
    if rule is None:
        raise UsageError(f"there is no rule {text!r}; {_suggestion(wanted)}")
    return rule


def matching_rules(pattern: str) -> tuple[Rule, ...]:
    """Return the rules of a code, a prefix of a code ("DDP1"), or a name.

    Raises:
        UsageError: It stands for none; the message names those that come close.
    """
    wanted = pattern.strip()
    found = tuple(
        rule
        for rule in RULES.values()
        if rule.name == wanted.lower() or (wanted and rule.code.startswith(wanted.upper()))
    )
    if not found:
        raise UsageError(f"no rule matches {pattern!r}; {_suggestion(wanted)}")
    return found


def _suggestion(text: str) -> str:
    names = {rule.name: rule for rule in RULES.values()}
    close = [names[name] for name in difflib.get_close_matches(text.lower(), names, n=3)]
    if not close:
        words = text.lower()
        close = [rule for rule in names.values() if len(words) >= 4 and words in rule.name][:3]
    if not close:
        close = [rule for code, rule in RULES.items() if _is_one_edit(code, text.upper())][:3]
    if not close:
        return "see `ddpcheck rules`"
    return "did you mean " + " or ".join(f"{rule.code} ({rule.name})" for rule in close) + "?"


def _is_one_edit(one: str, other: str) -> bool:
    """Check if two words differ by one letter, or by two letters in swapped order."""
    shorter, longer = sorted((one, other), key=len)
    if len(shorter) < len(longer):
        return any(longer[:at] + longer[at + 1 :] == shorter for at in range(len(longer)))
    apart = [(a, b) for a, b in zip(one, other, strict=True) if a != b]
    return len(apart) == 1 or (len(apart) == 2 and apart[0] == apart[1][::-1])
