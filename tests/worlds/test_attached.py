"""Whole pytest sessions on ranks that torchrun or mpirun has started: in step, one report, and no end without a word.

Starting a launcher costs seconds, so each session runs many inner tests, and each test here looks at one of them.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from ddpcheck import pytest_plugin
from ddpcheck.worlds.launchers import detection
from tests import innerpytest
from tests.innerpytest import Said
from tests.launchers.commands import EACH_LAUNCHER, ROOT, clean_environment, command_of
from tests.testing import test_marked
from tests.tiers import share

pytest.importorskip("torch")
# By `make test-launchers`, which has the real launchers: each of them starts processes that import torch.
pytestmark = pytest.mark.launchers


@dataclass(frozen=True)
class Launched:
    """A session that has ended."""

    tests: dict[str, Said]
    output: str
    returncode: int

    def __getitem__(self, name: str) -> Said:
        return self.tests[name]


def start(launcher: str, folder: Path, *program: str) -> tuple[str, int]:
    """Have a launcher start a program twice in a folder; what it printed, and how it ended."""
    (folder / "tmp").mkdir(exist_ok=True)
    done = subprocess.run(
        [*command_of(launcher), *program],
        cwd=folder,
        env=clean_environment(folder / "tmp"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    return done.stdout, done.returncode


def options(folder: Path) -> list[str]:
    """Options of pytest."""
    report = ["-o", "junit_logging=all", "-o", "junit_family=xunit1", f"--junitxml={folder / 'report.xml'}"]
    return [*innerpytest.PLUGINS, *report]


def ended(folder: Path, output: str, code: int) -> Launched:
    """What came of a session in a folder; nothing else is left of it."""
    processes = [process for process in psutil.process_iter(["cwd", "pid"]) if process.info["cwd"] == str(folder)]
    assert not psutil.wait_procs(processes, timeout=60)[1], "processes are left"
    assert [path.name for path in (folder / "tmp").iterdir() if path.name.startswith("ddpcheck")] == []
    report = folder / "report.xml"
    return Launched(innerpytest.read(report) if report.exists() else {}, output, code)


def launch(launcher: str, folder: Path, *arguments: str, **files: str) -> Launched:
    """Have a launcher start pytest twice in a folder with these files; nothing is left of it afterwards."""
    innerpytest.write(folder, **files)
    return ended(folder, *start(launcher, folder, "-m", "pytest", *options(folder), *arguments))


# --- Many tests in one session -------------------------------------------------------------------------------------

OURS = """
import os, time
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

@pytest.mark.ddp
def test_the_size_is_that_of_the_launcher(world_size):
    assert world_size == 2

def test_fixture(ddp_world):
    assert ddp_world.world_size == 2
    assert ddp_world.run(all_ranks, "x") == [[0, 2, "x"], [1, 2, "x"]]
    assert ddp_world(world_size=1).run(all_ranks) == [[0, 1]]

def test_fixture_of_more_ranks(ddp_world):
    ddp_world(world_size=3).run(all_ranks)

def test_rank_0_decides_on_arguments(ddp_world):
    assert ddp_world.run(all_ranks, here()) == [[0, 2, 0], [1, 2, 0]]

def test_arguments_are_copies(ddp_world):
    values = [1]
    ddp_world.run(values.append, 2)
    assert values == [1]

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

def test_options_that_say_how_ranks_start(ddp_world):
    zero, one = ddp_world(hash_seeds=True).run(hash, "a")
    assert zero != one
    assert ddp_world(world_size=1, process_group=False).run(dist.is_initialized) == [False]

def test_in_step_again(ddp_world):
    assert ddp_world.run(dist.get_rank) == [0, 1]

def test_plain(tmp_path):
    (tmp_path / str(here())).touch()

def test_plain_fails_on_rank_1():
    assert here() == 0, "plain"

@pytest.mark.xfail(raises=ZeroDivisionError, strict=True)
def test_plain_xfails_on_rank_1():
    1 / (1 - here())

def test_plain_fails_alike():
    assert [1] == [2]

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
CONFTEST = (
    test_marked.CONFTEST
    + """
def pytest_sessionfinish(session):
    name = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["RANK"]
    open(f"finished{name}", "w").write(" ".join(report.nodeid for report in reports))

reports = []
def pytest_runtest_logreport(report):
    if report.failed:
        reports.append(report)
"""
)


