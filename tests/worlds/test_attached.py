"""Whole pytest sessions on ranks that torchrun or mpirun has started: in step, one report, and no end without a word.

Starting a launcher costs seconds, so each session runs many inner tests, and each test here looks at one of them.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from ddpcheck import pytest_plugin
from ddpcheck.worlds.launchers import detection
from tests import innerpytest
from tests.innerpytest import Said
from tests.testing import test_marked
from tests.tiers import share
from tests.worlds import test_failure_matrix

pytest.importorskip("torch")
# By `make test-launchers`, which has the real launchers: each of them starts processes that import torch.
pytestmark = pytest.mark.launchers

ROOT = Path(__file__).parents[2]
LAUNCHERS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "mpirun": ["mpirun", "--oversubscribe", "--bind-to", "none", "-n", "2", sys.executable],
}
EACH_LAUNCHER = share(LAUNCHERS, ["torchrun"], pytest.mark.exhaustive)
FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC", "OMPI_", "PMI", "SLURM_", "DDPCHECK_", "GLOO_")
FOREIGN += ("_DDPCHECK", "PYTEST_", "COV")


@dataclass(frozen=True)
class Launched:
    """A session that has ended."""

    tests: dict[str, Said]
    output: str
    returncode: int

    def __getitem__(self, name: str) -> Said:
        return self.tests[name]


def clean_environment(folder: Path) -> dict[str, str]:
    """Ours, without what a launcher or pytest may have left in it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    return {**environment, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}


