"""Ranks that torchrun or mpirun has started: in step, the same words on each, and alive after a failure of one."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.replace import replace
from ddpcheck.worlds.launchers import store as loopback
from ddpcheck.worlds.launchers.detection import LauncherEnv, detect, require
from ddpcheck.worlds.launchers.store import open_store
from tests.launchers.commands import ROOT, clean_environment, command_of

pytest.importorskip("torch")
pytestmark = pytest.mark.launchers

PROGRAM = ROOT / "tests" / "launched_program.py"

Answers = dict[int, dict[str, list[Any]]]


def launch(launcher: str, folder: Path, *scenarios: str) -> tuple[Answers, int]:
    """Run the scenarios on two ranks; what each was told and the exit code, once nothing of them is left."""
    command = [*command_of(launcher), str(PROGRAM), str(folder), *scenarios]
    environment = clean_environment(folder)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150)
    answers: Answers = {}
    for rank in range(2):
        file = folder / f"rank{rank}"
        assert file.exists(), done.stderr
        answers[rank] = {name: answer for name, *answer in map(json.loads, file.read_text().splitlines())}
    deadline = time.monotonic() + 60
    while remaining := [
        *(pid for by_name in answers.values() for pid in by_name["pid"] if psutil.pid_exists(pid)),
        *(path.name for path in folder.iterdir() if path.name.startswith("ddpcheck")),
    ]:
        assert time.monotonic() < deadline, f"left are {remaining}"
        time.sleep(0.05)
    return answers, done.returncode


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Everything that leaves the ranks alive, in one session of a launcher."""
    scenarios = ("works", "fails", "out_of_step", "dies,kill,1", "dies,os_exit_3,0", "reads_late")
    answers, code = launch("torchrun", tmp_path_factory.mktemp("answers"), *scenarios)
    assert code == 0 and "over" in answers[0] and "over" in answers[1]
    assert "the last one end" not in answers[1], "a rank that is slow to read what all gathered last reads it"
    return answers


# --- Worlds --------------------------------------------------------------------------------------------------------


def both(answers: Answers, name: str) -> Any:
    """What both ranks were told, the same on each but for seconds."""
    mine, theirs = ([part for part in answers[rank][name] if not isinstance(part, float)] for rank in (0, 1))
    assert mine == theirs
    return mine


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("all_reduced", ["returned", "[3.0, 3.0]"]),
        ("big", [[[9 << 20, "0"], [9 << 20, "1"]]]),
        ("attachment", [["of 0", "of 1"]]),
        ("one of two", [[1]]),
        ("agree", [["word 0", "word 1"]]),
        ("end", [["end 0", "end 1"]]),
        ("files", [[]]),
        ("in step again", ["returned", "[3.0, 3.0]"]),
    ],
)
def test_every_rank_gets_all_results_also_after_failures(answers: Answers, name: str, expected: list[Any]) -> None:
    assert both(answers, name) == expected


def test_code_under_test_finds_itself_as_on_a_rank_of_our_own(answers: Answers) -> None:
    same, contexts, state, interface = both(answers, "context")
    assert same and contexts[0][3] == contexts[1][3], "one directory for a machine"
    for rank, context in enumerate(contexts):
        assert context[:3] == [rank, 2, "cpu"] and context[4:] == [str(rank), "2", str(rank), "2"]
    assert state == {} and interface is None, "nothing of it stays"


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
    answers: Answers, how: str, kind: str, message: str, type_: str, who: int
) -> None:
    error, said, failures = both(answers, f"{how} {who}")
    assert error == "RankError"
    assert said.startswith(f"rank {who} {message}")
    assert f"(rank {1 - who} was still waiting in all_reduce at tests/launched_program.py:" in said
    assert failures == [[who, kind, type_], [1 - who, "stuck", ""]]
    assert max(answers[rank][f"{how} {who}"][2] for rank in answers) < 18, "freed, not given up"


@pytest.mark.parametrize(("how", "who", "place"), [("sleep", 0, "step 3: loading (sleep"), ("loop", 1, "loop")])
def test_a_hang_says_where_each_rank_is(answers: Answers, how: str, who: int, place: str) -> None:
    error, said, failures = both(answers, f"{how} {who}")
    assert error == "HangError"
    assert said.startswith("ranks 0 and 1 did not finish within 2 s: ")
    assert f"rank {who} is in {place} at tests/launched_program.py:" in said
    assert f"rank {1 - who} waits in all_reduce at tests/launched_program.py:" in said
    assert [failure[:2] for failure in failures] == [[0, "stuck"], [1, "stuck"]]


# --- Out of step ---------------------------------------------------------------------------------------------------


