"""Rule table: defects by code, from the docstrings of the files in `ddpcheck/rules/`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from ddpcheck.findings.errors import UsageError

FAMILIES: dict[str, str] = {  # by prefix of the code; third-party rules add theirs
    "DDP1": "parameters and the loss",
    "DDP2": "the same on every rank",
    "DDP3": "gradients",
    "DDP4": "running",
    "DDP5": "the training loop and its data",
    "DDP6": "environment",
    "DDP8": "evaluation",
}


class Severity(Enum):
    """The severity of a finding.

    `ERROR`: training is wrong, or will stop. `WARNING`: fragile, slow, or probably not meant. `NOTE`: worth knowing.
    """

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"

    @property
    def rank(self) -> int:
        """Position of the severity, 0 for the worst."""
        return list(Severity).index(self)

    def reaches(self, threshold: Severity) -> bool:
        """Return True if the severity is at or above `threshold`."""
        return self.rank <= threshold.rank


@dataclass(frozen=True, slots=True)
class Explains:
    """Consequences of a defect, which become evidence of the finding instead of separate findings."""

    codes: tuple[str, ...]
    when: str = "always"  # a condition of `rules.causes`, or a tag of the cause or the consequence
    quietly: bool = False  # True if not reported as evidence either


@dataclass(frozen=True, slots=True)
class Rule:
    """One documented defect."""

    code: str  # permanent: never reused or renumbered
    name: str  # in kebab-case; an alternative to the code
    severity: Severity  # default severity of a finding
    summary: str  # the defect, in one sentence
    why: str  # effect on training, with its source
    fix: str  # advice, in the imperative
    detected: str  # what is compared or recorded, and what makes a finding of it
    ignore: str  # when it is no defect
    line: str = ""  # which line is the location of a finding
    reports: tuple[str, ...] = ()  # public threads, as OWNER/REPOSITORY#NUMBER
    example: str = ""  # lines of code that break the rule, with a comment on the correct line
    explains: tuple[Explains, ...] = ()  # consequences
    checks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # check lines by command ("report", "run")
    repeats: tuple[str, ...] = ()  # later views (`rules.registry`) in which `run` finds the defect again
    repro: str = ""  # comparison of `report --repro` in `extras.repro.script` that shows the defect
    color: str = ""  # fill of a parameter with this finding in `ddpcheck graph`, as #RRGGBB; "" if not drawn
    stops_ddp: bool = False  # if the wrapper raises, hangs or aborts at construction or in the step
    search_tolerates: bool = False  # if find_unused_parameters=True prevents that; it stays an error
    takes_severity: bool = False  # if a finding is as severe as the worst of its consequences
    needs_average: bool = False  # if the defect is that the wrapper does not average; the script may average by itself
    spreads: bool = False  # if findings on more and more tensors are one defect
    no_gradient: bool = False  # if parameters contribute nothing to the loss
    conditional_use: bool = False  # the same on some ranks or steps only; blocks of a list (experts) are one defect
    values_differ: bool = False  # if parameters have different values on the ranks
    unless_split: bool = False  # if it is intended when each rank has a part of the model
    unequal_start: bool = False  # if values differ before the first step
    at_step: bool = False  # if a finding of `run` without another line is at the optimizer's step
    gradients_differ: bool = False  # if gradients differ between ranks, or from the average or the single process
    undecided: bool = False  # if gradients cannot be compared
    buffers_only: bool = False  # if only buffers differ, on which the gradients of the step do not depend
    needless_option: bool = False  # if an option of the wrapper costs time and is not needed
    uneven_steps: bool = False  # if ranks make different numbers of steps
    ends_run: bool = False  # if the finding is on the failure or the hang itself
    stops_run: bool = False  # if a defect can be the reason for a run that fails or hangs
    keeps_gradients: bool = False  # if it cannot be why gradients differ from a single process (DDP314)
    keeps_results: bool = False  # if it cannot be why printed or saved numbers differ, when gradients are equal

    @property
    def family(self) -> str:
        """Family of the rule, by the prefix of its code."""
        return FAMILIES[self.code[:-2]]


_FIELD = re.compile("^(Why|Fix|Detected|Ignore|Line|Checks|Repeats|Explains|Reports|Color|Example):", re.MULTILINE)


def parse_rule(docstring: str) -> Rule:
    """Parse the docstring of a rule's file.

    The first line has code, name, severity, and flags that are set. The summary and labelled fields follow. `Explains`
    has groups of codes, separated by semicolons; a group may begin with "quietly", and end with "if" and a condition.
    `Checks` lists check lines by command ("report wrapping; run replicas, optimizers"), and after "repro" the name of a
    comparison. Code of `Example` is indented by 4.
    """
    head, _, text = docstring.strip().partition("\n")
    named, _, level_and_flags = head.partition(": ")
    (code, name), (severity, *flags) = named.split(), level_and_flags.split(", ")
    summary, *parts = _FIELD.split(text)
    texts = {label.lower(): value for label, value in zip(parts[::2], parts[1::2], strict=True)}
    fields: dict[str, Any] = {label: " ".join(value.split()) for label, value in texts.items()}
    if "example" in texts:
        fields["example"] = re.sub("^    ", "", texts["example"].strip("\n"), flags=re.MULTILINE) + "\n"
    fields["reports"] = tuple(fields.get("reports", "").split())
    fields["repeats"] = tuple(filter(None, fields.get("repeats", "").split(", ")))
    relations = [part.partition(" if ") for part in filter(None, fields.get("explains", "").split("; "))]
    fields["explains"] = tuple(
        Explains(tuple(codes.removeprefix("quietly ").split()), when or "always", codes.startswith("quietly "))
        for codes, _, when in relations
    )
    checks = dict(part.split(" ", 1) for part in filter(None, fields.get("checks", "").split("; ")))
    fields["repro"] = checks.pop("repro", "")
    fields["checks"] = {command: tuple(lines.split(", ")) for command, lines in checks.items()}
    fields.update(dict.fromkeys(flags, True))
    return Rule(code, name, Severity(severity), " ".join(summary.split()), **fields)


def _read_rules() -> dict[str, Rule]:
    """Read the documentation of all rules without importing their judges."""
    files = (Path(__file__).parents[1] / "rules").glob("*/ddp[0-9]*.py")
    rules = (parse_rule(file.read_text(encoding="utf-8").split('"""', 2)[1]) for file in files)
    return {rule.code: rule for rule in sorted(rules, key=lambda rule: rule.code)}


