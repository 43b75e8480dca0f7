"""Whole pytest sessions on ranks that torchrun or mpirun has started: in step, one report, and no end without a word.

Starting a launcher costs seconds, so each session runs many inner tests, and each test here looks at one of them.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from ddpcheck import pytest_plugin
from ddpcheck.worlds.launchers import detection
from tests import innerpytest
from tests.innerpytest import Session
from tests.launchers.commands import ROOT, clean_environment, command_of

pytest.importorskip("torch")
# By `make test-launchers`, which has the real launchers: each of them starts processes that import torch.
pytestmark = pytest.mark.launchers


def start(launcher: str, folder: Path, *program: str) -> tuple[str, int]:
    """Have a launcher start a program twice in a folder; what it printed, and how it ended."""
    (folder / "tmp").mkdir(exist_ok=True)
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    environment = clean_environment(folder / "tmp")
    command = [*command_of(launcher), *program]
    done = subprocess.run(command, cwd=folder, env=environment, **streams, text=True, timeout=240)
    return done.stdout, done.returncode


def options(folder: Path) -> list[str]:
    """Options of pytest."""
    report = ["-o", "junit_logging=all", "-o", "junit_family=xunit1", f"--junitxml={folder / 'report.xml'}"]
    return [*innerpytest.PLUGINS, *report]


def ended(folder: Path, output: str, code: int) -> Session:
    """What came of a session in a folder; nothing else is left of it."""
    processes = [process for process in psutil.process_iter(["cwd", "pid"]) if process.info["cwd"] == str(folder)]
    assert not psutil.wait_procs(processes, timeout=60)[1], "processes are left"
    assert [path.name for path in (folder / "tmp").iterdir() if path.name.startswith("ddpcheck")] == []
    report = folder / "report.xml"
    return Session(innerpytest.read(report) if report.exists() else {}, output, code)


def launch(folder: Path, *arguments: str, **files: str) -> Session:
    """Have torchrun start pytest twice in a folder with these files; nothing is left of it afterwards."""
    innerpytest.write(folder, **files)
    return ended(folder, *start("torchrun", folder, "-m", "pytest", *options(folder), *arguments))


# --- Many tests in one session -------------------------------------------------------------------------------------

OURS = """
import logging, os, time
import pytest
import torch, torch.distributed as dist
import ddpcheck

def here():
    return int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["RANK"])

def all_ranks(*args):
    return [dist.get_rank(), dist.get_world_size(), *args]

@pytest.mark.ddp(world_size=[1, 2, 4])
def test_sizes(rank, world_size):
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == world_size == dist.get_world_size()

def test_fixture(ddp_world):
    assert ddp_world.world_size == 2
    assert ddp_world.run(all_ranks, "x") == [[0, 2, "x"], [1, 2, "x"]]
    assert ddp_world(world_size=1).run(all_ranks) == [[0, 1]]

def test_rank_0_decides_on_arguments(ddp_world):
    assert ddp_world.run(all_ranks, here()) == [[0, 2, 0], [1, 2, 0]]

