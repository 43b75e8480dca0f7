"""Worlds: groups of rank processes with deadlines, fast start-up and full clean-up."""

from __future__ import annotations

import atexit
import itertools
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
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
    """Rank processes with a process group, on which `run` calls functions.

    Functions and their arguments may contain lambdas and local classes. `world_size`, `backend`, `device`, `timeout`,
    `startup_timeout` and `start_method` are attributes, too.

    Attributes:
        directory: Scratch directory, removed when the world closes.
        closed: True if the world is closed.
        failed: True if a call of `run` failed; a failed world cannot run again.
    """

    closed = True  # for `__del__`, if `__init__` raises
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
            world_size: Number of ranks.
            backend: `gloo` or `nccl`.
            device: `cpu`, or `cuda`: rank r gets GPU r modulo the number of GPUs.
            timeout: Maximum seconds per call of `run`, without start-up.
            startup_timeout: Maximum seconds from construction until every rank is ready.
            start_method: `fork` (from a server that has imported torch; the default on Linux) or `spawn`.
            process_group: `False` for one rank without a process group.
            threads: Torch threads per rank; default: number of cores divided by number of ranks.
            env: Environment variables for the ranks, added to the variables of this process.
            preload: Names of slow-to-import modules, imported once in the server from which ranks are forked.

        Raises:
            UsageError: An argument is invalid.
        """
        options = start_method, process_group, threads, env, preload
        self._start_ranks(WorldOptions(world_size, backend, device, timeout, startup_timeout, *options))

    def _start_ranks(self, options: WorldOptions) -> None:
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
        self._owner_pid = os.getpid()
        self._last_run: RunFuture[Any] | None = None
        self._files_at_close: dict[tuple[int, str], bytes] = {}  # files of the ranks, read at close
        self.directory = Path(tempfile.mkdtemp(prefix="ddpcheck-"))
        self._processes = RankProcesses(self.directory, one_machine=hosts is None or hosts.one_machine)
        self.closed = False
        _open_worlds.add(self)
        try:
            configs = [self._rank_config(rank) for rank in range(world_size)]
            starters = [starting.STARTERS[options.start_method]] * world_size
            if hosts is not None:
                configs = [hosts.complete_config(config) for config in configs]
                starters = [hosts.starter(rank, options.start_method) for rank in range(world_size)]
            seeds = starting.hash_seeds(world_size, differ=options.hash_seeds)
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
        """Call `fn(*args, **kwargs)` on every rank and return the results in rank order.

        Args:
            fn: Any callable.
            *args: Positional arguments of `fn`.
            timeout: Seconds; default: the timeout of the world.
            **kwargs: Keyword arguments of `fn`.

        Raises:
            RankError: A rank failed.
            HangError: A rank did not finish in time. Raised early if ranks idle in collectives while other ranks have
                finished (on Linux, for ranks on CPUs).
            UsageError: The function or an argument cannot be sent to the ranks.
        """
        return self.start(fn, *args, timeout=timeout, **kwargs).result()

    def start(
        self, fn: Callable[..., Result], /, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> RunFuture[Result]:
        """Start `fn` on every rank like `run`, without waiting, so that worlds run concurrently."""
        self._check_open()
        return self._send_tasks([validation.pack_task(fn, args, kwargs)] * self.world_size, timeout)

    def run_each(
        self, fn: Callable[..., Result], arguments: Sequence[tuple[Any, ...]], *, timeout: float | None = None
    ) -> list[Result]:
        """Call `fn(*arguments[rank])` on each rank and return the results in rank order."""
        self._check_open()
        if len(arguments) != self.world_size:
            raise UsageError(
                f"run_each needs one tuple of arguments a rank: {self.world_size} ranks, {len(arguments)} tuples."
            )
        return self._send_tasks([validation.pack_task(fn, tuple(args), {}) for args in arguments], timeout).result()

    def output(self, rank: int) -> str:
        """Return what a rank has written to stdout and stderr so far."""
        return self._read_file(rank, "out").decode("utf-8", "replace")

    def attachment(self, rank: int) -> bytes:
        """Return the bytes saved by a rank with `ddpcheck.rank.save_attachment`, or `b""`."""
        return self._read_file(rank, "attachment")

    def _read_file(self, rank: int, kind: str) -> bytes:
        if not 0 <= rank < self.world_size:
            raise UsageError(f"There is no rank {rank} in a world of {self.world_size} ranks.")
        return self._files_at_close.get((rank, kind), b"") if self.closed else self._processes.read_bytes(rank, kind)

    def _send_tasks(self, payloads: Sequence[bytes], timeout: float | None) -> RunFuture[Any]:
        timeout = self.timeout if timeout is None else timeout
        validation.check_seconds("timeout", timeout)
        self._processes.run += 1
        for rank in self._processes.ranks:
            rank.answer = rank.failing = None
        rewritten = rewritten_modules()
        packed = {payload: wire.pack(("task", self._processes.run, payload, rewritten)) for payload in {*payloads}}
        for rank, payload in zip(self._processes.ranks, payloads, strict=True):
            self._processes.post(rank, packed[payload])
        self._last_run = RunFuture(self, self._processes, timeout, self._options.watch)
        return self._last_run

    def _check_open(self) -> None:
        if self._owner_pid != os.getpid():
            raise DDPCheckError("This world belongs to the process that made it; make another one in this process.")
        is_running = self._last_run is not None and not self._last_run.done()  # first: may set `failed`
        if self.failed:
            raise DDPCheckError("This world has failed in an earlier run and cannot run again; make a new World.")
        if self.closed or self._processes.exit_requested:
            raise DDPCheckError("This world is closed; make a new World.")
        if is_running:
            raise DDPCheckError("This world is still at work; wait for the result of its last start().")

    def _rank_config(self, rank: int) -> wire.RankConfig:
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

    # --- Reuse -------------------------------------------------------------------------------------------------

    def update_options(
        self,
        *,
        timeout: float = 30.0,
        startup_timeout: float = 120.0,
        env: Mapping[str, str] | None = None,
        watch: Watch | None = None,
    ) -> None:
        """Change options of a started world, and send the current context to its ranks.

        The context is the environment, working directory, import path and `sys.argv` of this process. Random generators
        are reseeded, and output and attachments of the ranks are cleared. Changes of variables that are read only when
        a process or process group starts have no effect. `startup_timeout` counts from now.

        Raises:
            DDPCheckError: The world has failed or is closed, or a call of `run` is in progress.
        """
        self._check_open()
        self._options = replace(self._options, timeout=timeout, startup_timeout=startup_timeout, env=env, watch=watch)
        self.timeout = timeout
        self.startup_timeout = startup_timeout
        self._processes.clear_run_files()
        self._processes.update_context(starting.process_context(self._options.env))

    def reset_process_group(self) -> None:
        """Have the ranks replace the default process group and destroy subgroups; does not wait.

        Clears `ddpcheck.rank.state`. The next `run` waits for the new group, within the start-up timeout.

        Raises:
            DDPCheckError: The world has failed or is closed, or a call of `run` is in progress.
            UsageError: The world has no process group.
        """
        self._check_open()
        if not self._options.process_group:
            raise UsageError("A world that was made with process_group=False has no process group to reset.")
        self._processes.reset_process_group()

    @property
    def usable(self) -> bool:
        """True if a run can be started; the ranks may still be starting up."""
        if self._is_over or self.failed or not self._is_idle:
            return False
        self._processes.poll(0)
        return not self._processes.has_failed

    def wait_ready(self, seconds: float) -> bool:
        """Wait at most `seconds` for the process group; return True if all ranks joined."""
        deadline = time.monotonic() + seconds
        while (usable := self.usable) and not self._processes.ready and (wait := deadline - time.monotonic()) > 0:
            self._processes.poll(wait)
        return usable and self._processes.ready

    # --- Shutdown ----------------------------------------------------------------------------------------------

    @property
    def _is_over(self) -> bool:
        return self.closed or self._processes.exit_requested or self._owner_pid != os.getpid()

    @property
    def _is_idle(self) -> bool:
        return self._last_run is None or self._last_run.succeeded

    def begin_close(self) -> None:
        """Start shutting down the ranks without waiting; call `close` afterwards."""
        if not self._is_over and not self.failed:  # ranks are dead after a failure
            self._processes.request_exit(idle=self._is_idle)

    @property
    def has_exited(self) -> bool:
        """True if all ranks have exited, so that `close` does not wait."""
        if not self.closed and self._owner_pid == os.getpid():
            self._processes.poll(0)
            return self._processes.has_exited
        return True

    def close(self) -> None:
        """Shut down the ranks and remove the scratch directory; idempotent."""
        if self.closed:
            return
        self.closed = True
        _open_worlds.discard(self)
        is_owner = self._owner_pid == os.getpid()
        try:
            if is_owner:
                if not self.failed:
                    self._processes.terminate(idle=self._is_idle)
                files = itertools.product(range(self.world_size), ("out", "attachment"))
                self._files_at_close = {file: self._processes.read_bytes(*file) for file in files}
        finally:
            self._processes.release(is_owner)
            if is_owner:
                shutil.rmtree(self.directory, ignore_errors=True)

    def __del__(self) -> None:
        try:
            self.close()
        except Exception:  # interpreter shutdown: modules may be gone
            pass


def start_world(world_size: int = 2, **options: Any) -> World:
    """Start a `World` with `WorldOptions`, including internal options."""
    world = World.__new__(World)
    world._start_ranks(WorldOptions(world_size, **options))
    return world


# --- Interpreter exit ----------------------------------------------------------------------------------------------

_open_worlds: weakref.WeakSet[World] = weakref.WeakSet()


@atexit.register  # after the handler that ends the fork server, so called first
def _close_all() -> None:
    for world in list(_open_worlds):
        world.close()
