"""The judges of `ddpcheck run` on what the ranks of scripts have left: without ranks, without torch, in milliseconds.

`python -m tests.faultsuite.record_scripts` records it. What is expected is what the scripts expect. A finding is at the
line that the repaired twin of a script changes.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ddpcheck.findings.report import Report
from ddpcheck.findings.rules import rules_of_check
from ddpcheck.render import FORMATS, renderer_for
from ddpcheck.rules import registry
from ddpcheck.rules.verdict import Verdict
from ddpcheck.trace.view import View
from tests.faultsuite.recorded_scripts import FOLDER, Run, assert_as_expected, report_on, runs
from tests.faultsuite.scripts_page import SCRIPTS, expected_of
from tests.tiers import first_of_each, share

RUNS = {str(run): run for run in runs()}
FAULTS = [run for run in RUNS.values() if run.has_fault]
REPORTS: dict[Run, Report] = {}
"""Those that a test has made. `tests/rules/test_judges_disabled.py` runs that test again, without a judge."""


def path_of(run: Run) -> Path:
    return SCRIPTS / f"{run.stem}.py"


def code_of(run: Run) -> str:
    return str(expected_of(path_of(run))["code"])


FIRST = {run.stem for run in first_of_each(FAULTS, lambda run: [code_of(run)])}
IN_TEST = [run for run in RUNS.values() if not run.arguments or run.stem in FIRST]
"""All but the twins of further scripts of a code."""


def report_of(run: Run) -> Report:
    return REPORTS.get(run) or REPORTS.setdefault(run, report_on(run))


@pytest.mark.parametrize("run", share(RUNS.values(), IN_TEST), ids=str)
def test_the_fault_of_a_script_is_its_one_finding_and_a_healthy_one_is_clean(run: Run) -> None:
    verdicts: list[tuple[str, Verdict]] = []

    def noting(view: View, verdicts_of: Any = registry.verdicts_of) -> dict[str, Verdict]:
        verdicts.extend((made := verdicts_of(view)).items())
        return dict(made)

    with mock.patch.object(registry, "verdicts_of", noting):
        REPORTS[run] = report_on(run)
    assert_as_expected(run, REPORTS[run])
    for heading, verdict in verdicts:
        assert {finding.code for finding in verdict.findings} <= {*rules_of_check("run", heading)}, heading


@pytest.mark.parametrize("run", share(FAULTS, first_of_each(FAULTS, lambda run: [code_of(run)[:4]])), ids=str)
def test_a_report_on_a_script_can_be_shown(run: Run) -> None:
    for name in FORMATS:
        assert code_of(run) in renderer_for(name).render(report_of(run))


def test_there_are_records_of_the_scripts_that_there_are_and_they_name_no_folder_of_a_machine() -> None:
    assert sorted(FOLDER.glob("*.json")) == sorted(run.path for run in RUNS.values())
    assert not [path for path in FOLDER.glob("*.json") if re.search(r'[ "(]/[^" ]*\.py\b', path.read_text())]


EXACT, NEAR = 45, 3  # findings at a changed line itself, at least; lines
ELSEWHERE = (
    "barrier_in_save best_by_rank clamped_on_one_rank doubled_gradient evaluates_on_rank_0 inner_module own_normaliser "
    "recompiles_on_one_rank same_augmentation same_augmentation_in_workers same_noise sharded_other_method "
    "sharded_stale_optimizer sharded_statistics sharded_unused_on_a_rank short_timeout uneven_loader"
).split()
"""Scripts whose finding is at the call, the layer or the seed that is wrong, and whose twins change another line."""


def changed_by(script: Path) -> set[int]:
    """The lines of the statements that ask whether the script is to be its twin."""
    lines: set[int] = set()
    for statement in ast.walk(ast.parse(script.read_text())):
        if not isinstance(statement, ast.stmt):
            continue
        own = [part for part in ast.iter_child_nodes(statement) if not isinstance(part, ast.stmt | ast.excepthandler)]
        parts = [node for part in own for node in ast.walk(part)]
        if any(isinstance(node, ast.Name) and node.id == "FIXED" and isinstance(node.ctx, ast.Load) for node in parts):
            ends = [statement.lineno, *(getattr(node, "end_lineno", None) or 0 for node in parts)]
            last = (statement.end_lineno or 0) if isinstance(statement, ast.If) else max(ends)
            lines.update(range(statement.lineno, last + 1))
    return lines


def distance(run: Run) -> int:
    """Lines between the location of the expected finding and the nearest one that the twin changes."""
    findings = [finding for finding in report_of(run).findings if finding.code == code_of(run)]
    lines = [finding.location.line for finding in findings if finding.location is not None]
    return min((abs(line - changed) for line in lines for changed in changed_by(path_of(run))), default=1 << 20)


def test_findings_of_scripts_are_at_lines_that_their_twins_change() -> None:
    assert {Run(run.script, ("--fixed",)) for run in FAULTS} <= {*RUNS.values()}
    distances = {run.stem: distance(run) for run in FAULTS}
    assert sorted(stem for stem, lines in distances.items() if lines > NEAR) == ELSEWHERE
    assert sum(lines == 0 for lines in distances.values()) >= EXACT
