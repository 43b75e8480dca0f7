"""Ranks that torchrun or mpirun has started: in step, the same words on each, and alive after a failure of one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from ddpcheck.findings.errors import UsageError
from ddpcheck.worlds.launchers import store as loopback
from ddpcheck.worlds.launchers.detection import LauncherEnv, detect, require
from ddpcheck.worlds.launchers.store import open_store
from tests.tiers import one_of, share

pytest.importorskip("torch")
pytestmark = pytest.mark.launchers

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).parents[1] / "launched_program.py"
LAUNCHERS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "mpirun": ["mpirun", "--oversubscribe", "--bind-to", "none", "-n", "2"],
}
EACH_LAUNCHER = share(LAUNCHERS, ["torchrun"], pytest.mark.exhaustive)
FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC", "OMPI_", "PMI", "SLURM_", "DDPCHECK_", "GLOO_")

Answers = dict[int, dict[str, list[Any]]]


def clean_environment(folder: Path) -> dict[str, str]:
    """Ours, without what a launcher of this very test may have left in it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    return {**environment, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}


def launch(launcher: str, folder: Path, *scenarios: str) -> tuple[Answers, subprocess.CompletedProcess[str]]:
    """Run the scenarios on two ranks; what each was told, once nothing of them is left."""
    command = list(LAUNCHERS[launcher])
    if launcher == "mpirun":
        if shutil.which("mpirun") is None:
            pytest.skip("mpirun is not installed")
        command += ["--allow-run-as-root"] * (os.getuid() == 0) + [sys.executable]
    done = subprocess.run(
        [*command, str(PROGRAM), str(folder), *scenarios],
        cwd=ROOT,
        env=clean_environment(folder),
        capture_output=True,
        text=True,
        timeout=150,
    )
    answers: Answers = {}
    for rank in range(2):
        file = folder / f"rank{rank}"
        assert file.exists(), done.stderr
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        answers[rank] = {name: said for name, *said in lines}
    deadline = time.monotonic() + 60
    while left := [
        *(pid for (pid,) in (of_rank["pid"] for of_rank in answers.values()) if psutil.pid_exists(pid)),
        *(path.name for path in folder.iterdir() if path.name.startswith("ddpcheck")),
    ]:
        assert time.monotonic() < deadline, f"left are {left}"
        time.sleep(0.05)
    return answers, done


