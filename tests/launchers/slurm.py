"""A SLURM of our own: munge, slurmctld and a slurmd a node, in a folder, at ports of its own, and gone afterwards."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from tests.launchers.nodes import CannotStartError, Node

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "scontrol")
PATIENCE = 30.0
_PORTS = (10_000, 20_000)  # below those of jobs (`worlds.launchers.detection`) and of connections
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])

CONFIGURATION = """\
ClusterName=ddpcheck
SlurmctldHost={host}({address})
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmdParameters=config_overrides
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
KillWait=2
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=10 State=UP OverSubscribe=FORCE:4
"""


def why_not() -> str:
    """Why there can be no SLURM here, empty where there can."""
    if os.geteuid() != 0:
        return "a SLURM of our own needs root"
    if missing := [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]:
        return f"{', '.join(missing)} not installed (Debian: {' '.join(PACKAGES)})"
    return ""


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens at, and that the kernel gives to no connection of another process in the meantime."""
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        while len(ports) < count:
            with contextlib.suppress(OSError):
                listener = socket.create_server(("127.0.0.1", random.randrange(*_PORTS)))
                ports.append(stack.enter_context(listener).getsockname()[1])
        return ports


@contextlib.contextmanager
def cluster(nodes: Sequence[Node] = ()) -> Iterator[dict[str, str]]:
    """Start SLURM on this machine, or on nodes of it; yields the variables that its commands need.

    Raises:
        CannotStartError: A daemon has ended, or the nodes do not come up; with the end of its log.
    """
    here = list(nodes) or [Node(socket.gethostname().partition(".")[0], "", "127.0.0.1", ())]
    folder = Path(tempfile.mkdtemp(prefix="ddpcheck-slurm-"))
    folder.chmod(0o755)  # munge trusts no socket in a folder that others cannot enter
    daemons: dict[str, subprocess.Popen[bytes]] = {}
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    _adopt_orphans(True)
    configuration = folder / "slurm.conf"
    environment = {**os.environ, "PATH": PATH, "SLURM_CONF": str(configuration)}

    def start(name: str, node: Node, *command: str) -> None:
        with (folder / f"{name}.out").open("wb") as out:
            daemons[name] = subprocess.Popen(
                [*node.prefix, *command], env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )

    try:
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        lines = "\n".join(f"NodeName={node.name} NodeAddr={node.address} CPUs=4 State=UNKNOWN" for node in here)
        configuration.write_text(
            CONFIGURATION.format(
                host=here[0].name, address=here[0].address, ports=free_ports(2), folder=folder, nodes=lines
            )
        )
        (folder / "cgroup.conf").write_text("CgroupAutomount=no\nConstrainCores=no\n")
        files = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        munge = [f"--{option}={folder}/munge.{suffix}" for option, suffix in files.items()]
        start("munged", Node("", "", "", ()), "munged", "--foreground", "--force", f"--key-file={key}", *munge)
        _wait(lambda: (folder / "munge.socket").exists(), "munge opens its socket", daemons, folder)
        start("slurmctld", here[0], "slurmctld", "-D", "-c")
        for node in here:
            start(f"slurmd-{node.name}", node, "slurmd", "-D", "-N", node.name)

        def up() -> bool:
            done = subprocess.run(
                [*here[0].prefix, "sinfo", "--noheader", "--states=idle", "--format=%D"],
                env=environment, capture_output=True, text=True, timeout=PATIENCE,
            )  # fmt: skip
            return done.stdout.strip() == str(len(here))

        _wait(up, "the nodes are idle", daemons, folder)
        yield environment
    finally:
        _end_jobs(here[0], environment)
        for daemon in reversed(daemons.values()):
            daemon.send_signal(signal.SIGTERM)
        for name, daemon in daemons.items():
            try:
                daemon.wait(5)
            except subprocess.TimeoutExpired:
                print(f"{name} had to be killed", file=sys.stderr)
                daemon.kill()
                daemon.wait()
        _end_orphans(before)
        _adopt_orphans(False)
        shutil.rmtree(folder, ignore_errors=True)


def _adopt_orphans(ours: bool) -> None:
    """Let what a daemon leaves behind become a child of this process: slurmd's children outlive it for a while."""
    ctypes.CDLL(None).prctl(36, int(ours), 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def _end_orphans(before: set[int]) -> None:
    orphans = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    _, left = psutil.wait_procs(orphans, timeout=5)
    for orphan in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            print(f"{' '.join(orphan.cmdline())} had to be killed", file=sys.stderr)
            orphan.kill()
    psutil.wait_procs(left, timeout=5)


def _end_jobs(node: Node, environment: dict[str, str]) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(
            [*node.prefix, "scancel", "--user=root", "--state=RUNNING"],
            env=environment, capture_output=True, timeout=10,
        )  # fmt: skip


def _wait(ready: object, what: str, daemons: dict[str, subprocess.Popen[bytes]], folder: Path) -> None:
    assert callable(ready)
    deadline = time.monotonic() + PATIENCE
    while not ready():
        ended = [name for name, daemon in daemons.items() if daemon.poll() is not None]
        if ended or time.monotonic() > deadline:
            logs = [*folder.glob("*.log"), *folder.glob("*.out")]
            ends = "\n".join(f"{log.name}: {log.read_text(errors='replace')[-1500:]}" for log in logs)
            raise CannotStartError(f"{', '.join(ended) or 'Nobody'} ended before {what} ({PATIENCE:g} s)\n{ends}")
        time.sleep(0.1)
