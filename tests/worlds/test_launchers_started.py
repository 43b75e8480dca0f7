"""`init_dist` and the averages under real launchers: torchrun, Open MPI and SLURM, on one node and on two.

`make test-launchers` runs them; the default run does not. The nodes are network namespaces of this machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import psutil  # type: ignore[import-untyped]
import pytest

from ddpcheck.worlds.launchers.detection import first_host, port_of
from tests.launchers import slurm
from tests.launchers.nodes import CannotStartError, Node, two_nodes, why_not
from tests.worlds.test_launched import clean_environment

pytest.importorskip("torch")
pytestmark = pytest.mark.launchers

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
PROGRAM = ["-m", "tests.launchers.program"]
MPIRUN = ["mpirun", "--oversubscribe", "--bind-to", "none", *["--allow-run-as-root"] * (os.geteuid() == 0)]

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


def start(*commands: Sequence[str], folder: Path, environ: dict[str, str] | None = None) -> tuple[Answers, str]:
    """Run commands at the same time; what each rank has written down, and what they have printed."""
    environment = {**clean_environment(folder), **(environ or {})}

    def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)

    with ThreadPoolExecutor(len(commands)) as threads:
        done = list(threads.map(run, commands))
    printed = "\n".join(one.stdout + one.stderr for one in done)
    answers = {int(file.stem[4:]): json.loads(file.read_text()) for file in folder.glob("rank*.json")}
    assert answers, printed
    return answers, printed


def check_world(answers: Answers, world_size: int, local_ranks: list[int]) -> None:
    """Every rank has found its place, and all of them have worked together."""
    assert sorted(answers) == list(range(world_size))
    assert {rank: one.get("error") for rank, one in answers.items()} == dict.fromkeys(answers)
    per_node = [local_ranks.count(0) and sum(1 for _ in group) for group in _groups(local_ranks)]
    sizes = [size for size, group in zip(per_node, _groups(local_ranks), strict=True) for _ in group]
    total = float(sum(range(world_size)))
    for rank, one in answers.items():
        assert one["info"] == [rank, world_size] and one["device"] == "cpu" and one["backend"] == "gloo"
        assert one["sum"] == one["again"] == one["others"] == total
        assert one["grads"] == [1.0] * world_size + [None], "ranks had gradients for different parameters"
        assert one["param"] == total / world_size
        assert one["master_only"] == (0 if rank == 0 else None)
        environment = one["environment"]
        said = [int(environment[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
        assert said == [rank, world_size, local_ranks[rank], sizes[rank]]
    assert (
        len({(one["environment"]["MASTER_ADDR"], one["environment"]["MASTER_PORT"]) for one in answers.values()}) == 1
    )


def _groups(local_ranks: list[int]) -> list[list[int]]:
    groups: list[list[int]] = []
    for local in local_ranks:
        if local == 0:
            groups.append([])
        groups[-1].append(local)
    return groups


def program(folder: Path, **options: Any) -> list[str]:
    return [*PROGRAM, str(folder), json.dumps({"timeout": 60, **options})]


# --- torchrun --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("launcher", [None, "pytorch"])
def test_torchrun_on_one_node(tmp_path: Path, launcher: str | None) -> None:
    """Seed 3 (mmengine DDPStrategy): the process group is initialised once for launcher pytorch."""
    answers, _ = start(
        [*TORCHRUN, "--standalone", "--nproc-per-node", "2", *program(tmp_path, launcher=launcher)], folder=tmp_path
    )
    check_world(answers, 2, [0, 1])


def test_torchrun_with_two_agents_as_two_nodes(tmp_path: Path, nodes: list[Node]) -> None:
    """Seed 4 (mmcv dist_utils): the device is that of the local rank, not of the rank.

    The nodes' own names lead to their loopback interfaces, where gloo alone would look for the other ranks.
    """
    answers, _ = start(
        *(
            [*node.prefix, *TORCHRUN, "--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "2",
             "--master-addr", nodes[0].address, "--master-port", "29517", *program(tmp_path)]
            for number, node in enumerate(nodes)
        ),
        folder=tmp_path,
    )  # fmt: skip
    check_world(answers, 4, [0, 1, 0, 1])
    assert [answers[rank]["host"] for rank in range(4)] == ["node1", "node1", "node2", "node2"]


@pytest.mark.exhaustive
def test_torchrun_with_two_agents_on_one_host(tmp_path: Path) -> None:
    agent = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "two"]
    (port,) = slurm.free_ports(1)
    command = [*TORCHRUN, *agent, "--rdzv-endpoint", f"localhost:{port}", *program(tmp_path)]
    answers, _ = start(command, command, folder=tmp_path)
    check_world(answers, 2, [0, 0])


# --- Open MPI --------------------------------------------------------------------------------------------------------


@pytest.fixture
def mpirun() -> list[str]:
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed (Debian: openmpi-bin)")
    return MPIRUN


@pytest.mark.parametrize("launcher", [None, "mpi"])
def test_mpirun_on_one_node_needs_no_address_and_no_port(
    tmp_path: Path, mpirun: list[str], launcher: str | None
) -> None:
    """Seed 3 (mmengine DDPStrategy): the process group is initialised once for launcher mpi."""
    answers, _ = start([*mpirun, "-n", "3", sys.executable, *program(tmp_path, launcher=launcher)], folder=tmp_path)
    check_world(answers, 3, [0, 1, 2])
    assert answers[0]["environment"]["MASTER_ADDR"] == "127.0.0.1"


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_mpirun_meets_at_the_port_that_it_is_told(tmp_path: Path, mpirun: list[str], how: str) -> None:
    """Seed 4 (mmcv dist_utils): MASTER_PORT is the argument, else what the environment says."""
    (port,) = slurm.free_ports(1)
    options, environ = ({"port": port}, {}) if how == "argument" else ({}, {"MASTER_PORT": str(port)})
    command = [*mpirun, "-n", "2", sys.executable, *program(tmp_path, **options)]
    answers, _ = start(command, folder=tmp_path, environ=environ)
    check_world(answers, 2, [0, 1])
    assert answers[1]["environment"]["MASTER_PORT"] == str(port)


@pytest.mark.exhaustive
def test_two_jobs_of_mpirun_at_the_same_time(tmp_path: Path, mpirun: list[str]) -> None:
    """Seed 4 (mmcv dist_utils): a fixed default port collides; here there is none."""
    folders = [tmp_path / name for name in ("one", "two", "three")]
    for folder in folders:
        folder.mkdir()
    with ThreadPoolExecutor(len(folders)) as threads:
        found = list(
            threads.map(
                lambda folder: start([*mpirun, "-n", "2", sys.executable, *program(folder)], folder=folder)[0], folders
            )
        )
    for answers in found:
        check_world(answers, 2, [0, 1])


def across(nodes: list[Node], folder: Path) -> list[str]:
    """`mpirun` on the first node, for two ranks there and one on the second."""
    agent = folder / "agent"  # in the place of ssh
    cases = "\n".join(f'{node.name}) exec {shlex.join(node.prefix)} sh -c "$*" ;;' for node in nodes)
    agent.write_text(f"#!/bin/sh\nhost=$1; shift\ncase $host in\n{cases}\nesac\n")
    agent.chmod(0o755)
    settings = {
        "plm": "rsh",
        "plm_rsh_agent": str(agent),
        "oob_tcp_if_include": "10.77.0.0/24",
        "btl_tcp_if_include": "10.77.0.0/24",
    }
    mca = [word for name, value in settings.items() for word in ("--mca", name, value)]
    return [*nodes[0].prefix, *MPIRUN, *mca, "--host", "node1:2,node2:1", "-n", "3", "-x", "PYTHONPATH"]


def test_mpirun_on_two_nodes_meets_at_the_address(tmp_path: Path, mpirun: list[str], nodes: list[Node]) -> None:
    told = ["-x", "MASTER_ADDR=node1", "-x", "MASTER_PORT=29518"]
    answers, _ = start([*across(nodes, tmp_path), *told, sys.executable, *program(tmp_path)], folder=tmp_path)
    check_world(answers, 3, [0, 1, 0])


def test_mpirun_on_two_nodes_says_that_it_needs_an_address(
    tmp_path: Path, mpirun: list[str], nodes: list[Node]
) -> None:
    answers, _ = start([*across(nodes, tmp_path), sys.executable, *program(tmp_path)], folder=tmp_path)
    for one in answers.values():
        kind, said = one["error"]
        assert kind == "UsageError"
        assert said.startswith("mpirun has started 3 ranks on several machines; export MASTER_ADDR")


def test_a_rank_that_never_comes_is_named_in_time(tmp_path: Path, mpirun: list[str]) -> None:
    options = {"timeout": 15, "_exit": [1]}
    answers, _ = start([*mpirun, "-n", "3", sys.executable, *program(tmp_path, **options)], folder=tmp_path)
    assert sorted(answers) in ([0, 2], [0], [2]), "mpirun ends all ranks when the first one fails"
    for one in answers.values():
        kind, said = one["error"]
        assert kind == "HangError" and said.startswith("Rank 1 of 3 did not call init_dist within 15 s; check ")


# --- SLURM -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("launcher", "options"), [(None, []), ("slurm", []), (None, ["--mpi=pmi2"])], ids=["found", "asked", "pmi2"]
)
def test_srun_on_one_node_needs_no_address_and_no_port(
    tmp_path: Path, one_slurm: dict[str, str], launcher: str | None, options: list[str]
) -> None:
    """Seed 3 (mmengine DDPStrategy): the process group is initialised once for launcher slurm."""
    command = ["srun", "-n", "2", *options, sys.executable, *program(tmp_path, launcher=launcher)]
    answers, _ = start(command, folder=tmp_path, environ=one_slurm)
    check_world(answers, 2, [0, 1])
    assert answers[0]["environment"]["MASTER_ADDR"] == "127.0.0.1"


@pytest.mark.exhaustive
def test_two_steps_of_one_job_at_the_same_time(tmp_path: Path, one_slurm: dict[str, str]) -> None:
    """Seed 4 (mmcv dist_utils): a fixed default port collides; here there is none."""
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    steps = [
        shlex.join(["srun", "--overlap", "-n", "2", sys.executable, *program(folder, timeout=90)]) for folder in folders
    ]
    environment = {**clean_environment(tmp_path), **one_slurm}
    command = ["salloc", "-n", "2", "sh", "-c", f"{' & '.join(steps)} & wait"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    for folder in folders:
        answers = {int(file.stem[4:]): json.loads(file.read_text()) for file in folder.glob("rank*.json")}
        assert answers, done.stderr
        check_world(answers, 2, [0, 1])


def test_a_batch_script_is_told_to_use_srun(tmp_path: Path, one_slurm: dict[str, str]) -> None:
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/sh\ncd {ROOT}\n{shlex.join([sys.executable, *program(tmp_path, launcher='slurm')])}\n")
    out = tmp_path / "out"
    command = ["sbatch", "--wait", "-n", "2", f"--output={out}", str(script)]
    environment = {**clean_environment(tmp_path), **one_slurm}
    subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    said = json.loads((tmp_path / "rank0.json").read_text())["error"][1]
    assert "this is a script or shell of SLURM's job" in said and "start this with srun" in said
    assert said in out.read_text()


def test_srun_on_two_nodes_finds_the_first_one_and_a_port(
    tmp_path: Path, two_slurm: dict[str, str], nodes: list[Node]
) -> None:
    """Seed 4 (mmcv dist_utils): slurm resolves the first host with scontrol and sets MASTER_ADDR and MASTER_PORT.

    Three ranks are on the first node and one is on the second: its local rank is 0, and its rank modulo anything not.
    """
    command = [*nodes[0].prefix, "srun", "-N", "2", "-n", "4", sys.executable, *program(tmp_path, launcher="slurm")]
    answers, _ = start(command, folder=tmp_path, environ=two_slurm)
    check_world(answers, 4, [0, 1, 2, 0])
    environment = answers[3]["environment"]
    assert environment["MASTER_ADDR"] == "node1"
    assert int(environment["MASTER_PORT"]) in [port_of(f"{job} 0") for job in range(1, 50)]


INNER = """
import pytest, torch

