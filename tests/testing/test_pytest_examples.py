"""The tests in `examples/pytest` do what they say."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests import innerpytest
from tests.innerpytest import ROOT

pytestmark = pytest.mark.slow  # a session in a process of its own

EXAMPLES = ROOT / "examples" / "pytest"


def test_every_example_is_run(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES, tmp_path / "examples" / "pytest", ignore=shutil.ignore_patterns("__pycache__"))
    session = innerpytest.run(tmp_path, "examples/pytest")
    failing = ["test_a_mean_of_means", "test_a_rank_that_fails_alone", "test_a_rank_that_stays_away"]
    failing += ["test_gradients_that_one_rank_clips"]
    assert innerpytest.names(session, "failed") == failing
    assert len(innerpytest.names(session, "passed")) == 5 and len(session.tests) == 9
    assert "assert 5.0 == 3.0" in session["test_a_mean_of_means"].text
    text = session["test_a_rank_that_fails_alone"].text
    assert text.startswith("rank 1: AssertionError") and "{'test': 9} != {'test': 10}" in text
    assert "rank 0 waits in barrier() at examples/pytest/test_metric_broken.py" in text
