"""Key-value store of launched ranks: a TCPStore of torchrun's agent or on rank 0.

Waiting polls instead of blocking, so that two threads can share a store and a waiting rank can detect lost ranks.
Imports torch only when a store is opened.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpcheck.findings.errors import DDPCheckError, UsageError
from ddpcheck.findings.files import read_file
from ddpcheck.findings.replace import replace
from ddpcheck.worlds.launchers import detection
from ddpcheck.worlds.launchers.detection import LauncherEnv
from ddpcheck.worlds.wire import get_value, put_value, remove_value

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_PAUSE = 0.02
_FIRST_PAUSE = 0.0005  # seconds between polls of the store, growing
_LONGEST_PAUSE = 0.01

_joined: set[str] = set()  # tokens of the stores joined by this process, one per attempt


class StoreGoneError(Exception):
    """The store is gone because its server process has exited."""


class LauncherStore:
    """Key-value store shared by all ranks."""

    def __init__(self, store: Store, prefix: str) -> None:
        from torch._C._distributed_c10d import PrefixStore

        self.store = PrefixStore(prefix, store)  # also used to initialize process groups
        self.is_alive: Callable[[], bool] = lambda: True  # the server process of the store is alive
        self._has_failed = False

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the store."""
        store: Any = self.store
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        return store.host, store.port

    def put(self, name: str, data: bytes) -> None:
        """Write a value of any size atomically."""
        put_value(partial(self._request, "set"), name, data)

    def has(self, *names: str) -> bool:
        return bool(self._request("check", list(names)))

    def get(self, name: str) -> bytes:
        return get_value(partial(self._request, "get"), name)

    def claim(self, name: str, text: str) -> None:
        """Store a short text under `name`; only the first call has an effect."""
        self._request("compare_set", name, "", text)

    def claimed(self, name: str) -> str:
        """Return the text of the first `claim`; the name must be claimed."""
        return bytes(self._request("get", name)).decode()

    def next(self, name: str) -> int:
        """Increment a counter and return the new value, starting at 1."""
        return int(self._request("add", name, 1))

    def remove(self, name: str) -> None:
        """Delete a value written by `put`."""
        remove_value(partial(self._request, "delete_key"), name)

    def wait_for(
        self,
        names: Mapping[int, str],
        deadline: float,
        on_missing: Callable[[list[int]], None],
        *,
        longest: float = _LONGEST_PAUSE,
    ) -> list[int]:
        """Wait for the key of each rank; return the ranks missing at the deadline.

        `deadline` is in `time.monotonic()` seconds. `on_missing` is called on each poll with the missing ranks and may
        raise. Polls are at most `longest` seconds apart.
        """
        pause = _FIRST_PAUSE
        while not self.has(*names.values()):
            missing = [rank for rank, name in names.items() if not self.has(name)]
            on_missing(missing)
            if missing and time.monotonic() >= deadline:
                return missing
            time.sleep(pause)
            pause = min(longest, pause * 1.5)
        return []

    def _request(self, method: str, *arguments: object) -> Any:
        if self._has_failed or not self.is_alive():  # torch prints a long error per request
            raise StoreGoneError("the store has ended")
        try:
            return getattr(self.store, method)(*arguments)
        except Exception as error:  # stores raise various exception classes
            self._has_failed = True
            raise StoreGoneError(str(error)) from error


def open_store(
    launch: LauncherEnv, timeout: float, *, uses_port: bool = False
) -> tuple[LauncherStore, Callable[[], None]]:
    """Open the store of a launch; return the store and a cleanup function.

    Call the function after all ranks have joined: it deletes the rendezvous file, if any. `uses_port`: use the port of
    the launch even on one machine, instead of a file. Raises `UsageError` without a rendezvous address, and
    `DDPCheckError` if the store cannot be created or reached.
    """
    deadline = time.monotonic() + timeout
    launch = _with_address(launch, uses_port)
    by_file = launch.one_machine and launch.launcher != "torchrun" and launch.job and not uses_port
    path = rendezvous_file(launch.job)

    def close_file() -> None:
        if by_file and launch.rank == 0:
            path.unlink(missing_ok=True)

    if by_file and launch.rank == 0:
        store = _create_on_loopback(path, timeout)
    elif by_file:
        store = _join_on_loopback(path, launch, deadline)
    elif launch.address:
        store = _connect_to_address(launch, timeout)
    elif launch.one_machine:
        raise UsageError(
            f"{launch.launcher} does not say which job this is, so two jobs could meet; "
            "export MASTER_ADDR=127.0.0.1 and MASTER_PORT with a port that is free."
        )
    else:
        location = "on several machines" if launch.local_world_size else "on machines that it does not tell apart"
        raise UsageError(
            f"{launch.launcher} has started {launch.world_size} ranks {location}; export MASTER_ADDR (the machine of "
            "rank 0) and MASTER_PORT (a port that is free there) to all of them, so that they can meet."
        )
    job = hashlib.sha256(f"{launch.launcher} {launch.job}".encode()).hexdigest()[:16]
    try:
        # pytest may run again in one job
        number = LauncherStore(store, f"ddpcheck/{job}").next(f"joined/{launch.rank}")
    except StoreGoneError as error:
        raise DDPCheckError(
            f"The store of rank 0 ended when rank {launch.rank} arrived; see the output of rank 0."
        ) from error
    return LauncherStore(store, f"ddpcheck/{job}/{number}"), close_file


