"""Rules that a project or an installed package adds."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from ddpcheck import ConfigError, cli
from ddpcheck.cli import rule_examples
from ddpcheck.findings.evidence.script import LoaderPass
from ddpcheck.findings.report import Finding, Location, Report, Severity
from ddpcheck.findings.rules import FAMILIES, RULES
from ddpcheck.render import renderer_for
from ddpcheck.report import settings
from ddpcheck.report.settings import load_settings
from ddpcheck.rules import others, registry
from ddpcheck.trace.program import Program
from ddpcheck.trace.script_facts import ScriptFacts
from ddpcheck.trace.training import TrainedWrapper, Training
from tests.forked_run import ROOT, run_forked

EXAMPLES = ROOT / "examples" / "rules"
HEAD = "LAB001 too-warm: error"
FIELDS = "The lab is too warm.\nWhy: It is.\nFix: Open a window.\nDetected: By hand.\nIgnore: In summer."
RULE = f"{HEAD}\n{FIELDS}"
JUDGE = """
from ddpcheck.findings.wording import make_finding
from ddpcheck.rules.registry import rule
from ddpcheck.trace.program import Program

@rule
def judge_lab001(program: Program):
    yield make_finding("LAB001", ("lab",), "It is warm.", evidence=[program.loads["x"]])
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose rules are forgotten after the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(others, "_codes_by_file", {})
    tables: list[tuple[dict[str, Any], dict[str, Any]]] = [(table, dict(table)) for table in (RULES, FAMILIES)]
    judges = [*registry.judges_of_others]
    importlib.invalidate_caches()
    yield tmp_path
    for table, before in tables:
        table.clear()
        table.update(before)
    registry.judges_of_others[:] = judges
    for name in [name for name in sys.modules if name.startswith("lab_")]:
        del sys.modules[name]


def write(project: Path, docstring: str, code: str = JUDGE, *, settings: str = "", name: str = "lab_rules") -> None:
    (project / f"{name}.py").write_text(f'"""{docstring}"""\n{dedent(code)}', encoding="utf-8")
    (project / "pyproject.toml").write_text(f'[tool.ddpcheck]\nrules = ["{name}"]\n{settings}', encoding="utf-8")


def training(batch_size: int, *attributes: str) -> Training:
    line = Location("train.py", 7)
    loader = LoaderPass(0, 0, line, dataset="Digits", batch_size=batch_size, trains=True)
    return Training(2, [[loader], [loader]], [TrainedWrapper("Net", line, attributes)])


@pytest.mark.parametrize(
    ("docstring", "code", "message"),
    [
        ("", JUDGE, "the docstring of lab_rules has '' in place of a line such as 'LAB001 name: warning'"),
        (f"Rules of the lab.\n\n{HEAD}\n{FIELDS}", JUDGE, "has 'Rules of the lab.' in place of a line such as"),
        (f"{RULE}\n\nLAB2 cold: error\n{FIELDS}", JUDGE, "has 'LAB2 cold: error' in place of a line such as"),
        (f"DDP999 too-warm: error\n{FIELDS}", JUDGE, "DDP999 in lab_rules: codes that begin with DDP are those of"),
        (f"{RULE}\n\nLAB001 warm: error\n{FIELDS}", JUDGE, "there is a rule LAB001 too-warm"),
        (f"LAB001 hang: error\n{FIELDS}", JUDGE, "LAB001 hang in lab_rules: there is a rule DDP402 hang"),
        (f"{HEAD}\n{FIELDS.replace('Fix', 'Repair')}", JUDGE, "LAB001 in lab_rules has no 'Fix'"),
        (f"{HEAD}\nWhy{FIELDS.partition('Why')[2]}", JUDGE, "LAB001 in lab_rules has no sentence on the defect"),
        (f"{RULE}\nExplains: DDP101", JUDGE, "LAB001 in lab_rules has 'Explains', which only rules of"),
        (RULE, "", "lab_rules has no function judge_lab001 decorated with @rule"),
        (RULE, JUDGE.replace("lab001(", "warmth("), "judge judge_warmth in lab_rules is not named by a"),
        (RULE, JUDGE.replace(": Program)", ")"), "judge_lab001 must have one argument, whose type is"),
        (RULE, "import no_such_module", "'lab_rules' cannot be imported: lab_rules.py:7 raised ModuleNot"),
    ],
)
def test_a_wrong_module_is_one_sentence(
    project: Path, capsys: pytest.CaptureFixture[str], docstring: str, code: str, message: str
) -> None:
    write(project, docstring, code)
    assert cli.main(["rules"]) == 2
    error = capsys.readouterr().err
    assert "'rules' in [tool.ddpcheck] of pyproject.toml: " in error and message in error
    assert "LAB001" not in RULES and "LAB0" not in FAMILIES