@pytest.mark.ddp(world_size=2)
def test_sum(rank):
    total = torch.ones(1) * rank
    torch.distributed.all_reduce(total)
    assert total.item() == 1

def test_world(ddp_world):
    assert ddp_world.run(lambda: torch.distributed.get_rank()) == [0, 1]
"""


def run_inner_tests(tmp_path: Path, variables: dict[str, str], *command: str) -> None:
    inner = tmp_path / "test_inner.py"
    inner.write_text(INNER)
    pytest_command = [sys.executable, "-m", "pytest", "-q", "-p", "ddpcheck.pytest_plugin", "--rootdir", str(tmp_path)]
    environment = {**clean_environment(tmp_path), **variables}
    done = subprocess.run(
        [*command, *pytest_command, str(inner)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr


def test_tests_run_on_the_ranks_of_srun(tmp_path: Path, one_slurm: dict[str, str]) -> None:
    run_inner_tests(tmp_path, one_slurm, "srun", "-n", "2")


def test_tests_run_on_the_ranks_of_srun_on_two_nodes(
    tmp_path: Path, two_slurm: dict[str, str], nodes: list[Node]
) -> None:
    apart = ["unshare", "--pid", "--fork", "--mount-proc"]  # no process sees one of the other node's
    run_inner_tests(tmp_path, two_slurm, *nodes[0].prefix, "srun", "-n", "2", "-N", "2", *apart)


def test_a_report_is_made_on_the_ranks_of_srun(tmp_path: Path, one_slurm: dict[str, str]) -> None:
    """Seed 4 (mmcv dist_utils): the harness attaches to a world that srun has started; rank 0 writes the one report."""
    target = "examples/faults/parameters/unused_on_one_rank.py:broken"
    report = tmp_path / "report.json"
    command = ["srun", "-n", "2", sys.executable, "-m", "ddpcheck", "report", target, "--output", str(report)]
    environment = {**clean_environment(tmp_path), **one_slurm}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    (finding,) = json.loads(report.read_text())["findings"]
    assert (finding["code"], finding["ranks"]) == ("DDP104", [1])


@pytest.mark.parametrize("layout", ["node[1-2]", "a,b", "rack[2-3,7]-gpu[01-16],login", "n[08,10]", "x[009-011]"])
def test_the_first_host_of_a_list_is_what_scontrol_says(one_slurm: dict[str, str], layout: str) -> None:
    done = subprocess.run(
        ["scontrol", "show", "hostnames", layout], env=one_slurm, capture_output=True, text=True, timeout=30, check=True
    )
    assert first_host(layout) == done.stdout.split()[0]


def test_slurm_leaves_nothing_behind(one_slurm: dict[str, str]) -> None:
    with slurm.cluster() as variables:
        folder = Path(variables["SLURM_CONF"]).parent
        subprocess.run(["srun", "-n", "2", "true"], env=variables, timeout=60, check=True)
        ours = [process for process in psutil.process_iter(["cmdline"]) if _speaks_of(process, folder)]
        assert ours, "the daemons are found by their folder"
    deadline = time.monotonic() + 30
    while [one for one in psutil.process_iter(["cmdline"]) if _speaks_of(one, folder)] and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [one for one in psutil.process_iter(["cmdline"]) if _speaks_of(one, folder)]
    assert not folder.exists()


def _speaks_of(process: psutil.Process, folder: Path) -> bool:
    return str(folder) in " ".join(process.info["cmdline"] or [])
