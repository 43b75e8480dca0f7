"""The worlds of a pytest session: who gets which, and who watches over them while they work.

This module is light: it never imports torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from ddpcheck.findings.errors import RankError
from ddpcheck.harness import Watch, World
from ddpcheck.testing.outcome import TestOutcome
from ddpcheck.testing.rank_context import RankArtifacts, RngStates, TestConditions
from ddpcheck.testing.record import Lent, Record, sections
from ddpcheck.testing.remote_pdb import PdbTerminal
from ddpcheck.testing.world_pool import WorldPool


class Ranks:
    """All ranks of a session.

    Attributes:
        live: Whether what ranks print is shown while they work.
        terminal: The terminal, where there is one.
        following: The test after the one that runs.
        apart: Whether the ranks are processes of their own.
    """

    apart = True

    def __init__(self, config: pytest.Config) -> None:
        worker = hasattr(config, "workerinput")
        self._pool = WorldPool()
        self._controller = os.getppid() if worker else None
        self.following: pytest.Item | None = None
        self.live = config.getoption("capture", "no") == "no" and not worker
        self.terminal = None if worker else PdbTerminal(config)

    def lease(
        self, item: pytest.Item, record: Record, options: Mapping[str, Any], since: RngStates | None
    ) -> WorldLease:
        """A world for a test, which it gets when it first uses it."""
        lease = WorldLease(self, item, record, options, since)
        record.output_collectors.append(lease.collect_output)
        return lease

    def acquire(self, item: pytest.Item, options: Mapping[str, Any], watch: Watch) -> Lent:
        """A world with these options; fresh, or the one of the test's module."""
        options = {**options, "watch": watch}
        if options.pop("reuse", "test") == "module":
            return self._pool.lease_shared(_module(item), **options)
        return self._pool.acquire(last=self.following is None, **options)

    def release(self, world: Lent, *, broken: bool) -> None:
        """A test is done with its world; a broken one is not used again."""
        assert isinstance(world, World)
        self._pool.release(world, broken=broken)

    def drop(self, item: pytest.Item) -> None:
        """A test has failed after it was done with its ranks: none that its module shares is used again."""
        self._pool.end(_module(item))

    def once(self, what: str, work: Callable[[], Any]) -> Any:
        """Do in one process what starts ranks of its own, and return what comes of it; `what` says so in words."""
        return work()

    def check_controller(self) -> None:
        """In a worker of pytest-xdist: end the process when whoever would have heard of it has been killed."""
        if self._controller is not None and os.getppid() != self._controller:
            os._exit(pytest.ExitCode.INTERRUPTED)  # the ranks and their files go with the fork server, that with us

    def finish(self, item: pytest.Item) -> None:
        """A test is over."""
        if self.terminal is not None:
            self.terminal.leave()
        if self.following is None or _module(self.following) != _module(item):
            self._pool.end(_module(item))

    def close(self) -> None:
        """The session is over: end every rank."""
        self._pool.close()


def _module(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


class WorldLease:
    """A test's hold on a world: a fresh one when it is first needed, and after one that failed.

    Attributes:
        options: Of the world.
        attachment: What the ranks have brought back from the last run.
    """

    def __init__(
        self, ranks: Ranks, item: pytest.Item, record: Record, options: Mapping[str, Any], since: RngStates | None
    ) -> None:
        self._ranks = ranks
        self._item = item
        self._record = record
        self.options = dict(options)
        self.attachment: dict[int, RankArtifacts] = {}
        self._since = since
        self._world: Lent | None = None
        self._printed: list[int] = []  # of each rank's output, how many characters have been shown or kept

    @property
    def world(self) -> Lent:
        """The world."""
        if self._world is not None and self._world.failed:
            self.close()
        if self._world is None:
            self._world = self._ranks.acquire(self._item, self.options, self._watch)
            self._printed = [0] * self._world.world_size
        return self._world

    def run(self, function: Callable[..., Any], *args: Any, timeout: float | None = None) -> list[Any]:
        """Call a function of `ddpcheck.testing.rank_side` on every rank; its last argument is added here."""
        world = self.world
        try:
            return world.run(function, *args, self._conditions(), timeout=timeout)
        finally:
            self._show(world, last=True)
            self.attachment = self._record.unpack(world)

    def explained(self, error: RankError, verdict: TestOutcome) -> RankError:
        """Return an error of the last run, having told the record what its ranks have to say about it."""
        self._record.explained = error, sections(verdict, self.attachment)
        return error

    def _conditions(self) -> TestConditions:
        by_test = self._item.config.getoption("cov_context", None) == "test"
        context = f"{self._item.nodeid}|run" if by_test else ""
        return TestConditions.of(
            self._item.config,
            since=self._since,
            context=context,
            debugger=self._ranks.terminal is not None,
            apart=self._ranks.apart,
        )

    def once(self, what: str, work: Callable[[], Any]) -> Any:
        """As of `Ranks`."""
        return self._ranks.once(what, work)

    def _watch(self, world: World, finished: frozenset[int], running: frozenset[int]) -> str | None:
        self._ranks.check_controller()
        self._show(world, last=False)
        if self._ranks.terminal is not None:
            self._ranks.terminal.attend(world.directory)
        users: Watch | None = self.options.get("watch")
        return users(world, finished, running) if users is not None else None

    def _show(self, world: Lent, *, last: bool) -> None:
        """Under `-s`: print what the ranks have printed since, line by line, each with its rank."""
        if not self._ranks.live:
            return
        for rank, start in enumerate(self._printed):
            text = world.output(rank)[start:]
            if not last:
                text = text[: text.rfind("\n") + 1]
            self._printed[rank] += len(text)
            for line in text.splitlines():
                sys.stdout.write(f"[rank {rank}] {line}\n")
        sys.stdout.flush()

    def collect_output(self) -> None:
        """Keep what the ranks have printed, for the report of the test."""
        if self._world is None or self._ranks.live:
            return
        texts = {}
        for rank, start in enumerate(self._printed):
            texts[rank] = self._world.output(rank)[start:]
            self._printed[rank] += len(texts[rank])
        self._record.keep_output(self._world, texts)

    def close(self) -> None:
        """Give the world back."""
        if self._world is None:
            return
        self.collect_output()
        world, self._world = self._world, None
        self._ranks.release(world, broken=self._record.failed)
