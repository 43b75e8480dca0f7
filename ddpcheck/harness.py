"""Worlds: ranks that start fast, fail honestly, never hang the caller, and leave nothing behind.

    with World(world_size=2) as world:
        results = world.run(function, argument)   # one result a rank

Each rank is a process of its own with a process group already initialised. Functions and arguments of any kind
travel, lambdas and local classes included. Every wait has a deadline. Ranks are forked from a process that has
imported torch already, so a world costs tens of milliseconds.
"""

from __future__ import annotations

import atexit
import itertools
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from ddpcheck.findings.errors import DDPCheckError, UsageError
from ddpcheck.findings.replace import replace
from ddpcheck.worlds import starting, validation, wire
from ddpcheck.worlds.assert_rewriting import rewritten_modules
from ddpcheck.worlds.rank_processes import RankProcesses
from ddpcheck.worlds.run_future import RunFuture
from ddpcheck.worlds.validation import WorldOptions

__all__ = ["RunFuture", "Watch", "World"]

Result = TypeVar("Result")
Watch = Callable[["World", frozenset[int], frozenset[int]], str | None]


class World:
    """A number of ranks with a process group.

    `world_size`, `backend`, `device`, `timeout`, `startup_timeout` and `start_method` are attributes, too.

    Attributes:
        directory: Scratch directory, removed when the world closes.
        closed: Whether it is closed.
        failed: Whether a run failed; such a world does not run again.
    """

    closed = True  # until there is something to close
    failed = False

    def __init__(
        self,
        world_size: int = 2,
        *,
        backend: str = "gloo",
        device: str = "cpu",
        timeout: float = 30.0,
        startup_timeout: float = 120.0,
        start_method: Literal["fork", "spawn"] | None = None,
        process_group: bool = True,
        threads: int | None = None,
        env: Mapping[str, str] | None = None,
        preload: Sequence[str] = (),
    ) -> None:
        """Start the ranks, without waiting for them.

        Args:
            world_size: How many ranks.
            backend: `gloo` or `nccl`.
            device: `cpu`, or `cuda`: rank r gets GPU r modulo the number of GPUs.
            timeout: Seconds that a run may take, start-up not included.
            startup_timeout: Seconds from the making of the world until every rank is ready.
            start_method: `fork` (from a server that has imported torch; the default on Linux) or `spawn`.
            process_group: `False` for one rank without a process group.
            threads: That torch may use in each rank; by default the cores are shared out.
            env: Environment variables for the ranks, on top of ours.
            preload: Names of modules that every rank needs and that take long to import; they are imported once, in the
                server that ranks are forked from.

        Raises:
            UsageError: When an argument makes no sense.
        """
        own = start_method, process_group, threads, env, preload
        self._open(WorldOptions(world_size, backend, device, timeout, startup_timeout, *own))

    def _open(self, options: WorldOptions) -> None:
        hosts, world_size = options.hosts, options.world_size
        if hosts is not None and world_size != hosts.world_size:
            raise UsageError(
                f"world_size={world_size}, but {hosts.launcher} has started {hosts.world_size} ranks; use all of them, "
                "or run this without a launcher."
            )
        self._options = options
        self.world_size = world_size
        self.backend = options.backend
        self.device = options.device
        self.timeout = options.timeout
        self.startup_timeout = options.startup_timeout
        self.start_method = options.start_method
        self._owner = os.getpid()
        self._pending: RunFuture[Any] | None = None
        self._kept: dict[tuple[int, str], bytes] = {}  # files of the ranks, once the world is closed
        self.directory = Path(tempfile.mkdtemp(prefix="ddpcheck-"))
        self._processes = RankProcesses(self.directory, one_machine=hosts is None or hosts.one_machine)
        self.closed = False
        _open_worlds.add(self)
        try:
            configs = [self._config(rank) for rank in range(world_size)]
            own: starting.Starter = starting.ForkedRanks if self.start_method == "fork" else starting.SpawnedRanks
            starters = [own] * world_size
            if hosts is not None:
                configs = [hosts.settle(config) for config in configs]
                starters = [hosts.starter(rank, own) for rank in range(world_size)]
            seeds = starting.hash_seeds(world_size, own=options.hash_seeds)
            self._processes.start(configs, starters, seeds, options.ahead)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise DDPCheckError(
                    f"A world of {world_size} ranks could not be started: {error.strerror or error}; try fewer ranks."
                ) from error
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "failed" if self.failed else "open"
        return f"<World of {self.world_size} {self.backend} ranks on {self.device}, {state}>"

    # --- Running -----------------------------------------------------------------------------------------------

    def run(
        self, fn: Callable[..., Result], /, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> list[Result]:
        """Call `fn(*args, **kwargs)` on every rank and return the results in order of rank.

        Args:
            fn: Anything callable.
            *args: For it.
            timeout: Seconds, instead of the world's own.
            **kwargs: For it.

        Raises:
            RankError: When a rank fails.
            HangError: When a rank does not finish in time; sooner where ranks wait, idle, in collectives while others
                have finished (on Linux, for ranks on CPUs).
            UsageError: When something cannot be sent to the ranks.
        """
        return self.start(fn, *args, timeout=timeout, **kwargs).result()

    def start(
        self, fn: Callable[..., Result], /, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> RunFuture[Result]:
        """Do as `run`, but return at once; several worlds can work at the same time."""
        self._check_open()
        return self._begin([validation.pack_task(fn, args, kwargs)] * self.world_size, timeout)

    def run_each(
        self, fn: Callable[..., Result], arguments: Sequence[tuple[Any, ...]], *, timeout: float | None = None
    ) -> list[Result]:
        """Call `fn(*arguments[rank])` on each rank and return the results in order of rank."""
        self._check_open()
        if len(arguments) != self.world_size:
            raise UsageError(
                f"run_each needs one tuple of arguments a rank: {self.world_size} ranks, {len(arguments)} tuples."
            )
        return self._begin([validation.pack_task(fn, tuple(each), {}) for each in arguments], timeout).result()

    def output(self, rank: int) -> str:
        """Return what a rank has printed so far, to stdout and stderr."""
        return self._file(rank, "out").decode("utf-8", "replace")

    def attachment(self, rank: int) -> bytes:
        """Return what a rank has saved with `ddpcheck.rank.save_attachment`, `b""` when there is none."""
        return self._file(rank, "attachment")

    def _file(self, rank: int, kind: str) -> bytes:
        if not 0 <= rank < self.world_size:
            raise UsageError(f"There is no rank {rank} in a world of {self.world_size} ranks.")
        return self._kept.get((rank, kind), b"") if self.closed else self._processes.read_bytes(rank, kind)

    def _begin(self, payloads: Sequence[bytes], timeout: float | None) -> RunFuture[Any]:
        timeout = self.timeout if timeout is None else timeout
        validation.check_seconds("timeout", timeout)
        self._processes.run += 1
        for rank in self._processes.ranks:
            rank.answer = rank.failing = None
        rewritten = rewritten_modules()
        last: tuple[bytes, bytes] | None = None
        for rank, payload in zip(self._processes.ranks, payloads, strict=True):
            if last is None or last[0] is not payload:
                last = (payload, wire.pack(("task", self._processes.run, payload, rewritten)))
            self._processes.post(rank, last[1])
        watch = partial(self._options.watch, self) if self._options.watch is not None else None
        self._pending = RunFuture(self, self._processes, timeout, watch)
        return self._pending

    def _check_open(self) -> None:
        if self._owner != os.getpid():
            raise DDPCheckError("This world belongs to the process that made it; make another one in this process.")
        at_work = self._pending is not None and not self._pending.done()  # which may find that it has failed
        if self.failed:
            raise DDPCheckError("This world has failed in an earlier run and cannot run again; make a new World.")
        if self.closed or self._processes.sent_off:
            raise DDPCheckError("This world is closed; make a new World.")
        if at_work:
            raise DDPCheckError("This world is still at work; wait for the result of its last start().")

    def _config(self, rank: int) -> wire.RankConfig:
        return wire.RankConfig(
            rank=rank,
            world_size=self.world_size,
            backend=self.backend,
            device=self.device,
            directory=str(self.directory),
            process_group=self._options.process_group,
            threads=self._options.threads or validation.threads(self.world_size),
            context=starting.process_context(self._options.env),
            local_rank=rank,
            local_world_size=self.world_size,
            sharing=(rank, self.world_size),
            preload=tuple(self._options.preload),
        )

    # --- Using it again ----------------------------------------------------------------------------------------

    def update_options(
        self,
        *,
        timeout: float = 30.0,
        startup_timeout: float = 120.0,
        env: Mapping[str, str] | None = None,
        watch: Watch | None = None,
    ) -> None:
        """Give a world that was started earlier other options, and the context of this process as it is now.

        The context is the environment, the working directory, the import path and `sys.argv`; generators of random
        numbers are seeded anew, and output and attachments of the ranks are forgotten. Variables that matter when a
        process or its process group starts come too late. `startup_timeout` counts from now.

        Raises:
            DDPCheckError: When the world cannot run, or is running.
        """
        self._check_open()
        self._options = replace(self._options, timeout=timeout, startup_timeout=startup_timeout, env=env, watch=watch)
        self.timeout = timeout
        self.startup_timeout = startup_timeout
        self._processes.forget_files()
        self._processes.update_context(starting.process_context(self._options.env))

    def reset_process_group(self) -> None:
        """Give the ranks a new default process group, without waiting for it; the old one and all its subgroups go.

        What `ddpcheck.rank.state` holds goes as well. The next run waits for the group, within the start-up timeout.

        Raises:
            DDPCheckError: When the world cannot run, or is running.
            UsageError: When the world has no process group.
        """
        self._check_open()
        if not self._options.process_group:
            raise UsageError("A world that was made with process_group=False has no process group to reset.")
        self._processes.reset_process_group()

    @property
    def usable(self) -> bool:
        """Whether nothing is known to stand in the way of a run; the ranks may still be starting."""
        if self.closed or self.failed or self._processes.sent_off or self._owner != os.getpid():
            return False
        if self._pending is not None and not self._pending.succeeded:
            return False
        self._processes.poll(0)
        return not self._processes.has_failed

    def wait_ready(self, seconds: float) -> bool:
        """Wait until every rank has its process group, for some seconds at most; returns whether that is so."""
        deadline = time.monotonic() + seconds
        while (usable := self.usable) and not self._processes.ready and (left := deadline - time.monotonic()) > 0:
            self._processes.poll(left)
        return usable and self._processes.ready

    # --- Ending ------------------------------------------------------------------------------------------------

    def begin_close(self) -> None:
        """Begin to end the ranks, without waiting; nothing runs here any more, and `close` must follow."""
        if self.closed or self._processes.sent_off or self._owner != os.getpid():
            return
        if not self.failed:  # after a failure they are dead
            self._processes.request_exit(idle=self._pending is None or self._pending.succeeded)

    @property
    def gone(self) -> bool:
        """Whether all ranks have ended, so that `close` would not wait."""
        if not self.closed and self._owner == os.getpid():
            self._processes.poll(0)
            return self._processes.gone
        return True

    def close(self) -> None:
        """End the ranks and remove everything; may be called again."""
        if self.closed:
            return
        self.closed = True
        _open_worlds.discard(self)
        ours = self._owner == os.getpid()
        try:
            if ours:
                if not self.failed:
                    self._processes.terminate(idle=self._pending is None or self._pending.succeeded)
                files = itertools.product(range(self.world_size), ("out", "attachment"))
                self._kept = {file: self._processes.read_bytes(*file) for file in files}
        finally:
            self._processes.release(ours)
            if ours:
                shutil.rmtree(self.directory, ignore_errors=True)

    def __del__(self) -> None:
        try:
            self.close()
        except Exception:  # at the end of the interpreter anything may be missing
            pass


def start_world(world_size: int = 2, **options: Any) -> World:
    """Start a `World` with the options of `WorldOptions`, some of which are for ddpcheck alone."""
    world = World.__new__(World)
    world._open(WorldOptions(world_size, **options))
    return world


# --- The end of the process ----------------------------------------------------------------------------------------

_open_worlds: weakref.WeakSet[World] = weakref.WeakSet()


def _close_all() -> None:
    for world in list(_open_worlds):
        world.close()


# Registered after, and so called before, the one that ends the fork server.
atexit.register(_close_all)
