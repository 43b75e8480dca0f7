"""The judges of `ddpcheck run` on what the ranks of scripts have left: without ranks, without torch, in milliseconds.

`python -m tests.faultsuite.record_scripts` records it. What is expected is what the scripts expect.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ddpcheck.findings.evidence.loop import ModuleChanged
from ddpcheck.findings.evidence.script import OptimizerStep
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Report
from ddpcheck.findings.rules import rules_of_check
from ddpcheck.render import FORMATS, renderer_for
from ddpcheck.rules.registry import judge_all
from ddpcheck.rules.script_table import VIEWS
from ddpcheck.run.script_report import report_on_script
from ddpcheck.stream.rank_log import WatchedRank
from ddpcheck.trace.script_facts import ScriptFacts, entries_of
from tests.faultsuite.evidence import EvidenceError
from tests.faultsuite.recorded_scripts import FOLDER, Run, assert_as_expected, left_by, report_on, runs
from tests.faultsuite.scripts_page import SCRIPTS, expected_of
from tests.tiers import first_of_each, share


def path_of(run: Run) -> Path:
    return SCRIPTS / f"{run.stem}.py"


RUNS = runs()
FAULTS = [run for run in RUNS if run.has_fault]
ONE_OF_EACH_CODE = first_of_each(FAULTS, lambda run: [expected_of(path_of(run))["code"]])


def of(run: Run) -> Report:
    try:
        return report_on(run)
    except EvidenceError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_the_fault_of_a_script_is_its_one_finding_and_a_healthy_one_is_clean(run: Run) -> None:
    assert_as_expected(run, of(run))


@pytest.mark.parametrize("run", share(FAULTS, ONE_OF_EACH_CODE), ids=str)
def test_a_report_on_a_script_can_be_shown(run: Run) -> None:
    report = of(run)
    for name in FORMATS:
        assert expected_of(path_of(run))["code"] in renderer_for(name).render(report)


def test_there_are_records_of_the_scripts_that_there_are_and_of_no_others() -> None:
    assert sorted(FOLDER.glob("*.json")) == sorted(run.path for run in RUNS)


def test_no_record_names_a_folder_of_the_machine_that_made_it() -> None:
    named = [path.name for path in FOLDER.glob("*.json") if re.search(r'[ "(]/[^" ]*\.py\b', path.read_text())]
    assert named == []


@pytest.mark.parametrize("run", FAULTS, ids=str)
def test_each_row_of_the_table_finds_what_it_says_that_it_finds(run: Run) -> None:
    facts = ScriptFacts(left_by(run)[1], ended=True)
    for view in VIEWS:
        for heading, verdicts in judge_all(facts, [view]).verdicts.items():
            codes = {finding.code for verdict in verdicts for finding in verdict.findings}
            assert heading in view.checks and codes <= {*rules_of_check("run", heading)}, heading


LINES_OF_SOURCE = ("norm_at", "rate")
"""Fields with a line that was looked for in the source of the script."""


@pytest.mark.parametrize("name", ["sharded_own_norm", "schedule_by_rank"])
def test_a_line_that_is_looked_for_in_the_source_decides_nothing(name: str) -> None:
    run = next(run for run in RUNS if str(run) == name)
    ending, ranks = left_by(run)
    read = report_on_script(run.script, ending, ranks)
    unread = report_on_script(run.script, ending, [without_lines(rank) for rank in ranks])
    told = [[(one.code, one.severity, one.ranks, one.message) for one in report.findings] for report in (read, unread)]
    assert told[0] == told[1] != []


def without_lines(rank: WatchedRank) -> WatchedRank:
    def without(entry: Any) -> Any:
        return replace(entry, **{name: None for name in LINES_OF_SOURCE if hasattr(entry, name)})

    changed = [without(entry) for entry in rank.entries]
    assert changed != list(rank.entries)
    return replace(rank, entries=changed)


def test_parameters_that_no_line_writes_are_told_at_the_step_of_their_optimizer() -> None:
    run = next(run for run in RUNS if str(run) == "clamped_on_one_rank")
    ending, ranks = left_by(run)
    unseen = [replace(rank, entries=[e for e in rank.entries if not isinstance(e, ModuleChanged)]) for rank in ranks]
    (found,) = report_on_script(run.script, ending, unseen).findings
    assert found.code == "DDP306" and found.location is not None
    assert found.location in {step.location for step in entries_of(ranks[0], OptimizerStep)}


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
    (run,) = [one for one in RUNS if str(one) == name]
    (said,) = [check.detail for check in report_on(run).checks if check.name == line]
    assert words in said
