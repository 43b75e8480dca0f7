"""Two nodes on one machine: network namespaces joined by a cable, each with an address and a host name."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


class CannotStartError(Exception):
    """This machine has not what it takes."""


@dataclass(frozen=True)
class Node:
    """One of them; `prefix` is what a command must be preceded by to run there."""

    name: str
    space: str
    address: str
    prefix: tuple[str, ...]


def why_not() -> str:
    """Why there can be no nodes here, empty where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in ("ip", "nsenter", "unshare", "mount") if shutil.which(tool) is None]:
        return f"{', '.join(missing)} not installed (Debian: iproute2, util-linux)"
    name = f"ddpcheck-try{os.getpid()}"
    tried = _ip("netns", "add", name)
    _ip("netns", "delete", name)
    return "" if tried.returncode == 0 else f"no network namespaces here: {tried.stderr.strip()}"


@contextlib.contextmanager
def two_nodes(folder: Path) -> Iterator[list[Node]]:
    """Make them, and take them away again.

    Each knows both by name. Like on many an installation of Debian, a node's own name leads to its loopback interface.

    Raises:
        CannotStartError: The kernel lacks something, or this process a right.
    """
    tag = f"ddpc{os.getpid() % 100_000}"
    nodes = []
    try:
        for number in (1, 2):
            space, name = f"{tag}-{number}", f"node{number}"
            hosts = folder / f"hosts{number}"
            hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n10.77.0.{3 - number} node{3 - number}\n")
            set_up = f'mount --bind {hosts} /etc/hosts && hostname {name} && exec "$@"'
            # Not `ip netns exec`, which takes the control groups away that a slurmd looks for.
            prefix = ("nsenter", f"--net=/run/netns/{space}", "unshare", "--uts", "--mount", "sh", "-c", set_up, "sh")
            _must("netns", "add", space)
            nodes.append(Node(name, space, f"10.77.0.{number}", prefix))
        _must("link", "add", f"{tag}a", "netns", f"{tag}-1", "type", "veth", "peer", f"{tag}b", "netns", f"{tag}-2")
        for node, end in zip(nodes, "ab", strict=True):
            _must("-n", node.space, "address", "add", f"{node.address}/24", "dev", f"{tag}{end}")
            _must("-n", node.space, "link", "set", f"{tag}{end}", "up")
            _must("-n", node.space, "link", "set", "lo", "up")
        yield nodes
    finally:
        for node in nodes:
            _ip("netns", "delete", node.space)


def _ip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=30)


def _must(*arguments: str) -> None:
    done = _ip(*arguments)
    if done.returncode:
        raise CannotStartError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
