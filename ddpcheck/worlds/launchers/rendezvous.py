"""The rendezvous of launched processes: one connection from rank 0, the leader, to each of the others.

A store on which the ranks have met tells where. Without one a file does on one machine; on several, a store of torch at
the address that the launcher tells. Both sides prove that they know a secret before anything is unpickled.

This module is light: it imports torch only where the ranks are on several machines.
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
from ddpcheck.worlds.failures import died
from ddpcheck.worlds.launchers.detection import BY_HAND, LauncherEnv
from ddpcheck.worlds.launchers.store import LauncherStore, StoreGoneError, look_up, meeting_point, open_store, publish
from ddpcheck.worlds.waiting import wait_until

_DEATH = 0.1  # seconds from the end of a process's connections to its own
_POLL = 0.005


def this_machine() -> str:
    """A name that is the same for the processes that can see each other's ids, and for no others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} {uuid.getnode()}"


def how_it_ended(rank: int, pid: int | None) -> str:
    """The end of a rank's process in words, just after that of its connections; `None`: it was on another machine."""
    code = None if pid is None else _exit_code(pid)
    return f"rank {rank} has ended (its launcher knows how)" if code is None else died(rank, code, 0.0).message


def _exit_code(pid: int) -> int | None:
    """The exit code of a process, negative for a signal, as long as its parent has not asked for it."""
    wait_until(lambda: process_stat(pid)[:1] in ([], ["Z"], ["X"]), _DEATH, _POLL)
    state, *_, status = process_stat(pid) or ("", "")
    return os.waitstatus_to_exitcode(int(status)) if state in ("Z", "X") else None


PATIENCE = 120.0  # seconds that processes wait for each other, which a launcher starts at about the same time
_HANDSHAKE = 10.0  # seconds for one
_ANSWER = 5.0  # from the leader; somebody else may listen at its port by now, and say nothing
_HALF = 32  # characters of the token: the first half proves that one may join, the second that one may lead
_PAUSE = 0.02
_LOOPBACK = "127.0.0.1"
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of a process to the leader."""

    launch: LauncherEnv  # what its launcher said
    machine: str  # the same for processes that see each other's ids, files and loopback interface
    pid: int  # there
    temporary: str  # the folder for scratch directories
    master: str  # the address by which it has reached the machine of rank 0; empty for that itself
    context: wire.ProcessContext  # what its rank takes over
    clock: float  # `time.monotonic()` when this was sent

    @classmethod
    def of(cls, launch: LauncherEnv, master: str = "") -> Hello:
        """The message of this process."""
        context = starting.process_context()
        return cls(launch, _machine(), os.getpid(), tempfile.gettempdir(), master, context, time.monotonic())


@dataclass(frozen=True, slots=True)
class Welcome:
    """The leader's answer to a process."""

    shared: bool  # whether it is on the leader's machine
    offset: float  # what its clock has to be put forward by, in seconds, to be the leader's
    pid: int  # of the leader


def _machine() -> str:
    try:
        spaces = [os.readlink(f"/proc/self/ns/{space}") for space in ("net", "mnt")]
    except OSError:
        spaces = []
    return " ".join([this_machine(), *spaces])


def _file(launch: LauncherEnv) -> Path | None:
    """The file in which the processes of one machine find each other; `None` where they may be on several machines."""
    if not launch.one_machine or not (launch.job or launch.address):
        return None
    return meeting_point(f"hosts {launch.launcher} {launch.job} {launch.address}:{launch.port}")


# --- The leader's side -----------------------------------------------------------------------------------------------


Joined = tuple[socket.socket, Hello, Welcome]  # the leader's side of a connection


