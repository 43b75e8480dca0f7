"""Whole sessions: which tests share ranks, what they find there, and what no test leaves for the next one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import innerhere

pytest_plugins = ["pytester"]

NOTES = """
import json, os
import pytest
import torch.distributed as dist

seen = []  # process groups, on ranks that several tests share

def note(test):
    left = dist.distributed_c10d._get_default_store().check(["left"])
    noted = {"test": test, "rank": dist.get_rank(), "pid": os.getpid(), "left": left, "before": len(seen)}
    noted["new_group"] = all(group is not dist.group.WORLD for group in seen)
    seen.append(dist.group.WORLD)
    with open(os.environ["NOTES"], "a") as file:
        file.write(json.dumps(noted) + "\\n")
"""


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[str, list[dict]]]:
    """What the tests of an inner session have noted on their ranks: by test, one for each rank."""
    path = tmp_path / "notes"
    monkeypatch.setenv("NOTES", str(path))

    def read() -> dict[str, list[dict]]:
        noted: dict[str, list[dict]] = {}
        for note in sorted(map(json.loads, path.read_text().splitlines()), key=lambda note: note["rank"]):
            noted.setdefault(note["test"], []).append(note)
        return noted

    return read


def pids(ranks: list[dict]) -> list[int]:
    return [note["pid"] for note in ranks]


# --- The same ranks for a module -----------------------------------------------------------------------------------

SHARED = """
import torch
from noting import note, dist, pytest

@pytest.mark.ddp
def test_leaves_things_behind():
    note("first")
    dist.barrier()
    dist.distributed_c10d._get_default_store().set("left", "something")
    dist.barrier(async_op=True)

def work(test):
    note(test)
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    assert total.item() == sum(range(1, dist.get_world_size() + 1))

def test_finds_nothing_of_it(ddp_world):
    ddp_world.run(work, "second")
    ddp_world.run(int)

@pytest.mark.ddp(world_size=3)
def test_another_size():
    work("three")

def test_another_size_by_the_fixture(ddp_world):
    ddp_world(world_size=3).run(work, "three again")
    ddp_world.run(work, "two beside it")

@pytest.mark.ddp
def test_skips_everywhere():
    note("skips")
    pytest.skip("all of them")

@pytest.mark.ddp(timeout=20)
def test_at_last():
    work("last")
"""
OTHER = """
from noting import note, pytest

@pytest.mark.ddp
@pytest.mark.parametrize("number", [1, 2])
def test_other(number):
    note(f"other {number}")
"""


@pytest.mark.slow
def test_a_module_has_the_same_ranks_with_a_process_group_for_each_test(pytester: pytest.Pytester, notes) -> None:
    pytester.makepyfile(noting=NOTES, test_shared=SHARED, test_zother=OTHER)
    printed = innerhere.run(pytester, "--ddp-reuse=module")
    assert "= 7 passed, 1 skipped in" in printed, printed
    noted = notes()
    two = ["first", "second", "two beside it", "skips", "last"]
    assert all(pids(noted[test]) == pids(noted["first"]) for test in two)
    assert pids(noted["three"]) == pids(noted["three again"])
    assert pids(noted["other 1"]) == pids(noted["other 2"])
    everyone = [*pids(noted["first"]), *pids(noted["three"]), *pids(noted["other 1"])]
    assert len(set(everyone)) == 7
    assert [noted[test][0]["before"] for test in two] == [0, 1, 2, 3, 4]
    for ranks in noted.values():
        assert all(note["new_group"] and not note["left"] for note in ranks), ranks


FAILING = """
import os, signal
from noting import note, dist, pytest

def act(kind):
    note(kind)
    bad = dist.get_rank() == 1
    if kind == "disagrees" and bad:
        pytest.skip("only here")
    if kind == "killed" and bad:
        os.kill(os.getpid(), signal.SIGKILL)
    assert kind not in ("asserts", "caught") or not bad

@pytest.fixture
def torn(rank):
    yield
    assert rank == 0, "teardown"

@pytest.mark.parametrize("kind", ["asserts", "after asserts", "disagrees", "after disagrees", "killed", "after killed"])
@pytest.mark.ddp
def test_marker(kind):
    act(kind)