def test_folder_is_shared(ddp_world, tmp_path, tmp_path_factory):
    ddp_world.run(lambda: (tmp_path / f"of{dist.get_rank()}").write_text("x"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["of0", "of1"]

@pytest.mark.ddp(env={"ONLY": "here"}, threads=2)
def test_changes_its_process():
    os.environ["LEFT"] = "behind"
    os.chdir("/")
    assert os.environ["ONLY"] == "here" and torch.get_num_threads() == 2

@pytest.mark.ddp
def test_finds_no_changes():
    assert "LEFT" not in os.environ and "ONLY" not in os.environ and os.getcwd() != "/" and torch.get_num_threads() == 1

@pytest.fixture
def fails_on_rank_1():
    if here() == 1:
        print("heard on rank 1 only")
        raise OSError("no disk")

@pytest.mark.ddp
def test_setup_fails_on_rank_1(fails_on_rank_1):
    open("entered", "w").close()

@pytest.fixture
def skips_on_rank_0():
    if here() == 0:
        pytest.skip("no camera")

def test_setup_skips_on_rank_0(skips_on_rank_0, ddp_world): pass

def test_body_fails_before_others_run(ddp_world):
    assert here() == 1, "rank 0 does not run"
    ddp_world.run(all_ranks)

def test_runs_something_else_on_each(ddp_world):
    ddp_world.run(all_ranks) if here() else ddp_world.check("no.such:thing")

@pytest.mark.ddp
def test_rank_1_dies(rank):
    if rank == 1: os._exit(3)
    dist.all_reduce(torch.ones(1))

@pytest.mark.ddp
def test_rank_1_raises(rank):
    if rank == 1: raise ValueError("broken on 1")
    dist.barrier()

@pytest.mark.ddp(timeout=2)
def test_rank_0_hangs(rank):
    time.sleep(60) if rank == 0 else dist.barrier()

def test_options_that_say_how_ranks_start(ddp_world):
    assert len(set(ddp_world(hash_seeds=True).run(hash, "a"))) == 2
    assert ddp_world(world_size=1, process_group=False).run(dist.is_initialized) == [False]

@pytest.mark.ddp
def test_printed_and_logged(rank):
    print("printed by", rank)
    logging.error("logged by %d", rank)

@pytest.mark.ddp
def test_skips(rank):
    pytest.skip("not today")

def test_plain_fails_on_rank_1():
    assert here() == 0, "plain"

@pytest.mark.xfail(raises=ZeroDivisionError, strict=True)
def test_plain_xfails_on_rank_1():
    1 / (1 - here())

@pytest.fixture
def teardown_fails_on_rank_1():
    yield
    assert here() == 0, "late"

@pytest.mark.ddp
def test_teardown_fails_on_rank_1(teardown_fails_on_rank_1): pass

def recipe(bias):
    def loss(model, batch):
        return model(batch).mean() if bias else (batch @ model.weight.T).mean()
    return ddpcheck.Recipe(model=lambda: torch.nn.Linear(2, 2), batch=lambda step: torch.randn(8, 2), loss=loss)

def test_check(ddp_world):
    assert ddp_world.check(recipe(True), steps=1).ok

def test_check_finds(ddp_world):
    ddp_world.check(recipe(False), steps=1)

def test_breakpoint(ddp_world):
    ddp_world.run(breakpoint)
"""
CONFTEST = """
import os

def pytest_sessionfinish(session):
    name = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["RANK"]
    open(f"finished{name}", "w").write(" ".join(report.nodeid for report in reports))

reports = []
def pytest_runtest_logreport(report):
    if report.failed:
        reports.append(report)
"""


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    folder = tmp_path_factory.mktemp("attached")
    done = launch(folder, "-rA", "--log-level=INFO", conftest=CONFTEST, test_ours=OURS)
    assert done.returncode != 0
    assert not (folder / "entered").exists()
    assert (folder / "finished0").read_text() == (folder / "finished1").read_text() != "", "they agree on what failed"
    output = done["test_printed_and_logged"].output
    for rank in (0, 1):
        assert f"printed by {rank}\n" in output and f"Captured log of rank {rank} of 2 call" in done.stdout
    assert done.stdout.count("printed by 1") == done.stdout.count("logged by 0") == 1
    assert done.stdout.count("short test summary") == done.stdout.count("session starts") == 1
    return done


HERE = re.findall(r"^def (test_\w+)", OURS, re.MULTILINE)
OUTCOMES = {
    "test_body_fails_before_others_run": (
        "failed",
        r"^rank 0: AssertionError: rank 0 does not run\n(.|\n)*1 fell with it",
    ),
    "test_runs_something_else_on_each": (
        "failed",
        r"The ranks are not in step in .*rank 0 is at ddp_world.check; rank 1",
    ),
    "test_rank_1_dies": ("failed", r"^rank 1 ended with exit code 3 before its work was done"),
    "test_rank_1_raises": (
        "failed",
        r"ValueError: broken on 1(.|\n)*rank 0 (was still )?wait(s|ing) in barrier(\(\))? at ",
    ),
    "test_rank_0_hangs": ("failed", r"^ranks 0 and 1 did not finish within 2 s: (.|\n)*rank 0 is in test_rank_0_hangs"),
    "test_plain_fails_on_rank_1": (
        "failed",
        r"^rank 1: AssertionError: plain\n(.|\n)*assert here\(\) == 0(.|\n)*rank 0 p",
    ),
    "test_check_finds": ("failed", "DDP101"),
    "test_breakpoint": ("failed", "without torchrun or mpirun|torchrun or mpirun"),
    "test_setup_fails_on_rank_1": ("error", r"rank 1: OSError: no disk(.|\n)*rank 0 passed"),
    "test_setup_skips_on_rank_0": ("error", r"ranks disagree: rank 0 skipped \(no camera\), rank 1 passed"),
    "test_teardown_fails_on_rank_1": ("error", "rank 1: AssertionError: late"),
    "test_sizes[4_ranks]": ("skipped", "needs 4 ranks, (torchrun|mpirun) has started 2"),
    "test_plain_xfails_on_rank_1": ("skipped", ""),
    "test_skips": ("skipped", "not today"),
}
PASSED = {"test_sizes[1_rank]", "test_sizes[2_ranks]", *HERE} - {"test_sizes", *OUTCOMES}


@pytest.mark.parametrize("name", [*OUTCOMES, *sorted(PASSED)])
def test_what_comes_of_a_test_on_the_ranks_of_a_launcher(session: Session, name: str) -> None:
    outcome, words = OUTCOMES.get(name, ("passed", ""))
    test = session[name]
    assert test.outcome == outcome, test.text
    assert re.search(words, test.text), test.text
    assert name != "test_setup_fails_on_rank_1" or "heard on rank 1 only" in test.output


# --- How a session ends --------------------------------------------------------------------------------------------

HEAD = """
import os, signal, time
import pytest

def here():
    return int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["RANK"])

@pytest.mark.ddp
def test_ours(rank): print("printed by", rank)
"""

STOPS = """
def test_one(): assert here() == 0, 'only there'

@pytest.mark.ddp
def test_two(rank): open(f'went_on{rank}', 'w')
"""
MEASURED = "def f(rank):\n    if rank:\n        return 1\n    return 0\n\ndef g():\n    return 2\n"
OF_MEASURED = "from measured import f\n@pytest.mark.ddp\ndef test_f(rank): assert f(rank) == rank\n"
EXITS = "def test_exits():\n    if here() == 1: pytest.exit('that is all')\n\ndef test_next(): open('went_on', 'w')\n"
DIFFER = "@pytest.mark.parametrize('number', range(2 - here()))\ndef test_some(number): open('went_on', 'w')\n"
PLAIN = "import os\ndef test_plain(): assert '_DDPCHECK_RANK_OF' not in os.environ\n"
# Arguments, files, whether all is well, and what is printed. Ranks outlive all of these: one launch is enough.
ONE_AFTER_ANOTHER: dict[str, tuple[list[str], dict[str, str], bool, str]] = {
    "measures every rank": (
        ["--cov=measured", "--cov-report=term-missing"],
        {"measured": MEASURED, "test_it": HEAD + OF_MEASURED},
        True,
        r"measured.py +6 +1 +83% +7\n(.|\n)*2 passed",
    ),
    "stops after the same failure": (
        ["-x"],
        {"test_it": HEAD + STOPS},
        False,
        "rank 1: AssertionError: only there(.|\n)*stopping after 1 failures(.|\n)*1 failed, 1 passed",
    ),
    "runs none of different tests": (
        [],
        {"test_it": HEAD + DIFFER},
        False,
        r"test 3 is test_it.py::test_some\[1\] on rank 0, and nothing on rank 1 \(rank 0 has 3, rank 1 has 2\)",
    ),
    "ends at pytest.exit": ([], {"test_it": HEAD + EXITS}, False, r"rank 1 has left \(that is all\)"),
    "stops where a rank cannot import": (
        [],
        {"test_it": HEAD + "if here() == 1: import no_such_module\n"},
        False,
        "rank 1 could not collect test_it.py: ModuleNotFoundError: No module named 'no_such_module'",
    ),
    "no tests of ours": (["-p", "no:cacheprovider"], {"test_it": PLAIN}, True, "1 passed(.|\n)*1 passed"),
    "off": (["-p", "no:cacheprovider", "--ddp-launcher=off"], {"test_it": HEAD}, True, "1 passed(.|\n)*1 passed"),
}
PROGRAM = ROOT / "tests" / "launched_sessions.py"
Sessions = dict[str, tuple[Session, Path]]
# The tests above run under torchrun.
SECOND = "torchrun" if shutil.which("mpirun") is None else "mpirun"


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> Sessions:
    """What came of each of them, and its folder."""
    folders, tasks = {}, []
    for name, (arguments, files, _, _) in ONE_AFTER_ANOTHER.items():
        folders[name] = folder = tmp_path_factory.mktemp(name.replace(" ", "_"))
        innerpytest.write(folder, **files)
        (folder / "tmp").mkdir()
        tasks.append((str(folder), *options(folder), *arguments))
    printed, code = start(SECOND, tmp_path_factory.mktemp("one_launch"), str(PROGRAM), json.dumps(tasks))
    assert code == 0, printed
    sessions = {}
    for name, folder in folders.items():
        codes = [int((folder / f"code{rank}").read_text()) for rank in range(2)]
        sessions[name] = ended(folder, (folder / "output").read_text(), codes[0] or codes[1]), folder
    return sessions


@pytest.mark.parametrize("name", ONE_AFTER_ANOTHER)
def test_how_a_session_ends(name: str, sessions: Sessions) -> None:
    pytest.importorskip("pytest_cov")
    _, _, is_well, words = ONE_AFTER_ANOTHER[name]
    done, folder = sessions[name]
    assert (done.returncode == 0) is is_well, done.stdout
    assert re.search(words, done.stdout), done.stdout
    assert not list(folder.glob("went_on*")) and len(list(folder.glob(".coverage*"))) <= 1


PLAIN_DIES = "def test_dies():\n    if here() == 0: os._exit(3)\n"
MARKED_DIES = """
@pytest.mark.ddp
def test_dies(rank):
    import psutil, torch, torch.distributed as dist
    if rank == 1:
        psutil.Process().parents()[1].kill()  # the process of the launcher, which has started the fork server
        time.sleep(60)
    dist.all_reduce(torch.ones(1))
"""


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (PLAIN_DIES, "rank 0 (ended with exit code 3|has ended)"),
        (MARKED_DIES, "rank 1 (was lost|was killed by SIGKILL|has ended)"),  # by who notices it first
    ],
    ids=["plain", "marked"],
)
def test_a_process_of_the_launcher_that_dies_fails_the_test_and_the_others_say_so_and_stop(
    source: str, words: str, tmp_path: Path
) -> None:
    following = "@pytest.mark.ddp\ndef test_next(rank): open('went_on', 'w')\n"
    done = launch(tmp_path, test_it=HEAD + source + following)
    assert done.returncode != 0
    assert re.search(words, done.stdout), done.stdout
    assert "1 failed, 1 passed" in done.stdout and done.stdout.count("short test summary") == 1, done.stdout
    assert "The ranks cannot work together any more" in done.stdout
    assert not (tmp_path / "went_on").exists()


HANGS = """
@pytest.mark.ddp(timeout=300)
def test_hangs(rank):
    import torch, torch.distributed as dist
    open(f"there{rank}", "w")
    time.sleep(300) if rank else dist.all_reduce(torch.ones(1))
"""


@pytest.mark.slow
def test_nothing_stays_of_a_launcher_that_was_killed(tmp_path: Path) -> None:
    innerpytest.write(tmp_path, test_it=HEAD + HANGS)
    (temporary := tmp_path / "tmp").mkdir()
    program = [*command_of("torchrun"), "-m", "pytest", "-p", "ddpcheck.pytest_plugin", "-k", "hangs"]
    started = subprocess.Popen(program, cwd=tmp_path, env=clean_environment(temporary), stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 150
    while len(list(tmp_path.glob("there*"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    ours = psutil.Process(started.pid).children(recursive=True)
    assert len(ours) >= 2
    started.kill()
    started.wait()
    left = psutil.wait_procs(ours, timeout=60)[1]  # of the 300 that the ranks would wait
    for each in left:
        each.kill()
    assert left == []
    assert [path.name for path in temporary.iterdir() if path.name.startswith("ddpcheck")] == []


# --- Without starting a launcher -----------------------------------------------------------------------------------

WORLD = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
TORCHRUN = {**WORLD, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "none"}


@pytest.mark.parametrize(
    ("arguments", "words", "code"),
    [
        (("-n", "1"), "torchrun has started 2 ranks, and pytest-xdist workers in each of them; run pytest without", 1),
        (("--pdb",), "--pdb and --trace need one process at a terminal", 4),
        (("--ddp-launcher=sometimes",), "--ddp-launcher: expected auto, on or off, got 'sometimes'", 1),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(
    tmp_path: Path, arguments: tuple[str, ...], words: str, code: int
) -> None:
    innerpytest.write(tmp_path, test_it=HEAD)
    done = innerpytest.run(tmp_path, *arguments, **TORCHRUN)
    assert done.returncode == code
    assert words in done.stdout, done.stdout


@pytest.mark.smoke
def test_a_launcher_that_must_be_there_and_is_not_is_said(tmp_path: Path) -> None:
    innerpytest.write(tmp_path, test_it=HEAD)
    done = innerpytest.run(tmp_path, "--ddp-launcher=on")
    assert "No launcher has started this process: start it with torchrun" in done["test_ours"].text


@pytest.mark.smoke
def test_every_launcher_leaves_a_sign_that_the_plugin_looks_for() -> None:
    names = (detection._TORCHRUN, detection._OPEN_MPI, detection._MPICH, detection._SLURM, detection._BY_HAND)
    known = set(pytest_plugin._LAUNCHER_VARIABLES)
    assert all(known & {each.rank, each.world_size, *each.job.split()} for each in names)