def _with_address(launch: LauncherEnv, uses_port: bool) -> LauncherEnv:
    if uses_port and launch.one_machine and not launch.address:
        return replace(launch, address="127.0.0.1")
    if launch.launcher != "srun" or launch.one_machine:
        return launch
    address = launch.address
    if not address and launch.nodes:
        address = detection.first_host(launch.nodes)
        if launch.rank == 0 and launch.node not in ("", address):
            raise UsageError(
                f"Rank 0 is on {launch.node}, which is not the first machine of {launch.nodes}; "
                f"export MASTER_ADDR={launch.node} to all ranks."
            )
    return replace(launch, address=address, port=launch.port or detection.port_of_job(launch.job))


def connect(address: str, port: int, timeout: float, is_server: bool = False, listener: int | None = None) -> Store:
    """Connect to a TCPStore; if `is_server`, also run the server (on socket `listener`)."""
    from torch._C._distributed_c10d import TCPStore

    # The libuv server does not accept a listener before torch 2.5; clients work with both servers.
    options: dict[str, Any] = {} if listener is None else {"master_listen_fd": listener, "use_libuv": False}
    return TCPStore(
        address,
        port,
        None,
        is_server,
        timedelta(seconds=max(1.0, timeout)),
        wait_for_workers=False,
        multi_tenant=listener is None,  # tests may call init_process_group() with the same address
        **options,
    )


def _connect_to_address(launch: LauncherEnv, timeout: float) -> Store:
    address, port = launch.address, launch.port
    is_host = launch.rank == 0 and not launch.agent
    try:
        return connect(address, port, timeout, is_host)
    except Exception as error:
        action = "keep a store" if is_host else "reach the store of rank 0"
        raise DDPCheckError(
            f"Rank {launch.rank} could not {action} at {address}:{port} within {timeout:g} s "
            f"({str(error).splitlines()[0][:200]}); check MASTER_ADDR and MASTER_PORT."
        ) from error


# --- On one machine: the port of rank 0 on the loopback interface is published in a file ------------------------------


def rendezvous_file(job: str) -> Path:
    """Return the rendezvous file of a job, unique per user and network namespace."""
    try:
        network = os.readlink("/proc/self/ns/net")
    except OSError:
        network = ""
    name = hashlib.sha256(f"{os.getuid()} {network} {job}".encode()).hexdigest()[:20]
    return Path(tempfile.gettempdir()) / f"ddpcheck-meet-{name}"


def publish(path: Path, port: int, token: str) -> None:
    """Write port and token to a file private to this user, or raise `DDPCheckError`."""
    draft = ""
    try:
        fd, draft = tempfile.mkstemp(prefix=path.name, dir=path.parent)
        with os.fdopen(fd, "w") as file:
            file.write(f"{port} {token}")
        os.replace(draft, path)
    except OSError as error:
        if draft:
            Path(draft).unlink(missing_ok=True)
        raise DDPCheckError(f"{path}, where the ranks meet, cannot be written: {error.strerror or error}.") from error


def look_up(path: Path) -> tuple[int, str]:
    """Return port and token from `path`; (0, "") unless this user owns the file."""
    try:
        port, token = read_file(path, 100, own=True).split(b" ")
        return int(port), token.decode()
    except (OSError, ValueError):  # owned by another user, or empty
        return 0, ""


def _create_on_loopback(path: Path, timeout: float) -> Store:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = connect("127.0.0.1", port, timeout, is_server=True, listener=listener.detach())
    token = secrets.token_hex(16)
    store.set("ddpcheck/token", token)
    publish(path, port, token)
    return store


def _join_on_loopback(path: Path, launch: LauncherEnv, deadline: float) -> Store:
    from torch.distributed import DistError

    while (seconds_left := deadline - time.monotonic()) > 0:
        port, token = look_up(path)
        # A known token is a previous attempt: rank 0 will retry on a new store and close the old store.
        if port and token not in _joined:
            with contextlib.suppress(OSError, DistError):  # no or closed listener
                # A killed job may leave its file, and torch would retry until the timeout.
                socket.create_connection(("127.0.0.1", port), 1.0).close()
                store = connect("127.0.0.1", port, min(seconds_left, 10.0))
                if store.check(["ddpcheck/token"]) and bytes(store.get("ddpcheck/token")) == token.encode():
                    _joined.add(token)
                    return store
        time.sleep(_PAUSE)
    raise DDPCheckError(
        f"Rank 0 of {launch.launcher} did not show up at {path} in time; does every rank run the same command, "
        "with the same temporary directory?"
    )