@pytest.mark.ddp
def test_teardown(torn):
    note("asserts in teardown")

def test_parent(ddp_world):
    ddp_world.run(note, "after asserts in teardown")
    assert not "this"

@pytest.mark.ddp
def test_after_parent():
    note("after after asserts in teardown")

def test_caught(ddp_world):
    with pytest.raises(Exception):
        ddp_world.run(act, "caught")
    ddp_world.run(note, "after caught")

def test_kept(ddp_world):
    ddp_world.run(note, "kept")

@pytest.fixture
def broken_afterwards(ddp_world):
    ddp_world.run(note, "asserts afterwards")
    yield
    assert not "this"

def test_afterwards(broken_afterwards):
    pass

def test_after_afterwards(ddp_world):
    ddp_world.run(note, "after asserts afterwards")
"""


@pytest.mark.slow
def test_no_test_gets_ranks_on_which_another_failed(pytester: pytest.Pytester, notes) -> None:
    pytester.makepyfile(noting=NOTES, test_failing=FAILING)
    printed = innerhere.run(pytester, "--ddp-reuse=module", "--tb=line", "-v")
    noted = notes()
    kinds = [test for test in noted if f"after {test}" in noted]
    places = {"asserts in teardown", "after asserts in teardown", "asserts afterwards"}
    assert {*kinds} == {*places, "asserts", "caught", "disagrees", "killed"}, printed
    for kind in kinds:
        after = noted[f"after {kind}"]
        assert len(after) == 2 and not {*pids(noted[kind])} & {*pids(after)}, kind
        assert all(note["before"] == 0 for note in after), kind
    assert pids(noted["kept"]) == pids(noted["after caught"])
    line = FAILING[: FAILING.index("@pytest.mark.parametrize(")].count("\n")
    assert f"test_failing.py:{line}: rank 1 was killed by SIGKILL" in printed and "\n:0: " not in printed
    assert "5 failed, 8 passed, 1 error" in printed, printed


# --- Fresh ranks for every test ------------------------------------------------------------------------------------

FRESH = """
import os, random, sys, threading
import pytest, torch
import torch.distributed as dist
from noting import note

mine = []

@pytest.mark.ddp
@pytest.mark.parametrize("number", [1, 2])
def test_marker(number, rank):
    work(number, "marker")

@pytest.mark.parametrize("number", [1, 2])
def test_fixture(number, ddp_world):
    ddp_world.run(work, number, "fixture")

def work(number, form):
    note(f"{form} {number}")
    assert mine == [] and not hasattr(torch, "left") and torch.get_default_dtype() == torch.float32
    assert "LEFT" not in os.environ and "/left" not in sys.path and os.getcwd() != "/"
    assert torch.is_grad_enabled() and not torch.are_deterministic_algorithms_enabled()
    assert threading.active_count() == 1 and "left" not in sys.modules and sys.argv[-1] != "left"
    drawn = random.random(), torch.rand(1).item()
    random.seed(5), torch.manual_seed(5)
    assert drawn != (random.random(), torch.rand(1).item()), "another test's seed"
    mine.append(1)
    torch.left = 1
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    torch.set_grad_enabled(False)
    os.environ["LEFT"] = "1"
    sys.path.append("/left")
    sys.modules["left"] = sys
    sys.argv.append("left")
    os.chdir("/")
    pytest.MonkeyPatch().setattr(os, "getcwd", lambda: "/left")
    threading.Thread(target=threading.Event().wait, daemon=True).start()

def test_here():
    assert mine == [] and not hasattr(torch, "left") and "LEFT" not in os.environ and os.getcwd() != "/"
"""


def test_nothing_of_a_test_is_left_for_the_next_one(pytester: pytest.Pytester, notes) -> None:
    pytester.makepyfile(noting=NOTES, test_fresh=FRESH)
    printed = innerhere.run(pytester)
    assert "= 5 passed in" in printed, printed
    everyone = [pid for ranks in notes().values() for pid in pids(ranks)]
    assert len(everyone) == len(set(everyone)) == 8