def start(launcher: str, folder: Path, *program: str) -> tuple[str, int]:
    """Have a launcher start a program twice in a folder; what it printed, and how it ended."""
    command = list(LAUNCHERS[launcher])
    if launcher == "mpirun":
        if shutil.which("mpirun") is None:
            pytest.skip("mpirun is not installed")
        command[1:1] = ["--allow-run-as-root"] * (os.getuid() == 0)
    (folder / "tmp").mkdir(exist_ok=True)
    done = subprocess.run(
        [*command, *program],
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
    found = ["-p", "ddpcheck.pytest_plugin", "-p", "no:hypothesispytest", "--color=no", "-o", "junit_logging=all"]
    return [*found, "-o", "junit_family=xunit1", f"--junitxml={folder / 'report.xml'}"]


def ended(folder: Path, output: str, code: int) -> Launched:
    """What came of a session in a folder; nothing else is left of it."""
    left = [each for each in psutil.process_iter(["cwd", "pid"]) if each.info["cwd"] == str(folder)]
    assert not psutil.wait_procs(left, timeout=60)[1], "processes are left"
    assert [path.name for path in (folder / "tmp").iterdir() if path.name.startswith("ddpcheck")] == []
    report = folder / "report.xml"
    return Launched(innerpytest.read(report) if report.exists() else {}, output, code)


def launch(launcher: str, folder: Path, *arguments: str, **files: str) -> Launched:
    """Have a launcher start pytest twice in a folder with these files; nothing is left of it afterwards."""
    innerpytest.write(folder, **files)
    return ended(folder, *start(launcher, folder, "-m", "pytest", *options(folder), *arguments))


SHORT = """
import pytest

@pytest.mark.ddp
def test_marked(rank):
    assert rank == 0, "only there"

def test_world(ddp_world):
    import torch.distributed as dist
    assert ddp_world.run(dist.get_rank) == [0, 1]
"""


def test_torchrun_on_pytest_runs_tests_on_its_ranks(tmp_path: Path) -> None:
    """The shortest way through what the tests below look at closely."""
    done = launch("torchrun", tmp_path, test_short=SHORT)
    assert done.returncode != 0
    assert (done["test_marked"].outcome, done["test_world"].outcome) == ("failed", "passed"), done.output
    assert "rank 1: AssertionError: only there" in done["test_marked"].text


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
KINDS = ("raises", "skips", "calls_exit", "hangs", "unpicklable", "leaves_early")
CELLS = [("marker", "0"), ("marker", "1"), ("fixture", "1")]


def matrix() -> str:
    """The tests of the failure matrix that leave the ranks alive, without waiting long."""
    source = re.sub(r"timeout=[\d.]+", "timeout=2", test_failure_matrix.source())
    head, *parts = re.split(r"(?=^def body_)", source, flags=re.MULTILINE)
    names = tuple(f"def body_{kind}_{who}(" for kind in KINDS for who in "01")
    return head + "".join(part for part in parts if part.startswith(names))


@pytest.fixture(scope="module", params=EACH_LAUNCHER)
def session(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    folder = tmp_path_factory.mktemp("attached")
    files = {"conftest": CONFTEST, "test_ours": OURS}
    if request.param == "torchrun":
        files |= {"test_inner": test_marked.SOURCE, "test_matrix": matrix()}
    without = "(not fixture or not _0 or test_ours.py) and not test_interrupted"  # which ends a launched session
    done = launch(request.param, folder, "-rA", "--log-level=INFO", "-k", without, **files)
    assert done.returncode != 0
    assert not (folder / "entered").exists()
    assert (folder / "finished0").read_text() == (folder / "finished1").read_text() != "", "they agree on what failed"
    return done


HERE = re.findall(r"^def (test_\w+)", OURS, re.MULTILINE)
FAIL = {
    "test_body_fails_before_others_run": r"^rank 0: AssertionError: rank 0 does not run\n(.|\n)*rank 1 fell with it: ",
    "test_runs_something_else_on_each": r"The ranks are not in step in .*rank 0 is at ddp_world.check; rank 1 is at a ",
    "test_rank_1_dies": r"^rank 1 ended with exit code 3 before its work was done",
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
    said = session[name]
    assert said.outcome == outcome, said.text
    assert re.search(words, said.text), said.text


def test_what_another_rank_printed_before_it_failed_is_shown(session: Launched) -> None:
    assert "heard on rank 1 only" in session["test_setup_fails_on_rank_1"].output


# What these see differs from a world of our own: more than two ranks, or a process that is pytest's or not.
OTHERWISE = {"test_fixtures_by_value_and_on_ranks", "test_the_mark_configures_the_fixture", "test_interrupted"}
MARKED = [
    ("passed", test_marked.test_passes_on_the_ranks),
    ("skipped", test_marked.test_is_skipped_or_fails_as_expected),
    ("failed", test_marked.test_fails_with_a_sentence),
    ("error", test_marked.test_is_refused_before_it_runs),
]


def cells() -> list[tuple[str, str, str]]:
    found = []
    for outcome, test in MARKED:
        for case in test.pytestmark[0].args[1]:  # type: ignore[attr-defined]
            name, words = (case, "") if isinstance(case, str) else case
            three = "3_ranks" in name or name.startswith(("test_parametrized[", "test_inherits"))
            if name not in OTHERWISE:
                found.append((name, "skipped" if three else outcome, words))
    return found


@pytest.mark.parametrize(("name", "outcome", "words"), cells())
def test_a_marked_test_means_the_same_as_with_ranks_of_its_own(
    session: Launched, name: str, outcome: str, words: str
) -> None:
    if name not in session.tests:
        pytest.skip("this file runs under torchrun")
    said = session[name]
    allowed = ("error", "failed") if outcome in ("error", "failed") else (outcome,)
    assert said.outcome in allowed and words in said.text, said.text
    assert "ddpcheck/testing" not in said.text or outcome in ("skipped", "error"), "a traceback of ours"


def test_output_and_logs_of_each_rank_are_sections_of_one_report(session: Launched) -> None:
    if "test_printed_and_logged" not in session.tests:
        pytest.skip("this file runs under torchrun")
    output = session["test_printed_and_logged"].output
    for rank in (0, 1):
        assert f"printed by {rank}\n" in output
        assert f"Captured log of rank {rank} of 2 call" in session.output
    assert session.output.count("printed by 1") == session.output.count("logged by 0") == 1
    assert session.output.count("short test summary") == session.output.count("session starts") == 1


@pytest.mark.parametrize(("form", "who"), CELLS)
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            "raises",
            r"ValueError: broken on {who}(.|\n)*rank {other} (was still )?wait(s|ing) in barrier(\(\))? at test_matrix",
        ),
        ("skips", r"ranks disagree: rank {who} skipped \(no camera\), rank {other} passed"),
        ("calls_exit", r"rank {who}.*had enough"),
        ("hangs", r"rank {who} did not finish within 2 s: rank {who} is in body_hangs_{who} at test_matrix"),
        ("unpicklable", r"rank {who} raised .*returned a lock that cannot be pickled"),
        (
            "leaves_early",
            r"rank {other} did not finish within 2 s: rank {other} waits in all_reduce\(.*\) at test_matrix",
        ),
    ],
)
def test_one_rank_that_fails_fails_the_test_and_no_other(
    session: Launched, form: str, kind: str, words: str, who: str
) -> None:
    name = f"test_{form}_{kind}_{who}"
    if name not in session.tests:
        pytest.skip("the failure matrix runs under torchrun")
    said = session[name]
    assert said.outcome == "failed"
    other = str(1 - int(who))
    assert re.search(words.format(who=who, other=other), said.text), said.text


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

