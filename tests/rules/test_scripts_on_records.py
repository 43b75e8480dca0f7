"""The judges of `ddpcheck run` on what the ranks of scripts have left: without ranks, without torch, in milliseconds.

`python -m tests.faultsuite.record_scripts` records it. What is expected is what the scripts expect.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest

from ddpcheck.findings.evidence.loop import ModuleChanged
from ddpcheck.findings.evidence.script import OptimizerStep
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Report
from ddpcheck.render import FORMATS, renderer_for
from ddpcheck.rules.script_table import ROWS
from ddpcheck.run.script_report import report_on_script
from ddpcheck.stream.rank_log import WatchedRank
from ddpcheck.trace.script_facts import ScriptFacts, entries_of
from tests.faultsuite.breaking import finding_nothing, judges, seeing
from tests.faultsuite.evidence import EvidenceError
from tests.faultsuite.recorded_scripts import FOLDER, Run, assert_as_expected, left_by, report_on, runs
from tests.faultsuite.scripts_page import SCRIPTS, expected_of
from tests.tiers import first_of_each, share


def path_of(run: Run) -> Path:
    return SCRIPTS / f"{run.stem}.py"


RUNS = runs()
FAULTS = [run for run in RUNS if run.has_fault]
ONE_OF_EACH_CODE = first_of_each(FAULTS, lambda run: [expected_of(path_of(run))["code"]])
OF_SCRIPTS = (
    "script_",
    "optimizer_lines",
    "watched_steps",
    "stories",
    "loop_endings",
    "branch_endings",
    "wrapper_construction",
)

BY_HAND = frozenset(
    {
        "branch_endings._decided_alone",
        "branch_endings.explain_by_branch",
        "branch_endings.explain_by_exception",
        "stories._different",
        "stories._of_exit",
        "stories._of_peers",
        "stories.explain_by_exit",
        "stories.explain_by_exit_alone",
        "stories.explain_by_construction",  # test_endings.py
        "stories.explain_by_work",
        "stories.judge_circle",
        "stories.judge_missing_peer",
        "loop_endings._fewer",
        "loop_endings.explain_by_join",
        "script_alone._averaged_late",
        "script_alone._in_no_group",
        "script_alone._parted_for_good",
        "script_alone.judge_parts_reduced",
        "script_alone.judge_reduced_alike",
        "script_gathers.judge_own_parts",
        "script_states._finding_of_statistics",
        "script_changes.judge_ignored",
        "script_changes.judge_replaced",
        "script_changes.judge_written_alone",
        "script_clips.judge_scaled_by_hand",
        "script_clips._finding_of_hooks",
        "script_clips.judge_hooked",
        "script_clips._hooked_in_modules",
        "script_changes.replaced_after_sharding",
        "script_compilations._other_graphs",
        "script_compilations.judge_compilations",
        "script_compilations.judge_graphs",
        "script_data.judge_later_overlap",
        "script_draws.judge_behind",
        "script_draws.judge_step_draws",
        "script_draws.judge_same_targets",
        "script_files._judge_devices",
        "script_losses._judge_counted_again",
        "script_losses._judge_shared",
        "script_losses.judge_summed_again",
        "script_pace.judge_unmoved",
        "script_shares.judge_lone_share",
        "script_optimizers._loaded_on_some",
        "script_optimizers._out_of_step",
        "script_optimizers._skipped",
        "script_optimizers.judge_parts",
        "script_optimizers.judge_shard_states",
        "script_optimizers.judge_stale",
        "script_rows.judge_labels",
        "script_rows.judge_other_values",
        "script_order._told",
        "script_order.judge_sums_again",
        "script_rows.judge_restarted",
        "script_rows.judge_workers",
        "script_states._finding_of_use",
        "script_states.judge_uses",
        "script_weights.judge_own_weights",
        "script_wrappers.judge_local_sgd",  # test_comm_hooks.py
        "script_wrappers.judge_apart_meshes",  # test_sharded.py
        "script_wrappers.judge_meshes",  # likewise
        "watched_steps.judge_events",
    }
)
"""Judges without which the fault of each script is found all the same; test_judges_on_evidence.py names their tests."""


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
    for row in ROWS:
        for heading, verdict in row.judge(facts).items():
            assert heading in row.headings and {one.code for one in verdict.findings} <= {*row.codes}, heading


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


@functools.cache
def finding_in(run: Run) -> frozenset[str]:
    """The judges that find something in what the ranks of a run have left."""
    with seeing(judges()) as found:
        of(run)
    return frozenset(found)


def is_missed(run: Run) -> bool:
    try:
        assert_as_expected(run, report_on(run))
    except Exception:
        return True
    return False


@pytest.mark.slow
def test_a_fault_of_a_script_is_missed_without_any_one_of_the_judges() -> None:
    found = {run: finding_in(run) for run in FAULTS}
    idle = set()
    for name, judge in judges().items():
        with finding_nothing(judge):
            if name.startswith(OF_SCRIPTS) and not any(name in found[run] and is_missed(run) for run in FAULTS):
                idle.add(name)
    assert idle <= BY_HAND, "each needs a script in examples/scripts, or a test on evidence made by hand"


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
