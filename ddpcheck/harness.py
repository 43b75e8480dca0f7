"""Worlds: ranks that start fast, fail honestly, never hang the caller, and leave nothing behind.

    with World(world_size=2) as world:
        results = world.run(function, argument)   # one result a rank

Each rank is a process of its own with a process group already initialised. Functions and arguments of any kind
travel, lambdas and local classes included. Every wait has a deadline. Ranks are forked from a process that has
imported torch already, so a world costs tens of milliseconds.

This module is light: it never imports torch.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from ddpcheck.errors import DdpcheckError, RankError, UsageError
from ddpcheck.rank import read_slots
from ddpcheck.worlds import allowed, failures, processes, wire
from ddpcheck.worlds.rewriting import rewritten_modules
from ddpcheck.worlds.crew import Crew, Rank

_GRACE = 0.3  # after the first failure, for others to fail for reasons of their own
_TICK = 0.25  # between calls of `watch`

Watch = Callable[["World", frozenset[int], frozenset[int]], str | None]


class World:
    """A number of ranks with a process group.

    Attributes:
        world_size: How many ranks.
        backend: Of their process group.
        device: `cpu` or `cuda`.
        timeout: Seconds that a run may take, start-up not included.
        startup_timeout: Seconds from the making of the world until every rank is ready.
        start_method: `fork` or `spawn`.
        directory: Scratch directory, removed when the world closes.
        closed: Whether it is closed.
        failed: Whether a run failed; such a world does not run again.
    """

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
        hash_seeds: bool = False,
        watch: Watch | None = None,
    ) -> None:
        """Start the ranks, without waiting for them.

        Args:
            world_size: How many ranks.
            backend: `gloo` or `nccl`.
            device: `cpu`, or `cuda`: rank r gets GPU r modulo the number of GPUs.
            timeout: Seconds that a run may take.
            startup_timeout: Seconds that the start may take.
            start_method: `fork` (from a server that has imported torch; the default on Linux) or `spawn`.
            process_group: `False` for one rank without a process group.
            threads: That torch may use in each rank; by default the cores are shared out.
            env: Environment variables for the ranks, on top of ours.
            preload: Names of modules that every rank needs and that take long to import; they are imported once, in the
                server that ranks are forked from.
            hash_seeds: Give odd ranks another hash seed than even ones, as under a launcher, where the order of a set
                of strings differs from rank to rank; costs a second server. A `PYTHONHASHSEED` of the user's wins.
            watch: Called every quarter of a second during a run with the world, the ranks that have finished and
                those that have not; a sentence that it returns ends the run as a `HangError`.

        Raises:
            UsageError: When an argument makes no sense.
        """
        self.closed = True  # until there is something to close
        self.failed = False
        allowed.check_count("world_size", world_size, allowed.MAX_WORLD_SIZE)
        allowed.check_choice("backend", backend, allowed.BACKENDS)
        allowed.check_choice("device", device, allowed.DEVICES)
        allowed.check_seconds("timeout", timeout)
        allowed.check_seconds("startup_timeout", startup_timeout)
        if backend == "nccl" and device == "cpu":
            raise UsageError("backend 'nccl' works on GPUs only; pass device='cuda', or backend='gloo'.")
        if not process_group and world_size != 1:
            raise UsageError(
                f"process_group=False needs world_size=1, got {world_size}; ranks of a larger world need one."
            )
        if threads is not None:
            allowed.check_count("threads", threads, allowed.MAX_WORLD_SIZE)
        self.world_size = world_size
        self.backend = backend
        self.device = device
        self.timeout = timeout
        self.startup_timeout = startup_timeout
        self.start_method = allowed.choose_start_method(start_method)
        self._process_group = process_group
        self._threads = threads if threads is not None else max(1, allowed.cores() // world_size)
        self._env = allowed.check_env(env)
        self._preload = allowed.check_modules("preload", preload)
        self._watch = watch
        self._owner = os.getpid()
        self._pending: Pending | None = None
        self._outputs: dict[int, str] = {}
        self.directory = Path(tempfile.mkdtemp(prefix="ddpcheck-"))
        self._crew = Crew(self.directory)
        self.closed = False
        _open_worlds.add(self)
        self._born = time.monotonic()
        try:
            self._crew.start(self._config(), self.start_method, processes.hash_seeds(world_size, own=hash_seeds))
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise DdpcheckError(
                    f"A world of {world_size} ranks could not be started: {error.strerror or error}; try fewer ranks."
                ) from error
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "failed" if self.failed else "open"
        return f"<World of {self.world_size} {self.backend} ranks on {self.device}, {state}>"

    # --- Running -----------------------------------------------------------------------------------------------

    def run(self, fn: Callable[..., Any], /, *args: Any, timeout: float | None = None, **kwargs: Any) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every rank and return the results in order of rank.

        Args:
            fn: Anything callable.
            *args: For it.
            timeout: Seconds, instead of the world's own.
            **kwargs: For it.

        Raises:
            RankError: When a rank fails.
            HangError: When a rank does not finish in time.
            UsageError: When something cannot be sent to the ranks.
        """
        return self.start(fn, *args, timeout=timeout, **kwargs).result()

    def start(self, fn: Callable[..., Any], /, *args: Any, timeout: float | None = None, **kwargs: Any) -> Pending:
        """Do as `run`, but return at once; several worlds can work at the same time."""
        self._check_open()
        payload = allowed.pack_task(fn, args, kwargs)
        return self._begin([payload] * self.world_size, timeout)

    def run_each(
        self, fn: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], *, timeout: float | None = None
    ) -> list[Any]:
        """Call `fn(*arguments[rank])` on each rank and return the results in order of rank."""
        self._check_open()
        if len(arguments) != self.world_size:
            raise UsageError(
                f"run_each needs one tuple of arguments a rank: {self.world_size} ranks, {len(arguments)} tuples."
            )
        return self._begin([allowed.pack_task(fn, tuple(each), {}) for each in arguments], timeout).result()

    def output(self, rank: int) -> str:
        """Return what a rank has printed so far, to stdout and stderr."""
        if not 0 <= rank < self.world_size:
            raise UsageError(f"There is no rank {rank} in a world of {self.world_size} ranks.")
        if self.closed:
            return self._outputs.get(rank, "")
        return self._crew.read(rank, "out")

    def _begin(self, payloads: Sequence[bytes], timeout: float | None) -> Pending:
        if timeout is not None:
            allowed.check_seconds("timeout", timeout)
        self._crew.run += 1
        for rank in self._crew.ranks:
            rank.answer = None
        rewritten = rewritten_modules()
        last: tuple[bytes, bytes] | None = None
        for rank, payload in zip(self._crew.ranks, payloads, strict=True):
            if last is None or last[0] is not payload:
                last = (payload, wire.pack(("task", self._crew.run, payload, rewritten)))
            self._crew.post(rank, last[1])
        self._pending = Pending(self, self.timeout if timeout is None else timeout)
        return self._pending

    def _check_open(self) -> None:
        if self._owner != os.getpid():
            raise DdpcheckError("This world belongs to the process that made it; make another one in this process.")
        if self.failed:
            raise DdpcheckError("This world has failed in an earlier run and cannot run again; make a new World.")
        if self.closed:
            raise DdpcheckError("This world is closed; make a new World.")
        if self._pending is not None and not self._pending.done():
            raise DdpcheckError("This world is still at work; wait for the result of its last start().")
        if self.failed:  # found by done() just now
            raise DdpcheckError("This world has failed in an earlier run and cannot run again; make a new World.")

    def _config(self) -> wire.RankConfig:
        return wire.RankConfig(
            rank=0,
            world_size=self.world_size,
            backend=self.backend,
            device=self.device,
            directory=str(self.directory),
            process_group=self._process_group,
            threads=self._threads,
            environment={**processes.inherited_environment(), **self._env},
            explicit=frozenset(self._env),
            cwd=os.getcwd(),
            path=processes.import_path(),
            argv=tuple(sys.argv),
            preload=self._preload,
        )

    # --- Failing -----------------------------------------------------------------------------------------------

    def _fail(self, headline: str | None) -> BaseException:
        """End every rank and return the exception that says what happened; a hang when there is a headline."""
        error = self._describe_failure(headline)
        if isinstance(error, RankError):
            for rank in self._crew.ranks:
                if rank.answer is not None and rank.answer[0] == "result":
                    with contextlib.suppress(Exception):  # what cannot be read back is no reason to lose the error
                        error.results[rank.number] = wire.loads(rank.answer[1])
        return error

    def _describe_failure(self, headline: str | None) -> BaseException:
        self.failed = True
        if self._crew.refused:
            self._crew.kill()
            return UsageError(self._crew.trouble)
        dumps = self._crew.dump_stacks()
        now = time.monotonic()
        self._crew.kill()
        found = []
        for rank in self._crew.ranks:
            place, collective = read_slots(self.directory, rank.number)
            output = failures.tail(self._crew.path(rank.number, "out"))
            # What a stuck rank says once others are being killed is about that: they are not all killed at once.
            if rank.answer is not None and rank.number not in dumps:
                kind, reply = rank.answer
                if kind == "result":
                    continue
                if reply["usage"] and headline is None and reply["place"] == "starting up":
                    return UsageError(reply["text"])
                failure = replace(
                    failures.raised(rank.number, reply), place=reply["place"], collective=reply["collective"]
                )
            elif rank.ended is not None and rank.number not in dumps:
                failure = replace(failures.died(rank.number, *rank.ended, output), place=place, collective=collective)
            else:
                failure = failures.stuck(rank.number, now, dumps.get(rank.number, ""), place, collective)
            found.append(replace(failure, output=output))
        if headline is not None:
            late = [one.rank for one in found if one.kind == "stuck"] or [rank.number for rank in self._crew.ranks]
            return failures.hang(found, headline.replace("{ranks}", failures.name_ranks(late)))
        if not found or (self._crew.trouble and all(one.kind == "stuck" for one in found)):
            return RankError(
                f"The ranks could not go on: {self._crew.trouble or 'they ended while they were being asked'}.", found
            )
        return failures.error(found)

    # --- Ending ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the ranks and remove everything; may be called again."""
        if self.closed:
            return
        self.closed = True
        _open_worlds.discard(self)
        ours = self._owner == os.getpid()
        try:
            if ours:
                if not self.failed:  # after a failure they are dead
                    self._crew.dismiss(idle=self._pending is None or self._pending.succeeded)
                self._outputs = {number: self._crew.read(number, "out") for number in range(self.world_size)}
        finally:
            self._crew.release(ours)
            if ours:
                shutil.rmtree(self.directory, ignore_errors=True)

    def __del__(self) -> None:
        try:
            self.close()
        except Exception:  # at the end of the interpreter anything may be missing
            pass