# By launcher and name: arguments, and the files. Ranks outlive all of these, so that one launch is enough.
ONE_AFTER_ANOTHER: dict[str, dict[str, tuple[tuple[str, ...], dict[str, str]]]] = {
    "torchrun": {
        "measures": (
            ("--cov=measured", "--cov-report=term-missing"),
            {"measured": MEASURED, "test_it": HEAD + OF_MEASURED},
        ),
        "stops": (("-x",), {"test_it": HEAD + STOPS}),
        "differ": ((), {"test_it": HEAD + DIFFER}),
        "exits": ((), {"test_it": HEAD + EXITS}),
    },
    "mpirun": {
        "stops": (("-x",), {"test_it": HEAD + STOPS}),
        "cannot import": ((), {"test_it": HEAD + "if here() == 1: import no_such_module\n"}),
        "no tests of ours": (("-p", "no:cacheprovider"), {"test_it": PLAIN}),
        "off": (("-p", "no:cacheprovider", "--ddp-launcher=off"), {"test_it": HEAD}),
    },
}
PROGRAM = Path(__file__).parents[1] / "launched_sessions.py"
Sessions = Callable[[str, str], tuple[Launched, Path]]


@pytest.fixture(scope="module")
def one_of(tmp_path_factory: pytest.TempPathFactory) -> Sessions:
    """What came of one of them, by launcher and name, and its folder."""

    @functools.cache
    def all_of(launcher: str) -> dict[str, tuple[Launched, Path]]:
        folders = {}
        for name, (_, files) in ONE_AFTER_ANOTHER[launcher].items():
            folders[name] = tmp_path_factory.mktemp(name.replace(" ", "_"))
            innerpytest.write(folders[name], **files)
            (folders[name] / "tmp").mkdir()
        tasks = [
            (str(folders[name]), *options(folders[name]), *arguments)
            for name, (arguments, _) in ONE_AFTER_ANOTHER[launcher].items()
        ]
        printed, code = start(launcher, tmp_path_factory.mktemp(launcher), str(PROGRAM), json.dumps(tasks))
        assert code == 0, printed
        found = {}
        for name, folder in folders.items():
            codes = [int((folder / f"code{rank}").read_text()) for rank in range(2)]
            found[name] = ended(folder, (folder / "output").read_text(), codes[0] or codes[1]), folder
        return found

    return lambda launcher, name: all_of(launcher)[name]


@pytest.mark.exhaustive
def test_a_session_that_passes_ends_well_and_measures_every_rank(one_of: Sessions) -> None:
    pytest.importorskip("pytest_cov")
    done, folder = one_of("torchrun", "measures")
    assert done.returncode == 0, done.output
    assert "2 passed" in done.output and len(done.tests) == 2
    assert re.search(r"measured.py +6 +1 +83% +7\n", done.output), done.output
    assert done.output.count("session starts") == 1
    assert sorted(path.name for path in folder.glob(".coverage*")) == [".coverage"]


