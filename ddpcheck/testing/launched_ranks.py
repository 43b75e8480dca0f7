"""The ranks that torchrun or mpirun has started, as the worlds of tests: what they run means what it means elsewhere.

Rank 0 stands for the process that pytest runs in. What it would send to ranks of its own goes to all of them, so that
arguments, fixtures and seeds are the same, by value; what the code does to its process is undone where that is cheap:
environment, working directory, random numbers, threads.

This module is light: it never imports torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from ddpcheck.findings.errors import RankError, UsageError
from ddpcheck.findings.exception_origin import for_target
from ddpcheck.harness import Watch
from ddpcheck.testing.leases import Ranks
from ddpcheck.testing.rank_context import RngStates
from ddpcheck.testing.record import Lent
from ddpcheck.worlds import rank as this_rank
from ddpcheck.worlds import validation as allowed
from ddpcheck.worlds import wire
from ddpcheck.worlds.launchers import LaunchedWorld, RankGroup, detect, require
from ddpcheck.worlds.preloading import import_named

_DEBUG = "TORCH_DISTRIBUTED_DEBUG"
LAUNCHED = pytest.StashKey[RankGroup]()
STARTUP = 120.0
"""Seconds that ranks wait for each other where all should come at the same time."""
PATIENCE = 3600.0
"""Seconds that they wait for one that does something which nobody has given a timeout."""


def refuse_wrong_start(config: pytest.Config, launcher: str) -> None:
    """Refuse a session whose tests cannot have the ranks that they should.

    Args:
        config: Of pytest.
        launcher: The setting.

    Raises:
        UsageError: It is a worker of pytest-xdist that a launcher has started, or no launcher where there must be one.
    """
    if launcher == "off" or LAUNCHED in config.stash:
        return
    if launcher == "on":
        require()
    if hasattr(config, "workerinput") and (launch := detect()) is not None:
        raise UsageError(
            f"{launch.launcher} has started {launch.world_size} ranks, and pytest-xdist workers in each of them; run "
            "pytest without -n there, or with --launcher=off, which starts ranks of its own for each test."
        )


class JoinedRanks(Ranks):
    """All ranks of a session that a launcher has started."""

    apart = False

    def __init__(self, config: pytest.Config, launched: RankGroup) -> None:
        super().__init__(config)
        self.desk = None
        self._launched = launched
        self._capture = None if self.live else config.pluginmanager.getplugin("capturemanager")

    def acquire(self, item: pytest.Item, options: Mapping[str, Any], watch: Watch) -> Lent:
        """The first ranks; the test is skipped where there are not so many."""
        launch, size = self._launched.launch, options["world_size"]
        allowed.check_count("world_size", size, allowed.MAX_WORLD_SIZE)
        if size > self._launched.world_size:
            reason = f"needs {size} ranks, {launch.launcher} has started {self._launched.world_size}"
            raise pytest.skip.Exception(reason, _use_item_location=True)
        return JoinedWorld(self._launched, self._capture, **options)

    def release(self, world: Lent, *, broken: bool) -> None:
        """A test is done with its world."""
        assert isinstance(world, JoinedWorld)
        world.close()

    def once(self, what: str, work: Callable[[], Any]) -> Any:
        """Have rank 0 do it, and return, or raise, on every rank what comes of it."""
        data = b""
        if self._launched.rank == 0:
            try:
                done = (True, work())
            except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:
                done = (False, error)
            data = _travelling(*done)
        succeeded, value = wire.loads(self._launched.meet(what, data, timeout=PATIENCE)[0])
        if not succeeded:
            raise value
        return value


def _travelling(succeeded: bool, value: Any) -> bytes:
    try:
        wire.loads(data := wire.dumps((succeeded, value)))
    except Exception as error:  # most of all an exception with an `__init__` of its own
        what = f"rank 0 raised {type(value).__qualname__}: {value}" if not succeeded else f"not picklable: {error}"
        return wire.dumps((False, RankError(what)))
    return data


class JoinedWorld:
    """The first ranks of a launched session, with the face of a `World`."""

    def __init__(
        self,
        launched: RankGroup,
        capture: Any,
        *,
        world_size: int,
        env: Mapping[str, str] | None = None,
        threads: int | None = None,
        preload: Sequence[str] = (),
        reuse: str = "test",
        process_group: bool = True,
        start_method: str | None = None,
        hash_seeds: bool = False,
        watch: Watch | None = None,
        **options: Any,
    ) -> None:
        """Take them.

        Args:
            launched: The session.
            capture: pytest's capture manager, `None` where output is not captured.
            world_size: How many ranks.
            env: Environment variables while they run.
            threads: That torch may use in each meanwhile.
            preload: Modules to import before.
            reuse: Means nothing: they live on anyway.
            process_group: Must be true.
            start_method: Means nothing: they have been started.
            hash_seeds: Means nothing: the launcher has given each its own, or not.
            watch: Is not called: ranks watch over each other.
            **options: Of `LaunchedWorld`.

        Raises:
            UsageError: When an argument makes no sense.
        """
        if not process_group:
            raise UsageError(f"process_group=False is not possible on ranks that {launched.launch.launcher} started.")
        if threads is not None:
            allowed.check_count("threads", threads, allowed.MAX_WORLD_SIZE)
        self._env = allowed.check_env(env)
        self._preload = allowed.check_modules("preload", preload)
        self._threads = threads
        self._capture = capture
        self._launched = launched
        self._world = LaunchedWorld(
            launched, world_size, startup_timeout=options.pop("startup_timeout", STARTUP), **options
        )
        self._printed: dict[int, str] = {}
        self._attachments: dict[int, bytes] = {}

    @property
    def world_size(self) -> int:
        """How many ranks take part."""
        return self._world.world_size

    @property
    def failed(self) -> bool:
        """Whether the last run failed."""
        return self._world.failed

    def run(self, fn: Callable[..., Any], /, *args: Any, timeout: float | None = None, **kwargs: Any) -> list[Any]:
        """Call rank 0's function with rank 0's arguments on every rank, and return all results.

        Raises:
            RankError: When a rank fails; in the same words on every rank.
            HangError: When a rank does not finish in time.
            UsageError: When something cannot be sent to the ranks.
        """
        payload = allowed.pack_task(fn, args, kwargs)
        mine = payload if self._launched.rank == 0 else b""
        payload = self._launched.meet("a run", mine, timeout=self._world.startup_timeout)[0]
        self._attachments = {}
        try:
            with _undone(), _environment(self._env):
                return self._world.run(self._work, payload, timeout=timeout)
        finally:
            for rank in range(self.world_size):
                if data := self._world.attachment(rank):
                    self._attachments[rank], printed = pickle.loads(data)
                    self._printed[rank] = self._printed.get(rank, "") + printed

    @for_target
    def _work(self, payload: bytes) -> Any:
        """On a rank, in its process group."""
        with _threads(self._threads), _heard(self._capture), _logged():
            for name in self._preload:
                if refusal := import_named(name):
                    raise UsageError(refusal)
            this_rank.seed()
            function, args, kwargs = this_rank.unpacked_task(payload)
            return function(*args, **kwargs)

    def output(self, rank: int) -> str:
        """Return what a rank has printed in all runs."""
        return self._printed.get(rank, "")

    def attachment(self, rank: int) -> bytes:
        """Return what a rank has left in the last run."""
        return self._attachments.get(rank, b"")

    def close(self) -> None:
        """Let go of the ranks."""
        self._world.close()


# --- What the code of a test does to a process that lives on ---------------------------------------------------------


@contextlib.contextmanager
def _undone() -> Iterator[None]:
    seeds, directory, environment = RngStates.now(), os.getcwd(), dict(os.environ)
    try:
        yield
    finally:
        os.chdir(directory)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        seeds.plant()


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables, which whoever undoes everything undoes, and the one that torch reads only once."""
    before = os.environ.get(_DEBUG)
    os.environ.update(values)
    try:
        if _DEBUG in values:
            _set_debug_level()
        yield
    finally:
        if _DEBUG in values:
            os.environ[_DEBUG] = before or "OFF"
            _set_debug_level()


def _set_debug_level() -> None:
    import torch.distributed as dist

    dist.set_debug_level_from_env()  # type: ignore[attr-defined]  # exported without saying so


@contextlib.contextmanager
def _threads(number: int | None) -> Iterator[None]:
    if number is None:
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _heard(capture: Any) -> Iterator[None]:
    """Leave, with what the rank leaves itself, what it prints; what was printed before stays where it was."""
    before = _read(capture)
    try:
        yield
    finally:
        printed = "".join(_read(capture))
        for stream, text in zip((sys.stdout, sys.stderr), before, strict=True):
            if text:
                stream.write(text)
        this_rank.save_attachment(pickle.dumps((this_rank.attachment(), printed)))


@contextlib.contextmanager
def _logged() -> Iterator[None]:
    """Keep what the rank logs from the handlers of the process that pytest runs in: it is told them as the rank's."""
    root = logging.getLogger()
    kept = root.handlers[:]
    root.handlers[:] = [each for each in kept if type(each).__module__ != "_pytest.logging"]
    try:
        yield
    finally:
        root.handlers[:] = kept


def _read(capture: Any) -> tuple[str, str]:
    if capture is None or not capture.is_globally_capturing():
        return "", ""
    out, err = capture.read_global_capture()
    return out, err