class Pending:
    """A run that is under way."""

    def __init__(self, world: World, timeout: float) -> None:
        self._world = world
        self._timeout = timeout
        self._started = time.monotonic()
        self._first_trouble: float | None = None
        self._next_watch = self._started + _TICK
        self._results: list[Any] | None = None
        self._error: BaseException | None = None

    @property
    def complete(self) -> bool:
        """Whether the outcome is known already."""
        return self._results is not None or self._error is not None

    @property
    def succeeded(self) -> bool:
        """Whether every rank is known to have finished."""
        return self._results is not None

    def done(self) -> bool:
        """Return whether `result` would return or raise at once."""
        if not self.complete:
            self._guarded(block=False)
        return self.complete

    def result(self) -> list[Any]:
        """Wait for the results, one a rank.

        Raises:
            RankError: When a rank fails.
            HangError: When a rank does not finish in time.
        """
        if not self.complete:
            self._guarded(block=True)
        if self._error is not None:
            raise self._error
        assert self._results is not None
        return self._results

    def _guarded(self, block: bool) -> None:
        world = self._world
        if world.closed:
            self._error = DdpcheckError("The world was closed before its run had finished.")
            return
        try:
            world._crew.pump(0)
            while not self.complete:
                wait = self._advance()
                if not block or self.complete:
                    return
                world._crew.pump(wait)
        except BaseException as error:  # Ctrl-C above all: nothing may go on behind our back
            self._error = error if isinstance(error, Exception) else DdpcheckError("The run was interrupted.")
            world.close()
            raise

    def _advance(self) -> float:
        """Settle the outcome if it can be; return how long to wait at most before looking again."""
        world = self._world
        ranks = world._crew.ranks
        now = time.monotonic()
        if all(rank.answer is not None and rank.answer[0] == "result" for rank in ranks):
            self._settle(ranks)
            return 0.0
        running = [rank for rank in ranks if rank.answer is None and rank.ended is None]
        bad = world._crew.trouble or any(_has_failed(rank) for rank in ranks)
        if bad:
            if self._first_trouble is None:
                self._first_trouble = now
            if not running or world._crew.trouble or now >= self._first_trouble + _GRACE:
                self._error = world._fail(None)
                return 0.0
            return self._first_trouble + _GRACE - now
        deadline, headline = self._deadline()
        if now >= deadline:
            self._error = world._fail(headline)
            return 0.0
        wait = deadline - now
        if world._watch is not None:
            if now >= self._next_watch:
                finished = frozenset(rank.number for rank in ranks if rank.answer is not None)
                sentence = world._watch(world, finished, frozenset(rank.number for rank in running))
                if sentence:
                    self._error = world._fail(sentence)
                    return 0.0
                self._next_watch = time.monotonic() + _TICK
            wait = min(wait, max(0.0, self._next_watch - now))
        return wait

    def _deadline(self) -> tuple[float, str]:
        world = self._world
        started = self._started
        for rank in world._crew.ranks:
            if rank.ready is None:
                seconds = world.startup_timeout
                return world._born + seconds, f"{{ranks}} did not start within {seconds:g} s"
            started = max(started, rank.ready)
        return started + self._timeout, f"{{ranks}} did not finish within {self._timeout:g} s"

    def _settle(self, ranks: Iterable[Rank]) -> None:
        results = []
        for rank in ranks:
            assert rank.answer is not None
            try:
                results.append(wire.loads(rank.answer[1]))
            except Exception as error:
                self._error = DdpcheckError(
                    f"The result of rank {rank.number} could not be unpickled here ({type(error).__name__}: {error}); "
                    "return plain values or tensors."
                )
                return
            rank.answer = ("result", b"")
        self._results = results


def _has_failed(rank: Rank) -> bool:
    if rank.answer is not None:
        return rank.answer[0] == "failure"
    return rank.ended is not None


# --- The end of the process ----------------------------------------------------------------------------------------

_open_worlds: weakref.WeakSet[World] = weakref.WeakSet()


def _close_all() -> None:
    for world in list(_open_worlds):
        world.close()


# Registered after, and so called before, the one that ends the fork server.
atexit.register(_close_all)
