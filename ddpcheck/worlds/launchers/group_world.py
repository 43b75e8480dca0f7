"""Worlds on the ranks of a launcher, used as a `harness.World`: for tests that run on ranks that exist already.

This module is light: it never imports torch.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from ddpcheck.findings.errors import DdpcheckError, RankError, RankFailure, UsageError
from ddpcheck.findings.wording import format_ranks
from ddpcheck.worlds import failures, validation, wire
from ddpcheck.worlds import rank as ranks
from ddpcheck.worlds.launchers.group_run import RankOutcome, Run, check_thread
from ddpcheck.worlds.launchers.rank_group import RankGroup
from ddpcheck.worlds.launchers.store import StoreGoneError
from ddpcheck.worlds.rank_setup import choose_device
from ddpcheck.worlds.validation import WorldOptions

_AFTERWARDS = 1e6  # for `RankFailure.when`: ranks that are stuck are so after whatever has happened


class LaunchedWorld:
    """The first ranks of a session, with a process group of their own for each run.

    Every rank of the session makes it, runs and closes it at the same points, those that take no part too: they only
    learn what comes of it. Unlike the ranks of a `World`, these live on after a failure, and the next run works.

    Attributes:
        world_size: How many ranks take part.
        backend: Of their process groups.
        device: `cpu` or `cuda`.
        timeout: Seconds that a run may take.
        startup_timeout: Seconds that ranks wait for each other before a run.
        directory: Scratch directory, the same for the ranks of one machine; removed once all have closed the world.
        closed: Whether it is closed.
        failed: Whether the last run failed.
    """

    def __init__(self, session: RankGroup, options: WorldOptions) -> None:
        """Take the first ranks of a session.

        Args:
            session: This process's.
            options: Of a `World`; those that say how ranks start mean nothing here. On `cuda`, a rank gets the GPU of
                its number on its machine.

        Raises:
            UsageError: There are not so many ranks.
        """
        self.closed = True
        size, backend, device = options.world_size, options.backend, options.device
        if size > session.world_size:
            raise UsageError(
                f"world_size={size}, but {session.launch.launcher} has started {session.world_size} ranks; "
                "start more, or run this without a launcher."
            )
        launch = session.launch
        local_world_size = min(launch.local_world_size or size, size)
        self._takes_part = session.rank < size
        self._device = ("cpu", False)
        if self._takes_part:
            self._device = choose_device(device, backend, session.local_rank, local_world_size)
        self.session = session
        self.world_size = size
        self.backend = backend
        self.device = device
        self.timeout = options.timeout
        self.startup_timeout = options.startup_timeout
        self.failed = False
        self.closed = False
        self.directory = session.directory / session.name_world()
        self._state: dict[str, Any] = {}
        self._attachments: dict[int, bytes] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "failed" if self.failed else "open"
        return f"<LaunchedWorld of {self.world_size} {self.backend} ranks on {self.device}, {state}>"

    def run(self, fn: Callable[..., Any], /, *args: Any, timeout: float | None = None, **kwargs: Any) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every rank of the world; each rank of the session returns all results.

        Args:
            fn: Anything callable, the same on every rank.
            *args: For it, of this rank.
            timeout: Seconds, instead of the world's own.
            **kwargs: For it, of this rank.

        Raises:
            RankError: When a rank fails; in the same words on every rank.
            HangError: When a rank does not finish, or does not come, in time.
        """
        if self.closed:
            raise DdpcheckError("This world is closed; make a new one.")
        if timeout is not None:
            validation.check_seconds("timeout", timeout)
        check_thread()
        session = self.session
        seconds = self.timeout if timeout is None else timeout
        said = [getattr(fn, "__qualname__", type(fn).__qualname__), self.world_size, self.backend, self.device, seconds]
        self.failed = True
        call = f"run({', '.join(map(str, said))})"
        worlds = session.gather(call, self.directory.name.encode(), timeout=self.startup_timeout)
        if len(set(worlds)) > 1:
            raise RankError(
                f"The ranks are not in step: some of them have made more worlds than others before {call}; "
                "every rank must do the same things in the same order."
            )
        self.directory.mkdir(exist_ok=True)
        self._attachments = {}
        context = ranks.RankContext(
            session.rank, self.world_size, self.backend, self._device[0], self.directory, self._device[1]
        )
        run = Run(session, context if self._takes_part else None, self.world_size, seconds)
        try:
            with _state(self._state):
                run.perform(fn, args, kwargs)
            outcomes = run.outcomes()
        except StoreGoneError as error:
            lost = session.lost_store(error)
            if not (outcomes := run.outcomes_without_store()):
                raise lost from None
        self._attachments = {rank: outcome.attachment for rank, outcome in outcomes.items()}
        for rank, outcome in outcomes.items():
            if outcome.kind == "lost":
                session.lose(rank)
        results = _settle(outcomes, seconds)
        self.failed = False
        return results

    def attachment(self, rank: int) -> bytes:
        """The bytes that a rank has saved with `ddpcheck.rank.save_attachment` in the last run."""
        return self._attachments.get(rank, b"")

    def output(self, rank: int) -> str:
        """Nothing: what a rank prints is in its own terminal, or with its own pytest."""
        if not 0 <= rank < self.world_size:
            raise UsageError(f"There is no rank {rank} in a world of {self.world_size} ranks.")
        return ""

    def close(self) -> None:
        """Let go of the ranks; may be called again."""
        if not self.closed:
            self.closed = True
            self.session.clean_up_later(lambda: shutil.rmtree(self.directory, ignore_errors=True))


@contextlib.contextmanager
def _state(state: dict[str, Any]) -> Any:
    """Give `rank.state` the values of one world, and keep them for its next run."""
    before = dict(ranks.state)
    ranks.state.clear()
    ranks.state.update(state)
    try:
        yield
    finally:
        state.clear()
        state.update(ranks.state)
        ranks.state.clear()
        ranks.state.update(before)


def _settle(outcomes: dict[int, RankOutcome], seconds: float) -> list[Any]:
    """Return the results, or raise what has come instead."""
    found = [_failure(rank, outcome) for rank, outcome in outcomes.items() if outcome.kind != "result"]
    results: dict[int, Any] = {}
    for rank, outcome in outcomes.items():
        if outcome.kind == "result":
            try:
                results[rank] = wire.loads(outcome.data)
            except Exception as error:
                if not found:
                    raise DdpcheckError(
                        f"The result of rank {rank} could not be unpickled here ({type(error).__name__}: {error}); "
                        "return plain values or tensors."
                    ) from error
    if not found:
        return [results[rank] for rank in sorted(results)]
    for outcome in outcomes.values():
        if outcome.reply is not None and outcome.reply["usage"] and outcome.reply["place"] == "starting up":
            raise UsageError(outcome.reply["text"])
    late = [one.rank for one in found if one.kind == "stuck"]
    failed: RankError
    if len(late) == len(found):
        failed = failures.hang(found, f"{format_ranks(late)} did not finish within {seconds:g} s")
    else:
        failed = failures.error(found)
    failed.results = results
    raise failed


def _failure(rank: int, outcome: RankOutcome) -> RankFailure:
    if outcome.reply is not None:
        return replace(failures.raised(rank, dict(outcome.reply)), when=outcome.when)
    if outcome.kind == "gone":
        return RankFailure(rank, "died", outcome.reason, outcome.when, exit_code=outcome.code)
    failure = failures.stuck(rank, _AFTERWARDS, outcome.stack, outcome.place, outcome.collective)
    if outcome.kind == "lost":
        failure = replace(failure, message=failure.message + ", and could not be freed")
    return failure
