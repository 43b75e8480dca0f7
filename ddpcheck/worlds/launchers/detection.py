"""Detect this process's launcher (torchrun, `mpirun`, `srun`) from environment variables; without torch.

Sources: torch's docs, "torchrun (Elastic Launch)", section "Environment Variables"; mpirun(1) of Open MPI, section
"Exported Environment Variables"; the wiki of MPICH's Hydra; srun(1), section "OUTPUT ENVIRONMENT VARIABLES";
scontrol(1), "show hostnames".
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ddpcheck.findings.errors import UsageError
from ddpcheck.worlds.wire import NO_LAUNCH

_FIRST_PORT = 20_000
_PORTS = 10_000  # size of the range, below Linux's ephemeral ports (from 32768)
_STEPS = 101  # prime, so that steps of neighbouring jobs get different ports


def first_host(nodes: str) -> str:
    """Return the first host of a compressed list such as `rack[1-3,7]-gpu[01-16],login`, or raise `UsageError`.

    Same as the first line of `scontrol show hostnames`.
    """
    match = re.match(r"(?:[^][,\s]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+(?=,|$)", nodes)
    if match is None:
        raise UsageError(
            f"The first machine in SLURM's list of nodes {nodes!r} cannot be determined; export MASTER_ADDR, the "
            "machine of rank 0."
        )
    return re.sub(r"\[(\d+)[^]]*\]", r"\1", match[0])


def tasks_of_node(layout: str, node: str) -> int | None:
    """Return the task count of node number `node` in a layout such as `4(x2),1`."""
    counts: list[int] = []
    for part in layout.split(","):
        if not (match := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)):
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[int(node)] if node.isdigit() and int(node) < len(counts) else None


def port_of_job(job: str) -> int:
    """Return a rendezvous port computed from `job`, "<job id> <step id>"; possibly taken."""
    job_id, step_id = (int(number) for number in re.findall(r"\d+", f"{job} 0 0")[:2])
    return _FIRST_PORT + (_STEPS * job_id + step_id) % _PORTS


@dataclass(frozen=True, slots=True)
class LauncherEnv:
    """Parsed environment variables of a launcher."""

    launcher: str  # name for messages
    rank: int  # rank of this process
    world_size: int  # number of processes started
    local_rank: int | None  # `None` if unknown
    local_world_size: int | None  # ranks on this machine; `None` if unknown
    job: str  # job id, unique on this machine and equal on all ranks, or '' if unknown
    address: str  # host of rank 0, or '' if unknown
    port: int  # free port on the host of rank 0, or 0 if unknown
    agent: bool = False  # True if the agent of torchrun runs a TCPStore at `address`
    nodes: str = ""  # SLURM only: compressed host list, host of rank 0 first
    node: str = ""  # SLURM only: host of this process

    @property
    def one_machine(self) -> bool:
        """True if all ranks are known to be on one machine."""
        return self.local_world_size == self.world_size


class _Variables(NamedTuple):
    """Names of a launcher's environment variables; each field's first variable that is set counts."""

    launcher: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    job: str  # job id; joined from all of these variables that are set


# In order of precedence: a launcher may have been started by a later one in this list.
_TORCHRUN = _Variables(
    "torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT"
)
_OPEN_MPI = _Variables(
    "mpirun",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMIX_NAMESPACE OMPI_MCA_ess_base_jobid OMPI_MCA_orte_hnp_uri",
)
_MPICH = _Variables(
    "mpiexec",
    "PMI_RANK",
    "PMI_SIZE",
    "MPI_LOCALRANKID PMI_LOCAL_RANK",
    "MPI_LOCALNRANKS PMI_LOCAL_SIZE",
    "PMI_JOBID PALS_APID PMI_PORT",
)
_SLURM = _Variables("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "", "SLURM_JOB_ID SLURM_STEP_ID")
BY_HAND = "the environment"  # launcher name if the variables were set by hand
_BY_HAND = _Variables(BY_HAND, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "")


# Launcher names as in `mmcv` and `mmengine`: (variables, missing variable, advice).
_PYTORCH = "torchrun, or export RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
LAUNCHERS = {
    "pytorch": ((_TORCHRUN, _BY_HAND), "RANK", _PYTORCH),
    "mpi": ((_OPEN_MPI, _MPICH), "OMPI_COMM_WORLD_RANK or PMI_RANK", "mpirun or mpiexec"),
    "slurm": ((_SLURM,), "SLURM_JOB_ID", "srun"),
}


def detect(environ: Mapping[str, str] = os.environ) -> LauncherEnv | None:
    """Return the launcher environment; `None` if absent, incomplete, or with world size 1.

    Also `None` in child processes of a rank, which inherit the variables, and in an interactive SLURM shell.
    """
    with contextlib.suppress(UsageError):
        if (launch := _read_innermost(environ)) is not None and launch.world_size > 1:
            return launch
    return None


def require(environ: Mapping[str, str] = os.environ, launcher: str | None = None) -> LauncherEnv:
    """Return the launcher environment, even for world size 1.

    Uses the innermost launcher whose variables are set, or `launcher`, a key of `LAUNCHERS`.

    Raises:
        UsageError: No launcher started this process, or its variables are incomplete or invalid (rule DDP603).
    """
    if launcher is None:
        if (launch := _read_innermost(environ)) is not None:
            return launch
        raise UsageError(
            "No launcher has started this process: start it with torchrun, mpirun or srun, or set "
            "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."
        )
    launchers, (accepted, missing, advice) = _launchers_present(environ), LAUNCHERS[launcher]
    for names in launchers:
        if names in accepted:
            return _environment_of(names, environ)
    if launcher == "slurm" and "SLURM_JOB_ID" in environ:
        reason = f"this is a script or shell of SLURM's job {environ['SLURM_JOB_ID']}, and none of its tasks"
    elif launchers:
        reason = f"it is {launchers[0].launcher} that has started this process"
    else:
        reason = f"there is no {missing} in the environment"
    raise UsageError(f"Launcher {launcher!r} was asked for, but {reason}; start this with {advice}.")


def _read_innermost(environ: Mapping[str, str]) -> LauncherEnv | None:
    """Return the innermost launcher's environment or `None`; raise if variables are invalid."""
    if environ.get(NO_LAUNCH, str(os.getpid())) != str(os.getpid()):
        return None
    names = next(iter(_launchers_present(environ)), None)
    if names is None or (names is _SLURM and "SLURM_PTY_PORT" in environ):  # interactive step
        return None
    return _environment_of(names, environ)


