"""Link the launching processes of a multi-node job over torchrun's rendezvous store.

Each node publishes the state of its ranks. Only the first node, which has rank 0, decides that the job hangs. It
collects the logs of the others once their ranks have ended, and sends them the exit code of the report. No port is
opened, and whoever can write to the store can already make the ranks run anything. Values from the store are decoded
as data of known types, within size limits. Imports torch only after the rendezvous.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import msgspec

from ddpcheck.stream.rank_log import LARGEST_PART, FilePart, ReceivedFolder, file_parts
from ddpcheck.worlds.launchers.store import LauncherStore, connect
from ddpcheck.worlds.starting import wait_until

WAIT = 30.0  # seconds that a node waits for a silent node
_WHEN_INTERRUPTED = 5.0  # seconds instead of `WAIT` after a signal: a scheduler soon sends SIGKILL
_STALE_AFTER = 5.0  # seconds after which the state of a node is stale
_FAREWELL = 3.0  # seconds for the other nodes to read the exit code
_INTERVAL = 0.25  # seconds between two updates
_BUSY = 0.02  # seconds between two updates during a transfer
_MOST_PENDING = 4  # maximum number of pending parts in the store
_LONGEST = 4 * LARGEST_PART  # maximum bytes of a value

Standing = Literal["on", "stuck", "ended"]
_encode = msgspec.msgpack.encode


class NodeState(msgspec.Struct):
    """State that a node publishes for the first node."""

    beat: int = 0  # number of updates
    standing: Standing = "on"  # "on": running or unknown; "stuck": all ranks wait in vain; "ended": all have ended
    ranks: tuple[int, ...] = ()  # ranks of the node that joined the process group
    world_size: int = 0  # size of the process group; 0 before joining
    has_left: bool = False  # True if the node no longer waits for the first node


class FirstState(msgspec.Struct):
    """State that the first node publishes for the other nodes."""

    beat: int = 0  # number of updates; 0: none received
    ends: bool = False  # True if each node must end its ranks because the job hangs
    collects: bool = False  # True if the ranks of the first node have ended, and logs of other nodes are collected
    exit_code: int | None = None  # exit code of the report; None before the report


class NodeEnd(msgspec.Struct, frozen=True, tag=True):
    """Last message of a node, after its logs: the encoded `Ending` of its ranks."""

    ending: bytes


@dataclass
class _OtherNode:
    folder: Path
    state: NodeState | None = None
    ending: bytes | None = None
    refused: str = ""
    parts: int = 0
    heard_at: float = field(default_factory=time.monotonic)
    part_at: float = 0.0
    logs: ReceivedFolder | None = None

    @property
    def is_done(self) -> bool:  # sends no more data
        return self.ending is not None or bool(self.refused)

    @property
    def is_recent(self) -> bool:
        return self.state is not None and not self.state.has_left and time.monotonic() - self.heard_at < _STALE_AFTER


class NodeLink:
    """Link of this node to the other nodes, restarted at each rendezvous.

    Attributes:
        number: Number of this node; 0 for the first.
        size: Number of nodes; 1 before the rendezvous.
        host: Host name of the first node.
    """

    def __init__(self, folder: Path) -> None:
        self.number, self.size, self.host = 0, 1, ""
        self._folder = folder
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._reset()

    def _reset(self) -> None:
        self._is_gone = self._is_linked = False
        self._state = NodeState()
        self._first = FirstState()
        self._first_at = time.monotonic()
        self._nodes: dict[int, _OtherNode] = {}
        self._parts: Iterator[FilePart | NodeEnd] = iter(())
        self._is_sending = self._has_sent = False
        self._parts_put = self._parts_taken = 0
        self._part_taken_at = 0.0

    # Called by the launching process

    def reconnect(self, store: Any, number: int, size: int) -> None:
        """Restart the link on the store of a rendezvous, if that is a TCPStore."""
        self.close()
        self._stopped = threading.Event()
        self._reset()
        self.number, self.size = number, size
        meeting = LauncherStore(store, "ddpcheck")
        with contextlib.suppress(AttributeError, RuntimeError):  # an etcd or file store, or no more threads
            host, port = meeting.address
            if number == 0:
                self._nodes = {index: _OtherNode(self._folder / f"node{index}") for index in range(1, size)}
            for node in self._nodes.values():
                shutil.rmtree(node.folder, ignore_errors=True)  # from an earlier start
            arguments = (self._stopped, meeting, host, port)
            self._thread = threading.Thread(target=self._update, args=arguments, name="ddpcheck-nodes", daemon=True)
            self._thread.start()

    @property
    def is_joined(self) -> bool:
        """Return True if there are other nodes and the link is active."""
        return self._thread is not None and self.size > 1

    def publish_state(self, standing: Standing, ranks: tuple[int, ...], world_size: int) -> None:
        """Set the state that this node publishes; `standing`: running, stuck or ended."""
        self._state.world_size, self._state.ranks, self._state.standing = world_size, ranks, standing

    def must_end(self) -> bool:
        """Return True if this node must end its ranks, since the job hangs."""
        if self.number:
            is_last = self.size == 2 and (self._is_gone or self._first.exit_code is not None)
            return self._first.ends or (is_last and self._state.standing == "stuck")
        self._first.ends = self._first.ends or self._is_job_hung()
        return self._first.ends

    def collect(self, *, interrupted: bool) -> dict[int, bytes]:
        """Collect the other nodes' logs on node 0; return the encoded `Ending` by node."""
        since, wait = time.monotonic(), min(WAIT, _WHEN_INTERRUPTED) if interrupted else WAIT
        self._state.standing = "ended"
        self._first.collects = True
        with contextlib.suppress(KeyboardInterrupt):
            while not self._is_gone and any(
                not node.is_done and time.monotonic() - max(since, node.part_at) < wait for node in self._nodes.values()
            ):
                self.must_end()
                time.sleep(_BUSY)
        why = "the store of torchrun's agents has ended" if self._is_gone else f"they have not come within {wait:g} s"
        for node in self._nodes.values():
            if node.ending is None:
                node.refused = node.refused or why
                shutil.rmtree(node.folder, ignore_errors=True)  # incomplete logs would be misleading
        return {number: node.ending for number, node in self._nodes.items() if node.ending is not None}

    @property
    def refused(self) -> dict[int, str]:
        """Return the reasons why logs of nodes were not accepted, by node."""
        return {number: node.refused for number, node in self._nodes.items() if node.refused}

    def hand_over(self, ending: bytes) -> int | None:
        """Send the logs to the first node; return the report's exit code.

        `None` if the first node did not take the logs; 0 if there is no report yet.
        """
        since = time.monotonic()
        self._parts, self._is_sending = chain(file_parts(self._folder), [NodeEnd(ending)]), True
        while not self._is_gone and self._first.exit_code is None:
            now = time.monotonic()
            wait = WAIT if self._is_linked else _STALE_AFTER  # the first node may be under torchrun itself
            if now - (self._first_at if self._first.collects else max(since, self._part_taken_at)) > wait:
                break
            time.sleep(_BUSY)
        self._state.has_left = True
        self.close()
        return (self._first.exit_code or 0) if self._has_sent else None

    def finish(self, exit_code: int) -> None:
        """Publish the exit code of the report, let other nodes read it, then close."""
        self._first.exit_code = exit_code
        wait_until(lambda: self._is_gone or not any(node.is_recent for node in self._nodes.values()), _FAREWELL, _BUSY)
        self.close()

    def close(self) -> None:
        """Publish the last state and stop the thread."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(_FAREWELL)
            self._thread = None

    def _is_job_hung(self) -> bool:
        """Return True if all ranks of the job are stuck or have ended."""
        standings, ranks, world_size = {self._state.standing}, {*self._state.ranks}, self._state.world_size
        for node in self._nodes.values():
            if node.state is None:
                return False
            quiet = time.monotonic() - node.heard_at
            is_gone = node.is_done or node.state.has_left or quiet > WAIT
            if not is_gone and quiet > _STALE_AFTER:
                return False
            standings.add("ended" if is_gone else node.state.standing)
            ranks |= {*node.state.ranks}
            world_size = max(world_size, node.state.world_size)
        return "stuck" in standings and "on" not in standings and ranks.issuperset(range(world_size))

    # Run by the thread, which alone uses the store

    def _update(self, over: threading.Event, meeting: LauncherStore, host: str, port: int) -> None:
        try:
            store = self._connect(over, meeting, host, port)
            while store is not None:
                is_last = over.is_set()
                if self.number:
                    self._update_other_node(store)
                else:
                    self._update_first_node(store)
                if is_last:
                    return
                over.wait(_BUSY if self._is_sending or (self.number == 0 and self._first.collects) else _INTERVAL)
        except Exception:  # StoreGoneError if the store has ended; errors of torch if unreachable
            self._is_gone = True

    def _connect(self, over: threading.Event, meeting: LauncherStore, host: str, port: int) -> LauncherStore | None:
        """Open a separate connection, since the agent may block its connection for minutes.

        `meeting` keeps the store of the agent alive until the link is closed.
        """
        if self.number == 0:
            meeting.claim("run", f"{secrets.token_hex(16)} {socket.gethostname()}")
        while not meeting.has("run"):
            if over.wait(_INTERVAL):
                return None
        name, _, host_name = meeting.claimed("run").partition(" ")
        self._is_linked = True
        self.host = "".join(filter(str.isprintable, host_name))[:80]
        return LauncherStore(connect(host, port, WAIT), f"ddpcheck/{name}")

    def _update_first_node(self, store: LauncherStore) -> None:
        self._first.beat += 1
        store.put("first", _encode(self._first))
        for number, node in self._nodes.items():
            if not node.is_done:
                try:
                    self._take_parts(store, number, node)
                except (ValueError, OSError, msgspec.MsgspecError) as error:
                    node.refused = str(error)
            if store.has(f"state/{number}"):
                with contextlib.suppress(ValueError, msgspec.MsgspecError):
                    state = _decode(store.get(f"state/{number}"), NodeState)
                    if node.state is None or state.beat != node.state.beat:
                        node.state, node.heard_at = state, time.monotonic()

    def _take_parts(self, store: LauncherStore, number: int, node: _OtherNode) -> None:
        for _ in range(_MOST_PENDING):
            if node.is_done or not store.has(name := f"part/{number}/{node.parts}"):
                return
            part = _decode(store.get(name), FilePart | NodeEnd)
            if isinstance(part, NodeEnd):
                node.ending = part.ending
            else:
                node.logs = node.logs or ReceivedFolder(node.folder)
                node.logs.append_part(part)
            store.remove(name)
            node.parts, node.part_at = node.parts + 1, time.monotonic()

    def _update_other_node(self, store: LauncherStore) -> None:
        self._state.beat += 1
        store.put(f"state/{self.number}", _encode(self._state))
        if store.has("first"):
            state = _decode(store.get("first"), FirstState)
            if state.beat != self._first.beat:
                self._first, self._first_at = state, time.monotonic()
        while self._parts_taken < self._parts_put and not store.has(f"part/{self.number}/{self._parts_taken}"):
            self._parts_taken, self._part_taken_at = self._parts_taken + 1, time.monotonic()
        while self._parts_put - self._parts_taken < _MOST_PENDING and (part := next(self._parts, None)) is not None:
            store.put(f"part/{self.number}/{self._parts_put}", _encode(part))
            self._parts_put += 1
        self._has_sent = self._parts_taken == self._parts_put > 0


def _decode(data: bytes, kind: Any) -> Any:
    if len(data) > _LONGEST:
        raise ValueError(f"it has sent a value of {len(data)} bytes")
    return msgspec.msgpack.decode(data, type=kind)
