"""Whole sessions of people who use the plugin: pytest's options, output, warnings, and who does not use it at all."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import innerhere, innerpytest
from tests.tiers import share

pytest_plugins = ["pytester"]

Inner = Callable[..., str]


@pytest.fixture
def inner(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Inner:
    """Run an inner pytest in this process on a test file; returns what it prints, to a person."""
    monkeypatch.delenv("CI", raising=False)  # there pytest shows everything whole

    def run(source: str, *arguments: str) -> str:
        pytester.makepyfile(test_options=source)
        return innerhere.run(pytester, *arguments)

    return run


def of_tests(printed: str) -> list[str]:
    """The reports of `test_marker` and `test_fixture`."""
    failures = printed.partition("= short test summary")[0]
    return re.split(r"^_+ test_(?:marker|fixture) _+$", failures, flags=re.M)[1:]


# --- Options of pytest ---------------------------------------------------------------------------------------------

OPTIONS = """
import time, pytest
import torch.distributed as dist

def helper(values, expected):
    assert values == expected

def compare(rank):
    mine = f"local of {rank}"
    print("printed by", rank)
    dist.barrier()  # so that they start together
    if rank == 1:
        time.sleep(0.7)  # rank 0 has finished, also where it waits for a core
        helper(list(range(30)), [*range(29), 99])

def on_ranks():
    compare(dist.get_rank())

def test_first(ddp_world):
    ddp_world.run(int)

@pytest.mark.ddp
def test_marker(rank):
    compare(rank)

def test_fixture(ddp_world):
    ddp_world.run(on_ranks)
"""
HELPER = 5  # the line of the assertion


def outcomes(printed: str) -> dict[str, int]:
    last = printed.strip().splitlines()[-1]
    return {word: int(count) for count, word in re.findall(r"(\d+) (\w+)", last) if word != "s"}


def test_a_session_stops_after_the_first_failure(inner: Inner) -> None:
    assert outcomes(inner(OPTIONS, "--tb=no", "-x")) == {"passed": 1, "failed": 1}


def test_fixtures_and_markers_are_listed_with_what_they_do(inner: Inner) -> None:
    printed = inner("", "--fixtures")
    for name in ("ddp_world", "rank", "world_size", "device", "process_group"):
        assert re.search(rf"^{name} -- .*\n    \S", printed, re.M), name
    assert "@pytest.mark.ddp(world_size=2, *, backend, " in inner("", "--markers")
    assert "--ddp-world-size" in inner("", "--help")


OF_RANK = re.compile(r"^-+ rank 1 -+\n(.*?)^-+ ranks -+$", re.M | re.S)  # in the report of a test that uses ddp_world
SHOWN = {  # beside what every style shows: what it shows of rank 1, and what it does not
    "long": (["def helper(values, expected):\n>       assert values ==", "E       assert [0, 1, "], ["local of 1"]),
    "short": ([f"test_options.py:{HELPER}: in helper\n    assert values == expected\nE   assert [0,"], ["def helper"]),
    "native": (["Traceback (most recent call last):\n", f'test_options.py", line {HELPER}, in helper'], ["def helper"]),
}


@pytest.mark.parametrize("style", share(SHOWN, ["short"]))
def test_a_failure_on_a_rank_is_shown_in_the_style_of_the_session(inner: Inner, style: str) -> None:
    printed = inner(OPTIONS, f"--tb={style}", "-k", "marker or fixture")
    marker, fixture = of_tests(printed)
    of_rank = OF_RANK.search(fixture)
    assert of_rank is not None, fixture
    there, missing = SHOWN[style]
    for text in (marker, of_rank[1]):
        assert all(words in text for words in there), text
        assert not any(words in text for words in missing), text
        assert "At index 29 diff: 29 != 99" in text
        assert "ddpcheck/" not in text and "_pytest/" not in text, "frames that are not the user's"
    for text in (marker, fixture):
        assert "Captured stdout of rank 1 of 2 call -" in text and text.count("printed by 1\n") == 1
        assert re.search(r"^-+ ranks -+\nrank 1 raised AssertionError: .*\nrank 0 passed$", text, re.M), text


@pytest.mark.slow
def test_locals_and_the_whole_difference_are_shown_of_the_rank(inner: Inner) -> None:
    for text in of_tests(inner(OPTIONS, "--showlocals", "-vv", "-k", "marker or fixture")):
        assert "mine       = 'local of 1'" in text and "local of 0" not in text
        assert re.search(r"^E +-     99,\nE +\? +\^\nE +\+     29,$", text, re.M), text


# --- Output --------------------------------------------------------------------------------------------------------

LIVE = """
import os, sys, time
import pytest

def talk(rank, test):
    print(f"{test}: first of {rank}")
    sys.stderr.write(f"{test}: second of {rank}\\n")
    deadline = time.monotonic() + 30
    while not os.path.exists(f"heard of {test}") and time.monotonic() < deadline:
        time.sleep(0.01)
    sys.stdout.write(f"{test}: last of {rank}, heard {os.path.exists(f'heard of {test}')}")

def on_ranks():
    import torch.distributed as dist
    talk(dist.get_rank(), "fixture")

