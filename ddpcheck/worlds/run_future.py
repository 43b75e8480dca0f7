"""Future of a run: wait with a deadline, detect hangs, collect results or errors."""

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
from ddpcheck.worlds.rank import Slots, read_slots
from ddpcheck.worlds.rank_processes import RankProcesses

Result = TypeVar("Result")

_GRACE = 0.3  # seconds after the first failure, for independent failures on other ranks
_LOST = 5.0  # seconds to wait for the exit code of a rank that has closed its connection
_TICK = 0.25  # seconds between calls of `watch`
_BRIEF = 0.05  # seconds in `watch` up to which the deadline is not extended
_PROGRESS_TICK = 0.5  # seconds between reads of the ranks' positions
_FIRST = 2 * _PROGRESS_TICK  # seconds after a start until ranks report their first positions
_LAST_CHANCE = 5.0  # minimum seconds for start-up if the fork server is busy with another world
_LONGEST_COMPILATION = 900.0  # maximum compile seconds added to the deadline


class Running(Protocol):
    """The attributes of a world that a run needs."""

    device: str
    directory: Path
    startup_timeout: float
    closed: bool
    failed: bool

    def close(self) -> None: ...


class RunFuture(Generic[Result]):
    """Future of the results of a run, returned by `World.start`."""

    def __init__(
        self, world: Running, processes: RankProcesses, timeout: float, watch: Callable[..., str | None] | None
    ) -> None:
        self._world = world
        self._processes = processes
        self._timeout = timeout
        self._watch = watch
        self._deadlock = DeadlockDetector(processes, world.device)
        self._extra_seconds = 0.0
        self._started_at = time.monotonic()
        self._failed_at: float | None = None
        self._next_watch = self._started_at + _TICK
        self._next_progress_check = self._progressed_at = self._started_at
        self._turns: list[int] = []  # number of position updates per rank
        self._results: list[Result] | None = None
        self._error: BaseException | None = None

    @property
    def complete(self) -> bool:
        """True if the run has a result or an error."""
        return self._results is not None or self._error is not None

    @property
    def succeeded(self) -> bool:
        """True if every rank has returned a result."""
        return self._results is not None

    def done(self) -> bool:
        """Return True if `result` would return or raise immediately."""
        self._run_until_complete(block=False)
        return self.complete

    def result(self) -> list[Result]:
        """Wait for the results, one per rank.

        Raises:
            RankError: A rank failed.
            HangError: A rank did not finish in time.
        """
        self._run_until_complete(block=True)
        if self._error is not None:
            raise self._error
        assert self._results is not None
        return self._results

    def _run_until_complete(self, block: bool) -> None:
        if not self.complete and self._world.closed:
            self._error = DDPCheckError("The world was closed before its run had finished.")
        wait = 0.0
        try:
            while not self.complete:
                self._processes.poll(wait)
                wait = self._advance()
                if not block:
                    return
        except BaseException as error:  # mainly Ctrl-C: no rank may keep running
            self._error = error if isinstance(error, Exception) else DDPCheckError("The run was interrupted.")
            self._world.close()
            raise

    def _advance(self) -> float:
        """Complete the run if its outcome is known; else return seconds to wait."""
        ranks = self._processes.ranks
        now = time.monotonic()
        if all(rank.answer is not None and rank.answer[0] == "result" for rank in ranks):
            self._load_results()
            return 0.0
        running = frozenset(rank.number for rank in ranks if rank.answer is None and rank.ended is None)
        failed = any(rank.ended is not None if rank.answer is None else rank.answer[0] == "failure" for rank in ranks)
        if failed or self._processes.error:
            if self._failed_at is None:
                self._failed_at = now
            is_exit_awaited = any(not rank.connected and rank.ended is None for rank in ranks)
            grace = self._failed_at + (_LOST if is_exit_awaited else _GRACE) - now
            return grace if running and not self._processes.error and grace > 0 else self._fail(None)
        if now >= self._next_progress_check:  # by our clock: a rank's clock may differ
            turns = [slots.num_status_updates for slots in self._slots()]
            if turns != self._turns:
                self._turns, self._progressed_at = turns, now
            self._next_progress_check = now + _PROGRESS_TICK
        deadline, headline = self._deadline()
        if now >= deadline:  # extend by torch.compile time; read the files only here
            compiled = sum(slots.compiling(now) for slots in self._slots())
            deadline += min(compiled, _LONGEST_COMPILATION)  # the sum bounds how long ranks waited for each other
        if now >= deadline:
            return self._fail(headline)
        if stuck := self._deadlock.check_if_due(now):
            return self._fail(stuck)
        pauses = [deadline - now, self._deadlock.seconds_until_check(now), self._next_progress_check - now]
        if self._watch is not None:
            if now >= self._next_watch:
                finished = frozenset(rank.number for rank in ranks if rank.answer is not None)
                sentence = self._watch(self._world, finished, running)
                if (spent := time.monotonic() - now) > _BRIEF:  # extend the deadline: may be a debugger session
                    self._extra_seconds += spent
                    self._deadlock.reset()
                if sentence:
                    return self._fail(sentence)
                self._next_watch = time.monotonic() + _TICK
            pauses.append(max(0.0, self._next_watch - now))
        return min(pauses)

    def _deadline(self) -> tuple[float, str]:
        started = self._started_at
        for rank in self._processes.ranks:
            if rank.ready is None:
                seconds, start = self._world.startup_timeout, self._processes.started_at
                oldest, reason = self._processes.oldest_fork_request
                deadline = max(min(start, oldest) + seconds, start + min(seconds, _LAST_CHANCE)) + self._extra_seconds
                return deadline, f"{{ranks}} did not start within {seconds:g} s{reason}"
            started = max(started, rank.ready)
        deadline, progress_deadline = started + self._timeout + self._extra_seconds, self._progressed_at + self._timeout
        if progress_deadline > deadline + _FIRST:  # progress extends the deadline by `timeout`
            return progress_deadline, f"{{ranks}} made no progress for {self._timeout:g} s"
        return deadline, f"{{ranks}} did not finish within {self._timeout:g} s"

    def _load_results(self) -> None:
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

    # --- Failed runs ---------------------------------------------------------------------------------------------

    def _fail(self, headline: str | None) -> float:
        self._world.failed = True
        self._error = self._kill_and_explain(headline)
        if isinstance(self._error, RankError):
            for rank in self._processes.ranks:
                if rank.answer is not None and rank.answer[0] == "result":
                    with contextlib.suppress(Exception):  # a result that fails to unpickle must not hide the error
                        self._error.results[rank.number] = wire.loads(rank.answer[1])
        return 0.0

    def _slots(self) -> list[Slots]:
        return [read_slots(self._world.directory, rank.number) for rank in self._processes.ranks]

    def _kill_and_explain(self, headline: str | None) -> BaseException:
        processes = self._processes
        if processes.refused:
            processes.kill()
            return UsageError(processes.error)
        dumps = processes.dump_stacks()
        # Read before killing: a rank leaves its collective when the first killed rank is gone.
        slots_by_rank = self._slots()
        now = time.monotonic()
        replies = {rank.number: rank.failing for rank in processes.ranks if rank.answer is None}
        processes.kill()
        records = []
        for rank, slots in zip(processes.ranks, slots_by_rank, strict=True):
            status, collective = slots.status, slots.collective
            output = failures.tail(processes.path(rank.number, "out"))
            # Ignore answers of stuck ranks after the dump: they react to the kill of other ranks.
            if rank.answer is not None and rank.number not in dumps:
                kind, reply = rank.answer
                if kind == "result":
                    continue
                if reply["usage"] and headline is None and reply["place"] == "starting up":
                    return UsageError(reply["text"])
                failure = failures.failure_of_exception(rank.number, reply)
            elif rank.ended is not None and rank.number not in dumps:
                death = failures.failure_of_dead_rank(
                    rank.number, *rank.ended, output, processes.read(rank.number, "stack")
                )
                failure = replace(death, place=status, collective=collective)
            elif (reply := replies.get(rank.number)) is not None:
                failure = failures.failure_of_exception(rank.number, reply)
            else:
                dump = dumps.get(rank.number, "")
                by_thread = failures.thread_failure(rank.number, dump, processes.read(rank.number, "thread"))
                failure = by_thread or failures.failure_of_running_rank(rank.number, now, dump, status, collective)
            records.append(replace(failure, output=output))
        if headline is not None:
            stuck = [item.rank for item in records if item.kind == "stuck"] or [rank.number for rank in processes.ranks]
            return failures.hang_error(records, headline.replace("{ranks}", format_ranks(stuck)))
        if not records or (processes.error and all(item.kind == "stuck" for item in records)):
            return RankError(f"The ranks could not continue: {processes.error or 'they ended during a call'}.", records)
        return failures.rank_error(records)
