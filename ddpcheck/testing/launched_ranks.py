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
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from ddpcheck.findings.errors import RankError, UsageError
from ddpcheck.findings.exception_origin import for_target
from ddpcheck.harness import Watch
from ddpcheck.testing.leases import Lent, Ranks
from ddpcheck.testing.rank_context import RngStates
from ddpcheck.worlds import rank as this_rank
from ddpcheck.worlds import validation, wire
from ddpcheck.worlds.launchers import LaunchedWorld, RankGroup, detect, require
from ddpcheck.worlds.preloading import import_named
from ddpcheck.worlds.rank_setup import seed
from ddpcheck.worlds.validation import WorldOptions

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
        self.terminal = None
        self._launched = launched
        self._capture = None if self.live else config.pluginmanager.getplugin("capturemanager")

    def acquire(self, item: pytest.Item, options: Mapping[str, Any], watch: Watch) -> Lent:
        """The first ranks; the test is skipped where there are not so many."""
        launch, size = self._launched.launch, options["world_size"]
        validation.check_count("world_size", size, validation.MAX_WORLD_SIZE)
        if size > self._launched.world_size:
            reason = f"needs {size} ranks, {launch.launcher} has started {self._launched.world_size}"
            raise pytest.skip.Exception(reason, _use_item_location=True)
        if not options.get("process_group", True):
            raise UsageError(f"process_group=False is not possible on ranks that {launch.launcher} started.")
        # These ranks live on in any case, and their liveness is watched without a callback.
        asked = {name: value for name, value in options.items() if name not in ("reuse", "watch", "hash_seeds")}
        return JoinedWorld(self._launched, self._capture, WorldOptions(**{"startup_timeout": STARTUP, **asked}))

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
        succeeded, value = wire.loads(self._launched.gather(what, data, timeout=PATIENCE)[0])
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


class JoinedWorld(LaunchedWorld):
    """The first ranks of a launched session, for code of a test, whose output is kept and whose changes are undone."""

    def __init__(self, launched: RankGroup, capture: Any, options: WorldOptions) -> None:
        """Take them; `capture` is pytest's capture manager, `None` where output is not captured."""
        super().__init__(launched, options)
        self._options = options
        self._capture = capture
        self._printed: dict[int, str] = {}

    def run(self, fn: Callable[..., Any], /, *args: Any, timeout: float | None = None, **kwargs: Any) -> list[Any]:
        """Call rank 0's function with rank 0's arguments on every rank, and return all results.

        Raises:
            RankError: When a rank fails; in the same words on every rank.
            HangError: When a rank does not finish in time.
            UsageError: When something cannot be sent to the ranks.
        """
        payload = validation.pack_task(fn, args, kwargs)
        mine = payload if self.session.rank == 0 else b""
        payload = self.session.gather("a run", mine, timeout=self.startup_timeout)[0]
        self._attachments = {}
        try:
            with _process_restored(), _environment(self._options.env or {}):
                return super().run(self._call, payload, timeout=timeout)
        finally:
            for rank, data in self._attachments.items():
                if data:
                    self._attachments[rank], printed = pickle.loads(data)
                    self._printed[rank] = self._printed.get(rank, "") + printed

    @for_target
    def _call(self, payload: bytes) -> Any:
        """On a rank, in its process group."""
        with _threads(self._options.threads), _output_kept(self._capture), _without_pytest_logging():
            for name in self._options.preload:
                if refusal := import_named(name):
                    raise UsageError(refusal)
            seed()
            function, args, kwargs = this_rank.unpacked_task(payload)
            return function(*args, **kwargs)

    def output(self, rank: int) -> str:
        """Return what a rank has printed in all runs."""
        return self._printed.get(rank, "")


# --- Changes that the code of a test makes to a process that lives on ------------------------------------------------


@contextlib.contextmanager
def _process_restored() -> Iterator[None]:
    seeds, directory, environment = RngStates.capture(), os.getcwd(), dict(os.environ)
    try:
        yield
    finally:
        os.chdir(directory)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        seeds.restore()


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables, which `_process_restored` takes back, and have torch read the one that it reads only once."""
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
def _output_kept(capture: Any) -> Iterator[None]:
    """Save what the rank prints together with its attachment; what was printed before stays where it was."""
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
def _without_pytest_logging() -> Iterator[None]:
    """Keep records of the rank from pytest's handlers in this process: they are shown as those of the rank."""
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