@pytest.fixture(scope="module", params=EACH_LAUNCHER)
def session(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    folder = tmp_path_factory.mktemp("attached")
    files = {"conftest": CONFTEST, "test_ours": OURS}
    if request.param == "torchrun":
        files["test_inner"] = test_marked.SOURCE
    # A test that is interrupted ends a launched session.
    done = launch(request.param, folder, "-rA", "--log-level=INFO", "-k", "not test_interrupted", **files)
    assert done.returncode != 0
    assert not (folder / "entered").exists()
    assert (folder / "finished0").read_text() == (folder / "finished1").read_text() != "", "they agree on what failed"
    return done


HERE = re.findall(r"^def (test_\w+)", OURS, re.MULTILINE)
FAIL = {
    "test_body_fails_before_others_run": r"^rank 0: AssertionError: rank 0 does not run\n(.|\n)*rank 1 fell with it: ",
    "test_runs_something_else_on_each": r"The ranks are not in step in .*rank 0 is at ddp_world.check; rank 1 is at a ",
    "test_rank_1_dies": r"^rank 1 ended with exit code 3 before its work was done",
    "test_rank_1_raises": r"ValueError: broken on 1(.|\n)*rank 0 (was still )?wait(s|ing) in barrier(\(\))? at test_o",
    "test_plain_fails_on_rank_1": r"^rank 1: AssertionError: plain\n(.|\n)*assert here\(\) == 0(.|\n)*rank 0 p",
    "test_plain_fails_alike": r"^assert \[1\] == \[2\]",
    "test_check_finds": r"DDP101",
    "test_breakpoint": r"without torchrun or mpirun|torchrun or mpirun",
}
ERROR = {
    "test_setup_fails_on_rank_1": r"rank 1: OSError: no disk(.|\n)*rank 0 passed",
    "test_setup_skips_on_rank_0": r"ranks disagree: rank 0 skipped \(no camera\), rank 1 passed",
    "test_teardown_fails_on_rank_1": r"rank 1: AssertionError: late",
}
SKIP = {
    "test_sizes[4_ranks]": "needs 4 ranks, (torchrun|mpirun) has started 2",
    "test_fixture_of_more_ranks": "needs 3 ranks",
    "test_plain_xfails_on_rank_1": "",
}
PASS = [name for name in HERE if name not in {*FAIL, *ERROR, *SKIP, "test_sizes"}]
PASS += ["test_sizes[1_rank]", "test_sizes[2_ranks]"]


@pytest.mark.parametrize(
    ("name", "outcome", "words"),
    [
        *((name, "passed", "") for name in PASS),
        *((name, "failed", words) for name, words in FAIL.items()),
        *((name, "error", words) for name, words in ERROR.items()),
        *((name, "skipped", words) for name, words in SKIP.items()),
    ],
)
def test_what_comes_of_a_test_on_the_ranks_of_a_launcher(
    session: Launched, name: str, outcome: str, words: str
) -> None:
    test = session[name]
    assert test.outcome == outcome, test.text
    assert re.search(words, test.text), test.text
    assert name != "test_setup_fails_on_rank_1" or "heard on rank 1 only" in test.output


# What these see differs from a world of our own: a process that is pytest's or not.
DIFFERS = {"test_fixtures_by_value_and_on_ranks", "test_interrupted"}
MARKED = {
    **dict.fromkeys(test_marked.PASSED, ("passed", "")),
    **{name: ("skipped", words) for name, words in test_marked.SKIPPED.items()},
    **{name: ("failed", words) for name, words in test_marked.FAILED.items()},
    **{name: ("error", words) for name, words in test_marked.REFUSED.items()},
}


@pytest.mark.parametrize("name", [name for name in MARKED if name not in DIFFERS])
def test_a_marked_test_means_the_same_as_with_ranks_of_its_own(session: Launched, name: str) -> None:
    if name not in session.tests:
        pytest.skip("this file runs under torchrun")
    outcome, words = MARKED[name]
    if "3_ranks" in name or name.startswith(("test_parametrized[", "test_inherits", "test_the_fixture_inherits")):
        outcome = "skipped"
    test = session[name]
    assert test.outcome in (("error", "failed") if outcome in ("error", "failed") else (outcome,)), test.text
    assert words in test.text, test.text
    assert "ddpcheck/testing" not in test.text or outcome in ("skipped", "error"), "a traceback of ours"


def test_output_and_logs_of_each_rank_are_sections_of_one_report(session: Launched) -> None:
    if "test_printed_and_logged" not in session.tests:
        pytest.skip("this file runs under torchrun")
    output = session["test_printed_and_logged"].output
    for rank in (0, 1):
        assert f"printed by {rank}\n" in output
        assert f"Captured log of rank {rank} of 2 call" in session.output
    assert session.output.count("printed by 1") == session.output.count("logged by 0") == 1
    assert session.output.count("short test summary") == session.output.count("session starts") == 1


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
EXITS = """
def test_exits():
    if here() == 1: pytest.exit('that is all')

def test_next(): open('went_on', 'w')
"""
DIFFER = "@pytest.mark.parametrize('number', range(2 - here()))\ndef test_some(number): open('went', 'w')\n"
PLAIN = "import os\ndef test_plain(): assert '_DDPCHECK_RANK_OF' not in os.environ\n"

# Arguments and files. Ranks outlive all of these, so that one launch is enough.
ONE_AFTER_ANOTHER: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "measures": (
        ("--cov=measured", "--cov-report=term-missing"),
        {"measured": MEASURED, "test_it": HEAD + OF_MEASURED},
    ),
    "stops": (("-x",), {"test_it": HEAD + STOPS}),
    "differ": ((), {"test_it": HEAD + DIFFER}),
    "exits": ((), {"test_it": HEAD + EXITS}),
    "cannot import": ((), {"test_it": HEAD + "if here() == 1: import no_such_module\n"}),
    "no tests of ours": (("-p", "no:cacheprovider"), {"test_it": PLAIN}),
    "off": (("-p", "no:cacheprovider", "--ddp-launcher=off"), {"test_it": HEAD}),
}
PROGRAM = ROOT / "tests" / "launched_sessions.py"
Sessions = dict[str, tuple[Launched, Path]]
# The tests above run under torchrun.
SECOND = "torchrun" if shutil.which("mpirun") is None else "mpirun"


