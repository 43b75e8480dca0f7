"""Commands of torchrun and Open MPI that start two ranks on this machine, and an environment without a launcher."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MPIRUN = ["mpirun", "--oversubscribe", "--bind-to", "none", *["--allow-run-as-root"] * (os.geteuid() == 0)]
LAUNCHERS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "mpirun": [*MPIRUN, "-n", "2", sys.executable],
}
FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC", "OMPI_", "PMI", "SLURM_", "DDPCHECK_", "GLOO_")
FOREIGN += ("_DDPCHECK", "PYTEST_", "COV")


def command_of(launcher: str) -> list[str]:
    """Return the command that starts Python on two ranks; skip the test without the launcher."""
    if launcher == "mpirun" and shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed (Debian: openmpi-bin)")
    return LAUNCHERS[launcher]


def clean_environment(folder: Path, **variables: str) -> dict[str, str]:
    """Ours, without what a launcher or pytest may have left in it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    return {**environment, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder), "OMP_NUM_THREADS": "1", **variables}
