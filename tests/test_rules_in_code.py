"""The page on where a rule lives in the code, and what judges say of themselves, are as the code is."""

from __future__ import annotations

import ast
import re
from collections import defaultdict

from ddpcheck.findings.rules import RULES
from tests.faultsuite.rules_in_code import PACKAGE, PAGE, found, page

BY_CALLERS = {"DDP221", "DDP223"}  # who pass the code, for options of a wrapper and of an optimizer
LISTED = re.compile(r"DDP\d{3}(?:(?:, | and | to )(?:DDP)?\d{3}\b)*")


def codes_said(text: str) -> set[str]:
    """The codes in a text: "DDP401, 403 and 405 to 407"."""
    found = set()
    for listed in LISTED.findall(text):
        numbers = [int(number) for number in re.findall(r"\d{3}", listed)]
        found |= {f"DDP{number}" for number in numbers}
        for first, last in re.findall(r"(\d{3}) to (?:DDP)?(\d{3})", listed):
            found |= {f"DDP{number}" for number in range(int(first), int(last) + 1)}
    return found & RULES.keys()


def codes_given() -> dict[str, set[str]]:
    """By file of `judge/`, the codes that it gives."""
    given = defaultdict(set)
    for code, judges in found()[0].items():
        for one in judges:
            given[one.file].add(code)
    return given


def test_the_page_is_as_the_code_is() -> None:
    assert PAGE.read_text() == page(), "python -m tests.faultsuite.rules_in_code writes it"


def test_a_rule_leads_to_its_judges_and_recorders() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if "[DDP520]" in line]
    expected = (
        "judge/loop/script_pace.py`: `judge_left`",
        "`GradientsLeft`",
        "record/optimizers/gradient_recorders.py",
    )
    assert len(rows) == 1 and all(part in rows[0] for part in expected)
    never_found = {"DDP511", "DDP601", "DDP602", "DDP603"}  # their pages say so
    assert RULES.keys() - set().union(*codes_given().values()) - BY_CALLERS == never_found


def test_a_judge_names_no_code_that_it_does_not_give() -> None:
    given, wrong = codes_given(), {}
    for file, codes in given.items():
        tree = ast.parse((PACKAGE / file).read_text())
        said = codes_said((ast.get_docstring(tree) or "").partition("\n\n")[0])
        froms = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
        imported = [node.module or "" for node in froms]
        imported += [f"{node.module}.{one.name}" for node in froms for one in node.names]  # modules of a package
        of_others = [f"{module.removeprefix('ddpcheck.').replace('.', '/')}.py" for module in imported]
        if more := said - codes.union(BY_CALLERS, *(given.get(one, set()) for one in of_others)):
            wrong[file] = more
    assert wrong == {}
