"""A run of a world that is under way: waited for, watched, and settled. Every wait has a deadline.

This module is light: it never imports torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from ddpcheck.findings.errors import DdpcheckError
from ddpcheck.worlds import run_failure, wire
from ddpcheck.worlds.deadlock import DeadlockDetector
from ddpcheck.worlds.rank import read_compiling
from ddpcheck.worlds.rank_processes import Rank, RankProcesses

Result = TypeVar("Result")

_GRACE = 0.3  # after the first failure, for others to fail for reasons of their own
_TICK = 0.25  # between calls of `watch`
_BRIEF = 0.05  # time in `watch` that is not worth counting
_LONGEST_COMPILATION = 900.0  # that is not counted as time of a run


class Running(Protocol):
    """A world, as far as a run of it is concerned."""

    device: str
    directory: Path
    startup_timeout: float
    closed: bool
    failed: bool

    def close(self) -> None:
        """End the ranks."""


class RunFuture(Generic[Result]):
    """A run that is under way; `watch` is called with the ranks that have finished and those that have not."""

    def __init__(
        self,
        world: Running,
        processes: RankProcesses,
        timeout: float,
        watch: Callable[[frozenset[int], frozenset[int]], str | None] | None,
    ) -> None:
        self._world = world
        self._processes = processes
        self._timeout = timeout
        self._watch = watch
        self._deadlock = DeadlockDetector(processes, world.device)
        self._allowed = 0.0
        self._started = time.monotonic()
        self._failed_at: float | None = None
        self._next_watch = self._started + _TICK
        self._results: list[Result] | None = None
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

    def result(self) -> list[Result]:
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
            self._processes.poll(0)
            while not self.complete:
                wait = self._advance()
                if not block or self.complete:
                    return
                self._processes.poll(wait)
        except BaseException as error:  # Ctrl-C above all: nothing may go on behind our back
            self._error = error if isinstance(error, Exception) else DdpcheckError("The run was interrupted.")
            world.close()
            raise

    def _advance(self) -> float:
        """Settle the outcome if it can be; return how long to wait at most before looking again."""
        ranks = self._processes.ranks
        now = time.monotonic()
        if all(rank.answer is not None and rank.answer[0] == "result" for rank in ranks):
            self._settle(ranks)
            return 0.0
        running = [rank for rank in ranks if rank.answer is None and rank.ended is None]
        bad = self._processes.error or any(_has_failed(rank) for rank in ranks)
        if bad:
            if self._failed_at is None:
                self._failed_at = now
            if not running or self._processes.error or now >= self._failed_at + _GRACE:
                self._fail(None)
                return 0.0
            return self._failed_at + _GRACE - now
        deadline, headline = self._deadline()
        if now >= deadline:  # what torch.compile takes comes on top; files are read only now
            deadline += min(self._compilation(now), _LONGEST_COMPILATION)
        if now >= deadline:
            self._fail(headline)
            return 0.0
        wait = deadline - now
        if stuck := self._deadlock.verdict(now):
            self._fail(stuck)
            return 0.0
        if (look := self._deadlock.wait(now)) is not None:
            wait = min(wait, look)
        if self._watch is not None:
            if now >= self._next_watch:
                finished = frozenset(rank.number for rank in ranks if rank.answer is not None)
                sentence = self._watch(finished, frozenset(rank.number for rank in running))
                self._allow(time.monotonic() - now)
                if sentence:
                    self._fail(sentence)
                    return 0.0
                self._next_watch = time.monotonic() + _TICK
            wait = min(wait, max(0.0, self._next_watch - now))
        return wait

    def _fail(self, headline: str | None) -> None:
        self._world.failed = True
        self._error = run_failure.end_of(self._processes, self._world.directory, headline)

    def _allow(self, seconds: float) -> None:
        """Do not count time that `watch` has taken: it may have been a person at a debugger."""
        if seconds > _BRIEF:
            self._allowed += seconds
            self._deadlock.reset()

    def _deadline(self) -> tuple[float, str]:
        started = self._started
        for rank in self._processes.ranks:
            if rank.ready is None:
                seconds = self._world.startup_timeout
                return self._processes.born + seconds + self._allowed, f"{{ranks}} did not start within {seconds:g} s"
            started = max(started, rank.ready)
        return started + self._timeout + self._allowed, f"{{ranks}} did not finish within {self._timeout:g} s"

    def _compilation(self, now: float) -> float:
        """The seconds that the ranks have compiled in this run until `now`; together they have waited no longer."""
        directory = self._world.directory
        return sum(read_compiling(directory, rank.number, now) for rank in self._processes.ranks)

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