@pytest.mark.parametrize("launcher", EACH_LAUNCHER)
def test_all_ranks_stop_after_the_same_failure(launcher: str, one_of: Sessions) -> None:
    done, folder = one_of(launcher, "stops")
    assert done.returncode != 0
    assert "1 failed, 1 passed" in done.output and "stopping after 1 failures" in done.output
    assert "rank 1: AssertionError: only there" in done["test_one"].text
    assert not list(folder.glob("went_on*"))


def test_ranks_with_different_tests_run_none(one_of: Sessions) -> None:
    done, folder = one_of("torchrun", "differ")
    assert done.returncode != 0
    assert done.output.count("The ranks have not collected the same tests") == 1, done.output
    assert (
        "test 3 is test_it.py::test_some[1] on rank 0, and nothing on rank 1 (rank 0 has 3, rank 1 has 2)"
        in done.output
    )
    assert not (folder / "went").exists()


def test_a_file_that_one_rank_cannot_import_stops_all(one_of: Sessions) -> None:
    done, _ = one_of("mpirun", "cannot import")
    assert done.returncode != 0
    said = "rank 1 could not collect test_it.py: ModuleNotFoundError: No module named 'no_such_module'"
    lines = [line for line in done.output.splitlines() if said in line]
    assert lines and len(lines) == len(set(lines)), done.output  # once each: rank 0, and rank 1 if mpirun lets it


def test_pytest_exit_on_one_rank_ends_all(one_of: Sessions) -> None:
    done, folder = one_of("torchrun", "exits")
    assert done.returncode != 0
    assert "rank 1 has left (that is all)" in done.output, done.output
    assert not (folder / "went_on").exists()


@pytest.mark.parametrize("name", ["no tests of ours", "off"])
def test_sessions_that_do_not_want_the_ranks_are_left_alone(name: str, one_of: Sessions) -> None:
    done, _ = one_of("mpirun", name)
    assert done.returncode == 0, done.output
    assert done.output.count("1 passed") == 2, done.output


# The process of the launcher that has started the fork server of this rank.
KILL_HOST = "psutil.Process().parents()[1].kill(); time.sleep(60)"


@pytest.mark.parametrize(
    ("launcher", "who", "kind", "how", "words"),
    [
        pytest.param(
            *("mpirun", 1, "plain", "os.kill(os.getpid(), signal.SIGKILL)", "rank 1 (was killed by SIGKILL|has ended)"),
            marks=pytest.mark.exhaustive,
        ),
        ("torchrun", 0, "plain", "os._exit(3)", "rank 0 (ended with exit code 3|has ended)"),
        (
            "torchrun",
            1,
            "marked",
            KILL_HOST,
            "rank 1 (was lost|was killed by SIGKILL|has ended)",  # by who notices it first
        ),
        pytest.param(
            *("mpirun", 0, "marked", KILL_HOST, "rank 0 (was killed by SIGKILL|has ended)"),
            marks=pytest.mark.exhaustive,
        ),
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
    command = list(LAUNCHERS[launcher])
    if launcher == "mpirun":
        if shutil.which("mpirun") is None:
            pytest.skip("mpirun is not installed")
        command[1:1] = ["--allow-run-as-root"] * (os.getuid() == 0)
    source = HEAD + (
        "@pytest.mark.ddp(timeout=300)\ndef test_hangs(rank):\n    import torch, torch.distributed as dist\n"
        "    open(f'there{rank}', 'w')\n    time.sleep(300) if rank else dist.all_reduce(torch.ones(1))\n"
    )
    innerpytest.write(tmp_path, test_it=source)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    program = [*command, "-m", "pytest", "-p", "ddpcheck.pytest_plugin", "-k", "hangs"]
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
        (
            ("-n", "1"),
            "torchrun has started 2 ranks, and pytest-xdist workers in each of them; run pytest without -n",
            1,
        ),
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
    names = (detection._TORCHRUN, detection._OPEN_MPI, detection._MPICH, detection._SLURM, detection._PLAIN)
    known = set(pytest_plugin._SIGNS)
    assert all(known & {each.rank, each.world_size, *each.job.split()} for each in names)