RULES = _read_rules()


def rules_of_check(command: str, check: str) -> list[str]:
    """Return the codes of the rules whose findings belong to a command's check."""
    return [rule.code for rule in RULES.values() if check in rule.checks.get(command, ())]


def consequences_of(rule: Rule) -> list[str]:
    """Return the codes of rules that a finding of `rule` may explain."""
    return sorted({code for relation in rule.explains for code in relation.codes})


def causes_of(rule: Rule) -> list[str]:
    """Return the codes of rules whose findings may explain a finding of `rule`."""
    return [cause.code for cause in RULES.values() if rule.code in consequences_of(cause)]


def sections_of(rule: Rule) -> tuple[tuple[str, str], ...]:
    """Return headings and texts of a rule, in display order."""
    consequences, causes = ", ".join(consequences_of(rule)), ", ".join(causes_of(rule))
    as_evidence = "reported as evidence of this finding, not separately."
    instead = "If found, the cause is reported instead, with this finding as evidence."
    return (
        ("Why it matters", rule.why),
        ("Fix", rule.fix),
        ("How it is detected", rule.detected),
        *([("Location", rule.line)] if rule.line else ()),
        ("When to ignore it", rule.ignore),
        *([("Possible consequences", f"{consequences}: {as_evidence}")] if consequences else ()),
        *([("Possible root causes", f"{causes}. {instead}")] if causes else ()),
    )


def matching_rules(pattern: str) -> tuple[Rule, ...]:
    """Return the rules with a code, code prefix ("DDP1") or name; `UsageError` if none."""
    wanted = pattern.strip()
    codes = [code for code in RULES if wanted and code.startswith(wanted.upper())]
    rules = tuple(rule for rule in RULES.values() if rule.name == wanted.lower() or rule.code in codes)
    if not rules:
        raise UsageError(f"no rule matches {pattern!r}; {_suggestion(wanted)}")
    return rules


def is_selected(code: str, select: Sequence[str] = (), ignore: Sequence[str] = ()) -> bool:
    """Check if a rule is selected; the longer of two matching patterns wins."""

    def longest(patterns: Sequence[str]) -> int:
        name = RULES[code].name
        matches = [pattern for pattern in patterns if pattern.lower() == name or code.startswith(pattern.upper())]
        return max((len(code) if pattern.lower() == name else len(pattern) for pattern in matches), default=-1)

    return longest(select) > longest(ignore) if select else longest(ignore) < 0


def _suggestion(text: str) -> str:
    names = {rule.name: rule for rule in RULES.values()}
    words = text.lower()
    close = (
        [names[name] for name in difflib.get_close_matches(words, names, n=3)]
        or [rule for rule in names.values() if len(words) >= 4 and words in rule.name][:3]
        or [rule for code, rule in RULES.items() if _differs_by_edit(code, text.upper())][:3]
    )
    if not close:
        return "see `ddpcheck rules`"
    return "did you mean " + " or ".join(f"{rule.code} ({rule.name})" for rule in close) + "?"


def _differs_by_edit(word: str, target: str) -> bool:
    shorter, longer = sorted((word, target), key=len)
    if len(shorter) < len(longer):
        return any(longer[:index] + longer[index + 1 :] == shorter for index in range(len(longer)))
    pairs = [(a, b) for a, b in zip(word, target, strict=True) if a != b]
    return len(pairs) == 1 or (len(pairs) == 2 and pairs[0] == pairs[1][::-1])


def address_of(report: str) -> str:
    """Return the URL of a GitHub thread given as OWNER/REPOSITORY#NUMBER."""
    repository, _, number = report.partition("#")
    return f"https://github.com/{repository}/issues/{number}"
