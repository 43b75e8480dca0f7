"""The file in which processes of one machine find the port that rank 0 listens on, on the loopback interface.

This module is light: it never imports torch.
"""

from __future__ import annotations

import hashlib
import os
import socket
import stat
import tempfile
from pathlib import Path

from ddpcheck.findings.errors import DdpcheckError


def meeting_point(job: str) -> Path:
    """The file of a job; processes that do not share the loopback interface have another."""
    try:
        network = os.readlink("/proc/self/ns/net")
    except OSError:
        network = ""
    name = hashlib.sha256(f"{os.getuid()} {network} {job}".encode()).hexdigest()[:20]
    return Path(tempfile.gettempdir()) / f"ddpcheck-meet-{name}"


def publish(path: Path, port: int, token: str) -> None:
    """Write the port, and a token that nobody else can read.

    Raises:
        DdpcheckError: It cannot be written.
    """
    draft = ""
    try:
        fd, draft = tempfile.mkstemp(prefix=path.name, dir=path.parent)
        with os.fdopen(fd, "w") as file:
            file.write(f"{port} {token}")
        os.replace(draft, path)
    except OSError as error:
        if draft:
            Path(draft).unlink(missing_ok=True)
        raise DdpcheckError(f"{path}, where the ranks meet, cannot be written: {error.strerror or error}.") from error


def look_up(path: Path) -> tuple[int, str]:
    """The port and the token, 0 and `""` where there is no such file of ours."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return 0, ""
    with os.fdopen(fd) as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.getuid() or not stat.S_ISREG(status.st_mode):
            return 0, ""  # somebody else's
        port, _, token = file.read(100).partition(" ")
    return (int(port), token) if port.isdigit() else (0, "")


def answers(port: int) -> bool:
    """Whether anybody listens there: a job that was killed may have left its file."""
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True
