"""Joins the launching processes of one job, one a node, over the store on which torchrun's agents have met.

Each says every quarter of a second how its ranks stand. The first one, whose node has rank 0, alone decides that no
rank of the job can get on. It takes the logs of the others as soon as their ranks have ended, and tells them the exit
code of its report. No port is opened for this, and who can write into that store can make the ranks of torch run
anything. What comes from it is read as data of known types, within limits.

This module is light: it imports torch only once torch's agents have met.
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

from ddpcheck.stream.rank_log import LARGEST_PART, FilePart, ReceivedFolder, parts_of
from ddpcheck.worlds.launchers.store import LauncherStore, connect
from ddpcheck.worlds.waiting import wait_until

WAIT = 30.0  # seconds that a node waits for another one of which nothing comes
_WHEN_INTERRUPTED = 5.0  # a scheduler kills soon
_FRESH = 5.0  # seconds in which what a node has said of its ranks is true
_FAREWELL = 3.0  # seconds in which the others read the exit code
_LOOK = 0.25  # seconds between two turns
_BUSY = 0.02  # where somebody waits
_AHEAD = 4  # parts in the store that the first node has not taken yet
_LONGEST = 4 * LARGEST_PART  # bytes of a value

Standing = Literal["on", "stuck", "ended"]
_encode = msgspec.msgpack.encode


class NodeState(msgspec.Struct, frozen=True):
    """What a node says of itself."""

    beat: int  # counts
    standing: Standing  # whether its ranks are at work, as far as is known; or each waits in vain, or all have ended
    ranks: tuple[int, ...]  # those of them that have joined the process group
    world_size: int  # of that; 0 before
    has_left: bool  # whether it waits for the first node no more


class FirstState(msgspec.Struct, frozen=True):
    """What the first node says."""

    beat: int  # counts
    ends: bool  # whether each node is to end its ranks, since no rank of the job gets on
    collects: bool  # whether its own ranks have ended, and it waits for the logs of the others
    exit_code: int | None  # of its report, once that is made


class NodeEnd(msgspec.Struct, frozen=True, tag=True):
    """What a node sends after its logs: how its ranks have ended."""

    ending: bytes


@dataclass
class _Other:
    """Another node, as the first one knows it."""

    folder: Path
    state: NodeState | None = None
    ending: bytes | None = None
    refused: str = ""
    parts: int = 0
    heard_at: float = field(default_factory=time.monotonic)
    part_at: float = 0.0
    logs: ReceivedFolder | None = None

    @property
    def is_done(self) -> bool:
        """Whether nothing comes from it any more."""
        return self.ending is not None or bool(self.refused)


class NodeLink:
    """The link of this node to the others; there is one between two rendezvous of the agents.

    Attributes:
        number: Of this node; 0 for the first.
        size: How many nodes there are; 1 as long as none has been met.
        host: The first node's name.
    """

    def __init__(self, folder: Path) -> None:
        self.number, self.size, self.host = 0, 1, ""
        self._folder = folder
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._reset()

    def _reset(self) -> None:
        self._gone = self._has_met = False
        self._standing: tuple[Standing, tuple[int, ...], int] = ("on", (), 0)
        self._first: FirstState | None = None
        self._first_at = time.monotonic()
        self._others: dict[int, _Other] = {}
        self._ends = self._collects = self._has_left = False
        self._exit_code: int | None = None
        self._parts: Iterator[FilePart | NodeEnd] = iter(())
        self._sends = self._has_sent = False
        self._put = self._taken = self._beat = 0
        self._taken_at = 0.0

    # What the process does that launches the ranks of a node

    def meet(self, store: Any, number: int, size: int) -> None:
        """Begin anew, on the store of a rendezvous; where that is none that others can be met on, stay alone."""
        self.close()
        self._over = threading.Event()
        self._reset()
        self.number, self.size = number, size
        meeting = LauncherStore(store, "ddpcheck")
        with contextlib.suppress(AttributeError, RuntimeError):  # a store of etcd, or a file; no more threads
            host, port = meeting.address
            if number == 0:
                self._others = {other: _Other(self._folder / f"node{other}") for other in range(1, size)}
            for other in self._others.values():
                shutil.rmtree(other.folder, ignore_errors=True)  # of an earlier start
            arguments = (self._over, meeting, host, port)
            self._thread = threading.Thread(target=self._run, args=arguments, name="ddpcheck-nodes", daemon=True)
            self._thread.start()

    @property
    def is_joined(self) -> bool:
        """Whether there are other nodes, and this one can talk to them."""
        return self._thread is not None and self.size > 1

    def stands(self, standing: Standing, ranks: tuple[int, ...], world_size: int) -> None:
        """Say how the ranks of this node stand."""
        self._standing = (standing, ranks, world_size)

    def must_end(self) -> bool:
        """Whether the ranks of this node are to be ended; this one's are known to stand, where it is asked first.

        The first node says so. Where that has ended, one other node knows by itself that nobody is left to wait for.
        """
        if self.number:
            left_alone = self.size == 2 and (self._gone or self._exit_code_of_first() is not None)
            return (self._first is not None and self._first.ends) or (left_alone and self._standing[0] == "stuck")
        self._ends = self._ends or self._no_rank_gets_on()
        return self._ends

    def collect(self, *, interrupted: bool) -> dict[int, bytes]:
        """On the first node, when its ranks have ended: wait for the others; how theirs have ended."""
        since, wait = time.monotonic(), min(WAIT, _WHEN_INTERRUPTED) if interrupted else WAIT
        self.stands("ended", *self._standing[1:])
        self._collects = True
        with contextlib.suppress(KeyboardInterrupt):
            while not self._gone and any(
                not other.is_done and time.monotonic() - max(since, other.part_at) < wait
                for other in self._others.values()
            ):
                self.must_end()
                time.sleep(_BUSY)
        why = "the store of torchrun's agents has ended" if self._gone else f"they have not come within {wait:g} s"
        for other in self._others.values():
            if other.ending is None:
                other.refused = other.refused or why
                shutil.rmtree(other.folder, ignore_errors=True)  # without the rest they would say what is not so
        return {number: other.ending for number, other in self._others.items() if other.ending is not None}

    @property
    def refused(self) -> dict[int, str]:
        """The nodes whose logs were not taken, and why."""
        return {number: other.refused for number, other in self._others.items() if other.refused}

    def hand_over(self, ending: bytes) -> int | None:
        """On another node, when its ranks have ended: send what they have left; the exit code of the report.

        `None` where the first node has not got it; 0 where it has, and has not made its report yet.
        """
        since = time.monotonic()
        self._parts, self._sends = chain(parts_of(self._folder), [NodeEnd(ending)]), True
        while not self._gone and self._exit_code_of_first() is None:
            now = time.monotonic()
            collects = self._first is not None and self._first.collects
            wait = WAIT if self._has_met else _FRESH  # the first node may be under torchrun itself
            if now - (self._first_at if collects else max(since, self._taken_at)) > wait:
                break
            time.sleep(_BUSY)
        self._has_left = True
        self.close()
        return (self._exit_code_of_first() or 0) if self._has_sent else None

    def finish(self, exit_code: int) -> None:
        """On the first node, when there is a report: tell the others its exit code, and end."""
        self._exit_code = exit_code
        wait_until(lambda: self._gone or not any(map(self._listens, self._others.values())), _FAREWELL, _BUSY)
        self.close()

    def close(self) -> None:
        """Say what there is to say, and be silent from now on."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(_FAREWELL)
            self._thread = None

    def _exit_code_of_first(self) -> int | None:
        return None if self._first is None else self._first.exit_code

    def _no_rank_gets_on(self) -> bool:
        """On the first node: whether all ranks of the job are known, and each waits in vain or has ended."""
        now, (standing, own, world_size) = time.monotonic(), self._standing
        standings, ranks = {standing}, {*own}
        for other in self._others.values():
            if other.state is None:
                return False
            ranks |= {*other.state.ranks}
            quiet = now - other.heard_at
            is_gone = other.is_done or other.state.has_left or quiet > WAIT
            if not is_gone and quiet > _FRESH:
                return False
            standings.add("ended" if is_gone else other.state.standing)
            world_size = max(world_size, other.state.world_size)
        all_known = all(rank in ranks for rank in range(world_size))
        return "stuck" in standings and "on" not in standings and all_known

    def _listens(self, other: _Other) -> bool:
        return other.state is not None and not other.state.has_left and time.monotonic() - other.heard_at < _FRESH

    # The thread: all that goes over the store

    def _run(self, over: threading.Event, meeting: LauncherStore, host: str, port: int) -> None:
        try:
            store = self._open(over, meeting, host, port)
            while store is not None:
                is_last = over.is_set()
                if self.number:
                    self._turn_of_other(store)
                else:
                    self._turn_of_first(store)
                if is_last:
                    return
                over.wait(_BUSY if self._sends or self._collects else _LOOK)
        except Exception:  # the store has ended: StoreGoneError; torch's own errors where it cannot be reached
            self._gone = True

    def _open(self, over: threading.Event, meeting: LauncherStore, host: str, port: int) -> LauncherStore | None:
        """A connection of our own, since the agent may wait on its one for minutes; under a name of its own.

        The store that the agent has used is held by `meeting`, and so is not gone before all is said.
        """
        if self.number == 0:
            meeting.claim("run", f"{secrets.token_hex(16)} {socket.gethostname()}")
        while not meeting.has("run"):
            if over.wait(_LOOK):
                return None
        name, _, first = meeting.claimed("run").partition(" ")
        self._has_met = True
        self.host = "".join(filter(str.isprintable, first))[:80]
        return LauncherStore(connect(host, port, WAIT), f"ddpcheck/{name}")

    def _turn_of_first(self, store: LauncherStore) -> None:
        self._beat += 1
        store.put("first", _encode(FirstState(self._beat, self._ends, self._collects, self._exit_code)))
        for number, other in self._others.items():
            if not other.is_done:
                try:
                    self._take(store, number, other)
                except (ValueError, OSError, msgspec.MsgspecError) as error:
                    other.refused = str(error)
            if store.has(f"state/{number}"):
                with contextlib.suppress(ValueError, msgspec.MsgspecError):
                    state = _decoded(store.get(f"state/{number}"), NodeState)
                    if other.state is None or state.beat != other.state.beat:
                        other.state, other.heard_at = state, time.monotonic()

    def _take(self, store: LauncherStore, number: int, other: _Other) -> None:
        """Take what another node has sent."""
        for _ in range(_AHEAD):
            if other.is_done or not store.has(name := f"part/{number}/{other.parts}"):
                return
            part = _decoded(store.get(name), FilePart | NodeEnd)
            if isinstance(part, NodeEnd):
                other.ending = part.ending
            else:
                other.logs = other.logs or ReceivedFolder(other.folder)
                other.logs.take(part)
            store.remove(name)
            other.parts, other.part_at = other.parts + 1, time.monotonic()

    def _turn_of_other(self, store: LauncherStore) -> None:
        self._beat += 1
        store.put(f"state/{self.number}", _encode(NodeState(self._beat, *self._standing, self._has_left)))
        if store.has("first"):
            first = _decoded(store.get("first"), FirstState)
            if self._first is None or first.beat != self._first.beat:
                self._first, self._first_at = first, time.monotonic()
        while self._taken < self._put and not store.has(f"part/{self.number}/{self._taken}"):
            self._taken, self._taken_at = self._taken + 1, time.monotonic()
        while self._put - self._taken < _AHEAD and (part := next(self._parts, None)) is not None:
            store.put(f"part/{self.number}/{self._put}", _encode(part))
            self._put += 1
        self._has_sent = self._taken == self._put > 0


def _decoded(data: bytes, kind: Any) -> Any:
    """What was read from the store.

    Raises:
        ValueError: It is too long.
        MsgspecError: It is nothing of that kind.
    """
    if len(data) > _LONGEST:
        raise ValueError(f"it has sent a value of {len(data)} bytes")
    return msgspec.msgpack.decode(data, type=kind)
