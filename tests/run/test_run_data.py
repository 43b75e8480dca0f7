"""`ddpcheck run` on the loops of tests/data_loops.py: faults at their lines, and healthy ones without a finding."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data_loops import FAULTS
from tests.forked_run import ROOT
from tests.run.scripts import run_script

pytestmark = pytest.mark.slow
SCRIPT = ROOT / "tests" / "data_loops.py"
OF_FOUR_RANKS = ("ranks_of_a_node", "counts_of_a_row")


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_data_is_told_at_the_line_to_edit(name: str, tmp_path: Path) -> None:
    code, text = FAULTS[name]
    run = run_script(tmp_path, SCRIPT, name, ranks=4 if name in OF_FOUR_RANKS else 2)
    assert run.codes == [code] and text in run.places[0], run.findings


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("prefetched_later", "two_networks"), marks=pytest.mark.smoke),
        ("workers_of_a_set_that_counts_epochs", "repeated_augmentation"),
    ],
)
def test_healthy_loops_over_loaders_have_no_finding(names: tuple[str, ...], tmp_path: Path) -> None:
    assert run_script(tmp_path, SCRIPT, *names).findings == []


def test_ranks_that_share_samples_by_right_have_no_finding(tmp_path: Path) -> None:
    assert run_script(tmp_path, SCRIPT, "ring_of_all_ranks", "counts_of_all", ranks=4).findings == []