def test_ranks_that_are_not_in_step_are_named_with_where_they_are(answers: Answers) -> None:
    assert "skipped run" not in answers[1]
    assert answers[0]["skipped run"][1].startswith("Rank 1 has left skipped run already, while rank 0 waits in a run.")
    _, said = both(answers, "other run")
    assert said.startswith("The ranks are not in step in other run: rank 0 is at run(2, gloo, cpu, 10); ")
    assert "; rank 1 is at run(2, gloo, cpu, 11); " in said
    message = "Rank 1 did not reach a point of late within 0.2 s; rank 1 was last in late."
    assert answers[0]["late"] == ["HangError", message]


# --- Ranks that are gone -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "who", "words"),
    [("kill", 1, "was killed by SIGKILL"), ("os_exit_3", 0, "ended with exit code 3 before its work was done")],
)
def test_a_rank_that_dies_fails_its_test_and_no_other(answers: Answers, how: str, who: int, words: str) -> None:
    error, message, failures = both(answers, f"dies,{how},{who}")
    assert error == "RankError" and message.startswith(f"rank {who} {words}")
    assert failures[0][:2] == [who, "died"]
    assert both(answers, f"after dies,{how},{who}") == ["returned", "[3.0, 3.0]"]


def test_ranks_of_mpirun_outlive_deaths_and_one_that_has_left_is_named_with_its_reason(tmp_path: Path) -> None:
    answers, code = launch("mpirun", tmp_path, "works", "dies,kill,0", "leaves")
    assert both(answers, "big") == [[[9 << 20, "0"], [9 << 20, "1"]]]
    assert both(answers, "dies,kill,0")[1].startswith("rank 0 was killed by SIGKILL")
    assert both(answers, "after dies,kill,0") == ["returned", "[3.0, 3.0]"]
    error, message, seconds, _ = answers[0]["with one that left"]
    assert error == "RankError" and seconds < 18
    assert message.endswith("with one that left: rank 1 has left (stopped after 1 failure).")
    assert "left" in answers[1], "it waited for rank 0"
    assert code == 0


@pytest.mark.parametrize(("launcher", "who"), [("torchrun", 1), ("mpirun", 0)])
def test_a_process_of_the_launcher_that_dies_fails_this_and_every_later_test_at_once(
    tmp_path: Path, launcher: str, who: int
) -> None:
    scenario = f"dies,kill_host,{who}"
    answers, code = launch(launcher, tmp_path, scenario)
    mine = answers[1 - who]
    error, said, seconds, failures = mine[scenario]
    assert error == "RankError"
    lost = "rank 1 was lost: the process that the launcher had started for it has ended (rank 0 "
    ended = f"The ranks cannot work together any more, since {scenario}: rank {who} "
    assert said.startswith((lost, ended))
    assert not failures or failures[0][:2] == [who, "died"]
    assert seconds < 18, "not at the timeout"
    error, said, seconds, _ = mine[f"after {scenario}"]
    assert error == "RankError" and seconds < 5
    assert said.startswith(f"The ranks cannot work together any more, since {scenario}: rank ")
    assert "over" in mine, "it has had the time to say so"
    assert "over" not in answers[who]
    assert code != 0


def test_a_rank_that_the_launcher_ends_can_still_speak(tmp_path: Path) -> None:
    answers, _ = launch("torchrun", tmp_path, "stopped")
    assert answers[0]["stopped"] == [
        "The ranks cannot work together any more, since the start: torchrun has told rank 0 to end."
    ]
    assert answers[0]["after that"][1] == answers[0]["stopped"][0]
    error, said, *_ = answers[1]["after that"]
    assert error == "RankError" and "rank 0 has left" in said


# --- Who started us ------------------------------------------------------------------------------------------------


def environment(text: str) -> dict[str, str]:
    return {name: value for name, _, value in (word.partition("=") for word in text.split())}


