import graphlib
import re

import pytest

from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.rules import FAMILIES, RULES, Severity, matching_rules, sections_of

RULE_LIST = list(RULES.values())


def test_codes_are_unique_sorted_and_of_a_known_family() -> None:
    codes = [rule.code for rule in RULE_LIST]
    assert codes == sorted(set(codes)) == list(RULES)
    names = [rule.name for rule in RULE_LIST]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name) for name in names)
    assert all(re.fullmatch(r"DDP[1-68]\d\d", code) and code[:4] in FAMILIES for code in codes)


def test_the_codes_that_were_once_published_stay() -> None:
    published = {
        1: [*range(1, 13)],
        2: [*range(1, 10), *range(11, 17), 21, 22, 23],
        3: [*range(1, 12)],
        4: [*range(1, 8)],
        5: [*range(1, 19)],
        6: [1, 2, 3],
        8: [1, 2, 3, 4],
    }
    assert {f"DDP{family}{n:02}" for family, numbers in published.items() for n in numbers} <= set(RULES)


def test_no_rule_explains_itself_and_each_relation_is_told_from_both_ends() -> None:
    always = {rule.code: {c for r in rule.explains if r.when == "always" for c in r.codes} for rule in RULE_LIST}
    list(graphlib.TopologicalSorter(always).static_order())  # which raises where there is a circle
    for rule in RULE_LIST:
        for code in {code for relation in rule.explains for code in relation.codes}:
            assert code in dict(sections_of(rule))["Possible consequences"]
            assert rule.code in dict(sections_of(RULES[code]))["Possible root causes"]


@pytest.mark.parametrize("rule", RULE_LIST, ids=lambda rule: rule.code)
def test_a_rule_says_what_why_and_what_to_do(rule) -> None:
    for text in (rule.summary, *(text for _, text in sections_of(rule))):
        assert text == text.strip() and text.endswith((".", ".)")) and "\n" not in text and "  " not in text
    assert isinstance(rule.severity, Severity)
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", report) for report in rule.reports)
    assert not rule.example or (rule.example.endswith("\n") and max(map(len, rule.example.splitlines())) <= 115)


@pytest.mark.parametrize("rule", [rule for rule in RULE_LIST if rule.code < "DDP500"], ids=lambda rule: rule.code)
def test_a_rule_on_a_model_has_an_example_that_is_python_and_shows_the_right_way(rule) -> None:
    compile(rule.example, rule.code, "exec")
    assert "right" in rule.example or "falls back" in rule.example


def test_a_rule_is_found_by_code_prefix_and_name_and_an_unknown_one_is_refused_with_what_comes_close() -> None:
    for text in ("DDP101", " Ddp101 ", "Unused-Parameter"):
        assert matching_rules(text) == (RULES["DDP101"],)
    assert [rule.code for rule in matching_rules("ddp6")] == ["DDP601", "DDP602", "DDP603"]
    assert matching_rules("DDP") == tuple(RULE_LIST)
    for text, suggestion in {
        **{"unused-paramter": "DDP101 (unused-parameter)", "DDP1O1": "DDP101", "stride": "DDP205 (parameter-stride)"},
        **dict.fromkeys(("", " ", "xyzzy-quux", "[red]"), "ddpcheck rules"),
    }.items():
        with pytest.raises(UsageError, match=re.escape(suggestion)):
            matching_rules(text)
