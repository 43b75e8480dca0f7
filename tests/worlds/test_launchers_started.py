"""`init_dist` and the averages under real launchers: torchrun, Open MPI and SLURM, on one node and on two.

`make test-launchers` runs them; the default run does not. The nodes are network namespaces of this machine.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import psutil  # type: ignore[import-untyped]
import pytest

from ddpcheck.worlds.launchers.detection import port_of_job
from tests.launchers import slurm
from tests.launchers.commands import MPIRUN, ROOT, clean_environment, command_of
from tests.launchers.nodes import CannotStartError, Node, two_nodes, why_not

pytest.importorskip("torch")
pytestmark = pytest.mark.launchers

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
PROGRAM = ["-m", "tests.launchers.program"]

Answers = dict[int, dict[str, Any]]
T = TypeVar("T")


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    assert psutil.wait_procs(left, timeout=60)[1] == []


@contextlib.contextmanager
def or_skipped(reason: str, made: AbstractContextManager[T]) -> Iterator[T]:
    """What there is here; the test is skipped where it cannot be had."""
    if reason:
        pytest.skip(f"{reason}; `make test-launchers` installs what it can")
    with contextlib.ExitStack() as stack:
        try:
            value = stack.enter_context(made)
        except CannotStartError as error:
            pytest.skip(str(error))
        yield value


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Node]]:
    with or_skipped(why_not(), two_nodes(tmp_path_factory.mktemp("nodes"))) as made:
        yield made


@pytest.fixture(scope="module")
def one_slurm() -> Iterator[dict[str, str]]:
    """The variables of a SLURM on this machine."""
    with or_skipped(slurm.why_not(), slurm.cluster()) as variables:
        yield variables


@pytest.fixture(scope="module")
def two_slurm(nodes: list[Node]) -> Iterator[dict[str, str]]:
    """The variables of a SLURM on two nodes."""
    with or_skipped(slurm.why_not(), slurm.cluster(nodes)) as variables:
        yield variables


def run(command: Sequence[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    outputs: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.run(command, cwd=ROOT, env=clean_environment(folder, **variables), timeout=120, **outputs)


def start(*commands: Sequence[str], folder: Path, **variables: str) -> Answers:
    """What each rank of commands that run at the same time has written down."""
    with ThreadPoolExecutor(len(commands)) as threads:
        done = list(threads.map(lambda command: run(command, folder, **variables), commands))
    answers = {int(file.stem[4:]): json.loads(file.read_text()) for file in folder.glob("rank*.json")}
    assert answers, [each.stdout for each in done]
    return answers


def check_world(answers: Answers, *ranks_of_nodes: int) -> None:
    """Every rank has found its place, and all of them have worked together."""
    places = [(local_rank, size) for size in ranks_of_nodes for local_rank in range(size)]
    world_size = len(places)
    assert sorted(answers) == list(range(world_size))
    assert {rank: answer.get("error") for rank, answer in answers.items()} == dict.fromkeys(answers)
    total = float(sum(range(world_size)))
    for rank, answer in answers.items():
        assert answer["info"] == [rank, world_size] and answer["device"] == "cpu" and answer["backend"] == "gloo"
        assert answer["sum"] == answer["again"]["sum"] == answer["others"] == total
        assert answer["grads"] == [1.0] * world_size + [None], "ranks had gradients for different parameters"
        assert answer["param"] == total / world_size
        assert answer["master_only"] == (0 if rank == 0 else None)
        environment = answer["environment"]
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        assert [int(environment[name]) for name in names] == [rank, world_size, *places[rank]]
    names = ("MASTER_ADDR", "MASTER_PORT")
    assert len({tuple(answer["environment"][name] for name in names) for answer in answers.values()}) == 1


def program(folder: Path, **options: Any) -> list[str]:
    return [*PROGRAM, str(folder), json.dumps({"timeout": 60, **options})]


# --- torchrun --------------------------------------------------------------------------------------------------------


def test_torchrun_on_one_node(tmp_path: Path) -> None:
    """Seed 3 (mmengine DDPStrategy): the process group is initialised once for launcher pytorch."""
    command = [*command_of("torchrun"), *program(tmp_path, _again={"launcher": "pytorch"})]
    check_world(start(command, folder=tmp_path), 2)


def test_torchrun_with_two_agents_as_two_nodes(tmp_path: Path, nodes: list[Node]) -> None:
    """Seed 4 (mmcv dist_utils): the device is that of the local rank, not of the rank.

    The nodes' own names lead to their loopback interfaces, where gloo alone would look for the other ranks.
    """
    options = ["--nnodes", "2", "--nproc-per-node", "2", "--master-addr", nodes[0].address, "--master-port", "29517"]
    commands = [
        [*node.prefix, *TORCHRUN, *options, "--node-rank", str(number), *program(tmp_path)]
        for number, node in enumerate(nodes)
    ]
    answers = start(*commands, folder=tmp_path)
    check_world(answers, 2, 2)
    assert [answers[rank]["host"] for rank in range(4)] == ["node1", "node1", "node2", "node2"]


# --- Open MPI --------------------------------------------------------------------------------------------------------


@pytest.fixture
def mpirun() -> list[str]:
    command_of("mpirun")
    return MPIRUN


def test_mpirun_on_one_node_needs_no_address_and_no_port(tmp_path: Path, mpirun: list[str]) -> None:
    """Seed 3 (mmengine DDPStrategy): the process group is initialised once for launcher mpi."""
    command = [*mpirun, "-n", "3", sys.executable, *program(tmp_path, _again={"launcher": "mpi"})]
    answers = start(command, folder=tmp_path)
    check_world(answers, 3)
    assert answers[0]["environment"]["MASTER_ADDR"] == "127.0.0.1"


def test_mpirun_meets_at_the_port_that_it_is_told(tmp_path: Path, mpirun: list[str]) -> None:
    """Seed 4 (mmcv dist_utils): MASTER_PORT is the argument, else what the environment says."""
    first, second = slurm.free_ports(2)
    command = [*mpirun, "-n", "2", sys.executable, *program(tmp_path, _again={"port": second})]
    answers = start(command, folder=tmp_path, MASTER_PORT=str(first))
    check_world(answers, 2)
    for answer, port in ((answers[1], first), (answers[1]["again"], second)):
        assert answer["environment"]["MASTER_PORT"] == str(port)


def across(nodes: list[Node], folder: Path) -> list[str]:
    """`mpirun` on the first node, for two ranks there and one on the second."""
    agent = folder / "agent"  # in the place of ssh
    cases = "\n".join(f'{node.name}) exec {shlex.join(node.prefix)} sh -c "$*" ;;' for node in nodes)
    agent.write_text(f"#!/bin/sh\nhost=$1; shift\ncase $host in\n{cases}\nesac\n")
    agent.chmod(0o755)
    settings = {"plm": "rsh", "plm_rsh_agent": str(agent)}
    settings |= dict.fromkeys(["oob_tcp_if_include", "btl_tcp_if_include"], "10.77.0.0/24")
    mca = [word for name, value in settings.items() for word in ("--mca", name, value)]
    return [*nodes[0].prefix, *MPIRUN, *mca, "--host", "node1:2,node2:1", "-n", "3", "-x", "PYTHONPATH"]


def test_mpirun_on_two_nodes_meets_at_the_address(tmp_path: Path, mpirun: list[str], nodes: list[Node]) -> None:
    address = ["-x", "MASTER_ADDR=node1", "-x", "MASTER_PORT=29518"]
    check_world(start([*across(nodes, tmp_path), *address, sys.executable, *program(tmp_path)], folder=tmp_path), 2, 1)


# --- SLURM -----------------------------------------------------------------------------------------------------------


def test_srun_on_one_node_needs_no_address_and_no_port(tmp_path: Path, one_slurm: dict[str, str]) -> None:
    """Seed 3 (mmengine DDPStrategy): the process group is initialised once for launcher slurm."""
    command = ["srun", "-n", "2", "--mpi=pmi2", sys.executable, *program(tmp_path, _again={"launcher": "slurm"})]
    answers = start(command, folder=tmp_path, **one_slurm)
    check_world(answers, 2)
    assert answers[0]["environment"]["MASTER_ADDR"] == "127.0.0.1"


def test_srun_on_two_nodes_finds_the_first_one_and_a_port(
    tmp_path: Path, two_slurm: dict[str, str], nodes: list[Node]
) -> None:
    """Seed 4 (mmcv dist_utils): slurm resolves the first host with scontrol and sets MASTER_ADDR and MASTER_PORT.

    Three ranks are on the first node and one is on the second: its local rank is 0, and its rank modulo anything not.
    """
    command = [*nodes[0].prefix, "srun", "-N", "2", "-n", "4", sys.executable, *program(tmp_path, launcher="slurm")]
    answers = start(command, folder=tmp_path, **two_slurm)
    check_world(answers, 3, 1)
    environment = answers[3]["environment"]
    assert environment["MASTER_ADDR"] == "node1"
    assert int(environment["MASTER_PORT"]) in [port_of_job(f"{job} 0") for job in range(1, 50)]


def test_a_report_is_made_on_the_ranks_of_srun(tmp_path: Path, one_slurm: dict[str, str]) -> None:
    """Seed 4 (mmcv dist_utils): the harness attaches to a world that srun has started; rank 0 writes the one report."""
    target = "examples/faults/parameters/unused_on_one_rank.py:broken"
    report = tmp_path / "report.json"
    command = ["srun", "-n", "2", sys.executable, "-m", "ddpcheck", "report", target, "--output", str(report)]
    done = run(command, tmp_path, **one_slurm)
    assert done.returncode == 1, done.stdout
    (finding,) = json.loads(report.read_text())["findings"]
    assert (finding["code"], finding["ranks"]) == ("DDP104", [1])
