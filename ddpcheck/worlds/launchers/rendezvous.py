"""Rendezvous of launched processes: one connection per rank to rank 0, the leader.

The port is published in an existing store, in a file on one machine, or on several machines in a torch store at the
launcher's address (only then torch is imported). Both sides prove that they know a token before anything is unpickled.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import tempfile
import time
import uuid
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ddpcheck.findings.errors import DDPCheckError, HangError
from ddpcheck.findings.files import process_stat
from ddpcheck.findings.wording import format_ranks
from ddpcheck.worlds import starting, wire
from ddpcheck.worlds.failures import failure_of_dead_rank
from ddpcheck.worlds.launchers.detection import BY_HAND, LauncherEnv
from ddpcheck.worlds.launchers.store import LauncherStore, StoreGoneError, look_up, open_store, publish, rendezvous_file
from ddpcheck.worlds.starting import wait_until

_DEATH = 0.1  # seconds from closed connections to the exit of a process
_POLL = 0.005


def this_machine() -> str:
    """Return an id of this machine and pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} {uuid.getnode()}"


def describe_exit(rank: int, pid: int | None) -> str:
    """Return a sentence on how a rank exited; `pid` is `None` on another machine."""
    if pid is not None:
        wait_until(lambda: process_stat(pid)[:1] in ([], ["Z"], ["X"]), _DEATH, _POLL)
        state, *_, status = process_stat(pid) or ("", "")
        if state in ("Z", "X"):
            return failure_of_dead_rank(rank, os.waitstatus_to_exitcode(int(status)), 0.0).message
    return f"rank {rank} has ended (its launcher knows how)"


