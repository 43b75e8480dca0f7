"""Whole sessions under coverage: what only ranks execute is covered, however coverage is measured."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import innerpytest

coverage = pytest.importorskip("coverage", reason="coverage is not installed")
pytest.importorskip("pytest_cov", reason="pytest-cov is not installed")

PACKAGE = """
def of_marker(rank):
    if rank == 0:
        value = 3
    else:
        value = 4
    return value

def of_fixture():
    total = 0
    for number in range(3):
        total += number
    return total

def never():
    return 13
"""
TESTS = """
import pytest
# torch is imported by ranks only

@pytest.mark.ddp
def test_marker(rank):
    from theirs.part import of_marker
    assert of_marker(rank) == 3 + rank

def on_ranks():
    from theirs import part
    if __import__("torch").distributed.get_rank() == 1:
        return part.of_fixture()

def test_fixture(ddp_world):
    assert ddp_world.run(on_ranks) == [None, 3]

@pytest.mark.ddp(reuse="module")
def test_that_fails(rank):
    reached = rank
    assert reached == 7
    reached = 8
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        (("pytest",), ("--cov=.", "--cov-branch", "--cov-context=test", "--cov-report=")),
        (("pytest",), ("--cov=theirs", "--cov=test_cov", "--cov-context=test", "--cov-report=", "-n", "2")),
        (("coverage", "run", "--source=.", "-m", "pytest"), ()),
    ],
    ids=["alone", "xdist", "coverage-run"],
)
def test_what_only_ranks_execute_is_covered(tmp_path: Path, program, arguments) -> None:
    (tmp_path / "theirs").mkdir()
    innerpytest.write(tmp_path / "theirs", __init__="", part=PACKAGE.lstrip("\n"))
    innerpytest.write(tmp_path, test_cov=TESTS.lstrip("\n"))
    (scratch := tmp_path / "scratch").mkdir()
    with innerpytest.start(tmp_path, *arguments, program=program, TMPDIR=str(scratch)) as process:
        printed, _ = process.communicate(timeout=200)
    assert process.returncode == 1 and "= 1 failed, 2 passed" in printed, printed
    assert "CoverageWarning" not in printed and "no data" not in printed.lower(), printed
    data = coverage.CoverageData(str(tmp_path / ".coverage"))
    data.read()
    part = str(tmp_path / "theirs" / "part.py")
    assert set(data.lines(part) or ()) == {1, 2, 3, 5, 6, 8, 9, 10, 11, 12, 14}, "all but line 15"
    tests = set(data.lines(str(tmp_path / "test_cov.py")) or ())
    assert {6, 7, 10, 11, 12, 19, 20} <= tests and 21 not in tests
    if "--cov-branch" in arguments:
        assert {(2, 3), (2, 5), (10, 11), (11, 10), (10, 12)} <= set(data.arcs(part) or ())
    if "--cov-context=test" in arguments:
        contexts = data.contexts_by_lineno(part)
        assert contexts[3] == ["test_cov.py::test_marker|run"] and contexts[11] == ["test_cov.py::test_fixture|run"]
    left = {path.name for path in tmp_path.iterdir()}
    assert left <= {"theirs", "test_cov.py", ".coverage", "__pycache__", ".pytest_cache", "scratch"}
    assert not [name for name in os.listdir(scratch) if not name.startswith("pytest-of-")]  # xdist makes that