def gather(
    launch: LauncherEnv, timeout: float = PATIENCE, store: LauncherStore | None = None
) -> tuple[Hello, list[Joined]]:
    """As rank 0: what there is to tell of this process, and a connection to each other one, in order of rank.

    `store` is one on which the ranks have met already.

    Raises:
        UsageError: Nothing tells where to meet.
        HangError: Some did not come.
    """
    deadline = time.monotonic() + timeout
    mine, token, path = Hello.of(launch), secrets.token_hex(_HALF), _file(launch) if store is None else None
    found: dict[int, Joined] = {}
    with contextlib.ExitStack() as meeting, contextlib.ExitStack() as undo:
        if path is None and store is None:
            store, met = open_store(launch, timeout)
            meeting.callback(met)
        server = meeting.enter_context(_listen(_LOOPBACK if launch.one_machine else ""))
        port = server.getsockname()[1]
        if path is not None:
            publish(path, port, token)
            meeting.callback(path.unlink, missing_ok=True)
        elif store is not None:
            store.put("hosts", f"{port} {token}".encode())
        while missing := [rank for rank in range(1, launch.world_size) if rank not in found]:
            server.settimeout(max(1e-3, deadline - time.monotonic()))
            try:
                sock, _ = server.accept()
            except TimeoutError:
                by_hand = launch.launcher == BY_HAND
                because = "RANK and WORLD_SIZE are set" if by_hand else f"{launch.launcher} has started this one"
                raise HangError(
                    f"{format_ranks(missing).capitalize()} of {launch.world_size} did not show up within {timeout:g} "
                    f"s, although {because}; start every rank with the same command, or use --launcher off."
                ) from None
            hello = _admitted(sock, token.encode(), launch)
            if hello is None or hello.launch.rank not in missing:
                sock.close()
                continue
            undo.callback(sock.close)
            shared = hello.machine == mine.machine
            offset = 0.0 if shared else time.monotonic() - hello.clock
            found[hello.launch.rank] = sock, hello, Welcome(shared, offset, os.getpid())
        for sock, _, welcome in found.values():
            sock.sendall(wire.pack(welcome))
            sock.settimeout(None)
        undo.pop_all()
    return mine, [found[rank] for rank in sorted(found)]


def _listen(address: str) -> socket.socket:
    """A socket at an address, which is empty for all of this machine."""
    if not address and socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=128, dualstack_ipv6=True)
    return socket.create_server((address, 0), backlog=128)


def _admitted(sock: socket.socket, token: bytes, launch: LauncherEnv) -> Hello | None:
    sock.settimeout(_HANDSHAKE)
    try:
        if not hmac.compare_digest(wire.read(sock, _HALF) or b"", token[:_HALF]):
            return None
        sock.sendall(token[_HALF:])
        hello = wire.receive(sock)
        _stay_connected(sock)
    except OSError:
        return None
    return hello if isinstance(hello, Hello) and hello.launch.world_size == launch.world_size else None


# --- The others' side ------------------------------------------------------------------------------------------------


def join(
    launch: LauncherEnv, timeout: float = PATIENCE, store: LauncherStore | None = None
) -> tuple[socket.socket, Welcome]:
    """As another rank than 0: find the leader; `store` as of `gather`.

    Raises:
        UsageError: Nothing tells where to meet.
        DDPCheckError: The leader did not show up.
    """
    deadline = time.monotonic() + timeout
    path = _file(launch) if store is None else None
    if path is not None:
        look = partial(look_up, path)
    else:
        store = store or open_store(launch, timeout)[0]
        look = partial(_read_from, store)
    address = _LOOPBACK if launch.one_machine or store is None else store.address[0]
    while time.monotonic() < deadline:
        port, token = look()
        if port and (sock := _introduced(address, port, token.encode(), launch)) is not None:
            sock.settimeout(max(1.0, deadline - time.monotonic()))
            with contextlib.suppress(OSError):
                welcome = wire.receive(sock)
                if isinstance(welcome, Welcome):
                    sock.settimeout(None)
                    _stay_connected(sock)
                    return sock, welcome
            sock.close()
        time.sleep(_PAUSE)
    where = f"at {path}" if path is not None else f"on {address}"
    raise DDPCheckError(
        f"Rank {launch.rank} waited {timeout:g} s for rank 0 to show up {where}; start every rank with the same "
        "command, or use --launcher off."
    )


def _read_from(store: LauncherStore) -> tuple[int, str]:
    """The port and the token of the leader, 0 and `""` as long as it has not written them."""
    try:
        port, _, token = (store.get("hosts") if store.has("hosts") else b"0").decode().partition(" ")
    except StoreGoneError as error:
        raise DDPCheckError("Rank 0 has ended before all ranks were there.") from error
    return int(port), token


def _introduced(address: str, port: int, token: bytes, launch: LauncherEnv) -> socket.socket | None:
    try:
        sock = socket.create_connection((address, port), _HANDSHAKE)
    except OSError:
        return None
    try:
        sock.settimeout(_ANSWER)
        sock.sendall(token[:_HALF])
        if hmac.compare_digest(wire.read(sock, _HALF) or b"", token[_HALF:]):
            sock.sendall(wire.pack(Hello.of(launch, sock.getpeername()[0])))
            return sock
    except OSError:
        pass
    sock.close()
    return None


def _stay_connected(sock: socket.socket) -> None:
    """Notice within half a minute where the other machine is not there any more, and at once where its process is."""
    os.register_at_fork(after_in_child=sock.close)  # a connection ends with the last process that holds it
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        with contextlib.suppress(AttributeError, OSError):  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