def test_a_module_that_does_not_exist_is_named(project: Path) -> None:
    (project / "pyproject.toml").write_text('[tool.ddpcheck]\nrules = ["lab_rules.missing"]', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"there is no module 'lab_rules\.missing'"):
        load_settings(environ={})
    with pytest.raises(ConfigError, match="environment variable DDPCHECK_RULES: there is no module 'lab_x'"):
        load_settings(environ={"DDPCHECK_RULES": "lab_x"}, start=project.parent)


def test_rules_are_loaded_once_from_the_folder_of_the_settings(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(project, RULE, settings='select = ["LAB", "too-warm"]\nrules-severity = "error"')
    (project / "below").mkdir()
    monkeypatch.chdir(project / "below")
    for _ in range(2):
        loaded = load_settings(environ={"DDPCHECK_RULES": "lab_rules"})
    assert (loaded.rules, loaded.rules_severity) == (("lab_rules",), Severity.ERROR)
    assert loaded.select == ("LAB", "too-warm")
    assert RULES["LAB001"].checks == {"run": ("files",)}
    assert cli.main(["rules"]) == 0
    assert "LAB0xx rules of lab_rules\n  LAB001 too-warm" in capsys.readouterr().out
    assert cli.main(["explain", "too-warm"]) == 0
    assert "Open a window." in capsys.readouterr().out
    assert cli.main(["rules", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["rules"][-1]["code"] == "LAB001"


def test_an_installed_package_adds_rules(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(project, RULE, name="lab_installed")
    (project / "pyproject.toml").unlink()
    monkeypatch.syspath_prepend(project)
    metadata = project / "lab-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: lab\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[ddpcheck.rules]\nlab = lab_installed\n")
    settings._entry_points.cache_clear()
    try:
        load_settings(environ={})
        assert RULES["LAB001"].name == "too-warm"
        (metadata / "entry_points.txt").write_text("[ddpcheck.rules]\nlab = lab_missing\n")
        settings._entry_points.cache_clear()
        with pytest.raises(ConfigError, match=r"entry point 'lab' of ddpcheck\.rules: there is no module"):
            load_settings(environ={})
    finally:
        settings._entry_points.cache_clear()


def test_a_judge_that_raises_is_a_note(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    second = "\n\n@rule\ndef judge_lab001_too(program: Program):\n    return None\n"
    write(project, RULE, JUDGE.replace("program.loads", "{}") + second)
    load_settings(environ={})
    monkeypatch.setattr(ScriptFacts, "can_compare", True)
    findings, notes = others.judge_third_party_rules(ScriptFacts([], ended=True), Severity.WARNING)
    assert findings == []
    assert notes == [
        "LAB001 was not judged: lab_rules.py:14 raised KeyError: 'x'",
        "LAB001 was not judged: lab_rules.py raised TypeError: 'NoneType' object is not iterable",
    ]


def judging(*findings: Any, severity: Severity = Severity.ERROR) -> list[Finding]:
    def judge_lab001(program: Program) -> Iterator[Finding]:
        del program
        yield from findings

    return list(others.judge_view(Program(), judge_lab001, severity))


@pytest.mark.parametrize(
    ("finding", "message"),
    [
        (Finding("DDP101", (), "It is warm.", Severity.ERROR), "returns a finding of DDP101"),
        (Finding("LAB001", "lab", "It is warm.", Severity.ERROR), "Expected `array`, got `str`"),  # type: ignore[arg-type]
    ],
)
def test_a_finding_that_cannot_be_shown_is_refused(finding: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        judging(finding)


def test_findings_are_capped() -> None:
    warm = Finding("LAB001", (), "It is warm.", Severity.ERROR, tags=("of a copy",))
    findings = judging(warm, Finding("LAB001", (), "It is cold.", Severity.NOTE), severity=Severity.WARNING)
    assert [finding.severity for finding in findings] == [Severity.WARNING, Severity.NOTE]
    assert not any(finding.tags for finding in findings)


@pytest.mark.parametrize(
    ("view", "codes"), [(training(16), ["LAB001"]), (training(8), []), (training(8, "temperature"), ["LAB002"])]
)
def test_the_rules_of_the_example(monkeypatch: pytest.MonkeyPatch, view: Training, codes: list[str]) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    others.load_rules("lab_rules")
    judges = [judge for _, judge in registry.judges_of_others if judge.__module__ == "lab_rules"]
    findings = [finding for judge in judges for finding in others.judge_view(view, judge, Severity.WARNING)]
    assert [finding.code for finding in findings] == codes
    report = Report("train.py", findings=tuple(findings))
    for name in ("text", "html", "sarif", "json"):
        text = renderer_for(name).render(report)
        assert all(code in text and RULES[code].name in text for code in codes)
    assert Report.from_json(report.to_json()).findings == report.findings


def test_a_report_on_rules_that_are_not_loaded_is_shown() -> None:
    finding = Finding("LAB001", ("lab",), "It is warm.", Severity.WARNING)
    for name in ("text", "markdown", "html", "sarif", "junit"):
        assert "LAB001" in renderer_for(name).render(Report("train.py", findings=(finding,)))


@pytest.mark.parametrize(
    ("example", "codes"),
    [
        ("broken_lab002", {"LAB002"}),
        pytest.param("fixed_lab002", set(), marks=pytest.mark.slow),
        pytest.param("broken_lab001", {"LAB001"}, marks=pytest.mark.slow),
        pytest.param("fixed_lab001", set(), marks=pytest.mark.slow),
    ],
)
def test_the_examples_of_the_example_on_ranks(project: Path, example: str, codes: set[str]) -> None:
    (project / "pyproject.toml").write_text('[tool.ddpcheck]\nrules = ["lab_rules"]', encoding="utf-8")
    shutil.copytree(EXAMPLES, project, dirs_exist_ok=True)
    script = project / "train.py"
    script.write_text(f"import sys\n\nsys.path.append({str(project)!r})\nimport lab_rules\n\nlab_rules.{example}()\n")
    ended = run_forked(f"--check-output={project / 'report.json'}", str(script), cwd=project)
    assert ended.returncode == 0, ended.stderr
    report = Report.from_json((project / "report.json").read_text("utf-8"))
    places = {(item.code, item.severity, item.location and item.location.path) for item in report.findings}
    assert places == {(code, Severity.WARNING, "lab_training.py") for code in codes}, ended.stderr


def test_examples_are_judged_by_their_reports(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    examples = "\n\ndef broken_lab001():\n    pass\n\n\ndef fixed_lab001():\n    pass\n"
    write(project, RULE, JUDGE + examples)
    warm = Finding("LAB001", ("lab",), "It is warm.", Severity.WARNING)

    def check_script(script: Path, **_options: Any) -> Report:
        assert "lab_rules" in script.read_text("utf-8")
        return Report(str(script), findings=(warm,) if script.stem == "broken_lab001" or always else ())

    monkeypatch.setattr(rule_examples, "check_script", check_script)
    always = False
    assert cli.main(["test-rule", "lab_rules.py"]) == 0
    assert capsys.readouterr().out == "LAB001 broken: 1 finding\nLAB001 fixed: no finding\n"
    always = True
    assert cli.main(["test-rule", "lab_rules.py"]) == 1
    assert capsys.readouterr().out.endswith("LAB001 fixed: 1 finding, expected none; LAB001: It is warm.\n")


def test_missing_examples_are_said(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(project, RULE)
    assert cli.main(["test-rule", "lab_rules.py"]) == 1
    assert capsys.readouterr().out == (
        "LAB001 broken: no example: write a function broken_lab001()\n"
        "LAB001 fixed: no example: write a function fixed_lab001()\n"
    )
    assert cli.main(["test-rule", "no_rules.py"]) == 2
    assert "no_rules.py is not a Python file that can be imported" in capsys.readouterr().err