PATIENCE = 120.0  # seconds that launched processes wait for each other at startup
_HANDSHAKE = 10.0  # seconds for the handshake of one connection
_REPLY_SECONDS = 5.0  # seconds for the leader's reply; an unrelated silent process may own the port by now
_TOKEN_HALF = 32  # characters per token half: the first authenticates a follower, the second the leader
_PAUSE = 0.02
_LOOPBACK = "127.0.0.1"
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a launched process to the leader, the process of rank 0."""

    launch: LauncherEnv  # environment set by the launcher
    machine: str  # id of the machine with its pid, network and mount namespaces
    pid: int  # pid on that machine
    temporary: str  # folder for scratch directories
    master: str  # address used to reach rank 0's machine; '' on rank 0
    context: wire.ProcessContext  # environment and paths for its rank
    clock: float  # `time.monotonic()` on sending

    @classmethod
    def create(cls, launch: LauncherEnv, master: str = "") -> Hello:
        """Return the message of this process."""
        machine, context = this_machine(), starting.process_context()
        with contextlib.suppress(OSError):
            machine = " ".join([machine, *(os.readlink(f"/proc/self/ns/{space}") for space in ("net", "mnt"))])
        return cls(launch, machine, os.getpid(), tempfile.gettempdir(), master, context, time.monotonic())


@dataclass(frozen=True, slots=True)
class Welcome:
    """Reply of the leader (rank 0) to the `Hello` of a launched process."""

    shared: bool  # True if the process is on the same machine as the leader
    offset: float  # leader's clock minus this process's clock, in seconds
    pid: int  # of the leader


def _rendezvous_file(launch: LauncherEnv, store: LauncherStore | None) -> Path | None:
    """Return the rendezvous file; `None` with a store, several machines or an unknown job."""
    if store is not None or not launch.one_machine or not (launch.job or launch.address):
        return None
    return rendezvous_file(f"hosts {launch.launcher} {launch.job} {launch.address}:{launch.port}")


# --- Leader side -----------------------------------------------------------------------------------------------------


Joined = tuple[socket.socket, Hello, Welcome]  # the leader's side of a connection


def gather(
    launch: LauncherEnv, timeout: float = PATIENCE, store: LauncherStore | None = None
) -> tuple[Hello, list[Joined]]:
    """Accept a connection from each other rank; return the leader's `Hello` and the connections.

    `store` is an existing store shared by all ranks. Raises `UsageError` without a rendezvous address, and `HangError`
    if some ranks did not connect in time.
    """
    deadline = time.monotonic() + timeout
    leader_hello, token, path = Hello.create(launch), secrets.token_hex(_TOKEN_HALF), _rendezvous_file(launch, store)
    joined: dict[int, Joined] = {}
    with contextlib.ExitStack() as meeting, contextlib.ExitStack() as undo:
        if path is None and store is None:
            store, close_file = open_store(launch, timeout)
            meeting.callback(close_file)
        server = meeting.enter_context(_listen(_LOOPBACK if launch.one_machine else ""))
        port = server.getsockname()[1]
        if path is not None:
            publish(path, port, token)
            meeting.callback(path.unlink, missing_ok=True)
        elif store is not None:
            store.put("hosts", f"{port} {token}".encode())
        while missing := [rank for rank in range(1, launch.world_size) if rank not in joined]:
            server.settimeout(max(1e-3, deadline - time.monotonic()))
            try:
                sock, _ = server.accept()
            except TimeoutError:
                by_hand = launch.launcher == BY_HAND
                reason = "RANK and WORLD_SIZE are set" if by_hand else f"{launch.launcher} has started this one"
                raise HangError(
                    f"{format_ranks(missing).capitalize()} of {launch.world_size} did not show up within {timeout:g} "
                    f"s, although {reason}; start every rank with the same command, or use --launcher off."
                ) from None
            hello = _accept_follower(sock, token.encode(), launch)
            if hello is None or hello.launch.rank not in missing:
                sock.close()
                continue
            undo.callback(sock.close)
            shared = hello.machine == leader_hello.machine
            offset = 0.0 if shared else time.monotonic() - hello.clock
            joined[hello.launch.rank] = sock, hello, Welcome(shared, offset, os.getpid())
        for sock, _, welcome in joined.values():
            sock.sendall(wire.pack(welcome))
            sock.settimeout(None)
        undo.pop_all()
    return leader_hello, [joined[rank] for rank in sorted(joined)]


def _listen(address: str) -> socket.socket:
    if not address and socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=128, dualstack_ipv6=True)
    return socket.create_server((address, 0), backlog=128)


def _accept_follower(sock: socket.socket, token: bytes, launch: LauncherEnv) -> Hello | None:
    sock.settimeout(_HANDSHAKE)
    try:
        if not hmac.compare_digest(wire.read_exactly(sock, _TOKEN_HALF) or b"", token[:_TOKEN_HALF]):
            return None
        sock.sendall(token[_TOKEN_HALF:])
        hello = wire.receive(sock)
        _set_keepalive(sock)
    except OSError:
        return None
    return hello if isinstance(hello, Hello) and hello.launch.world_size == launch.world_size else None


# --- Follower side ---------------------------------------------------------------------------------------------------


def join(
    launch: LauncherEnv, timeout: float = PATIENCE, store: LauncherStore | None = None
) -> tuple[socket.socket, Welcome]:
    """Connect a follower to the leader, or raise `DDPCheckError`; `store` as in `gather`."""
    deadline = time.monotonic() + timeout
    path = _rendezvous_file(launch, store)
    if path is not None:
        read_address = partial(look_up, path)
    else:
        store = store or open_store(launch, timeout)[0]
        read_address = partial(_read_address, store)
    address = _LOOPBACK if launch.one_machine or store is None else store.address[0]
    while time.monotonic() < deadline:
        port, token = read_address()
        if port and (sock := _authenticate(address, port, token.encode(), launch)) is not None:
            sock.settimeout(max(1.0, deadline - time.monotonic()))
            with contextlib.suppress(OSError):
                welcome = wire.receive(sock)
                if isinstance(welcome, Welcome):
                    sock.settimeout(None)
                    _set_keepalive(sock)
                    return sock, welcome
            sock.close()
        time.sleep(_PAUSE)
    location = f"at {path}" if path is not None else f"on {address}"
    raise DDPCheckError(
        f"Rank {launch.rank} waited {timeout:g} s for rank 0 to show up {location}; start every rank with the same "
        "command, or use --launcher off."
    )


def _read_address(store: LauncherStore) -> tuple[int, str]:
    """Return the leader's port and token, or (0, "") if not published."""
    try:
        port, _, token = (store.get("hosts") if store.has("hosts") else b"0").decode().partition(" ")
    except StoreGoneError as error:
        raise DDPCheckError("Rank 0 has ended before all ranks were there.") from error
    return int(port), token


def _authenticate(address: str, port: int, token: bytes, launch: LauncherEnv) -> socket.socket | None:
    try:
        sock = socket.create_connection((address, port), _HANDSHAKE)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        sock.settimeout(_REPLY_SECONDS)
        sock.sendall(token[:_TOKEN_HALF])
        if hmac.compare_digest(wire.read_exactly(sock, _TOKEN_HALF) or b"", token[_TOKEN_HALF:]):
            sock.sendall(wire.pack(Hello.create(launch, sock.getpeername()[0])))
            return sock
    sock.close()
    return None


def _set_keepalive(sock: socket.socket) -> None:
    """Set keepalive options to detect a lost machine within 30 s."""
    os.register_at_fork(after_in_child=sock.close)  # otherwise a fork would keep the connection open
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        with contextlib.suppress(AttributeError, OSError):  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
