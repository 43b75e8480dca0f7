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
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from ddpcheck.findings.errors import DdpcheckError, UsageError
from ddpcheck.findings.exception_origin import for_target
from ddpcheck.testing.rank_context import RngStates
from ddpcheck.worlds import rank as this_rank
from ddpcheck.worlds import validation
from ddpcheck.worlds.launchers.group_run import Run, results_of
from ddpcheck.worlds.launchers.rank_group import RankGroup
from ddpcheck.worlds.preloading import import_named
from ddpcheck.worlds.rank_setup import choose_device, seed
from ddpcheck.worlds.validation import WorldOptions

_DEBUG = "TORCH_DISTRIBUTED_DEBUG"
LAUNCHED = pytest.StashKey[RankGroup]()
STARTUP = 120.0
"""Seconds that ranks wait for each other where all should come at the same time."""
PATIENCE = 3600.0
"""Seconds that they wait for one that does something which nobody has given a timeout."""


class LaunchedWorld:
    """The first ranks of a session, with a process group of their own for each run.

    Every rank of the session makes it, runs and closes it at the same points, those that take no part too: they only
    learn what comes of it. Unlike the ranks of a `World`, these live on after a failure, and the next run works.

    Attributes:
        world_size: How many ranks take part.
        failed: Whether the last run failed.
    """

    def __init__(self, session: RankGroup, options: WorldOptions, capture: Any = None) -> None:
        """Take the first ranks of a session; raises a `UsageError` where there are not so many.

        Options that say how ranks start mean nothing here. On `cuda`, a rank gets the GPU of its number on its machine.
        `capture` is pytest's capture manager, `None` where output is not captured.
        """
        launch, size = session.launch, options.world_size
        if size > session.world_size:
            raise UsageError(
                f"world_size={size}, but {launch.launcher} has started {session.world_size} ranks; "
                "start more, or run this without a launcher."
            )
        self.world_size = size
        self.failed = False
        self._session = session
        self._options = options
        self._capture = capture
        self._directory = session.placement.directory / session.name_world()  # the same for the ranks of one machine
        self._context: this_rank.RankContext | None = None
        if session.rank < size:
            local_size = min(launch.local_world_size or size, size)
            device, shared = choose_device(options.device, options.backend, session.placement.local_rank, local_size)
            self._context = this_rank.RankContext(session.rank, size, options.backend, device, self._directory, shared)
        self._state: dict[str, Any] = {}
        self._attachments: dict[int, bytes] = {}
        self._printed: dict[int, str] = {}

    def run(self, fn: Callable[..., Any], /, *args: Any, timeout: float | None = None) -> list[Any]:
        """Call rank 0's function with rank 0's arguments on every rank, and return all results; raises as `World.run`.

        A failure is told in the same words on every rank.
        """
        if timeout is not None:
            validation.check_seconds("timeout", timeout)
        if threading.current_thread() is not threading.main_thread():
            raise DdpcheckError("On the ranks of a launcher, run() must be called in the main thread.")
        session, options = self._session, self._options
        seconds = options.timeout if timeout is None else timeout
        payload = validation.pack_task(fn, args, {})
        self.failed = True
        here = f"run({self.world_size}, {options.backend}, {options.device}, {seconds:g}) of {self._directory.name}"
        mine = (here, payload if session.rank == 0 else b"")
        told = session.gather("a run", mine, timeout=options.startup_timeout)
        session.check_in_step([at for at, _ in told])
        payload = told[0][1]
        self._directory.mkdir(exist_ok=True)
        self._attachments = {}
        run = Run(session, self._context, self.world_size, seconds)
        with _process_restored(options.env or {}), _state(self._state):
            outcomes = run.perform(lambda: self._call(payload))
        for rank, outcome in outcomes.items():
            if outcome.attachment:
                self._attachments[rank], printed = pickle.loads(outcome.attachment)
                self._printed[rank] = self._printed.get(rank, "") + printed
            if outcome.lost:
                session.mark_broken(f"rank {rank} is stuck, and could not be freed.")
        results = results_of(outcomes, seconds)
        self.failed = False
        return results

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

    def attachment(self, rank: int) -> bytes:
        """The bytes that a rank has saved with `ddpcheck.rank.save_attachment` in the last run."""
        return self._attachments.get(rank, b"")

    def output(self, rank: int) -> str:
        """Return what a rank has printed in all runs."""
        return self._printed.get(rank, "")

    def close(self) -> None:
        """Let go of the ranks; the scratch directory is removed once all have done so."""
        self._session.clean_up_later(lambda: shutil.rmtree(self._directory, ignore_errors=True))


# --- Changes that the code of a test makes to a process that lives on ------------------------------------------------


@contextlib.contextmanager
def _process_restored(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables, and have torch read the one that it reads only once; take back them, and what the code changes."""
    seeds, directory, environment = RngStates.capture(), os.getcwd(), dict(os.environ)
    os.environ.update(variables)
    try:
        if _DEBUG in variables:
            _set_debug_level()
        yield
    finally:
        os.chdir(directory)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        seeds.restore()
        if _DEBUG in variables:
            _set_debug_level()


def _set_debug_level() -> None:
    import torch.distributed as dist

    dist.set_debug_level_from_env()  # type: ignore[attr-defined]  # exported without saying so


@contextlib.contextmanager
def _state(values: dict[str, Any]) -> Iterator[None]:
    """Give `rank.state` the values of one world, and keep them for its next run."""
    before = dict(this_rank.state)
    this_rank.state.clear()
    this_rank.state.update(values)
    try:
        yield
    finally:
        values.clear()
        values.update(this_rank.state)
        this_rank.state.clear()
        this_rank.state.update(before)


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
