"""A rule is one file: its documentation, and the judge of its code alone."""

import ast
import re
from pathlib import Path

import ddpcheck
from ddpcheck.findings.rules import RULES, parse_rule
from ddpcheck.rules import registry
from ddpcheck.rules.script_table import VIEWS
from ddpcheck.trace.divergences import Parity

PACKAGE = Path(ddpcheck.__file__).parent
FILES = sorted((PACKAGE / "rules").glob("*/ddp[0-9]*.py"))


def codes_in(path: Path) -> list[str]:
    """Return the strings of a module that are a code and nothing else."""
    source = path.read_text(encoding="utf-8")
    nodes = ast.walk(ast.parse(source)) if '"DDP' in source else ()
    strings = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [text for text in strings if re.fullmatch(r"DDP\d{3}", text)]


def test_each_rule_has_one_file() -> None:
    assert len(FILES) == len(RULES)


def test_the_docstring_of_a_rule_begins_with_its_code_and_its_file_names_no_other_code() -> None:
    for file in FILES:
        docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")), clean=False)
        assert docstring is not None, file
        code, _, name = file.stem.partition("_")
        assert docstring.startswith(f"{code.upper()} {name.replace('_', '-')}: "), file
        assert parse_rule(docstring) == RULES[code.upper()]
        assert {*codes_in(file)} <= {code.upper()}, file


def test_codes_are_named_in_the_files_of_their_rules() -> None:
    others = {*PACKAGE.rglob("*.py")} - {*FILES}
    assert {path: codes for path in others if (codes := codes_in(path))} == {}


def test_each_view_of_a_judge_has_a_row() -> None:
    registry.import_rules()
    views = {view for view in registry._judges if view.__module__.startswith("ddpcheck.")}
    assert views - {Parity} <= {*VIEWS}, "its judges never run"
