"""The judges of `ddpcheck run` on what the ranks of scripts have left: without ranks, without torch, in milliseconds.

`python -m tests.faultsuite.record_scripts` records it. What is expected is what the scripts expect. A finding is at the
line that the repaired twin of a script changes, and the advice says what that line lacks.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ddpcheck.findings.evidence.loop import ModuleChanged
from ddpcheck.findings.evidence.script import OptimizerStep
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Report
from ddpcheck.findings.rules import rules_of_check
from ddpcheck.render import FORMATS, renderer_for
from ddpcheck.rules import registry
from ddpcheck.rules.verdict import Verdict
from ddpcheck.run.script_report import report_on_script
from ddpcheck.stream.rank_log import RankTrace
from ddpcheck.trace.script_facts import entries_of
from ddpcheck.trace.view import View
from tests.faultsuite.recorded_scripts import FOLDER, Run, assert_as_expected, left_by, report_on, runs
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


LINES_OF_SOURCE = ("norm_at", "rate")
"""Fields with a line that was looked for in the source of the script."""


def without_lines(rank: RankTrace) -> RankTrace:
    def without(entry: Any) -> Any:
        return replace(entry, **{name: None for name in LINES_OF_SOURCE if hasattr(entry, name)})

    changed = [without(entry) for entry in rank.entries]
    assert changed != list(rank.entries)
    return replace(rank, entries=changed)


@pytest.mark.parametrize("name", ["sharded_own_norm", "schedule_by_rank"])
def test_a_line_that_is_looked_for_in_the_source_decides_nothing(name: str) -> None:
    ending, ranks = left_by(RUNS[name])
    unread = report_on_script(RUNS[name].script, ending, [without_lines(rank) for rank in ranks])
    facts = [
        [(finding.code, finding.severity, finding.ranks, finding.message) for finding in report.findings]
        for report in (report_of(RUNS[name]), unread)
    ]
    assert facts[0] == facts[1] != []


def test_parameters_that_no_line_writes_are_told_at_the_step_of_their_optimizer() -> None:
    run = RUNS["clamped_on_one_rank"]
    ending, ranks = left_by(run)
    unseen = [replace(rank, entries=[e for e in rank.entries if not isinstance(e, ModuleChanged)]) for rank in ranks]
    (finding,) = report_on_script(run.script, ending, unseen).findings
    assert finding.code == "DDP306" and finding.location is not None
    assert finding.location in {step.location for step in entries_of(ranks[0], OptimizerStep)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "line", "words"),
    [
        ("no_sampler", "parameters", "every trainable parameter contributed to the loss in 64 steps"),
        ("healthy_shards", "parameters", "except those that may be unused"),
        ("healthy_shards", "reducer", "equal the average or sum of the ranks' own"),
        ("own_centre", "replicas", "DDP214; modules, parameters and gradients match between ranks"),
        ("branch_by_step", "optimizers", "options of 1 optimizer match between ranks in"),
    ],
)
def test_a_line_says_that_more_holds_only_if_it_does(name: str, line: str, words: str) -> None:
    (detail,) = [check.detail for check in report_of(RUNS[name]).checks if check.name == line]
    assert words in detail


# --- The line and the advice -----------------------------------------------------------------------------------------

EXACT, NEAR = 45, 3  # findings at a changed line itself, at least; lines
ELSEWHERE = {
    "barrier_in_save": "the barrier, which is called in a branch of the caller's",
    "best_by_rank": "the variable; what decides to copy is compared with a local loss",
    "clamped_on_one_rank": "the write; its condition is computed three lines above",
    "doubled_gradient": "the module: what hooks of its parameters do is not seen one by one",
    "evaluates_on_rank_0": "the call that waits; the advice names the branch around the call of the function",
    "inner_module": "the call; the twin assigns what is called",
    "own_normaliser": "the update of the statistics; the twin reduces before",
    "recompiles_on_one_rank": "the call; the twin compiles for any size",
    "same_augmentation": "the seed; the twin seeds once more",
    "same_augmentation_in_workers": "the seed; the twin seeds once more",
    "same_noise": "the seed; the twin seeds once more",
    "sharded_other_method": "the method; the twin registers it",
    "sharded_stale_optimizer": "the optimizer; the twin makes it anew later",
    "sharded_statistics": "the layer; the twin averages its buffers before it saves",
    "sharded_unused_on_a_rank": "the layer: the forward pass of shards is not run again to find the branch",
    "short_timeout": "what takes so long; the twin has a longer timeout",
    "uneven_loader": "the loop; the twin cuts the samples",
}
"""Scripts whose finding is at another line than their twins change, each with the line that it is at."""

OTHER_WORDS = {
    "average_of_other_start": "the twin makes the copy after the wrapper, which is constructed on another line",
    "branch_by_step": "the twin takes the branch in each step; the advice keeps it",
    "doubled_gradient": "the twin goes through no parameter to register the hook, which the advice removes",
    "late_parameter": "the twin adds the parameter before it wraps the module, on another line",
    "raises_on_one_rank": "the exception is the program's own",
    "sharded_unused_layer": "the twin has no such layer any more: the advice says to remove it",
    "split_twice": "the twin sets the variable from which the sampler has its num_replicas",
    "weights_in_own_batch": "the twin averages over the ranks what the loss divides by, at which the advice looks",
    "unused_head": "the twin uses the head, as the advice says",
}
"""Scripts whose advice shares no word with what their twins change, each with the reason."""

OF_ANY_LINE = frozenset(("self", "x", "out", "model", "step", "data", "number", "get"))


@functools.cache
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


def expected_findings(run: Run) -> Iterator[Finding]:
    return (finding for finding in report_of(run).findings if finding.code == code_of(run))


def distance(run: Run) -> int:
    """Lines between the location of the expected finding and the nearest one that the twin changes."""
    lines = [finding.location.line for finding in expected_findings(run) if finding.location is not None]
    return min((abs(line - changed) for line in lines for changed in changed_by(path_of(run))), default=1 << 20)


def test_findings_of_scripts_are_at_lines_that_their_twins_change() -> None:
    distances = {run.stem: distance(run) for run in FAULTS}
    assert {stem for stem, lines in distances.items() if lines > NEAR} == ELSEWHERE.keys()
    assert sum(lines == 0 for lines in distances.values()) >= EXACT


def words_of(*names: str) -> set[str]:
    return {word for name in names for word in (name, *name.split("_"))}


@pytest.mark.parametrize("run", FAULTS, ids=str)
def test_the_advice_on_a_script_names_what_its_twin_changes(run: Run) -> None:
    script = path_of(run)
    nodes = [n for n in ast.walk(ast.parse(script.read_text())) if getattr(n, "lineno", None) in changed_by(script)]
    names = [getattr(node, kind, None) for node in nodes for kind in ("id", "attr", "arg")]
    changed = words_of(*filter(None, names)) - OF_ANY_LINE
    advice = [words_of(*re.findall(r"[A-Za-z_]\w+", finding.what_to_do)) for finding in expected_findings(run)]
    shared = changed.intersection(*advice)
    assert bool(shared) != (run.stem in OTHER_WORDS), shared
    assert changed_by(script) and Run(run.script, ("--fixed",)) in RUNS.values()
