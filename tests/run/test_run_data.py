"""`ddpcheck run` on the loops of tests/data_loops.py: faults at their lines, and healthy ones without a finding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.data_loops import FAULTS
from tests.faultsuite.scripts_page import ROOT, TIMEOUT
from tests.forked_run import run_forked

pytestmark = pytest.mark.slow
SCRIPT = "tests/data_loops.py"
OF_FOUR_RANKS = ("ranks_of_a_node", "counts_of_a_row")


def findings(folder: Path, *names: str, ranks: int = 2) -> list[Any]:
    file = folder / "report.json"
    ours = (f"--check-timeout={TIMEOUT}", f"--check-output={file}")
    ran = run_forked(*ours, SCRIPT, *names, ranks=ranks)
    assert file.exists(), ran.stderr
    found: list[Any] = json.loads(file.read_text())["findings"]
    return found


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_data_is_told_at_the_line_to_edit(name: str, tmp_path: Path) -> None:
    code, text = FAULTS[name]
    (finding,) = findings(tmp_path, name, ranks=4 if name in OF_FOUR_RANKS else 2)
    line = (ROOT / SCRIPT).read_text().splitlines()[finding["location"]["line"] - 1]
    assert finding["code"] == code and text in line, finding


@pytest.mark.smoke
def test_healthy_loops_over_loaders_have_no_finding(tmp_path: Path) -> None:
    names = ("prefetched_later", "workers_of_a_set_that_counts_epochs", "repeated_augmentation", "two_networks")
    assert findings(tmp_path, *names) == []


@pytest.mark.parametrize("name", ["ring_of_all_ranks", "counts_of_all"])
def test_ranks_that_share_samples_by_right_have_no_finding(name: str, tmp_path: Path) -> None:
    assert findings(tmp_path, name, ranks=4) == []
