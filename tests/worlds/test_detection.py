"""Who started this process, as the variables of launchers say it, and the store through which its ranks meet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.replace import replace
from ddpcheck.worlds.launchers import store as loopback
from ddpcheck.worlds.launchers.detection import LauncherEnv, detect, require
from ddpcheck.worlds.launchers.store import open_store

pytest.importorskip("torch")


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


@pytest.mark.parametrize(("environ", "expected"), DETECTED.values(), ids=DETECTED)
def test_each_launcher_is_recognised(environ: dict[str, str], expected: LauncherEnv) -> None:
    assert detect(environ) == require(environ) == expected


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