@pytest.fixture(scope="module", params=EACH_LAUNCHER)
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Everything that leaves the ranks alive, in one session of a launcher."""
    answers, done = launch(request.param, tmp_path_factory.mktemp("told"), "works", "fails", "out_of_step")
    assert done.returncode == 0, done.stderr
    assert "over" in answers[0] and "over" in answers[1]
    return answers


# --- Worlds --------------------------------------------------------------------------------------------------------


def both(told: Answers, name: str) -> Any:
    """What both ranks were told, the same on each but for seconds."""
    mine, other = ([part for part in told[rank][name] if not isinstance(part, float)] for rank in (0, 1))
    assert mine == other
    return mine


def test_every_rank_gets_all_results(told: Answers) -> None:
    assert both(told, "all_reduced") == ["returned", "[3.0, 3.0]"]
    assert both(told, "big") == [[[9 << 20, "0"], [9 << 20, "1"]]]


def test_code_under_test_finds_itself_as_on_a_rank_of_our_own(told: Answers) -> None:
    same, (zero, one), state, interface = both(told, "context")
    assert same
    assert zero[:3] == [0, 2, "cpu"] and one[:3] == [1, 2, "cpu"] and zero[3] == one[3], "one directory for a machine"
    assert zero[4:] == ["0", "2", "0", "2"] and one[4:] == ["1", "2", "1", "2"]
    assert state == {} and interface is None, "nothing of it stays"


def test_what_ranks_leave_reaches_every_rank(told: Answers) -> None:
    assert both(told, "attachment") == [["of 0", "of 1"]]


def test_a_rank_that_takes_no_part_learns_the_outcome(told: Answers) -> None:
    assert both(told, "one of two") == [[1]]
    kind, _, failures = both(told, "only rank 1 of two fails in a world of one")
    assert kind == "RankError" and failures == [[0, "raised", "AssertionError"]]


def test_ranks_agree_on_words_in_order_of_rank(told: Answers) -> None:
    assert both(told, "agree") == [["word 0", "word 1"]]
    assert both(told, "end") == [["end 0", "end 1"]]


def test_files_of_ranks_go_with_their_world(told: Answers) -> None:
    assert told[0]["files"] == [[]]


# --- One rank fails ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "kind", "message", "type_"),
    [
        ("raise", "raised", "raised AssertionError: not the same", "AssertionError"),
        ("skip", "raised", "raised Skipped: no disk", "Skipped"),
        ("exit", "exited", "called exit(0) in the middle of a run", "SystemExit"),
    ],
)
@pytest.mark.parametrize("who", [0, 1])
def test_the_failure_of_one_rank_is_the_headline_on_all(
    told: Answers, how: str, kind: str, message: str, type_: str, who: int
) -> None:
    error, said, failures = both(told, f"{how} {who}")
    assert error == "RankError"
    assert said.startswith(f"rank {who} {message}")
    assert f"(rank {1 - who} was still waiting in all_reduce at tests/launched_program.py:" in said
    assert failures == [[who, kind, type_], [1 - who, "stuck", ""]]
    assert max(told[rank][f"{how} {who}"][2] for rank in told) < 18, "freed, not given up"


@pytest.mark.parametrize(
    ("how", "who", "place"),
    [
        ("sleep", 0, "step 3: loading (sleep at tests/launched_program.py:"),
        ("sleep", 1, "step 3: loading (sleep at tests/launched_program.py:"),
        ("loop", 1, "loop at tests/launched_program.py:"),
        ("swallow", 0, "swallow at tests/launched_program.py:"),
    ],
)
def test_a_hang_says_where_each_rank_is(told: Answers, how: str, who: int, place: str) -> None:
    error, said, failures = both(told, f"{how} {who}")
    assert error == "HangError"
    assert said.startswith("ranks 0 and 1 did not finish within 2 s: ")
    assert f"rank {who} is in {place}" in said
    assert f"rank {1 - who} waits in all_reduce at tests/launched_program.py:" in said
    assert [one[:2] for one in failures] == [[0, "stuck"], [1, "stuck"]]


def test_a_rank_that_waits_in_a_subgroup_is_freed(told: Answers) -> None:
    error, said, _ = both(told, "subgroup")
    assert error == "RankError"
    assert said.startswith("rank 1 raised ValueError: not in the subgroup (rank 0 was still waiting in all_reduce at ")


def test_a_result_that_cannot_be_sent_is_a_failure(told: Answers) -> None:
    error, said, _ = both(told, "unpicklable")
    assert error == "RankError" and "returned a generator that cannot be pickled" in said


def test_more_ranks_than_there_are_is_refused_in_a_sentence(told: Answers) -> None:
    error, said, _ = both(told, "too many")
    assert error == "UsageError"
    assert "world_size=3, but" in said and "has started 2 ranks" in said


def test_the_session_works_after_every_failure(told: Answers) -> None:
    assert both(told, "works after all") == ["returned", "[3.0, 3.0]"]


# --- Out of step ---------------------------------------------------------------------------------------------------


def test_a_rank_that_never_comes_to_a_run_is_named_at_once(told: Answers) -> None:
    assert "skipped run" not in told[1]
    (said,) = told[0]["skipped run"]
    assert said.startswith("Rank 1 has left skipped run already, while rank 0 waits in a run.")


def test_ranks_at_different_points_are_told_which(told: Answers) -> None:
    (said,) = both(told, "other run")
    assert said.startswith("The ranks are not in step in other run: rank 0 is at run(2, gloo, cpu, 10); ")
    assert "; rank 1 is at run(2, gloo, cpu, 11); " in said


def test_a_late_rank_is_named_with_where_it_was(told: Answers) -> None:
    assert told[0]["late"] == [
        "HangError",
        "Rank 1 did not reach a point of late within 0.2 s; rank 1 was last in late.",
    ]


def test_ranks_that_were_out_of_step_are_in_step_in_the_next_test(told: Answers) -> None:
    assert both(told, "in step again") == ["returned", "[3.0, 3.0]"]


# --- Ranks that are gone -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("launcher", "how", "who", "words"),
    [
        ("torchrun", "kill", 1, "was killed by SIGKILL"),
        ("torchrun", "os_exit_3", 0, "ended with exit code 3 before its work was done, without a Python exception"),
        ("mpirun", "kill", 0, "was killed by SIGKILL"),
        ("mpirun", "os_exit_0", 1, "ended with exit code 0 before its work was done, without a Python exception"),
    ],
)
def test_a_rank_that_dies_fails_its_test_and_no_other(
    tmp_path: Path, launcher: str, how: str, who: int, words: str
) -> None:
    answers, done = launch(launcher, tmp_path, f"dies,{how},{who}")
    error, said, failures = both(answers, "dies")
    assert error == "RankError"
    assert said.startswith(f"rank {who} {words}")
    assert failures[0][:2] == [who, "died"]
    assert both(answers, "the next one") == ["returned", "[3.0, 3.0]"]
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("launcher", "who"), one_of(3, [("torchrun", 1), ("torchrun", 0), ("mpirun", 1), ("mpirun", 0)])
)
def test_a_process_of_the_launcher_that_dies_fails_this_and_every_later_test_at_once(
    tmp_path: Path, launcher: str, who: int
) -> None:
    answers, done = launch(launcher, tmp_path, f"dies,kill_host,{who}")
    mine = answers[1 - who]
    error, said, seconds, failures = mine["dies"]
    assert error == "RankError"
    lost = "rank 1 was lost: the process that the launcher had started for it has ended (rank 0 "
    ended = f"The ranks cannot work together any more, since dies: rank {who} "
    assert said.startswith((lost, ended))
    assert not failures or failures[0][:2] == [who, "died"]
    assert seconds < 18, "not at the timeout"
    error, said, seconds, _ = mine["the next one"]
    assert error == "RankError" and seconds < 5
    assert said.startswith("The ranks cannot work together any more, since dies: rank ")
    assert "over" in mine, "it has had the time to say so"
    assert "over" not in answers[who]
    assert done.returncode != 0


def test_a_rank_that_has_left_is_named_with_its_reason(tmp_path: Path) -> None:
    answers, _ = launch("torchrun", tmp_path, "leaves")
    error, said, seconds, _ = answers[0]["with one that left"]
    assert error == "RankError" and seconds < 18
    assert said.endswith("with one that left: rank 1 has left (stopped after 1 failure).")
    assert "left" in answers[1], "it waited for rank 0"


@pytest.mark.parametrize("launcher", EACH_LAUNCHER)
def test_a_rank_that_is_slow_to_read_what_all_gathered_last_reads_it(tmp_path: Path, launcher: str) -> None:
    answers, _ = launch(launcher, tmp_path, "reads_late")
    assert "the last one end" not in answers[1], answers[1]


def test_a_rank_that_the_launcher_ends_can_still_speak(tmp_path: Path) -> None:
    answers, _ = launch("torchrun", tmp_path, "stopped")
    assert answers[0]["stopped"] == [
        "The ranks cannot work together any more, since the start: torchrun has told rank 0 to end."
    ]
    assert answers[0]["after that"][1] == answers[0]["stopped"][0]
    error, said, *_ = answers[1]["after that"]
    assert error == "RankError" and "rank 0 has left" in said


@pytest.mark.exhaustive
def test_two_jobs_at_the_same_time_do_not_meet(tmp_path: Path) -> None:
    found: dict[str, Answers] = {}
    threads = []
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()

        def work(name: str = name, folder: Path = folder) -> None:
            found[name] = launch("mpirun", folder, "works")[0]

        threads.append(threading.Thread(target=work))
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed")
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[name][0]["all_reduced"] for name in ("one", "two")] == [["returned", "[3.0, 3.0]"]] * 2


# --- Who started us ------------------------------------------------------------------------------------------------

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "abc",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "77",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_JOB_ID": "5",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
}
PLAIN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1234"}


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (TORCHRUN, LauncherEnv("torchrun", 1, 4, 1, 2, "abc 0", "node1", 29500, True)),
        (OPEN_MPI, LauncherEnv("mpirun", 0, 2, 0, 2, "77", "", 0)),
        (MPICH, LauncherEnv("mpiexec", 1, 2, 1, 2, "", "", 0)),
        (SLURM, LauncherEnv("srun", 3, 4, 1, None, "5 0", "", 0)),
        ({**SLURM, "SLURM_STEP_NUM_NODES": "1"}, LauncherEnv("srun", 3, 4, 1, 4, "5 0", "", 0)),
        (PLAIN, LauncherEnv("the environment", 0, 2, None, None, "", "localhost", 1234)),
        (
            {**SLURM, "SLURM_STEP_NODELIST": "n[1-2]", "SLURMD_NODENAME": "n2", "SLURM_NODEID": "1"}
            | {"SLURM_STEP_TASKS_PER_NODE": "1,3", "MASTER_PORT": "4000"},
            LauncherEnv("srun", 3, 4, 1, 3, "5 0", "", 4000, nodes="n[1-2]", node="n2"),
        ),
        ({**SLURM, "PMI_RANK": "3", "PMI_SIZE": "4"}, LauncherEnv("srun", 3, 4, 1, None, "5 0", "", 0)),
        ({**SLURM, "PMI_RANK": "7", "PMI_SIZE": "8"}, LauncherEnv("mpiexec", 7, 8, None, None, "", "", 0)),
        ({**SLURM, **TORCHRUN}, LauncherEnv("torchrun", 1, 4, 1, 2, "abc 0", "node1", 29500, True)),
        ({**SLURM, **OPEN_MPI}, LauncherEnv("mpirun", 0, 2, 0, 2, "77", "", 0)),
    ],
    ids=[
        "torchrun",
        "open mpi",
        "mpich",
        "slurm",
        "slurm on one node",
        "by hand",
        "slurm with a list of nodes",
        "srun that speaks PMI",
        "mpiexec in srun",
        "torchrun in srun",
        "mpirun in srun",
    ],
)
def test_each_launcher_is_recognised(environ: dict[str, str], expected: LauncherEnv) -> None:
    assert detect(environ) == expected
    assert require(environ) == expected


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({}, "No launcher has started this process: start it with torchrun, mpirun or srun"),
        ({"RANK": "0"}, "WORLD_SIZE is not set; export it"),
        ({"WORLD_SIZE": "2"}, "RANK is not set; export it"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set; export it, and MASTER_PORT"),
        ({**PLAIN, "MASTER_PORT": ""}, "MASTER_PORT must be a whole number, got ''"),
        ({**PLAIN, "RANK": "gold"}, "RANK must be a whole number, got 'gold'"),
        ({**PLAIN, "RANK": "2"}, "RANK=2 and WORLD_SIZE=2 do not go together"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "mpirun has started this process, but OMPI_COMM_WORLD_SIZE is not set"),
        ({"SLURM_JOB_ID": "5", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, "No launcher has started this process"),
        ({**SLURM, "SLURM_PTY_PORT": "4000"}, "No launcher has started this process"),
        ({**TORCHRUN, "_DDPCHECK_RANK_OF": "1"}, "No launcher has started this process"),
    ],
)
def test_half_of_an_environment_is_no_launch_and_says_what_is_missing(environ: dict[str, str], words: str) -> None:
    assert detect(environ) is None
    with pytest.raises(UsageError) as caught:
        require(environ)
    assert words in str(caught.value)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("launcher", "environ", "expected"),
    [
        ("pytorch", {**SLURM, **PLAIN}, ("the environment", 0)),
        ("pytorch", {**SLURM, **TORCHRUN}, ("torchrun", 1)),
        ("slurm", {**SLURM, **TORCHRUN}, ("srun", 3)),
        ("slurm", {**SLURM, "SLURM_PTY_PORT": "4000"}, ("srun", 3)),
        ("mpi", {**SLURM, "PMI_RANK": "3", "PMI_SIZE": "4"}, ("mpiexec", 3)),
        ("mpi", {**OPEN_MPI, **PLAIN}, ("mpirun", 0)),
        ("mpi", {**OPEN_MPI, "_DDPCHECK_RANK_OF": "1"}, ("mpirun", 0)),
    ],
)
def test_a_launcher_that_is_asked_for_is_the_only_one_listened_to(
    launcher: str, environ: dict[str, str], expected: tuple[str, int]
) -> None:
    found = require(environ, launcher)
    assert (found.launcher, found.rank) == expected


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("launcher", "environ", "words"),
    [
        (
            "pytorch",
            {},
            "Launcher 'pytorch' was asked for, but there is no RANK in the environment; start this with tor",
        ),
        ("mpi", {}, "there is no OMPI_COMM_WORLD_RANK or PMI_RANK in the environment; start this with mpirun"),
        ("slurm", {}, "there is no SLURM_JOB_ID in the environment; start this with srun"),
        ("slurm", {"SLURM_JOB_ID": "5"}, "this is a script or shell of SLURM's job 5, and none of its tasks; start"),
        ("mpi", TORCHRUN, "it is torchrun that has started this process; start this with mpirun"),
        ("pytorch", {"WORLD_SIZE": "2"}, "RANK is not set; export it"),
        ("slurm", {**SLURM, "MASTER_PORT": "x"}, "MASTER_PORT must be a whole number, got 'x'"),
    ],
)
def test_a_launcher_that_is_asked_for_and_not_there_is_named(
    launcher: str, environ: dict[str, str], words: str
) -> None:
    with pytest.raises(UsageError) as caught:
        require(environ, launcher)
    assert words in str(caught.value)


@pytest.mark.smoke
def test_rank_0_on_another_node_than_the_first_is_told_what_to_export() -> None:
    environ = {**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "n[1-2]", "SLURMD_NODENAME": "n2"}
    with pytest.raises(
        UsageError, match=r"Rank 0 is on n2, which is not the first machine of .*; export MASTER_ADDR=n2"
    ):
        open_store(require(environ), 1.0)


@pytest.mark.smoke
def test_one_process_is_no_launch_unless_it_is_asked_for() -> None:
    environ = {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"}
    assert detect(environ) is None
    assert require(environ).world_size == 1


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (SLURM, "srun has started 4 ranks on machines that it does not tell apart; export MASTER_ADDR"),
        (
            {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
            "mpirun has started 2 ranks on several machines; export MAST",
        ),
        (MPICH, "mpiexec does not say which job this is, so two jobs could meet; export MASTER_ADDR=127.0.0.1"),
    ],
)
def test_ranks_that_cannot_find_each_other_are_told_what_to_export(environ: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_store(require(environ), 1.0)
    assert words in str(caught.value)


@pytest.mark.smoke
def test_the_file_of_a_job_that_was_killed_leads_nobody_astray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: Callable[[dict[str, str]], Any]
) -> None:
    point = loopback.meeting_point("77")
    point.write_text("1 stale")
    board, met = opened(OPEN_MPI)
    assert point.read_text() != "1 stale", "rank 0 has written its own"
    other, _ = opened({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1"})
    board.put("word", b"from 0")
    assert other.get("word") == b"from 0"
    met()
    assert not point.exists()


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], Any]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return lambda environ: open_store(require(environ), 20.0)


@pytest.mark.smoke
def test_the_first_claim_on_a_name_stays(opened: Callable[[dict[str, str]], Any]) -> None:
    board, met = opened(OPEN_MPI)
    board.claim("end", "first")
    board.claim("end", "second")
    assert board.claimed("end") == "first"
    large = bytes(range(256)) * (40 << 10)
    board.put("large", large)
    assert board.get("large") == large and board.has("large", "end") and not board.has("end", "no")
    board.remove("large")
    assert not board.has("large") and not board.has("large#1")
    met()
