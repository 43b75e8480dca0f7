"""The tests in `examples/pytest` do what they say."""

from __future__ import annotations

import shutil

import pytest

from tests import innerpytest
from tests.innerpytest import ROOT, Session

pytestmark = pytest.mark.slow  # a session in a process of its own

EXAMPLES = ROOT / "examples" / "pytest"


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    root = tmp_path_factory.mktemp("examples")
    shutil.copytree(EXAMPLES, root / "examples" / "pytest", ignore=shutil.ignore_patterns("__pycache__"))
    return innerpytest.run(root, "examples/pytest")


def test_every_example_is_run(session: Session) -> None:
    failing = ["test_a_mean_of_means", "test_a_rank_that_fails_alone", "test_a_rank_that_stays_away"]
    failing += ["test_gradients_that_one_rank_clips"]
    assert innerpytest.names(session, "failed") == failing
    assert len(innerpytest.names(session, "passed")) == 5 and len(session.tests) == 9


def test_a_wrong_mean_shows_its_values(session: Session) -> None:
    assert "assert 5.0 == 3.0" in session["test_a_mean_of_means"].text


def test_the_rank_that_fails_alone_is_named_and_the_other_is_one_line(session: Session) -> None:
    text = session["test_a_rank_that_fails_alone"].text
    assert text.startswith("rank 1: AssertionError") and "{'test': 9} != {'test': 10}" in text
    assert "rank 0 waits in barrier() at examples/pytest/test_metric_broken.py" in text
