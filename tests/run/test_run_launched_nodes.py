"""`ddpcheck run` on two nodes, each with a network of its own, as SLURM and Open MPI start it there: one report."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.launchers.nodes import Node
from tests.run.test_run_nodes import ROOT, SCRIPT
from tests.worlds.test_launchers_started import nodes, two_slurm  # noqa: F401

pytestmark = [pytest.mark.slow, pytest.mark.launchers]

SRUN = ("srun", "--nodes=2", "--ntasks-per-node=1")
MPIRUN = ("salloc", "--nodes=2", "--ntasks=2", "mpirun", "--allow-run-as-root", "--map-by", "ppr:1:node")
# A node's own name leads to its loopback interface, through which gloo would talk, under torchrun as well.
OF_GLOO = "export GLOO_SOCKET_IFNAME=$(ip -o -4 address | awk '/10[.]77/{print $2}'); exec \"$@\""


@pytest.mark.parametrize(
    ("launcher", "how", "code", "said"),
    [
        (SRUN, "leaves", 4, "Ranks 2 and 3 left the loop at train.py:16 by the `break` at train.py:18"),
        (MPIRUN, "healthy", 0, "ddpcheck: clean: 4 ranks (gloo), Sequential (12 steps)"),
    ],
    ids=["srun", "mpirun"],
)
def test_there_is_one_report_on_the_ranks_of_both_nodes(
    launcher: Sequence[str],
    how: str,
    code: int,
    said: str,
    tmp_path: Path,
    nodes: list[Node],  # noqa: F811
    two_slurm: dict[str, str],  # noqa: F811
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    meeting = ["--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=node1:29511", "--rdzv-id=7"]
    command = [sys.executable, "-m", "ddpcheck", "run", *meeting, "--check-timeout=6", "train.py", how]
    ended = subprocess.run(
        [*nodes[0].prefix, *launcher, "sh", "-c", OF_GLOO, "sh", *command],
        cwd=tmp_path,
        env={**two_slurm, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert ended.returncode == code, ended.stderr
    assert ended.stderr.count(said) == 1, ended.stderr
    assert "ddpcheck: node 1 of 2: the report on all ranks is that of node 0, on node1" in ended.stderr