def _launchers_present(environ: Mapping[str, str]) -> list[_Variables]:
    flags = {
        _TORCHRUN: "TORCHELASTIC_RUN_ID" in environ,
        _OPEN_MPI: _OPEN_MPI.rank in environ,
        _MPICH: _MPICH.rank in environ,
        _SLURM: "SLURM_STEP_ID" in environ and _SLURM.world_size in environ,  # a batch script has no step variables
        _BY_HAND: "RANK" in environ or "WORLD_SIZE" in environ,
    }
    launchers = [names for names, flag in flags.items() if flag]
    pairs = [[environ.get(name) for name in (names.rank, names.world_size)] for names in (_MPICH, _SLURM)]
    if flags[_MPICH] and flags[_SLURM] and pairs[0] == pairs[1]:
        launchers.remove(_SLURM)  # `srun --mpi=pmi2` also sets PMI_*; SLURM has more information
        launchers.insert(launchers.index(_MPICH), _SLURM)
    return launchers


def _environment_of(names: _Variables, environ: Mapping[str, str]) -> LauncherEnv:
    rank = _parse_number(environ, names.rank, names)
    world_size = _parse_number(environ, names.world_size, names)
    if not 0 <= rank < world_size:
        raise UsageError(
            f"{names.rank}={rank} and {names.world_size}={world_size} do not go together: "
            "ranks count from 0 to one less."
        )
    local_rank, local_world_size = (
        next((_parse_number(environ, name, names) for name in keys.split() if name in environ), None)
        for keys in (names.local_rank, names.local_world_size)
    )
    nodes = node = ""
    if names is _SLURM:
        nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST", "")
        node = environ.get("SLURMD_NODENAME", "")
        if "1" in (environ.get("SLURM_STEP_NUM_NODES"), environ.get("SLURM_JOB_NUM_NODES")):
            local_world_size = world_size
        else:
            local_world_size = tasks_of_node(
                environ.get("SLURM_STEP_TASKS_PER_NODE", ""), environ.get("SLURM_NODEID", "")
            )
    address = environ.get("MASTER_ADDR", "")
    needs_port = address and names is not _SLURM  # SLURM's port is derived from the job id
    port = _parse_number(environ, "MASTER_PORT", names) if needs_port or "MASTER_PORT" in environ else 0
    if not address and names in (_TORCHRUN, _BY_HAND):
        raise UsageError(f"{_started_by(names)} but MASTER_ADDR is not set; export it, and MASTER_PORT.")
    return LauncherEnv(
        names.launcher,
        rank,
        world_size,
        local_rank,
        local_world_size,
        " ".join(environ[name] for name in names.job.split() if name in environ),
        address,
        port,
        environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        nodes,
        node,
    )


def _parse_number(environ: Mapping[str, str], name: str, names: _Variables) -> int:
    text = environ.get(name)
    if text is None:
        raise UsageError(f"{_started_by(names)} but {name} is not set; export it, or start the ranks with torchrun.")
    if not text.isascii() or not text.isdigit():
        raise UsageError(f"{name} must be a whole number, got {text!r}.")
    return int(text)


def _started_by(names: _Variables) -> str:
    if names is _BY_HAND:
        return "RANK or WORLD_SIZE say that a launcher has started this process,"
    return f"{names.launcher} has started this process,"