TORCHRUN = environment(
    "RANK=1 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=node1 MASTER_PORT=29500 TORCHELASTIC_RUN_ID=abc "
    "TORCHELASTIC_RESTART_COUNT=0 TORCHELASTIC_USE_AGENT_STORE=True"
)
OPEN_MPI = environment(
    "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=2 "
    "PMIX_NAMESPACE=77"
)
MPICH = environment("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2")
SLURM = environment(
    "SLURM_JOB_ID=5 SLURM_STEP_ID=0 SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_NUM_NODES=2"
)
PLAIN = environment("RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=1234")
SLURM_NODES = SLURM | environment(
    "SLURM_STEP_NODELIST=n[1-2] SLURMD_NODENAME=n2 SLURM_NODEID=1 SLURM_STEP_TASKS_PER_NODE=1,3 MASTER_PORT=4000"
)
ONE_PROCESS = {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"}
OF_TORCHRUN = LauncherEnv("torchrun", 1, 4, 1, 2, "abc 0", "node1", 29500, True)
OF_OPEN_MPI = LauncherEnv("mpirun", 0, 2, 0, 2, "77", "", 0)
OF_SLURM = LauncherEnv("srun", 3, 4, 1, None, "5 0", "", 0)
DETECTED = {
    "torchrun": (TORCHRUN, OF_TORCHRUN),
    "open mpi": (OPEN_MPI, OF_OPEN_MPI),
    "mpich": (MPICH, LauncherEnv("mpiexec", 1, 2, 1, 2, "", "", 0)),
    "slurm": (SLURM, OF_SLURM),
    "slurm on one node": ({**SLURM, "SLURM_STEP_NUM_NODES": "1"}, replace(OF_SLURM, local_world_size=4)),
    "by hand": (PLAIN, LauncherEnv("the environment", 0, 2, None, None, "", "localhost", 1234)),
    "slurm with a list of nodes": (
        SLURM_NODES,
        replace(OF_SLURM, local_world_size=3, port=4000, nodes="n[1-2]", node="n2"),
    ),
    "srun that speaks PMI": ({**SLURM, "PMI_RANK": "3", "PMI_SIZE": "4"}, OF_SLURM),
    "mpiexec in srun": (
        {**SLURM, "PMI_RANK": "7", "PMI_SIZE": "8"},
        LauncherEnv("mpiexec", 7, 8, None, None, "", "", 0),
    ),
    "torchrun in srun": ({**SLURM, **TORCHRUN}, OF_TORCHRUN),
}


@pytest.mark.smoke
@pytest.mark.parametrize(("environ", "expected"), DETECTED.values(), ids=DETECTED)
def test_each_launcher_is_recognised(environ: dict[str, str], expected: LauncherEnv) -> None:
    assert detect(environ) == require(environ) == expected


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({}, "No launcher has started this process: start it with torchrun, mpirun or srun"),
        ({"RANK": "0"}, "WORLD_SIZE is not set; export it"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set; export it, and MASTER_PORT"),
        ({**PLAIN, "MASTER_PORT": ""}, "MASTER_PORT must be a whole number, got ''"),
        ({**PLAIN, "RANK": "gold"}, "RANK must be a whole number, got 'gold'"),
        ({**PLAIN, "RANK": "2"}, "RANK=2 and WORLD_SIZE=2 do not go together"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "mpirun has started this process, but OMPI_COMM_WORLD_SIZE is not set"),
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
        ("slurm", {**SLURM, **TORCHRUN, "SLURM_PTY_PORT": "4000"}, ("srun", 3)),
        ("mpi", {**SLURM, "PMI_RANK": "3", "PMI_SIZE": "4"}, ("mpiexec", 3)),
        ("mpi", ONE_PROCESS, ("mpirun", 0)),
        ("mpi", {**OPEN_MPI, "_DDPCHECK_RANK_OF": "1"}, ("mpirun", 0)),
    ],
)
def test_a_launcher_that_is_asked_for_is_the_only_one_listened_to(
    launcher: str, environ: dict[str, str], expected: tuple[str, int]
) -> None:
    launch = require(environ, launcher)
    assert (launch.launcher, launch.rank) == expected
    assert detect(ONE_PROCESS) is None, "unless it is asked for"


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("launcher", "environ", "words"),
    [
        ("pytorch", {}, "Launcher 'pytorch' was asked for, but there is no RANK in the environment; start this with "),
        ("mpi", {}, "there is no OMPI_COMM_WORLD_RANK or PMI_RANK in the environment; start this with mpirun"),
        ("slurm", {}, "there is no SLURM_JOB_ID in the environment; start this with srun"),
        ("slurm", {"SLURM_JOB_ID": "5"}, "this is a script or shell of SLURM's job 5, and none of its tasks; start"),
        ("mpi", TORCHRUN, "it is torchrun that has started this process; start this with mpirun"),
        ("pytorch", {"WORLD_SIZE": "2"}, "RANK is not set; export it"),
    ],
)
def test_a_launcher_that_is_asked_for_and_not_there_is_named(
    launcher: str, environ: dict[str, str], words: str
) -> None:
    with pytest.raises(UsageError) as caught:
        require(environ, launcher)
    assert words in str(caught.value)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (SLURM, "srun has started 4 ranks on machines that it does not tell apart; export MASTER_ADDR"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "mpirun has started 2 ranks on several machines; export MA"),
        (MPICH, "mpiexec does not say which job this is, so two jobs could meet; export MASTER_ADDR=127.0.0.1"),
        ({**SLURM_NODES, "SLURM_PROCID": "0"}, "Rank 0 is on n2, which is not the first machine of "),
    ],
)
def test_ranks_that_cannot_find_each_other_are_told_what_to_export(environ: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_store(require(environ), 1.0)
    assert words in str(caught.value)


@pytest.mark.smoke
def test_the_file_of_a_job_that_was_killed_leads_nobody_astray(
    opened: Callable[[dict[str, str]], Any],
) -> None:
    point = loopback.rendezvous_file("77")
    point.write_text("1 stale")
    board, met = opened(OPEN_MPI)
    assert point.read_text() != "1 stale", "rank 0 has written its own"
    theirs, _ = opened({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1"})
    board.put("word", b"from 0")
    assert theirs.get("word") == b"from 0"
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
