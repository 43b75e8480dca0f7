"""The page of all rules and their faults: `python -m tests.faultsuite.rules_page` writes `docs/rules.md`."""

from __future__ import annotations

from collections.abc import Sequence

from ddpcheck.findings.rules import FAMILIES, RULES, Rule
from tests.faultsuite.cases import ROOT, Case, all_cases
from tests.faultsuite.table import cell

PAGE = ROOT / "docs" / "rules.md"
HEAD = """\
# Rules

Every defect that ddpcheck can name. `ddpcheck explain CODE` says the same on the command line. Codes are permanent.
Under a rule stand the faults of [the suite](faults.md) that show it: each a file with a broken recipe and its clean
twin.
"""


def rules_page(cases: Sequence[Case]) -> str:
    """Every rule by family: what, why, what to do, an example, and the cases that expect it."""
    parts = [HEAD]
    for prefix, family in FAMILIES.items():
        rules = [rule for rule in RULES.values() if rule.code.startswith(prefix)]
        parts.append(
            f"- **{prefix}xx {family}**: " + ", ".join(f"[{r.code}](#{r.code.lower()}-{r.name})" for r in rules)
        )
    for prefix, family in FAMILIES.items():
        parts.append(f"\n## {prefix}xx {family}")
        parts += [_section(r, cases) for r in RULES.values() if r.code.startswith(prefix)]
    return "\n".join(parts) + "\n"


def _section(rule: Rule, cases: Sequence[Case]) -> str:
    lines = [f"\n### {rule.code} {rule.name}", "", f"*{rule.severity.value.capitalize()}.* {cell(rule.summary)}", ""]
    lines += [f"**Why it matters.** {cell(rule.why)}", "", f"**What to do.** {cell(rule.fix)}"]
    if rule.example:
        lines += ["", "```python", rule.example.rstrip(), "```"]
    shown = [case for case in cases if case.expected.code == rule.code]
    if shown:
        lines += ["", "Shown by:", ""]
        lines += [f"- [{cell(case.title)}](../examples/faults/{case}.py)" for case in shown]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(rules_page(all_cases()), encoding="utf-8")
