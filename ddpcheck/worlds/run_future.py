"""A run of a world that is under way: waited for, watched, and settled. Every wait has a deadline."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from ddpcheck.findings.errors import DDPCheckError, RankError, UsageError
from ddpcheck.findings.replace import replace
from ddpcheck.findings.wording import format_ranks
from ddpcheck.worlds import failures, wire
from ddpcheck.worlds.deadlock import DeadlockDetector
from ddpcheck.worlds.rank import read_slots
from ddpcheck.worlds.rank_processes import RankProcesses

Result = TypeVar("Result")

_GRACE = 0.3  # after the first failure, for others to fail for reasons of their own
_LOST = 5.0  # and for the exit code of one that is gone: others may know of that before it is told here
_TICK = 0.25  # between calls of `watch`
_BRIEF = 0.05  # time in `watch` that is not worth counting
_LOOK = 0.5  # between looks at where ranks say that they are
_FIRST = 2 * _LOOK  # in which they say it for the first time
_LAST_CHANCE = 5.0  # to start, if the fork server has not answered another world in the time that this has
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
    """A run that is under way, as `World.start` returns it."""

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
        self._next_look = self._got_on = self._started
        self._turns: list[int] = []  # how often each rank has said where it is
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
        self._go_on(block=False)
        return self.complete

    def result(self) -> list[Result]:
        """Wait for the results, one a rank.

        Raises:
            RankError: When a rank fails.
            HangError: When a rank does not finish in time.
        """
        self._go_on(block=True)
        if self._error is not None:
            raise self._error
        assert self._results is not None
        return self._results

    def _go_on(self, block: bool) -> None:
        if not self.complete and self._world.closed:
            self._error = DDPCheckError("The world was closed before its run had finished.")
        wait = 0.0
        try:
            while not self.complete:
                self._processes.poll(wait)
                wait = self._advance()
                if not block:
                    return
        except BaseException as error:  # Ctrl-C above all: nothing may go on behind our back
            self._error = error if isinstance(error, Exception) else DDPCheckError("The run was interrupted.")
            self._world.close()
            raise

    def _advance(self) -> float:
        """Settle the outcome if it can be; return how long to wait at most before looking again."""
        ranks = self._processes.ranks
        now = time.monotonic()
        if all(rank.answer is not None and rank.answer[0] == "result" for rank in ranks):
            self._settle()
            return 0.0
        running = frozenset(rank.number for rank in ranks if rank.answer is None and rank.ended is None)
        bad = any(rank.ended is not None if rank.answer is None else rank.answer[0] == "failure" for rank in ranks)
        if bad or self._processes.error:
            if self._failed_at is None:
                self._failed_at = now
            grace = self._failed_at + (_LOST if self._processes.has_lost_one else _GRACE) - now
            return grace if running and not self._processes.error and grace > 0 else self._fail(None)
        if now >= self._next_look:  # by the clock of this process: a rank may have another one
            turns = [read_slots(self._world.directory, rank.number).turns for rank in ranks]
            if turns != self._turns:
                self._turns, self._got_on = turns, now
            self._next_look = now + _LOOK
        deadline, headline = self._deadline()
        if now >= deadline:  # what torch.compile takes comes on top; files are read only now
            compiled = sum(read_slots(self._world.directory, rank.number).compiling(now) for rank in ranks)
            deadline += min(compiled, _LONGEST_COMPILATION)  # together they have waited no longer
        if now >= deadline:
            return self._fail(headline)
        if stuck := self._deadlock.verdict(now):
            return self._fail(stuck)
        waits = [deadline - now, self._deadlock.wait(now), self._next_look - now]
        if self._watch is not None:
            if now >= self._next_watch:
                finished = frozenset(rank.number for rank in ranks if rank.answer is not None)
                sentence = self._watch(finished, running)
                if (spent := time.monotonic() - now) > _BRIEF:  # not counted: it may have been a person at a debugger
                    self._allowed += spent
                    self._deadlock.reset()
                if sentence:
                    return self._fail(sentence)
                self._next_watch = time.monotonic() + _TICK
            waits.append(max(0.0, self._next_watch - now))
        return min(waits)

    def _deadline(self) -> tuple[float, str]:
        started = self._started
        for rank in self._processes.ranks:
            if rank.ready is None:
                seconds, born = self._world.startup_timeout, self._processes.born
                owes, why = self._processes.server_owes
                deadline = max(min(born, owes) + seconds, born + min(seconds, _LAST_CHANCE)) + self._allowed
                return deadline, f"{{ranks}} did not start within {seconds:g} s{why}"
            started = max(started, rank.ready)
        deadline, got_on = started + self._timeout + self._allowed, self._got_on + self._timeout
        if got_on > deadline + _FIRST:  # a part of the work has as long as the whole
            return got_on, f"{{ranks}} made no progress for {self._timeout:g} s"
        return deadline, f"{{ranks}} did not finish within {self._timeout:g} s"

    def _settle(self) -> None:
        results = []
        for rank in self._processes.ranks:
            assert rank.answer is not None
            try:
                results.append(wire.loads(rank.answer[1]))
            except Exception as error:
                self._error = DDPCheckError(
                    f"The result of rank {rank.number} could not be unpickled here ({type(error).__name__}: {error}); "
                    "return plain values or tensors."
                )
                return
            rank.answer = ("result", b"")
        self._results = results

    # --- A run that has failed -----------------------------------------------------------------------------------

    def _fail(self, headline: str | None) -> float:
        """End every rank, and settle on the exception that says what happened: a hang when there is a headline."""
        self._world.failed = True
        self._error = self._end_ranks(headline)
        if isinstance(self._error, RankError):
            for rank in self._processes.ranks:
                if rank.answer is not None and rank.answer[0] == "result":
                    with contextlib.suppress(Exception):  # what cannot be read back is no reason to lose the error
                        self._error.results[rank.number] = wire.loads(rank.answer[1])
        return 0.0

    def _end_ranks(self, headline: str | None) -> BaseException:
        processes = self._processes
        if processes.refused:
            processes.kill()
            return UsageError(processes.error)
        dumps = processes.dump_stacks()
        # Before they are killed, one after the other: a rank leaves its collective when the first of them is gone.
        slots = {rank.number: read_slots(self._world.directory, rank.number) for rank in processes.ranks}
        now = time.monotonic()
        replies = {rank.number: rank.failing for rank in processes.ranks if rank.answer is None}
        processes.kill()
        found = []
        for rank in processes.ranks:
            place, collective = slots[rank.number].place, slots[rank.number].collective
            output = failures.tail(processes.path(rank.number, "out"))
            # What a stuck rank says once others are being killed is about that: they are not all killed at once.
            if rank.answer is not None and rank.number not in dumps:
                kind, reply = rank.answer
                if kind == "result":
                    continue
                if reply["usage"] and headline is None and reply["place"] == "starting up":
                    return UsageError(reply["text"])
                failure = failures.raised(rank.number, reply)
            elif rank.ended is not None and rank.number not in dumps:
                last_words = failures.died(rank.number, *rank.ended, output, processes.read(rank.number, "stack"))
                failure = replace(last_words, place=place, collective=collective)
            elif (reply := replies.get(rank.number)) is not None:
                failure = failures.raised(rank.number, reply)
            else:
                dump = dumps.get(rank.number, "")
                by_thread = failures.in_thread(rank.number, dump, processes.read(rank.number, "thread"))
                failure = by_thread or failures.stuck(rank.number, now, dump, place, collective)
            found.append(replace(failure, output=output))
        if headline is not None:
            late = [one.rank for one in found if one.kind == "stuck"] or [rank.number for rank in processes.ranks]
            return failures.hang(found, headline.replace("{ranks}", format_ranks(late)))
        if not found or (processes.error and all(one.kind == "stuck" for one in found)):
            return RankError(f"The ranks could not continue: {processes.error or 'they ended during a call'}.", found)
        return failures.error(found)
