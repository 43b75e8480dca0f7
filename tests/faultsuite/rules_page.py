"""The pages of the rules and their faults: `python -m tests.faultsuite.rules_page` writes them into `docs/`.

All they say of a rule is what `ddpcheck explain` says, from the same table. The faults that show it are added, and what
plain DDP did with each of them, from `docs/faults.md` and `docs/scripts.md`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from pathlib import Path

from ddpcheck.findings.rules import FAMILIES, RULES, Rule, address_of, sections_of
from ddpcheck.render.markdown import prose
from tests.faultsuite.cases import ROOT, Case, all_cases
from tests.faultsuite.scripts_page import SCRIPTS, options_of
from tests.faultsuite.table import cell

DOCS = ROOT / "docs"
PAGE = DOCS / "rules.md"
FOLDER = DOCS / "rules"
WRITTEN = "<!-- Written by `python -m tests.faultsuite.rules_page`. -->"
HEAD = f"""\
{WRITTEN}
# Rules

Every defect that ddpcheck can name. Codes are permanent. `ddpcheck explain CODE` prints the page of a rule, without the
faults that show it. A rule may be given by its code, by the beginning of its code or by its name, in `--select` and
`--ignore` and elsewhere.
"""


def rules_pages(cases: Sequence[Case]) -> dict[Path, str]:
    """The text of every page: the list of all rules, and one for each."""
    plain = plain_endings()
    scripts = scripts_by_code()
    pages = {
        FOLDER / f"{rule.code}.md": _page(
            rule, [case for case in cases if case.expected.code == rule.code], plain, scripts.get(rule.code, [])
        )
        for rule in RULES.values()
    }
    return {PAGE: _list(), **pages}


def _list() -> str:
    parts = [HEAD]
    for prefix, family in FAMILIES.items():
        parts += [f"## {prefix}xx: {family}", "", "| rule | severity | |", "|---|---|---|"]
        parts += [
            f"| [{rule.code}](rules/{rule.code}.md) {rule.name} | {rule.severity.value} | {cell(rule.summary)} |"
            for rule in RULES.values()
            if rule.code.startswith(prefix)
        ]
        parts.append("")
    return "\n".join(parts)


def _page(rule: Rule, cases: Sequence[Case], plain: dict[str, str], scripts: Sequence[Path]) -> str:
    lines = [WRITTEN, f"# {rule.code}: {rule.name}", "", f"*{rule.severity.value.capitalize()}.* {prose(rule.summary)}"]
    for heading, text in sections_of(rule):
        lines += ["", f"## {heading}", "", prose(text)]
    if rule.example:
        lines += ["", "## Example", "", "```python", rule.example.rstrip(), "```"]
    if cases:
        shown = min(cases, key=lambda case: (len(_code(case)), str(case)))
        lines += ["", "## A fault and its twin", ""]
        lines += [f"`broken` breaks the rule, and `fixed` does not ([file](../../examples/faults/{shown}.py)):", ""]
        lines += ["```python", _code(shown), "```", "", "```sh"]
        lines += [f"ddpcheck report {shown.target(twin)}" for twin in ("broken", "fixed")]
        lines += ["```"]
    elif scripts:
        options = " ".join((*options_of(scripts[0]), "--standalone --nproc-per-node 2"))
        command = f"ddpcheck run {options} examples/scripts/{scripts[0].name}"
        lines += ["", "## A fault and its twin", "", f"[A script](../../examples/scripts/{scripts[0].name}) that"]
        lines += ["breaks the rule, and with `--fixed` does not:", "", "```sh", command, f"{command} --fixed", "```"]
    if cases or scripts:
        lines += ["", "## Faults that show it", "", "| fault | plain DDP |", "|---|---|"]
        lines += [
            f"| [{cell(case.title)}](../../examples/faults/{case}.py) | {plain.get(str(case), '')} |" for case in cases
        ]
        lines += [
            f"| [{cell(_title(script))}](../../examples/scripts/{script.name}), a script | "
            f"{plain.get(script.stem, '')} |"
            for script in scripts
        ]
    if rule.reports:
        lines += ["", "## Public reports", "", "Threads on this defect, or on the message that it brings about:", ""]
        lines += [f"- [{report}]({address_of(report)})" for report in rule.reports]
    return "\n".join(lines) + "\n"


def _code(case: Case) -> str:
    """The code of a case, from the first definition on: without imports and without what is expected of it."""
    text = case.path.read_text(encoding="utf-8")
    body = ast.parse(text).body
    after = next(
        node
        for number, node in enumerate(body)
        if number and not isinstance(node, ast.Import | ast.ImportFrom) and "EXPECT" not in ast.unparse(node)[:8]
    )
    first = min([after.lineno, *(item.lineno for item in getattr(after, "decorator_list", []))])
    return "\n".join(text.splitlines()[first - 1 :]).rstrip()


def _title(script: Path) -> str:
    return (ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or "").splitlines()[0].rstrip(".")


def plain_endings() -> dict[str, str]:
    """What plain DDP did with each fault and script, as the pages of both have recorded it."""
    faults = re.findall(
        r"^\| \[.*?\]\(\.\./examples/faults/(\S+?)\.py\) \| (.*?) \| \*\*DDP",
        (DOCS / "faults.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    scripts = re.findall(
        r"^\| \[(\w+)\]\(\S+\) \| .*? \| (nothing: .*?|after .*?) \| \*\*DDP",
        (DOCS / "scripts.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    return dict([*faults, *scripts])


def scripts_by_code() -> dict[str, list[Path]]:
    """The scripts of `examples/scripts` by the code that they expect."""
    found: dict[str, list[Path]] = {}
    for script in sorted(SCRIPTS.glob("*.py")):
        code = re.search(r'EXPECT = \{\s*"code": "(DDP\d{3})"', script.read_text(encoding="utf-8"))
        if code:
            found.setdefault(code[1], []).append(script)
    return found


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for path, page in rules_pages(all_cases()).items():
        path.write_text(page, encoding="utf-8")