@pytest.fixture(scope="module", params=share(["torchrun", "mpirun"], [SECOND], pytest.mark.exhaustive))
def sessions(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sessions:
    """What came of each of them, and its folder."""
    folders, tasks = {}, []
    for name, (arguments, files) in ONE_AFTER_ANOTHER.items():
        folders[name] = folder = tmp_path_factory.mktemp(name.replace(" ", "_"))
        innerpytest.write(folder, **files)
        (folder / "tmp").mkdir()
        tasks.append((str(folder), *options(folder), *arguments))
    printed, code = start(request.param, tmp_path_factory.mktemp("one_launch"), str(PROGRAM), json.dumps(tasks))
    assert code == 0, printed
    sessions = {}
    for name, folder in folders.items():
        codes = [int((folder / f"code{rank}").read_text()) for rank in range(2)]
        sessions[name] = ended(folder, (folder / "output").read_text(), codes[0] or codes[1]), folder
    return sessions


def test_a_session_that_passes_ends_well_and_measures_every_rank(sessions: Sessions) -> None:
    pytest.importorskip("pytest_cov")
    done, folder = sessions["measures"]
    assert done.returncode == 0, done.output
    assert "2 passed" in done.output and len(done.tests) == 2
    assert re.search(r"measured.py +6 +1 +83% +7\n", done.output), done.output
    assert done.output.count("session starts") == 1
    assert sorted(path.name for path in folder.glob(".coverage*")) == [".coverage"]


def test_all_ranks_stop_after_the_same_failure(sessions: Sessions) -> None:
    done, folder = sessions["stops"]
    assert done.returncode != 0
    assert "1 failed, 1 passed" in done.output and "stopping after 1 failures" in done.output
    assert "rank 1: AssertionError: only there" in done["test_one"].text
    assert not list(folder.glob("went_on*"))


def test_ranks_with_different_tests_run_none(sessions: Sessions) -> None:
    done, folder = sessions["differ"]
    assert done.returncode != 0
    assert done.output.count("The ranks have not collected the same tests") == 1, done.output
    nothing = "test 3 is test_it.py::test_some[1] on rank 0, and nothing on rank 1 (rank 0 has 3, rank 1 has 2)"
    assert nothing in done.output
    assert not (folder / "went").exists()


def test_a_file_that_one_rank_cannot_import_stops_all(sessions: Sessions) -> None:
    done, _ = sessions["cannot import"]
    assert done.returncode != 0
    words = "rank 1 could not collect test_it.py: ModuleNotFoundError: No module named 'no_such_module'"
    lines = [line for line in done.output.splitlines() if words in line]
    assert lines and len(lines) == len(set(lines)), done.output  # once each: rank 0, and rank 1 if mpirun lets it


def test_pytest_exit_on_one_rank_ends_all(sessions: Sessions) -> None:
    done, folder = sessions["exits"]
    assert done.returncode != 0
    assert "rank 1 has left (that is all)" in done.output, done.output
    assert not (folder / "went_on").exists()


@pytest.mark.parametrize("name", ["no tests of ours", "off"])
def test_sessions_that_do_not_want_the_ranks_are_left_alone(name: str, sessions: Sessions) -> None:
    done, _ = sessions[name]
    assert done.returncode == 0, done.output
    assert done.output.count("1 passed") == 2, done.output


# The process of the launcher that has started the fork server of this rank.
KILL_HOST = "psutil.Process().parents()[1].kill(); time.sleep(60)"


KILL = "os.kill(os.getpid(), signal.SIGKILL)"
exhaustive = pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("launcher", "who", "kind", "how", "words"),
    [
        ("torchrun", 0, "plain", "os._exit(3)", "rank 0 (ended with exit code 3|has ended)"),
        # By who notices it first.
        ("torchrun", 1, "marked", KILL_HOST, "rank 1 (was lost|was killed by SIGKILL|has ended)"),
        pytest.param("mpirun", 1, "plain", KILL, "rank 1 (was killed by SIGKILL|has ended)", marks=exhaustive),
        pytest.param("mpirun", 0, "marked", KILL_HOST, "rank 0 (was killed by SIGKILL|has ended)", marks=exhaustive),
    ],
)
def test_a_process_of_the_launcher_that_dies_fails_the_test_and_the_others_say_so_and_stop(
    launcher: str, who: int, kind: str, how: str, words: str, tmp_path: Path
) -> None:
    marked = (
        f"@pytest.mark.ddp\ndef test_dies(rank):\n    import psutil, torch, torch.distributed as dist\n"
        f"    if rank == {who}: {how}\n    dist.all_reduce(torch.ones(1))\n"
    )
    plain = f"def test_dies():\n    if here() == {who}: {how}\n"
    following = "@pytest.mark.ddp\ndef test_next(rank): open('went_on', 'w')\n"
    done = launch(launcher, tmp_path, test_it=HEAD + {"marked": marked, "plain": plain}[kind] + following)
    assert done.returncode != 0
    assert re.search(words, done.output), done.output
    assert "1 failed, 1 passed" in done.output and done.output.count("short test summary") == 1, done.output
    assert "The ranks cannot work together any more" in done.output
    assert not (tmp_path / "went_on").exists()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", EACH_LAUNCHER)
def test_nothing_stays_of_a_launcher_that_was_killed(launcher: str, tmp_path: Path) -> None:
    source = HEAD + (
        "@pytest.mark.ddp(timeout=300)\ndef test_hangs(rank):\n    import torch, torch.distributed as dist\n"
        "    open(f'there{rank}', 'w')\n    time.sleep(300) if rank else dist.all_reduce(torch.ones(1))\n"
    )
    innerpytest.write(tmp_path, test_it=source)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    program = [*command_of(launcher), "-m", "pytest", "-p", "ddpcheck.pytest_plugin", "-k", "hangs"]
    with (tmp_path / "said").open("w") as said:
        started = subprocess.Popen(program, cwd=tmp_path, env=clean_environment(temporary), stdout=said, stderr=said)
    deadline = time.monotonic() + 150
    while len(list(tmp_path.glob("there*"))) < 2:
        assert time.monotonic() < deadline, (tmp_path / "said").read_text()
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

TORCHRUN = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
    "TORCHELASTIC_RUN_ID": "none",
}


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
