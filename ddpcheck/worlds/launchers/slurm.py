"""Values that SLURM does not give its tasks directly: their first machine, how many are on one, and a port.

This module is light. Sources: srun(1), section "OUTPUT ENVIRONMENT VARIABLES"; scontrol(1), "show hostnames".
"""

from __future__ import annotations

import re
import shutil
import subprocess

from ddpcheck.findings.errors import UsageError

_PATIENCE = 10.0  # seconds for scontrol, which looks into SLURM's configuration only
_FIRST_PORT = 20_000
_PORTS = 10_000  # up to where the ports begin that the kernel gives to anybody
_STEPS = 101  # a prime: steps of jobs with neighbouring numbers get ports of their own


def first_host(nodes: str) -> str:
    """Return the first machine of a compressed list of hosts such as `rack[1-3,7]-gpu[01-16],login`.

    It is what `scontrol show hostnames` says, and where that is missing or fails, what can be read from the list.

    Raises:
        UsageError: The list makes no sense.
    """
    said, complaint = _ask_scontrol(nodes)
    if found := said or read_first_host(nodes):
        return found
    raise UsageError(
        f"The first machine of SLURM's list of nodes {nodes!r} cannot be told ({complaint}); "
        "export MASTER_ADDR, the machine of rank 0."
    )


def _ask_scontrol(nodes: str) -> tuple[str, str]:
    """The first host, empty where there is no answer, and why there is none."""
    if (scontrol := shutil.which("scontrol")) is None:
        return "", "scontrol is not installed here"
    try:
        done = subprocess.run(
            [scontrol, "show", "hostnames", nodes], capture_output=True, text=True, timeout=_PATIENCE, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"scontrol: {error}"
    hosts = done.stdout.split()
    if done.returncode == 0 and hosts:
        return hosts[0], ""
    return "", f"scontrol: {' '.join((done.stderr or 'no answer').split())[:200]}"


def read_first_host(nodes: str) -> str:
    """Return the first host of a compressed list without help, empty where the list makes no sense."""
    whole = re.match(r"(?:[^][,\s]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+(?=,|$)", nodes)
    return re.sub(r"\[(\d+)[^]]*\]", r"\1", whole[0]) if whole else ""


def tasks_of_node(layout: str, node: str) -> int | None:
    """Return how many tasks are on a node, by its number, of a layout such as `4(x2),1`; `None`: unknown."""
    counts: list[int] = []
    for part in layout.split(","):
        if not (found := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)):
            return None
        counts += [int(found[1])] * int(found[2] or 1)
    return counts[int(node)] if node.isdigit() and int(node) < len(counts) else None


def port_of(job: str) -> int:
    """Return the port of a step, given its job's number and its own: the same on all of its machines.

    20000 + (101 * job + step) % 10000, below the ports that Linux gives to clients (from 32768). Nobody reserves it:
    another program of the machine of rank 0 may listen there.
    """
    job_id, step_id = (int(number) for number in re.findall(r"\d+", f"{job} 0 0")[:2])
    return _FIRST_PORT + (_STEPS * job_id + step_id) % _PORTS