@pytest.mark.ddp
def test_marker(rank):
    talk(rank, "marker")

@pytest.mark.ddp(reuse="module")
def test_fixture(ddp_world):
    ddp_world.run(on_ranks)

@pytest.mark.ddp(reuse="module")
def test_again(rank):
    print("again", rank)
    assert rank == 0, "on purpose"
"""


@pytest.mark.slow
def test_without_capture_ranks_are_heard_while_they_work(tmp_path: Path) -> None:
    innerpytest.write(tmp_path, test_live=LIVE)
    printed: list[str] = []
    with innerpytest.start(tmp_path, "-s") as process:
        assert process.stdout is not None
        for line in process.stdout:
            printed.append(line)
            for test in ("marker", "fixture"):  # a test goes on once both ranks have been heard
                if sum(f"{test}: second of" in each for each in printed) == 2:
                    (tmp_path / f"heard of {test}").touch()
    text = "".join(printed)
    for test in ("marker", "fixture"):
        for rank in (0, 1):
            for words in ("first", "second"):
                assert text.count(f"[rank {rank}] {test}: {words} of {rank}\n") == 1, text
            assert text.count(f"[rank {rank}] {test}: last of {rank}, heard True\n") == 1, text
    assert text.count("[rank 0] again 0\n") == text.count("[rank 1] again 1\n") == 1
    assert "rank 1: AssertionError: on purpose" in text and "Captured stdout of rank" not in text


# --- Warnings ------------------------------------------------------------------------------------------------------

WARNING = """
import warnings
import pytest

class Own(UserWarning): pass

def warn(text, category=UserWarning):
    warnings.warn(text, category)  # line 7

def on_ranks():
    warn("from ddp_world")

@pytest.mark.ddp
def test_marker():
    warn("from a marker")

def test_fixture(ddp_world):
    ddp_world.run(on_ranks)

@pytest.mark.ddp
def test_own_kind():
    warn("of its own kind", Own)
    warn("deprecated", DeprecationWarning)

@pytest.mark.ddp
@pytest.mark.filterwarnings("ignore:not to")
def test_ignored():
    warn("not to be seen")

@pytest.mark.ddp
@pytest.mark.filterwarnings("error:grave")
def test_marked_error():
    warn("grave")
"""


@pytest.mark.slow
def test_warnings_of_ranks_arrive_once_with_their_line(inner: Inner) -> None:
    printed = inner(WARNING, "--tb=short")
    summary = printed.partition("= warnings summary =")[2].partition("= short test summary")[0]
    for words in ("from a marker", "from ddp_world", "of its own kind", "deprecated"):
        assert len(re.findall(rf"^  .*test_options.py:7: \w+: {words}$", summary, re.M)) == 1, printed
        assert words not in printed.replace(summary, "")
    assert "test_options.py::test_marker\n" in summary and "test_options.py::test_fixture\n" in summary
    assert "not to be seen" not in printed and "did you mean" not in summary
    assert outcomes(printed) == {"passed": 4, "failed": 1, "warnings": 4}
    assert re.search(r"^test_options.py:7: in warn\n(    .*\n)+E   UserWarning: grave$", printed, re.M), printed


# --- Who does not use it -------------------------------------------------------------------------------------------

LOOK = """
import json, os, sys, tempfile

def pytest_unconfigure(config):
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        children = file.read().split()
    names = ("torch", "ddpcheck", "rich", "cloudpickle")
    ours = sorted(name for name in sys.modules if name.partition(".")[0] in names)
    with open("left.json", "w") as file:
        json.dump({"children": children, "modules": ours, "scratch": os.listdir(tempfile.gettempdir())}, file)
"""
NOT_USED = """
import pytest

@pytest.fixture
def rank():
    return 7

@pytest.mark.parametrize("world_size", [1, 2])
def test_with_names_of_ours(rank, world_size):
    assert rank == 7
"""
COLLECTED = """
import pytest

@pytest.mark.ddp(world_size=[1, 2])
def test_marker(rank): pass

def test_fixture(ddp_world): pass
"""


IMPORTED = {"ddpcheck", "ddpcheck.findings", "ddpcheck.findings.errors", "ddpcheck.pytest_plugin"}


@pytest.mark.parametrize(
    ("source", "arguments", "imported"),
    [
        pytest.param(NOT_USED, (), IMPORTED, id="not-used"),
        pytest.param(COLLECTED, ("--collect-only",), None, id="collected", marks=pytest.mark.slow),
    ],
)
def test_who_runs_no_rank_pays_for_none(tmp_path: Path, source, arguments, imported) -> None:
    innerpytest.write(tmp_path, conftest=LOOK, test_look=source)
    (scratch := tmp_path / "scratch").mkdir()
    done = innerpytest.run(tmp_path, *arguments, TMPDIR=str(scratch))
    left = json.loads((tmp_path / "left.json").read_text())
    assert done.returncode == 0, done.stdout
    assert left["children"] == [] and left["scratch"] == []
    assert not {"torch", "rich", "cloudpickle"} & set(left["modules"])
    if imported is not None:
        assert set(left["modules"]) - {"ddpcheck.testing", "ddpcheck.testing.entry_point"} == imported
